"""A bounds-checked reader of the FlatBuffers metadata of Arrow IPC record batches.

It sees the bytes before pyarrow does, so that no made-up length reaches an allocation. Sources: FlatBuffers
internals (tables, vtables, vectors); Arrow columnar format, Message.fbs, Schema.fbs and File.fbs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

from shardkit.errors import FormatError

FILE_MAGIC = b"ARROW1"
"""Begins and ends an Arrow IPC file (Arrow columnar format, "IPC File Format")."""

CONTINUATION = b"\xff\xff\xff\xff"
"""Stands before the length of every message."""

END_OF_STREAM = CONTINUATION + bytes(4)
"""A message of length 0."""

_V5 = 4
_RECORD_BATCH = 3
_CODECS = {0: "lz4", 1: "zstd"}


@dataclass(frozen=True, slots=True, eq=False)
class BatchHeader:
    """What the metadata of a record batch says.

    Attributes:
        rows: Rows of the batch.
        lengths: Items of each array, parents first.
        nulls: Nulls of all arrays together.
        buffers: Offset in the body and length of each buffer; inside the body, in order.
        codec: ``none``, ``lz4`` or ``zstd``.
        body_offset: Where the body begins in the message.
        message_bytes: Bytes of the whole message.
    """

    rows: int
    lengths: tuple[int, ...]
    nulls: int
    buffers: tuple[tuple[int, int], ...]
    codec: str
    body_offset: int
    message_bytes: int


class MetadataTable:
    """One FlatBuffers table; every access is inside `data` or a FormatError."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data = data
        self._position = position
        vtable = position - self._read("<i", position)
        self._slots = self._read("<H", vtable) // 2 - 2
        self._vtable = vtable

    def _read(self, layout: str, position: int) -> int:
        if position < 0 or position + struct.calcsize(layout) > len(self._data):
            raise FormatError(f"arrow metadata: a reference to {position} leaves its {len(self._data)} bytes")
        return int(struct.unpack_from(layout, self._data, position)[0])

    def place(self, slot: int) -> int | None:
        """Where a field lies; None where it is absent."""
        if slot >= self._slots:
            return None
        offset = self._read("<H", self._vtable + 4 + 2 * slot)
        return self._position + offset if offset else None

    def number(self, slot: int, layout: str) -> int:
        """Scalar field, 0 where absent (the default of every field read here)."""
        place = self.place(slot)
        return 0 if place is None else self._read(layout, place)

    def table(self, slot: int) -> MetadataTable | None:
        """Field that refers to another table."""
        place = self.place(slot)
        return None if place is None else MetadataTable(self._data, place + self._read("<I", place))

    def structs(self, slot: int, width: int) -> slice:
        """Where the items of a vector of structs of `width` bytes lie; empty where it is absent."""
        place = self.place(slot)
        if place is None:
            return slice(0, 0)
        start = place + self._read("<I", place)
        end = start + 4 + self._read("<I", start) * width
        if end > len(self._data):
            raise FormatError(f"arrow metadata: a vector runs to {end}, past its {len(self._data)} bytes")
        return slice(start + 4, end)

    def absent(self, slot: int) -> bool:
        """Whether a field is not there."""
        return self.place(slot) is None


def _pairs(data: memoryview) -> tuple[tuple[int, int], ...]:
    return tuple(struct.iter_unpack("<qq", data))


class _Shape:
    """What the metadata of many batches of one file have in common: all but four kinds of numbers, and where these lie.

    Metadata that are alike but for these numbers lead every reader of FlatBuffers the same ways, so that the numbers of
    another batch can be read where those of the first were found.

    Args:
        data: metadata, of which the structure is read.

    Raises:
        FormatError: no record batch of metadata version 5.
    """

    def __init__(self, data: bytes) -> None:
        metadata = memoryview(data)
        root = MetadataTable(metadata, int.from_bytes(metadata[:4], "little"))
        version, kind = root.number(0, "<h"), root.number(1, "<B")
        batch = root.table(2)
        if (
            version != _V5
            or kind != _RECORD_BATCH
            or batch is None
            or not root.absent(4)
            or not batch.absent(4)
        ):
            raise FormatError(f"arrow message: version {version} kind {kind}, expected a plain record batch")
        self._codec = "none"
        compression = batch.table(3)
        if compression is not None:
            if compression.number(1, "<b") != 0:
                raise FormatError("arrow message: unknown compression method")
            self._codec = _CODECS.get(compression.number(0, "<b"), "unknown")
        root.number(3, "<q"), batch.number(0, "<q")  # inside the metadata, or an error
        self._body, self._rows = root.place(3), batch.place(0)
        self._nodes, self._buffers = batch.structs(1, 16), batch.structs(2, 16)
        self._differing = [slice(place, place + 8) for place in (self._body, self._rows) if place is not None]
        self._differing += [self._nodes, self._buffers]
        self._common = self._without_numbers(data)

    def fits(self, data: bytes) -> bool:
        """Whether other metadata differ in nothing else."""
        return len(data) == len(self._common) and self._without_numbers(data) == self._common

    def _without_numbers(self, data: bytes) -> bytearray:
        found = bytearray(data)
        for place in self._differing:
            found[place] = bytes(place.stop - place.start)
        return found

    def header(self, data: bytes) -> BatchHeader:
        """What metadata that fit say.

        Raises:
            FormatError: lengths that leave the message.
        """
        metadata = memoryview(data)
        body, rows = (
            0 if place is None else int.from_bytes(metadata[place : place + 8], "little", signed=True)
            for place in (self._body, self._rows)
        )
        if body < 0 or body % 8:
            raise FormatError(f"arrow message: body of {body} bytes")
        buffers, nodes = _pairs(metadata[self._buffers]), _pairs(metadata[self._nodes])
        _check_buffers(buffers, body)
        return BatchHeader(
            rows=rows,
            lengths=tuple([length for length, _ in nodes]),
            nulls=sum([abs(count) for _, count in nodes]),
            buffers=buffers,
            codec=self._codec,
            body_offset=8 + len(data),
            message_bytes=8 + len(data) + body,
        )


_MOST_SHAPES = 64
_shapes: dict[int, _Shape] = {}  # the last one of so many bytes


def read_batch_header(message: memoryview) -> BatchHeader:
    """Header of the encapsulated record batch message at the start of `message`, which may be longer.

    Raises:
        FormatError: no record batch of metadata version 5, or lengths that leave the message.
    """
    length = int.from_bytes(message[4:8], "little")
    if len(message) < 8 or message[:4] != CONTINUATION or length % 8 or not 8 <= length <= len(message) - 8:
        raise FormatError(f"arrow message: prefix {bytes(message[:8]).hex()} of {len(message)} bytes")
    # Blocks of fixed-size rows have the same metadata again and again: what was read once is known.
    header = _read_metadata(bytes(message[8 : 8 + length]))
    if header.message_bytes > len(message):
        raise FormatError(f"arrow message: {header.message_bytes} bytes in a message of {len(message)}")
    return header


@lru_cache(maxsize=64)
def _read_metadata(data: bytes) -> BatchHeader:
    """The header whose metadata, behind the 8 bytes of prefix, is `data`."""
    shape = _shapes.get(len(data))
    if shape is None or not shape.fits(data):
        shape = _Shape(data)
        if len(_shapes) >= _MOST_SHAPES:
            _shapes.clear()
        _shapes[len(data)] = shape
    return shape.header(data)


def _check_buffers(buffers: tuple[tuple[int, int], ...], body: int) -> None:
    end = 0
    for offset, length in buffers:
        if offset < end or offset % 8 or length < 0 or offset + length > body:
            raise FormatError(f"arrow message: buffer of {length} bytes at {offset} in a body of {body}")
        end = offset + length


def raw_message_bytes(header: BatchHeader, message: memoryview) -> int:
    """Bytes that the message would have without compression; buffers padded to 8 as pyarrow does."""
    if header.codec == "none":
        return header.message_bytes
    total = header.body_offset
    for number, (_, length) in enumerate(header.buffers):
        if length:
            raw, _ = compressed_buffer(header, message, number)
            total += -(-(length - 8 if raw is None else raw) // 8) * 8
    return total


def compressed_buffer(header: BatchHeader, message: memoryview, number: int) -> tuple[int | None, memoryview]:
    """Of a buffer of a compressed message that is not empty: the bytes that it declares, and what lies behind that.

    None where those behind it are not compressed.

    Raises:
        FormatError: there is no room for what it declares, or that is no size.
    """
    offset, length = header.buffers[number]
    start = header.body_offset + offset
    raw = int.from_bytes(message[start : start + 8], "little", signed=True)
    if length < 8 or raw < -1:
        raise FormatError(f"arrow message: compressed buffer of {length} bytes declares {raw}")
    return None if raw == -1 else raw, message[start + 8 : start + length]


def file_head_size(data: memoryview) -> int:
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
