"""Blocks of the `arrow` format: record batch messages of an Arrow IPC file (SPEC.md §4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shardkit.errors import FormatError, SampleError

from . import canonical_json
from .arrow_message import CONTINUATION, FILE_MAGIC, BatchHeader, read_batch_header
from .block import Column, FixedColumn, VariableColumn
from .compression import zstd_level
from .rows import Row
from .schema import FieldType, Schema

__all__ = ["KEY_FIELD", "ArrowEncoder", "arrow_schema", "decode_batch", "head_size"]

KEY_FIELD = "__key__"
METADATA_KEY = b"shardkit"
_TEXT = FieldType("str")
_EMPTY = np.empty(0, np.uint8)


def arrow_type(kind: FieldType) -> Any:
    """The Arrow type of a field; no level of it is nullable."""
    if kind.kind == "bytes":
        return pa.large_binary()
    if kind.kind in ("str", "json"):
        return pa.large_string()
    item = pa.bool_() if kind.dtype == "bool" else pa.from_numpy_dtype(kind.numpy_dtype)
    if kind.kind == "ragged":
        return pa.large_list(pa.field("item", item, nullable=False))
    for size in reversed(kind.shape):
        item = pa.list_(pa.field("item", item, nullable=False), size)
    return item


def arrow_schema(schema: Schema) -> Any:
    """Key column, then the fields; the shardkit schema and format version are in its metadata."""
    fields = [pa.field(KEY_FIELD, pa.large_string(), nullable=False)]
    for name, kind in schema.items():
        metadata = {METADATA_KEY: b"json"} if kind.kind == "json" else None
        fields.append(pa.field(name, arrow_type(kind), nullable=False, metadata=metadata))
    text = canonical_json.dumps({"fields": schema.to_json(), "version": 1})
    return pa.schema(fields, metadata={METADATA_KEY: text})


class _Chunks:
    """The file object that pyarrow writes to: keeps the pieces until a block is complete."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[Any] = []

    def write(self, data: Any) -> int:
        self._pieces.append(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered elsewhere."""

    def close(self) -> None:
        """Nothing is open."""

    def take(self) -> bytes:
        """Everything written since the last call."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken


def head_size(data: memoryview) -> int:
    """Bytes of magic and schema message at the start of an Arrow IPC file.

    Raises:
        FormatError: it does not begin like one.
    """
    length = int.from_bytes(data[12:16], "little")
    if (
        len(data) < 16
        or data[:8] != FILE_MAGIC + b"\x00\x00"
        or data[8:12] != CONTINUATION
        or length > len(data) - 16
    ):
        raise FormatError("arrow file: no magic and schema at its start")
    return 16 + length


class ArrowEncoder:
    """Rows to stored record batch messages, written by pyarrow's own file writer."""

    def __init__(self, schema: Schema, compression: str) -> None:
        self._kinds = list(schema.items())
        self._schema = arrow_schema(schema)
        level = zstd_level(compression)
        codec = pa.Codec("zstd", compression_level=level) if level is not None else None
        self._options = pa.ipc.IpcWriteOptions(
            # allow_64bit: a child array of a ragged field may hold more than 2**31 items.
            compression=codec or ("lz4" if compression == "lz4" else None),
            use_threads=False,
            allow_64bit=True,
        )
        with pa.ipc.new_file(empty := _Chunks(), self._schema, options=self._options):
            pass
        without_rows = empty.take()
        self._head = without_rows[: head_size(memoryview(without_rows))]
        self._chunks = _Chunks()
        self._writer = pa.ipc.new_file(self._chunks, self._schema, options=self._options)
        self._begun = False

    def head(self) -> bytes:
        """Magic and schema message."""
        return self._head

    def encode(self, rows: Sequence[Row]) -> tuple[bytes, int, None, None]:
        """Stored message of a block and its raw size; Arrow needs no field offsets."""
        keys = _variable_array(pa.large_string(), [row.key.encode() for row in rows])
        arrays = [keys]
        for place, (name, kind) in enumerate(self._kinds):
            arrays.append(_to_array(kind, [row.payloads[place] for row in rows], name))
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        written = self._take()
        header = read_batch_header(memoryview(written))
        return written, _raw_bytes(header, memoryview(written)), None, None

    def tail(self) -> bytes:
        """End-of-stream marker and footer."""
        self._writer.close()
        return self._take()

    def _take(self) -> bytes:
        # pyarrow writes the head together with whatever comes first.
        written = self._chunks.take()
        begun, self._begun = self._begun, True
        return written if begun else written[len(self._head) :]


def _variable_array(kind: Any, payloads: list[bytes]) -> Any:
    offsets = np.zeros(len(payloads) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, payloads), np.int64, len(payloads)), out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(payloads))]
    return pa.Array.from_buffers(kind, len(payloads), buffers, null_count=0)


def _to_array(kind: FieldType, payloads: list[bytes], name: str) -> Any:
    """One field of many rows, from its payloads joined once."""
    if kind.kind in ("bytes", "str", "json"):
        array = _variable_array(arrow_type(kind), payloads)
        if kind.kind != "bytes":
            try:
                array.validate(full=True)
            except pa.ArrowException as error:
                raise SampleError(
                    f"field {name!r}: a payload is not UTF-8 ({error}); use Schema.encode"
                ) from None
        return array
    dtype = kind.numpy_dtype
    raw = b"".join(payloads)
    if dtype.kind == "b":
        raw = np.packbits(np.frombuffer(raw, np.uint8), bitorder="little").tobytes()
    item = pa.bool_() if dtype.kind == "b" else pa.from_numpy_dtype(dtype)
    count = sum(map(len, payloads)) // dtype.itemsize
    values = pa.Array.from_buffers(item, count, [None, pa.py_buffer(raw)], null_count=0)
    if kind.kind == "ragged":
        offsets = np.zeros(len(payloads) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, payloads), np.int64, len(payloads)), out=offsets[1:])
        buffers = [None, pa.py_buffer(offsets // dtype.itemsize)]
        return pa.Array.from_buffers(
            arrow_type(kind), len(payloads), buffers, null_count=0, children=[values]
        )
    for place in reversed(range(len(kind.shape))):
        level = arrow_type(FieldType("array", kind.dtype, kind.shape[place:]))
        count //= kind.shape[place]
        values = pa.Array.from_buffers(level, count, [None], null_count=0, children=[values])
    return values


def _raw_bytes(header: BatchHeader, message: memoryview) -> int:
    """Bytes that the message would have without compression; buffers padded to 8 as pyarrow does."""
    if header.codec == "none":
        return header.message_bytes
    total = header.body_offset
    for offset, length in header.buffers.tolist():
        if length == 0:
            continue
        start = header.body_offset + offset
        raw = int.from_bytes(message[start : start + 8], "little", signed=True)
        if raw == -1:  # stored as it is behind the prefix
            raw = length - 8
        if length < 8 or raw < 0:
            raise FormatError(f"arrow message: compressed buffer of {length} bytes declares {raw}")
        total += -(-raw // 8) * 8
    return total


def _aligned(stored: memoryview) -> memoryview:
    """`stored`, or a copy where it does not begin at a multiple of 8, as FlatBuffers and Arrow need it."""
    array = np.frombuffer(stored, np.uint8)
    return stored if array.ctypes.data % 8 == 0 else array.copy().data


def decode_batch(
    stored: memoryview, schema: Schema, codec: str, rows: int, raw_size: int
) -> tuple[dict[str, Column], VariableColumn]:
    """Columns of a record batch message, and the keys; nothing beyond `raw_size` is allocated.

    Args:
        stored: The message, its digest checked.
        schema: The index's schema; that of the file is never asked.
        codec: ``none``, ``lz4`` or ``zstd``, as the index says.
        rows: Rows that the index counts.
        raw_size: Bytes that the index declares.

    Raises:
        FormatError: not the message that `ArrowEncoder` writes for this schema.
    """
    message = _aligned(stored)
    header = read_batch_header(message)
    if header.message_bytes != len(message) or header.rows != rows or header.codec != codec:
        raise FormatError(
            f"arrow message of {header.message_bytes} bytes, {header.rows} rows, codec {header.codec}; "
            f"the index says {len(message)}, {rows}, {codec}"
        )
    if bool((header.nodes[:, 1] != 0).any()):
        raise FormatError("arrow message: a column declares nulls")
    if _raw_bytes(header, message) != raw_size:
        raise FormatError(
            f"arrow message: {_raw_bytes(header, message)} raw bytes, the index says {raw_size}"
        )
    layout = _layout(schema)
    if len(header.nodes) != sum(nodes for nodes, _ in layout) or len(header.buffers) != sum(
        n for _, n in layout
    ):
        raise FormatError(
            f"arrow message: {len(header.nodes)} arrays, {len(header.buffers)} buffers do not fit {schema}"
        )
    buffers = _plain_buffers(message, header) if codec == "none" else _decompressed_buffers(message, schema)
    if len(buffers) != len(header.buffers):
        raise FormatError("arrow message: pyarrow finds other buffers than its metadata")
    reader = _Reader(header.nodes[:, 0].tolist(), buffers, rows)
    keys = reader.variable(_TEXT, KEY_FIELD)
    columns = {name: reader.column(kind, name) for name, kind in schema.items()}
    return columns, keys


def _layout(schema: Schema) -> list[tuple[int, int]]:
    """(arrays, buffers) of each column, the key first."""
    counts = [(1, 3)]
    for kind in schema.values():
        if kind.kind in ("bytes", "str", "json"):
            counts.append((1, 3))
        elif kind.kind == "ragged":
            counts.append((2, 4))
        else:
            counts.append((1 + len(kind.shape), 2 + len(kind.shape)))
    return counts


def _plain_buffers(message: memoryview, header: BatchHeader) -> list[NDArray[np.uint8]]:
    body = np.frombuffer(message, np.uint8)[header.body_offset :]
    return [body[offset : offset + length] for offset, length in header.buffers.tolist()]


def _decompressed_buffers(message: memoryview, schema: Schema) -> list[NDArray[np.uint8]]:
    """Buffers as pyarrow decompresses them: it holds each to its declared length, which has been bounded."""
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), arrow_schema(schema))
        batch.validate(full=True)
        found = [buffer for column in batch.columns for buffer in column.buffers()]
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise FormatError(f"arrow message: pyarrow refuses it: {str(error)[:200]}") from None
    return [_EMPTY if buffer is None else np.frombuffer(buffer, np.uint8) for buffer in found]


class _Reader:
    """Takes arrays and buffers off a batch in order, checking each against what the type calls for."""

    def __init__(self, lengths: list[int], buffers: list[NDArray[np.uint8]], rows: int) -> None:
        self._lengths: Iterator[int] = iter(lengths)
        self._buffers: Iterator[NDArray[np.uint8]] = iter(buffers)
        self._rows = rows

    def column(self, kind: FieldType, name: str) -> Column:
        """The next column."""
        if kind.kind in ("bytes", "str", "json"):
            return self.variable(kind, name)
        if kind.kind == "ragged":
            return self._ragged(kind, name)
        count = self._rows
        for size in kind.shape:
            self._array(count, name)
            count *= size
        self._array(count, name)
        values = self._items(count, kind.numpy_dtype, name)
        return FixedColumn(values.reshape(self._rows, *kind.shape))

    def variable(self, kind: FieldType, name: str) -> VariableColumn:
        """The next column of bytes or text."""
        self._array(self._rows, name)
        offsets = self._offsets(name)
        data = self._take(int(offsets[-1]), name)
        if kind.kind != "bytes":
            _check_utf8(data, offsets, name)
        return VariableColumn(data, offsets[:-1], offsets[1:], kind)

    def _ragged(self, kind: FieldType, name: str) -> VariableColumn:
        self._array(self._rows, name)
        offsets = self._offsets(name)
        self._array(int(offsets[-1]), name)
        dtype = kind.numpy_dtype
        values = self._items(int(offsets[-1]), dtype, name)
        ends = offsets * dtype.itemsize if dtype.itemsize > 1 else offsets
        return VariableColumn(values.view(np.uint8), ends[:-1], ends[1:], kind)

    def _array(self, expected: int, name: str) -> None:
        """The next array: so many items, and no validity bitmap."""
        length = next(self._lengths)
        if length != expected or len(next(self._buffers)):
            raise FormatError(
                f"arrow column {name!r}: {length} items where {expected} belong, or a validity bitmap"
            )

    def _take(self, size: int, name: str) -> NDArray[np.uint8]:
        buffer = next(self._buffers)
        if not size <= len(buffer) < size + 64:
            raise FormatError(f"arrow column {name!r}: buffer of {len(buffer)} bytes, expected {size}")
        return _read_only(buffer[:size])

    def _offsets(self, name: str) -> NDArray[np.int64]:
        raw = self._take(8 * (self._rows + 1), name)
        offsets: NDArray[np.int64] = raw.view("<i8")
        # A last offset beyond the data is refused where the data is taken; in between they may not fall.
        if offsets[0] != 0 or bool((offsets[1:] < offsets[:-1]).any()):
            raise FormatError(f"arrow column {name!r}: offsets do not ascend from 0")
        if int(offsets[-1]) > 2**40:
            raise FormatError(f"arrow column {name!r}: offsets run to {int(offsets[-1])}")
        return offsets

    def _items(self, count: int, dtype: np.dtype[Any], name: str) -> NDArray[Any]:
        if dtype.kind != "b":
            return self._take(count * dtype.itemsize, name).view(dtype)
        bits = self._take(-(-count // 8), name)
        return _read_only(np.unpackbits(bits, count=count, bitorder="little").view(np.bool_))


def _check_utf8(data: NDArray[np.uint8], offsets: NDArray[np.int64], name: str) -> None:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    try:
        pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers, null_count=0).validate(full=True)
    except pa.ArrowException as error:
        raise FormatError(f"arrow column {name!r}: not UTF-8: {str(error)[:200]}") from None


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
