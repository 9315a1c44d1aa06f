"""A bounds-checked reader of the FlatBuffers metadata of Arrow IPC record batches.

Lengths are validated here before anything is allocated by them. Sources: FlatBuffers internals (tables, vtables,
vectors); Arrow columnar format, Message.fbs, Schema.fbs and File.fbs.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from shardkit.errors import FormatError

FILE_MAGIC = b"ARROW1"
"""First and last bytes of an Arrow IPC file (Arrow columnar format, "IPC File Format")."""

CONTINUATION = b"\xff\xff\xff\xff"
"""Marker before the length of every message."""

END_OF_STREAM = CONTINUATION + bytes(4)
"""A message of length 0."""

_V5 = 4
_ZSTD = 1
_MAX_METADATA_BYTES = 64 << 20


class NumberPlaces(NamedTuple):
    """Offsets, after the 8-byte prefix, of the numbers that differ between messages of one schema and writer."""

    rows: int | None
    body: int | None
    nodes: slice  # of (items, nulls), two int64 each
    buffers: slice  # of (offset, length), two int64 each


class BatchHeader(NamedTuple):
    """The parsed metadata of a record batch message."""

    rows: int
    lengths: tuple[int, ...]  # items of each array, parents first
    nulls: int  # sum over all arrays
    buffers: tuple[tuple[int, int], ...]  # (offset in the body, bytes) of each, in order and inside the body
    codec: str  # none, zstd or unknown
    body_offset: int  # bytes before the body, prefix included
    message_bytes: int
    places: NumberPlaces


_I8, _U8, _I16, _U16, _I32, _U32, _I64 = map(struct.Struct, ("<b", "<B", "<h", "<H", "<i", "<I", "<q"))


_BLOCK = struct.Struct("<qi4xq")
"""Place of a message in a file: its offset, and the bytes of its metadata and body (File.fbs, Block)."""


class MetadataTable:
    """One FlatBuffers table; an access outside `data` raises FormatError."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data = data
        self._position = position
        vtable = position - self._read(_I32, position)
        slots = max(0, self._read(_U16, vtable) // 2 - 2)
        if vtable + 4 + 2 * slots > len(data):
            raise FormatError(f"arrow metadata: a table of {slots} fields leaves its {len(data)} bytes")
        self._offsets = struct.unpack_from(f"<{slots}H", data, vtable + 4)

    def _read(self, layout: struct.Struct, position: int) -> int:
        if 0 <= position <= len(self._data) - layout.size:
            value: int = layout.unpack_from(self._data, position)[0]
            return value
        raise FormatError(f"arrow metadata: a reference to {position} leaves its {len(self._data)} bytes")

    def place(self, slot: int) -> int | None:
        """Return the offset of a field, or None if it is absent."""
        offset = self._offsets[slot] if slot < len(self._offsets) else 0
        return self._position + offset if offset else None

    def number(self, slot: int, layout: struct.Struct) -> int:
        """Return a scalar field; 0 if it is absent, which is the default of every field read here."""
        place = self.place(slot)
        return 0 if place is None else self._read(layout, place)

    def table(self, slot: int) -> MetadataTable | None:
        """Return the table that a field refers to, or None."""
        place = self.place(slot)
        return None if place is None else MetadataTable(self._data, place + self._read(_U32, place))

    def structs(self, slot: int, width: int) -> slice:
        """Return the range of a vector of structs of `width` bytes; empty if it is absent."""
        place = self.place(slot)
        if place is None:
            return slice(0, 0)
        start = place + self._read(_U32, place)
        end = start + 4 + self._read(_U32, start) * width
        if end > len(self._data):
            raise FormatError(f"arrow metadata: a vector runs to {end}, past its {len(self._data)} bytes")
        return slice(start + 4, end)


class MessageHead(NamedTuple):
    """Kind and sizes of any message; `rows` is 0 unless it is a record batch."""

    kind: int
    rows: int
    num_bytes: int  # prefix, metadata and body


SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3
"""Kinds of messages (Message.fbs, MessageHeader)."""


def message_metadata_bytes(prefix: bytes) -> int:
    """Return the size of the metadata after an 8-byte prefix; 0 at the end of the stream.

    Raises:
        FormatError: The prefix is not one of a message; streams before Arrow 0.15 have shorter ones.
    """
    length = int.from_bytes(prefix[4:8], "little")
    if len(prefix) < 8 or prefix[:4] != CONTINUATION or length % 8 or length > _MAX_METADATA_BYTES:
        raise FormatError(f"arrow message: prefix {prefix.hex()}")
    return length


def read_message_head(metadata: bytes) -> MessageHead:
    """Parse the metadata that follows the 8-byte prefix of any message.

    Raises:
        FormatError: The metadata refers to bytes outside of it, or declares a negative size.
    """
    view = memoryview(metadata)
    root = MetadataTable(view, int.from_bytes(view[:4], "little"))
    kind, body = root.number(1, _U8), root.number(3, _I64)
    batch = root.table(2) if kind == RECORD_BATCH else None
    rows = 0 if batch is None else batch.number(0, _I64)
    if rows < 0 or body < 0 or body % 8:
        raise FormatError(f"arrow message: {rows} rows, body of {body} bytes")
    return MessageHead(kind, rows, 8 + len(metadata) + body)


def end_of_blocks(footer: bytes) -> int:
    """Return where the last message of a file ends, given its footer; 0 if it lists none.

    Raises:
        FormatError: The footer refers to bytes outside of it.
    """
    view = memoryview(footer)
    root = MetadataTable(view, int.from_bytes(view[:4], "little"))
    blocks = b"".join(
        view[root.structs(slot, _BLOCK.size)] for slot in (2, 3)
    )  # dictionaries, record batches
    return max((sum(block) for block in _BLOCK.iter_unpack(blocks)), default=0)


def read_batch_header(message: memoryview) -> BatchHeader:
    """Parse the header of the record batch message at the start of `message`, which may be longer.

    Raises:
        FormatError: The metadata is not a plain record batch, or refers to bytes outside of `message`.
    """
    header = read_batch_head(message)
    if header.message_bytes > len(message):
        raise FormatError(f"arrow message: {header.message_bytes} bytes in a message of {len(message)}")
    return header


def read_batch_head(message: memoryview) -> BatchHeader:
    """Parse the header of a message whose body may be cut off."""
    length = int.from_bytes(message[4:8], "little")
    if len(message) < 8 or message[:4] != CONTINUATION or length % 8 or not 8 <= length <= len(message) - 8:
        raise FormatError(f"arrow message: prefix {bytes(message[:8]).hex()} of {len(message)} bytes")
    return _read_metadata(bytes(message[8 : 8 + length]))


@lru_cache(maxsize=64)  # blocks of fixed-size rows share their metadata
def _read_metadata(data: bytes) -> BatchHeader:
    """Parse the metadata that follows the 8-byte prefix."""
    metadata = memoryview(data)
    root = MetadataTable(metadata, int.from_bytes(metadata[:4], "little"))
    version, kind = root.number(0, _I16), root.number(1, _U8)
    batch = root.table(2)
    is_plain = batch is not None and root.place(4) is None and batch.place(4) is None
    if version != _V5 or kind != RECORD_BATCH or batch is None or not is_plain:
        raise FormatError(f"arrow message: version {version} kind {kind}, expected a plain record batch")
    codec = "none"
    if (compression := batch.table(3)) is not None:
        is_known = (compression.number(0, _I8), compression.number(1, _I8)) == (_ZSTD, 0)
        codec = "zstd" if is_known else "unknown"
    body = root.number(3, _I64)
    if body < 0 or body % 8:
        raise FormatError(f"arrow message: body of {body} bytes")
    node_places, buffer_places = batch.structs(1, 16), batch.structs(2, 16)
    nodes = tuple(struct.iter_unpack("<qq", metadata[node_places]))
    buffers = tuple(struct.iter_unpack("<qq", metadata[buffer_places]))
    _check_buffers(buffers, body)
    return BatchHeader(
        rows=batch.number(0, _I64),
        lengths=tuple([length for length, _ in nodes]),
        nulls=sum([abs(count) for _, count in nodes]),
        buffers=buffers,
        codec=codec,
        body_offset=8 + len(data),
        message_bytes=8 + len(data) + body,
        places=NumberPlaces(batch.place(0), root.place(3), node_places, buffer_places),
    )


def _check_buffers(buffers: tuple[tuple[int, int], ...], body: int) -> None:
    end = 0
    for offset, length in buffers:
        if offset < end or offset % 8 or length < 0 or offset + length > body:
            raise FormatError(f"arrow message: buffer of {length} bytes at {offset} in a body of {body}")
        end = offset + length


def raw_message_bytes(header: BatchHeader, message: memoryview) -> int:
    """Return the size of the message without compression, with buffers padded to 8 bytes as pyarrow does."""
    if header.codec == "none":
        return header.message_bytes
    total = header.body_offset
    for number, (_, length) in enumerate(header.buffers):
        if length:
            raw, _ = compressed_buffer(header, message, number)
            total += -(-(length - 8 if raw is None else raw) // 8) * 8
    return total


def compressed_buffer(header: BatchHeader, message: memoryview, number: int) -> tuple[int | None, memoryview]:
    """Split a buffer of a compressed message, which must not be empty.

    Returns:
        The declared uncompressed size (None if the buffer is not compressed), and the bytes after it.
    """
    offset, length = header.buffers[number]
    start = header.body_offset + offset
    raw = int.from_bytes(message[start : start + 8], "little", signed=True)
    if length < 8 or raw < -1:
        raise FormatError(f"arrow message: compressed buffer of {length} bytes declares {raw}")
    return None if raw == -1 else raw, message[start + 8 : start + length]


def file_head_size(data: memoryview) -> int:
    """Return the size of magic and schema message at the start of an Arrow IPC file."""
    length = int.from_bytes(data[12:16], "little")
    if (
        len(data) < 16
        or data[:8] != FILE_MAGIC + b"\x00\x00"
        or data[8:12] != CONTINUATION
        or length > len(data) - 16
    ):
        raise FormatError("arrow file: no magic and schema at its start")
    return 16 + length
