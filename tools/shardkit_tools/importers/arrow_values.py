"""Convert record batches of a source to its schema, or to Python values; rows that do not fit are failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from shardkit.dataset.encoding import RowOrigin, index_array
from shardkit.errors import SchemaError
from shardkit.formats import FieldType, Schema
from shardkit.formats.arrow_payloads import stored_columns
from shardkit.formats.arrow_writing import arrow_schema
from shardkit.formats.block import payloads_of
from shardkit.formats.foreign_columns import ForeignColumns, is_media, media_bytes, plain_column
from shardkit_tools.importers.protocol import (
    MIXED,
    DecodedRows,
    DecodedStream,
    SampleStream,
    SourceFailure,
    SourceFile,
    SourceSample,
)


def null_columns(batches: Iterable[Any]) -> set[str]:
    """Return the columns of record batches that hold nulls, except inside a value."""
    return {
        name for batch in batches for name, column in zip(batch.schema.names, batch.columns, strict=True)
        if (media_bytes(column) if is_media(column.type) else plain_column(column)).null_count
    }  # fmt: skip


def conform_batch(
    batch: Any, fields: Schema, schema: Schema, file: SourceFile, first_row: int
) -> DecodedStream:
    """Yield a record batch of a source as one of its schema; rows that do not fit are failures.

    `fields` are the fields of the schema under the names of the source.
    """
    columns = _Columns(batch, file.path, first_row)
    arrays = [columns.conform(name, kind) for name, kind in fields.items()]
    keys = columns.keys()
    made = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema, keys=False))
    rows = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
    origin = RowOrigin([file.name] * batch.num_rows, rows, keys)
    for row in sorted(columns.bad):
        yield SourceFailure(file.name, first_row + row, columns.bad[row])
    if columns.bad:
        good = np.array([row for row in range(batch.num_rows) if row not in columns.bad], np.int64)
        made, origin = made.take(index_array(good)), origin.take(good)
    if len(origin):
        yield DecodedRows(made, origin)


def batch_samples(
    batch: Any, fields: Schema, file: SourceFile, first_row: int, *, unchecked: bool
) -> SampleStream:
    """Yield rows of a record batch as Python values; `unchecked` ones that do not fit stay as in Arrow."""
    columns = _Columns(batch, file.path, first_row)
    values = {name: columns.values(name, kind, unchecked=unchecked) for name, kind in fields.items()}
    keys = columns.keys()
    for row in range(batch.num_rows):
        if row in columns.bad:
            yield SourceFailure(file.name, first_row + row, columns.bad[row])
            continue
        sample = {name: column[row] for name, column in values.items()}
        yield SourceSample(sample, keys[row] if keys else None, file.name, first_row + row)


class _Columns(ForeignColumns):
    """Columns of a record batch that can also be had as Python values."""

    def values(self, name: str, kind: FieldType, *, unchecked: bool) -> Sequence[Any]:
        """Return a column's values, None if missing; `unchecked` ones that do not fit stay as in Arrow."""
        before = dict(self.bad)
        try:
            if unchecked and kind.kind == MIXED:
                raise SchemaError("no type has all values")
            array = self.conform(name, kind)
        except SchemaError:
            if not unchecked:
                raise
            array = None
        if unchecked and (array is None or self.bad != before):
            self.bad = before
            raw: list[Any] = self.column(name).to_pylist()
            return raw
        alone = Schema({"value": kind})
        columns = [
            payloads_of(column)
            for column in stored_columns(alone, pa.RecordBatch.from_arrays([array], ["value"]))
        ]
        return [
            None if row in self.bad else alone.decode(payloads)["value"]
            for row, payloads in enumerate(zip(*columns, strict=True))
        ]
