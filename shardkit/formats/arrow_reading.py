"""Decode blocks of the `arrow` format: record batch messages of an Arrow IPC file (SPEC.md §4).

The metadata is parsed by `arrow_message`, and its arrays and buffers are compared with the schema of the index. Columns
are numpy views of the buffers. Buffers of the requested columns are decompressed after every declared length has been
validated. The schema in the file is never used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError, UsageError

from .arrow_message import (
    BatchHeader,
    compressed_buffer,
    raw_message_bytes,
    read_batch_head,
    read_batch_header,
)
from .block import Column, FixedColumn, VariableColumn, check_text
from .compression import MAX_RATIO, decompress_frame
from .schema import KEY_FIELD, FieldType, Schema, presence_of

_TEXT, _BYTES = FieldType("str"), FieldType("bytes")
_EMPTY = np.empty(0, np.uint8)


def _align(stored: memoryview) -> NDArray[np.uint8]:
    """Return `stored` as an array that begins at a multiple of 8, as FlatBuffers and Arrow need; copy if necessary."""
    array = np.frombuffer(stored, np.uint8)
    return array if array.__array_interface__["data"][0] % 8 == 0 else array.copy()


class BatchReader:
    """Columns of one record batch message, each decoded on request.

    The constructor checks the metadata: number, order and sizes of arrays and buffers. Offsets and UTF-8 are checked
    when the column is decoded.

    Args:
        stored: The message; its digest has been checked.
        schema: Schema of the index.
        codec: ``none`` or ``zstd``, from the index.
        rows: Number of rows in the index.
        raw_size: Raw size of the block in the index; no more is allocated.
        columns: Columns that will be requested, with `KEY_FIELD` for the keys; others are not decompressed. None: all.

    Raises:
        FormatError: `stored` is not a message that `ArrowEncoder` writes for this schema.
    """

    def __init__(
        self,
        stored: memoryview,
        schema: Schema,
        codec: str,
        rows: int,
        raw_size: int,
        columns: Iterable[str] | None = None,
    ) -> None:
        message = _align(stored)
        header = _checked_header(message.data, codec, rows, raw_size)
        self._rows, self._schema, self._lengths = rows, schema, header.lengths
        self._places = _places(header.rows, header.lengths, header.nulls, len(header.buffers), schema)
        self._presence = frozenset(schema.stored) - frozenset(schema)
        if codec == "none":
            self._spans, self._plain = header.buffers, message[header.body_offset :]
            self._decompressed: dict[int, NDArray[np.uint8]] | None = None
        else:  # decompressed at once, because the caller has just verified these bytes
            self._decompressed = {}
            for name in self._places if columns is None else columns:
                _, first = self._places[name]
                for number in range(first, first + self._num_buffers(name)):
                    if number not in self._decompressed:
                        self._decompressed[number] = _decompress(message.data, header, number)

    def keys(self, *, checked_later: bool = False) -> VariableColumn:
        """Return the keys; with `checked_later` the caller compares them with known text, so UTF-8 is not checked."""
        return self._variable(KEY_FIELD, _BYTES if checked_later else _TEXT)

    def column(self, name: str) -> Column:
        """Decode one column of `Schema.stored`.

        Raises:
            FormatError: The buffers are not valid for the type.
            UsageError: The column was not requested in the constructor.
        """
        if name in self._presence:
            return FixedColumn(self._present(name))
        kind = self._schema[name]
        if kind.is_opaque:
            return self._variable(name, kind)
        if kind.kind == "ragged":
            return self._ragged_column(name, kind)
        _, buffer = self._places[name]
        count = self._rows * prod(kind.shape)
        for validity in range(buffer + kind.optional, buffer + 1 + len(kind.shape)):
            self._no_bitmap(validity, name)
        values = self._items(buffer + 1 + len(kind.shape), count, kind.numpy_dtype, name)
        return FixedColumn(values.reshape(self._rows, *kind.shape))

    def _num_buffers(self, name: str) -> int:
        if name in self._presence:
            return 1
        return _counts(_BYTES if name == KEY_FIELD else self._schema[name])[1]

    def _present(self, name: str) -> NDArray[np.bool_]:
        """Return a mask of the rows with a value; Arrow omits the bitmap if all rows have one."""
        _, buffer = self._places[name]
        if not len(self._buffer(buffer)):
            return _read_only(np.ones(self._rows, np.bool_))
        return self._items(buffer, self._rows, np.dtype(np.bool_), name)

    def _variable(self, name: str, kind: FieldType) -> VariableColumn:
        _, buffer = self._places[name]
        if not kind.optional:
            self._no_bitmap(buffer, name)
        offsets = self._offsets(buffer + 1, name)
        data = self._take(buffer + 2, int(offsets[-1]), name)
        if (
            kind.kind in ("str", "json") and len(data) and int(data.max()) >= 128
        ):  # ASCII is valid wherever it is cut
            check_text(data, offsets[:-1], offsets[1:], name)
        return VariableColumn(data, offsets[:-1], offsets[1:], kind)

    def _ragged_column(self, name: str, kind: FieldType) -> VariableColumn:
        array, buffer = self._places[name]
        if not kind.optional:
            self._no_bitmap(buffer, name)
        offsets = self._offsets(buffer + 1, name)
        _expect_items(self._lengths[array + 1], int(offsets[-1]), name)
        self._no_bitmap(buffer + 2, name)
        dtype = kind.numpy_dtype
        values = self._items(buffer + 3, int(offsets[-1]), dtype, name)
        ends = offsets * dtype.itemsize if dtype.itemsize > 1 else offsets
        return VariableColumn(values.view(np.uint8), ends[:-1], ends[1:], kind)

    def _buffer(self, number: int) -> NDArray[np.uint8]:
        if self._decompressed is not None:
            if number not in self._decompressed:
                raise UsageError(f"buffer {number} of a block belongs to a field that was not to be read")
            return self._decompressed[number]
        offset, length = self._spans[number]
        return self._plain[offset : offset + length]

    def _no_bitmap(self, number: int, name: str) -> None:
        if len(self._buffer(number)):
            raise FormatError(f"arrow column {name!r}: it has a validity bitmap")

    def _take(self, number: int, size: int, name: str) -> NDArray[np.uint8]:
        buffer = self._buffer(number)
        _expect_bytes(len(buffer), size, name)
        return _read_only(buffer[:size])

    def _offsets(self, number: int, name: str) -> NDArray[np.int64]:
        raw = self._take(number, 8 * (self._rows + 1), name)
        offsets: NDArray[np.int64] = raw.view("<i8")
        # A last offset beyond the data is refused when the data is taken.
        if offsets[0] != 0 or bool((offsets[1:] < offsets[:-1]).any()):
            raise FormatError(f"arrow column {name!r}: offsets do not ascend from 0")
        if int(offsets[-1]) > 2**40:
            raise FormatError(f"arrow column {name!r}: offsets run to {int(offsets[-1])}")
        return offsets

    def _items(self, number: int, count: int, dtype: np.dtype[Any], name: str) -> NDArray[Any]:
        if dtype.kind != "b":
            return self._take(number, count * dtype.itemsize, name).view(dtype)
        bits = self._take(number, -(-count // 8), name)
        return _read_only(np.unpackbits(bits, count=count, bitorder="little").view(np.bool_))


def _checked_header(message: memoryview, codec: str, rows: int, raw_size: int) -> BatchHeader:
    """Return the header of a message after comparing it with the index."""
    header = read_batch_header(message)
    if header.message_bytes != len(message) or header.rows != rows or header.codec != codec:
        raise FormatError(
            f"arrow message of {header.message_bytes} bytes, {header.rows} rows, codec {header.codec}; "
            f"the index says {len(message)}, {rows}, {codec}"
        )
    if codec != "none" and raw_size > MAX_RATIO * len(message):
        raise FormatError(f"arrow message: {len(message)} bytes cannot hold {raw_size}")
    declared = raw_message_bytes(header, message)
    if declared != raw_size:
        raise FormatError(f"arrow message: {declared} raw bytes, the index says {raw_size}")
    return header


def message_layout(
    message: memoryview, schema: Schema, fields: Sequence[str], codec: str
) -> NDArray[np.int64] | None:
    """Return the layout of messages of one schema and writer, with which block_rows.c reads them.

    Args:
        message: An example, whose body may be cut off. It need not be verified: the metadata of every message read by
            the layout must equal its metadata, except for the masked numbers.
        schema: Schema of the messages.
        fields: Fields to read.
        codec: ``none`` or ``zstd``, from the index.

    Returns:
        None if one of `fields` is optional or bool, which C does not read. Otherwise int64 values:

        * bytes of prefix and metadata; bytes of padding for decompressed buffers at multiples of 64; offset of the
          number of rows; offset of the body size; offset and number of nodes; offset and number of buffers; number of
          fields;
        * for each node, items per row, or -1 if they vary;
        * for each field, the first of its buffers that must be empty and their number; the buffer of values or offsets;
          the buffer of data, or -1; bytes per item; the node of its items, or -1;
        * prefix and metadata; a mask of the same size, 0 at the numbers that may differ (rows, body size, nodes without
          null counts, buffers; null counts too if the schema has optional fields) and 255 elsewhere; both padded to 8
          bytes.

    Raises:
        FormatError: The metadata is not what `ArrowEncoder` writes for this schema.
    """
    kinds = [schema.stored[name] for name in fields]
    if any(kind.optional or kind.dtype == "bool" for kind in kinds):
        return None
    header = read_batch_head(message)
    if header.codec != codec or header.places.rows is None or header.places.body is None:
        raise FormatError(f"arrow message: codec {header.codec}, the index says {codec}; or it has no rows")
    first = _places(header.rows, header.lengths, header.nulls, len(header.buffers), schema)
    per_row = [1] * len(header.lengths)
    for name, kind in schema.items():
        array = first[name][0]
        inner = [-1] if kind.kind == "ragged" else np.cumprod(kind.shape, dtype=np.int64).tolist()
        per_row[array + 1 : array + 1 + len(inner)] = inner
    places: list[int] = []
    for name, kind in zip(fields, kinds, strict=True):
        array, buffer = first[name]
        if kind.is_opaque:
            places += (buffer, 1, buffer + 1, buffer + 2, 1, -1)
        elif kind.kind == "ragged":
            places += (buffer, 1, buffer + 1, buffer + 3, kind.numpy_dtype.itemsize, array + 1)
        else:
            depth = 1 + len(kind.shape)
            places += (buffer, depth, buffer + depth, -1, kind.item_bytes or 0, -1)
    size = header.body_offset
    head, mask = np.zeros((2, -(-size // 8) * 8), np.uint8)
    head[:size], mask[:size] = np.frombuffer(message[:size], np.uint8), 255
    rows, body = 8 + header.places.rows, 8 + header.places.body
    nodes, buffers = (range(8 + one.start, 8 + one.stop, 16) for one in header.places[2:])
    nulls = [] if schema.stored is schema else [place + 8 for place in nodes]
    lengths = [place + 8 for place in buffers]
    for place in (rows, body, *nodes, *nulls, *buffers, *lengths):
        mask[place : place + 8] = 0
    padding = 128 * sum(2 if kind.item_bytes is None else 1 for kind in kinds)
    layout = [size, padding, rows, body, nodes.start, len(nodes), buffers.start, len(buffers), len(fields)]
    return np.concatenate([np.array(layout + per_row + places, np.int64), head.view("<i8"), mask.view("<i8")])


@lru_cache(maxsize=64)  # most blocks share their metadata with others
def _places(
    rows: int, lengths: tuple[int, ...], nulls: int, buffers: int, schema: Schema
) -> dict[str, tuple[int, int]]:
    """Return the first (array, buffer) of each column, the keys first."""
    if nulls and schema.stored is schema:
        raise FormatError("arrow message: a column declares nulls")
    array, buffer = 1, 3
    places = {KEY_FIELD: (0, 0)}
    for name, kind in schema.items():
        places[name] = (array, buffer)
        if kind.optional:
            places[presence_of(name)] = (array, buffer)
        arrays, own = _counts(kind)
        array, buffer = array + arrays, buffer + own
    if len(lengths) != array or buffers != buffer:
        raise FormatError(f"arrow message: {len(lengths)} arrays, {buffers} buffers do not fit {schema}")
    for name, (array, _) in places.items():
        count = rows
        _expect_items(lengths[array], count, name)
        for depth, size in enumerate(schema[name].shape if name in schema else ()):
            count *= size
            _expect_items(lengths[array + 1 + depth], count, name)
    return places


def _counts(kind: FieldType) -> tuple[int, int]:
    """Return the number of (arrays, buffers) of a column."""
    if kind.is_opaque:
        return 1, 3
    return (2, 4) if kind.kind == "ragged" else (1 + len(kind.shape), 2 + len(kind.shape))


def _expect_items(found: int, expected: int, name: str) -> None:
    if found != expected:
        raise FormatError(f"arrow column {name!r}: {found} items where {expected} belong")


def _expect_bytes(found: int, expected: int, name: str) -> None:
    if not expected <= found < expected + 64:
        raise FormatError(f"arrow column {name!r}: buffer of {found} bytes, expected {expected}")


def _decompress(message: memoryview, header: BatchHeader, number: int) -> NDArray[np.uint8]:
    """Return a decompressed copy of one buffer, whose length has been checked."""
    if not header.buffers[number][1]:
        return _EMPTY
    raw, data = compressed_buffer(header, message, number)
    if raw is None:
        return np.frombuffer(bytes(data), np.uint8)
    return np.frombuffer(decompress_frame(data, raw, f"arrow message: buffer {number}"), np.uint8)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
