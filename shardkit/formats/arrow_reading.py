"""Reading blocks of the `arrow` format: record batch messages of an Arrow IPC file (SPEC.md §4).

One way for all: buffers are found by our own bounds-checked reader of the metadata, checked against what the
index's schema calls for, and viewed by numpy. pyarrow only decompresses, after every declared length has been
bounded, and checks UTF-8; the schema in the file is never asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shardkit.errors import FormatError

from .arrow_message import BatchHeader, raw_message_bytes, read_batch_header
from .arrow_schema import KEY_FIELD, arrow_schema
from .block import Column, FixedColumn, VariableColumn
from .compression import MAX_RATIO
from .schema import FieldType, Schema

__all__ = ["decode_batch"]

_TEXT, _BYTES = FieldType("str"), FieldType("bytes")
_EMPTY = np.empty(0, np.uint8)


def _aligned(stored: memoryview) -> memoryview:
    """`stored`, or a copy where it does not begin at a multiple of 8, as FlatBuffers and Arrow need it."""
    array = np.frombuffer(stored, np.uint8)
    return stored if array.ctypes.data % 8 == 0 else array.copy().data


def decode_batch(
    stored: memoryview,
    schema: Schema,
    codec: str,
    rows: int,
    raw_size: int,
    *,
    keys_checked_later: bool = False,
) -> tuple[dict[str, Column], VariableColumn]:
    """Columns of a record batch message, and the keys; nothing beyond `raw_size` is allocated.

    Args:
        stored: The message, its digest checked.
        schema: The index's schema; that of the file is never asked.
        codec: ``none``, ``lz4`` or ``zstd``, as the index says.
        rows: Rows that the index counts.
        raw_size: Bytes that the index declares.
        keys_checked_later: The caller compares the keys with ones that are known to be text.

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
    if codec != "none" and raw_size > MAX_RATIO * len(message):
        raise FormatError(f"arrow message: {len(message)} bytes cannot hold {raw_size}")
    if raw_message_bytes(header, message) != raw_size:
        raise FormatError(
            f"arrow message: {raw_message_bytes(header, message)} raw bytes, the index says {raw_size}"
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
    keys = reader.variable(_BYTES if keys_checked_later else _TEXT, KEY_FIELD)
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
