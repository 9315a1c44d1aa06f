"""A version as Arrow record batches, from verified blocks, each of them read once."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shardkit.errors import MissingDependency, UsageError
from shardkit.formats import Block, Schema, arrow_schema, record_batch
from shardkit.reading.blocks import BlockReader
from shardkit.reading.row_map import RowMap

__all__ = ["all_numbers", "read_runs", "stream_table", "table_library"]

_NUMBERS_AT_ONCE = 1 << 16  # located together, however many samples there are


def all_numbers(count: int) -> Iterator[NDArray[np.int64]]:
    """The sample numbers 0 to `count` - 1, some at a time."""
    for start in range(0, count, _NUMBERS_AT_ONCE):
        yield np.arange(start, min(start + _NUMBERS_AT_ONCE, count), dtype=np.int64)


def read_runs(
    reader: BlockReader,
    row_map: RowMap,
    numbers: Iterable[NDArray[np.int64]],
    fields: Sequence[str] | None = None,
) -> Iterator[tuple[Block, NDArray[np.int64]]]:
    """The samples of `numbers` as (verified block, rows in it), each block read once.

    Args:
        reader: of the version's blocks.
        row_map: where its samples lie.
        numbers: ascending sample numbers, over all arrays; they may repeat.
        fields: those that the blocks will be asked for; all where None.
    """
    last, block = -1, None
    for some in numbers:
        where = row_map.locate(some)
        borders = (np.flatnonzero(np.diff(where.block)) + 1).tolist()
        for first, end in zip([0, *borders], [*borders, len(some)], strict=True):
            if first == end:
                continue
            number = int(where.block[first])
            if block is None or number != last:
                last, block = number, reader.read(*row_map.shard_of_block(number), keys=False, fields=fields)
            yield block, where.row_in_block[first:end]


def stream_table(
    reader: BlockReader, row_map: RowMap, schema: Schema, fields: Sequence[str] | None, batch_rows: int | None
) -> Any:
    """A ``pyarrow.RecordBatchReader`` over all samples.

    Args:
        reader: of the version's blocks.
        row_map: where its samples lie.
        schema: of the version.
        fields: those wanted, in this order; all where None.
        batch_rows: rows of each batch but the last; None: a batch for each block.

    Raises:
        SchemaError: there is no such field.
    """
    if isinstance(fields, str):
        raise UsageError(f"fields={fields!r}: expected a list of field names, such as [{fields!r}]")
    if fields is not None:
        wanted = list(fields)
        for name in wanted:
            schema.position(name)
        schema = Schema({name: schema[name] for name in wanted})
    arrow = arrow_schema(schema, keys=False)
    runs = read_runs(reader, row_map, all_numbers(len(row_map)), list(schema))
    batches = (record_batch(block, rows, schema, arrow) for block, rows in runs)
    return pa.RecordBatchReader.from_batches(
        arrow, batches if batch_rows is None else _cut(batches, batch_rows)
    )


def _cut(batches: Iterable[Any], size: int) -> Iterator[Any]:
    """The same rows in batches of `size`; a batch that lies inside one block is a view of it."""
    waiting: list[Any] = []
    rows = 0
    for batch in batches:
        done = 0
        while done < batch.num_rows:
            part = batch.slice(done, size - rows)
            waiting.append(part)
            done, rows = done + part.num_rows, rows + part.num_rows
            if rows == size:
                yield _joined(waiting)
                waiting, rows = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def table_library(name: str, call: str) -> Any:
    """A library that makes tables of Arrow's.

    Raises:
        MissingDependency: it is not installed; says how to get it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependency(
            f"ds.{call}() needs {name}; run: pip install {name}, or use ds.to_arrow()"
        ) from error
