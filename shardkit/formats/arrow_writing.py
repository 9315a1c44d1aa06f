"""Arrow schemas, arrays and tables of fields; blocks as messages of an Arrow IPC file (SPEC.md §4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from shardkit.documents import encode
from shardkit.errors import FormatError, SampleError

from .arrow_message import file_head_size, raw_message_bytes, read_batch_header
from .block import (
    Block,
    Column,
    EncodedBlock,
    FixedColumn,
    JoinedPayloads,
    PayloadColumn,
    RowBlock,
    VariableColumn,
    part_of,
    payloads_of,
    sizes_of,
)
from .compression import zstd_level
from .schema import KEY_FIELD, FieldType, Schema, presence_of
from .values import unpack_array, unpack_list

METADATA_KEY = b"shardkit"

_NO_BITS = np.empty(0, np.uint8)


def arrow_item_type(kind: FieldType) -> Any:
    """Return the Arrow type of one item of a field."""
    return pa.bool_() if kind.dtype == "bool" else pa.from_numpy_dtype(kind.numpy_dtype)


def arrow_type(kind: FieldType) -> Any:
    """Return the Arrow type of a field in a shard; no level inside of it is nullable."""
    if kind.logical is not None and kind.logical.kind != "decimal":
        return kind.logical.arrow_type
    if kind.is_opaque:
        return pa.large_string() if kind.kind in ("str", "json") else pa.large_binary()
    item = arrow_item_type(kind)
    if kind.kind == "ragged":
        return pa.large_list(pa.field("item", item, nullable=False))
    for size in reversed(kind.shape):
        item = pa.list_(pa.field("item", item, nullable=False), size)
    return item


def table_type(kind: FieldType) -> Any:
    """Return the Arrow type of a field in tables, where packed fields are nested lists and decimals are decimal128."""
    items = kind.items
    if kind.logical is not None:
        return kind.logical.arrow_type
    if items is None:
        return arrow_type(kind)
    if kind.kind == "list":
        return pa.large_list(pa.field("item", arrow_type(items), nullable=False))
    item = arrow_item_type(items)
    for size in reversed(items.shape):
        field = pa.field("item", item, nullable=False)
        item = pa.list_(field, size) if size else pa.large_list(field)
    return item


def arrow_schema(schema: Schema, *, keys: bool = True, packed: bool = True) -> Any:
    """Return the Arrow schema of a shard or table; its metadata has the shardkit schema and the format version.

    Args:
        schema: Fields.
        keys: Begin with the key column.
        packed: Use the types of shards (`arrow_type`); otherwise the types of `record_batch` (`table_type`).
    """
    type_of = arrow_type if packed else table_type
    fields = [pa.field(KEY_FIELD, pa.large_string(), nullable=False)] if keys else []
    for name, kind in schema.items():
        metadata = {METADATA_KEY: b"json"} if kind.kind == "json" else None
        fields.append(pa.field(name, type_of(kind), nullable=kind.optional, metadata=metadata))
    text = encode({"fields": schema.to_json(), "version": 1})
    return pa.schema(fields, metadata={METADATA_KEY: text})


class _Chunks:
    """The file object that pyarrow writes to; collects the pieces of a block."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[Any] = []

    def write(self, data: Any) -> int:
        self._pieces.append(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken


class ArrowEncoder:
    """Encode rows as record batch messages with the file writer of pyarrow."""

    def __init__(self, schema: Schema, compression: str) -> None:
        self._fields = schema
        self._schema = arrow_schema(schema)
        level = zstd_level(compression)
        codec = pa.Codec("zstd", compression_level=level) if level is not None else None
        self._options = pa.ipc.IpcWriteOptions(
            # allow_64bit: a child array of a ragged field may hold more than 2**31 items.
            compression=codec,
            use_threads=False,
            allow_64bit=True,
        )
        with pa.ipc.new_file(empty := _Chunks(), self._schema, options=self._options):
            pass
        without_rows = empty.take()
        self._head = without_rows[: file_head_size(memoryview(without_rows))]
        self._chunks = _Chunks()
        self._writer = pa.ipc.new_file(self._chunks, self._schema, options=self._options)
        self._begun = False
        self._compresses = compression != "none"

    def head(self) -> bytes:
        return self._head

    def encode(self, rows: RowBlock) -> tuple[list[EncodedBlock], None, None]:
        """Return the messages of the blocks; Arrow needs no field offsets and sizes."""
        return [self._message(rows, start, end) for start, end in pairwise(rows.borders)], None, None

    def _message(self, rows: RowBlock, start: int, end: int) -> EncodedBlock:
        own = [part_of(column, start, end) for column in rows.columns]
        columns = dict(zip(self._fields.stored, own, strict=True))
        arrays = [_key_array(rows.keys[start:end])]
        for name, kind in self._fields.items():
            arrays.append(arrow_array(kind, columns[name], name, columns.get(presence_of(name))))
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        written = self._take()
        if not self._compresses:
            return EncodedBlock(written, len(written))
        header = read_batch_header(memoryview(written))
        return EncodedBlock(written, raw_message_bytes(header, memoryview(written)))

    def tail(self) -> bytes:
        self._writer.close()
        return self._take()

    def _take(self) -> bytes:
        # pyarrow writes the head with the first message, or with the footer if there is none.
        written = self._chunks.take()
        begun, self._begun = self._begun, True
        return written if begun else written[len(self._head) :]


def index_array(values: ArrayLike) -> Any:
    """Return numbers as an int64 array; `pyarrow.array` would import pandas if it is installed."""
    numbers = np.ascontiguousarray(values, np.int64)
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)], null_count=0)


def text_array(texts: Iterable[str]) -> Any:
    """Return texts as a large_string array, without `pyarrow.array`."""
    return arrow_array(FieldType("str"), [text.encode() for text in texts], "", None)


def _key_array(keys: Sequence[str]) -> Any:
    """Return the key column; keys are ASCII (`check_keys`)."""
    borders = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, keys), np.int64, len(keys)), out=borders[1:])
    buffers = [None, pa.py_buffer(borders), pa.py_buffer("".join(keys).encode("ascii"))]
    return pa.Array.from_buffers(pa.large_string(), len(keys), buffers, null_count=0)


def _variable_array(kind: Any, payloads: PayloadColumn, validity: _Validity) -> Any:
    buffers = [validity.bits, pa.py_buffer(_borders(payloads)), pa.py_buffer(_join(payloads))]
    return pa.Array.from_buffers(kind, len(payloads), buffers, null_count=validity.nulls)


class _Validity(NamedTuple):
    """The validity bitmap of a column, or None if all rows have a value."""

    bits: Any = None
    nulls: int = 0

    @classmethod
    def of(cls, presence: PayloadColumn | None) -> _Validity:
        """Return the bitmap of a presence column."""
        present = _NO_BITS if presence is None else np.frombuffer(_join(presence), np.uint8)
        nulls = len(present) - int(np.count_nonzero(present))
        return cls(pa.py_buffer(np.packbits(present, bitorder="little")), nulls) if nulls else cls()


def _borders(payloads: PayloadColumn) -> NDArray[np.int64]:
    borders = np.zeros(len(payloads) + 1, np.int64)
    np.cumsum(sizes_of(payloads), out=borders[1:])
    return borders


def _join(payloads: PayloadColumn) -> Any:
    """Return all payloads in one contiguous buffer."""
    if isinstance(payloads, JoinedPayloads):
        return payloads.data
    return (
        np.ascontiguousarray(payloads).reshape(-1) if isinstance(payloads, np.ndarray) else b"".join(payloads)
    )


def arrow_array(
    kind: FieldType, payloads: PayloadColumn, name: str, presence: PayloadColumn | None = None
) -> Any:
    """Return the Arrow array of a column; shares the memory of contiguous payloads.

    Args:
        kind: Type of the field.
        payloads: Canonical payloads.
        name: Field name in messages.
        presence: Payloads of the presence column of an optional field.

    Raises:
        SampleError: A payload of text or JSON is not UTF-8.
    """
    validity = _Validity.of(presence)
    if kind.is_opaque:
        array = _variable_array(arrow_type(kind), payloads, validity)
        if kind.kind in ("str", "json"):
            try:
                array.validate(full=True)
            except pa.ArrowException as error:
                raise SampleError(
                    f"field {name!r}: a payload is not UTF-8 ({error}); use Schema.encode"
                ) from None
        return array
    dtype = kind.numpy_dtype
    raw = _join(payloads)
    borders = _borders(payloads)
    if dtype.kind == "b":
        raw = np.packbits(np.frombuffer(raw, np.uint8), bitorder="little")
    item = arrow_item_type(kind) if kind.logical is None else arrow_type(kind)
    count = int(borders[-1]) // dtype.itemsize
    inner = validity if kind.kind == "scalar" else _Validity()
    values = pa.Array.from_buffers(item, count, [inner.bits, pa.py_buffer(raw)], null_count=inner.nulls)
    if kind.kind == "ragged":
        buffers = [validity.bits, pa.py_buffer(borders // dtype.itemsize)]
        return pa.Array.from_buffers(
            arrow_type(kind), len(payloads), buffers, null_count=validity.nulls, children=[values]
        )
    for place in reversed(range(len(kind.shape))):
        level = arrow_type(FieldType("array", kind.dtype, kind.shape[place:]))
        count //= kind.shape[place]
        outer = _Validity() if place else validity
        values = pa.Array.from_buffers(level, count, [outer.bits], null_count=outer.nulls, children=[values])
    return values


def _nested_array(kind: FieldType, payloads: PayloadColumn, name: str, presence: PayloadColumn | None) -> Any:
    """Return the Arrow array of a packed field, as nested lists."""
    validity, items = _Validity.of(presence), kind.items
    sizes: tuple[int, ...]
    assert items is not None, "what is packed has items"
    rows = [payload if len(payload) or not kind.optional else None for payload in payloads_of(payloads)]
    try:
        if kind.kind == "list":
            lists = [unpack_list(row) if row is not None else [] for row in rows]
            shapes, sizes = np.array([[len(one)] for one in lists], np.int64), (0,)
            array = arrow_array(items, [item for one in lists for item in one], name)
        else:
            sizes, dtype = items.shape, items.numpy_dtype
            found = [
                unpack_array(row, dtype, sizes) if row is not None else np.empty(sizes, dtype) for row in rows
            ]
            shapes = np.array([one.shape for one in found], np.int64)
            values = np.concatenate([one.ravel() for one in found])
            octets = values.view(np.uint8).reshape(-1, dtype.itemsize)
            array = arrow_array(FieldType("scalar", items.dtype), octets, name)
    except ValueError as error:
        raise FormatError(f"field {name!r}: a payload is no {kind}: {error}") from None
    for depth in reversed(range(len(sizes))):
        level = (
            table_type(replace(kind, items=replace(items, shape=sizes[depth:])))
            if depth
            else table_type(kind)
        )
        lists_of = shapes[:, :depth].prod(axis=1)
        buffers = [validity.bits if not depth else None]
        if not sizes[depth]:
            borders = np.zeros(int(lists_of.sum()) + 1, np.int64)
            np.cumsum(np.repeat(shapes[:, depth], lists_of), out=borders[1:])
            buffers.append(pa.py_buffer(borders))
        nulls = 0 if depth else validity.nulls
        array = pa.Array.from_buffers(level, int(lists_of.sum()), buffers, null_count=nulls, children=[array])
    return array


def _decimal_array(
    kind: FieldType, payloads: PayloadColumn, name: str, presence: PayloadColumn | None
) -> Any:
    """Return the Arrow array of decimals, widened from 8 bytes to the 16 of decimal128."""
    numbers = arrow_array(replace(kind, logical=None), payloads, name, presence)
    low = np.frombuffer(_join(payloads), "<i8")
    wide = np.stack([low, low >> 63], axis=1)
    buffers = [numbers.buffers()[0], pa.py_buffer(wide)]
    return pa.Array.from_buffers(table_type(kind), len(payloads), buffers, null_count=numbers.null_count)


def record_batch(block: Block, rows: NDArray[np.int64], schema: Schema, arrow: Any) -> Any:
    """Return some rows of a block as a record batch without keys.

    Args:
        block: The block.
        rows: Row numbers, ascending, at least one.
        schema: Fields of the batch.
        arrow: Their Arrow schema (`arrow_schema` without keys, not packed).

    Raises:
        FormatError: A payload is not valid for its type.
    """
    run = slice(int(rows[0]), int(rows[-1]) + 1)
    which = run if run.stop - run.start == len(rows) else rows  # a slice of adjacent rows needs no copy
    arrays = []
    for name, kind in schema.items():
        try:
            presence = _payloads(block.column(presence_of(name)), which) if kind.optional else None
            is_decimal = kind.logical is not None and kind.logical.kind == "decimal"
            make = _nested_array if kind.is_packed else _decimal_array if is_decimal else arrow_array
            arrays.append(make(kind, _payloads(block.column(name), which), name, presence))
        except SampleError as error:
            raise FormatError(str(error)) from None
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def _payloads(column: Column, which: slice | NDArray[np.int64]) -> PayloadColumn:
    return _fixed_column(column, which) if isinstance(column, FixedColumn) else _variable(column, which)


def _fixed_column(column: FixedColumn, which: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
    values = np.require(column.values[which], requirements=("C", "A"))
    octets: NDArray[np.uint8] = values.reshape(len(values), -1).view(np.uint8)
    return octets


def _variable(column: VariableColumn, which: slice | NDArray[np.int64]) -> PayloadColumn:
    starts, ends = column.starts[which], column.ends[which]
    if bool((starts[1:] == ends[:-1]).all()):
        data = column.data[starts[0] : ends[-1]]
        return JoinedPayloads(_align(data, column.kind.numpy_dtype.itemsize), ends - starts)
    view = column.data.data
    return [view[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _align(data: NDArray[np.uint8], item_bytes: int) -> NDArray[np.uint8]:
    """Align the data to its items, because readers of Arrow memory may rely on it."""
    return data if data.ctypes.data % item_bytes == 0 else data.copy()
