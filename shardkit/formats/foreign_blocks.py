"""Decode blocks of adopted files: row groups, record batches, runs of lines, arrays (SPEC.md §5, "Encoded blocks").

Only verified bytes get here: the ranges of a block, and `ShardIndex.common`, which the digest of the index covers.
pyarrow decodes them. Importers open the same files with the functions of this module.
"""

from __future__ import annotations

import bisect
import io
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from shardkit.errors import FormatError, SchemaError, SourceError

from .arrow_message import END_OF_STREAM, raw_message_bytes, read_batch_header
from .arrow_writing import arrow_schema
from .block import (
    Block,
    Column,
    FixedColumn,
    JoinedPayloads,
    PayloadColumn,
    VariableColumn,
    payloads_of,
    stored_columns,
)
from .foreign_columns import ForeignColumns
from .index import ShardIndex
from .line_blocks import LineSettings, line_columns
from .schema import FieldType, Schema
from .values import check_bools

PARQUET_MAGIC = b"PAR1"
INT96_UNIT = "us"
"""Unit in which INT96 times are read; the default, nanoseconds, would wrap around before 1677 and after 2262."""

Parts = Mapping[int, memoryview]
"""Offset in the file → verified bytes."""


class _Decoder(Protocol):
    """Decodes the blocks of one file."""

    def columns(self, block: int, parts: Parts, schema: Schema, rows: int) -> dict[str, Column]:
        """Return the stored columns of some fields of a block of `rows` rows."""


def foreign_block(index: ShardIndex, block: int, parts: Parts, fields: Sequence[str]) -> Block:
    """Decode some fields of a block.

    Args:
        index: Index of the file, with an encoding.
        block: Number of the block.
        parts: Verified bytes: the block, or the ranges of the fields.
        fields: Fields to decode.

    Returns:
        The block, with the memory that its columns take; the index has an estimate.

    Raises:
        FormatError: The bytes are not valid.
    """
    span, schema = index.spans[block], Schema({name: index.schema[name] for name in fields})
    rows = span.end_row - span.first_row
    columns = _decoder(index).columns(block, parts, schema, rows)
    return Block(index.schema, rows, memory_of(columns.values()), columns.__getitem__)


class _TableDecoder(ABC):
    """Decodes the blocks of a file of tables from record batches."""

    def __init__(self, index: ShardIndex) -> None:
        self._constants, self._spans = index.constants or {}, index.spans

    @abstractmethod
    def batch(self, block: int, parts: Parts, names: Sequence[str], rows: int) -> Any:
        """Return a record batch with the named columns; a column that the file lacks is left out."""

    def columns(self, block: int, parts: Parts, schema: Schema, rows: int) -> dict[str, Column]:
        where = f"block {block}"
        try:
            batch = self.batch(block, parts, list(schema), rows)
            if batch.num_rows != rows:
                raise FormatError(f"{where}: {batch.num_rows} rows, the index says {rows}")
            return foreign_columns(batch, schema, self._constants, where, self._spans[block].first_row)
        except (pa.ArrowException, OSError, SourceError, SchemaError) as error:
            raise FormatError(f"{where}: cannot be decoded ({error}); adopt the file again") from error


def foreign_columns(
    batch: Any, schema: Schema, constants: Mapping[str, str], where: str, first_row: int
) -> dict[str, Column]:
    """Return the stored columns of a record batch of a foreign file.

    Args:
        batch: Columns of the file; a column that it lacks is null in every row.
        schema: Fields to convert.
        constants: Field → text of the value of all rows.
        where: Name of the file, for messages.
        first_row: Number in the file of the first row of the batch.

    Raises:
        SourceError: A value does not fit its field; the message names the row.
    """
    for name, text in constants.items():
        if name in schema and name not in batch.schema.names:
            batch = batch.append_column(name, pa.repeat(pa.scalar(text), batch.num_rows))
    source = ForeignColumns(batch, where, first_row)
    arrays = [source.conform(name, kind) for name, kind in schema.items()]
    for row in sorted(source.bad)[:1]:
        error = source.bad[row]
        error.is_of_row = True
        raise error
    made = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema, keys=False))
    stored = schema.stored
    return {
        name: column_of(kind, payloads, batch.num_rows)
        for (name, kind), payloads in zip(stored.items(), stored_columns(schema, made), strict=True)
    }


OFFSET_BYTES: Final = 16
"""Memory of a value of variable size besides its bytes, as `memory_of` counts it."""


def memory_of(columns: Any) -> int:
    """Return the bytes of memory of decoded columns; the sum over the parts of a block is the memory of the block."""
    total = 0
    for column in columns:
        if isinstance(column, FixedColumn):
            total += column.values.nbytes
        else:
            total += int((column.ends - column.starts).sum()) + column.starts.nbytes + column.ends.nbytes
    return total


def column_of(kind: FieldType, payloads: PayloadColumn, rows: int) -> Column:
    """Return the payloads of a stored column of a block as its decoded column."""
    if isinstance(payloads, np.ndarray):
        values = payloads.view(kind.numpy_dtype).reshape(rows, *kind.shape)
        values.flags.writeable = False
        return FixedColumn(values)
    if not isinstance(payloads, JoinedPayloads):
        sizes = np.fromiter(map(len, payloads), np.int64, rows)
        payloads = JoinedPayloads(np.frombuffer(b"".join(payloads_of(payloads)), np.uint8), sizes)
    ends = np.cumsum(payloads.sizes)
    return VariableColumn(payloads.data, ends - payloads.sizes, ends, kind)


# ---- Parquet


class SparseFile(io.RawIOBase):
    """The verified parts of a file, for a reader that expects the whole file; other bytes are refused."""

    def __init__(self, size: int, parts: Parts) -> None:
        self._size, self._parts, self._position = size, parts, 0
        self._starts = sorted(parts)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._position = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        )
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1, /) -> Any:
        place = bisect.bisect_right(self._starts, self._position) - 1
        start = self._starts[max(place, 0)] if self._starts else 0
        part = self._parts.get(start, memoryview(b""))
        inside = self._position - start
        if not 0 <= inside < max(1, len(part)) or not 0 <= size <= len(part) - inside:
            raise OSError(f"{size} bytes at {self._position} are not among the verified bytes")
        self._position += size
        return part[inside : inside + size]


def parquet_file(source: Any, *, footer: Any = None, unit: str = INT96_UNIT, buffer_bytes: int = 0) -> Any:
    """Return a `pyarrow.parquet.ParquetFile` that reads the columns of a row group one after the other."""
    return pq.ParquetFile(
        source,
        metadata=footer,
        coerce_int96_timestamp_unit=unit,
        pre_buffer=False,  # otherwise the row group is read into memory before its first batch
        buffer_size=buffer_bytes,
        page_checksum_verification=True,  # of the pages that have one
    )


def parquet_footer(data: bytes | memoryview) -> Any:
    """Return the metadata of a Parquet file from its last bytes: the footer, its size and the magic."""
    return pq.read_metadata(pa.BufferReader(PARQUET_MAGIC + bytes(data)))


def chunk_span(chunk: Any) -> tuple[int, int]:
    """Return the first and the last offset, exclusive, of a column chunk in its file."""
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    return start, start + chunk.total_compressed_size


def column_leaves(schema: Iterable[Any]) -> list[str]:
    """Return the name of the column that each leaf column of a Parquet file belongs to."""
    return [field.name for field in schema for _ in range(_leaves(field.type))]


def _leaves(kind: Any) -> int:
    """Return the number of Parquet columns that store an Arrow column."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    return sum(_leaves(kind.field(n).type) for n in range(kind.num_fields)) if pa.types.is_nested(kind) else 1


def filled_groups(footer: Any) -> list[int]:
    """Return the row groups that have rows; these are the blocks of a file."""
    return [number for number in range(footer.num_row_groups) if footer.row_group(number).num_rows]


class _ParquetDecoder(_TableDecoder):
    def __init__(self, index: ShardIndex) -> None:
        super().__init__(index)
        assert index.common is not None
        self._footer = parquet_footer(index.common.tobytes())
        self._groups, self._size = filled_groups(self._footer), index.shard_size
        self._names = set(self._footer.schema.to_arrow_schema().names)

    def batch(self, block: int, parts: Parts, names: Sequence[str], rows: int) -> Any:
        found = [name for name in names if name in self._names]
        if not found:
            return _no_columns(rows)
        with parquet_file(SparseFile(self._size, parts), footer=self._footer) as parquet:
            table = parquet.read_row_group(self._groups[block], found, use_threads=False)
        batches = table.combine_chunks().to_batches()
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _no_columns(rows: int) -> Any:
    return pa.RecordBatch.from_arrays([pa.nulls(rows)], [""])


# ---- Arrow IPC


def arrow_schema_of(common: bytes) -> Any:
    """Return the pyarrow schema of an Arrow file from its first messages: schema and dictionaries."""
    with pa.ipc.open_stream(common + END_OF_STREAM) as reader:
        return reader.schema


def arrow_raw_bytes(message: memoryview) -> int:
    """Return the size of a record batch without compression, as its buffers declare it."""
    return raw_message_bytes(read_batch_header(message), message)


def arrow_batch(common: bytes, schema: Any, message: memoryview, names: Sequence[str], rows: int) -> Any:
    """Decode the named columns of a record batch message; a column that the file lacks is left out."""
    wanted = [place for place, name in enumerate(schema.names) if name in names]
    if not wanted:
        return _no_columns(rows)
    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    stream = pa.BufferReader(b"".join((common, message, END_OF_STREAM)))
    with pa.ipc.open_stream(stream, options=options) as reader:
        return reader.read_next_batch()


class _ArrowDecoder(_TableDecoder):
    def __init__(self, index: ShardIndex) -> None:
        super().__init__(index)
        assert index.common is not None
        self._common = index.common.tobytes()
        self._schema = arrow_schema_of(self._common)

    def batch(self, block: int, parts: Parts, names: Sequence[str], rows: int) -> Any:
        (message,) = parts.values()
        declared, limit = arrow_raw_bytes(message), self._spans[block].raw_size
        if declared > limit:
            raise FormatError(f"block {block}: its buffers declare {declared} bytes, the index says {limit}")
        return arrow_batch(self._common, self._schema, message, names, rows)


# ---- Lines


class _LineDecoder:
    def __init__(self, index: ShardIndex) -> None:
        self._encoding, self._settings = index.encoding or "", LineSettings.of(index)
        self._skipped: dict[int, set[int]] = {}  # block → its rows that are left out
        for block, row in self._settings.skipped:
            self._skipped.setdefault(block, set()).add(row)

    def columns(self, block: int, parts: Parts, schema: Schema, rows: int) -> dict[str, Column]:
        (stored,) = parts.values()
        where = f"block {block}"
        columns, found = line_columns(
            self._encoding, self._settings, stored, schema, self._skipped.get(block, ()), where
        )
        if found != rows:
            raise FormatError(f"{where}: {found} rows, the index says {rows}")
        return {name: column_of(kind, columns[name], rows) for name, kind in schema.stored.items()}


# ---- Arrays


class _ArrayDecoder:
    """Decodes blocks in which the range of a field is an array of its rows."""

    def __init__(self, index: ShardIndex) -> None:
        assert index.range_offset is not None
        assert index.range_size is not None
        self._schema, self._file_size = index.schema, index.shard_size
        self._offsets, self._sizes = index.block_offset[:, None] + index.range_offset, index.range_size

    def columns(self, block: int, parts: Parts, schema: Schema, rows: int) -> dict[str, Column]:
        file = SparseFile(self._file_size, parts)
        found: dict[str, Column] = {}
        for name, kind in schema.items():
            place = self._schema.position(name)
            size = int(self._sizes[block, place])
            if kind.optional or kind.item_bytes is None or size != rows * kind.item_bytes:
                raise FormatError(f"block {block} field {name!r}: {size} bytes are not {rows} rows of {kind}")
            file.seek(int(self._offsets[block, place]))
            values = np.frombuffer(file.read(size), kind.numpy_dtype).reshape(rows, *kind.shape)
            try:
                check_bools(values, kind.numpy_dtype)
            except ValueError as error:
                raise FormatError(f"block {block} field {name!r}: {error}") from None
            found[name] = FixedColumn(values)
        return found


_OPENERS: dict[str, Any] = {
    "parquet": _ParquetDecoder,
    "arrow": _ArrowDecoder,
    "jsonl": _LineDecoder,
    "csv": _LineDecoder,
    "npz": _ArrayDecoder,
}
_open: weakref.WeakKeyDictionary[ShardIndex, _Decoder] = weakref.WeakKeyDictionary()


def _decoder(index: ShardIndex) -> _Decoder:
    """Return the decoder of a file, kept as long as its index."""
    found = _open.get(index)
    if found is None:
        found = _open[index] = _OPENERS[index.encoding or ""](index)
    return found
