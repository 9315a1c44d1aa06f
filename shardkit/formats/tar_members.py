"""The `tar` format: ustar members `key.field.extension`, their npy headers, and blocks of members (SPEC.md §3).

The bytes are deterministic. Sources: IEEE Std 1003.1, pax utility, "ustar Interchange Format"; numpy.lib.format,
version 1.0: magic, version, little-endian uint16 header length, a Python literal padded with spaces and ended by a
newline so that the data begins at a multiple of 64 bytes. npy headers are built here, so that they do not depend on the
NumPy version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SampleError

from .block import EncodedBlock, RowBlock, payloads_of
from .schema import FieldType, Schema, presence_of
from .values import array_header

BLOCK = 512
"""Bytes of a tar block (POSIX.1-1988 ustar)."""

TRAILER = bytes(2 * BLOCK)
"""The two zero blocks that end a tar."""

MAX_MEMBER_SIZE = 8**11 - 1
"""Maximum size of a member: eleven octal digits of a header, 8 GiB - 1."""

_MAX_FIELD = 40
_UNFIT = re.compile(rb"[^A-Za-z0-9_-]")
_BEFORE_SIZE = b"0000644\x00" + b"0000000\x00" + b"0000000\x00"  # mode, uid, gid
_MTIME = b"00000000000\x00"
_AFTER_CHECKSUM = (
    b"0" + bytes(100) + b"ustar\x00" + b"00" + bytes(64) + b"0000000\x00" + b"0000000\x00" + bytes(155 + 12)
)
# Sum of everything but name and size, with the checksum field counted as eight spaces.
_FIXED_SUM = sum(_BEFORE_SIZE) + sum(_MTIME) + 8 * 0x20 + sum(_AFTER_CHECKSUM)


RAGGED_HEADER_BYTES = 128
"""Bytes of the npy header of any one-dimensional array: no length has enough digits for the next size, 192."""


# (offset, magic bytes, extension); the first match wins. At most four letters (`writing.MAX_EXTENSION`).
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"\x89PNG\r\n\x1a\n", "png"),
    (0, b"GIF87a", "gif"),
    (0, b"GIF89a", "gif"),
    (0, b"II*\x00", "tiff"),
    (0, b"MM\x00*", "tiff"),
    (0, b"ID3", "mp3"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (4, b"ftyp", "mp4"),
    (0, b"%PDF-", "pdf"),
)
_RIFF = {b"WEBP": "webp", b"WAVE": "wav"}


def padded(size: int) -> int:
    """Return `size` rounded up to a multiple of 512."""
    return -(-size // BLOCK) * BLOCK


def member_header(name: bytes, size: int) -> bytes:
    """Return the 512-byte header of a regular file: mode 0644, owner 0, time 0.

    Raises:
        SampleError: The name has more than 100 bytes, or the member is too large.
    """
    if len(name) > 100 or not 0 <= size <= MAX_MEMBER_SIZE:
        raise SampleError(
            f"tar member {name.decode(errors='replace')!r} of {size} bytes: name above 100 bytes or too big"
        )
    octal = b"%011o\x00" % size
    checksum = b"%06o\x00 " % (_FIXED_SUM + sum(name) + sum(octal))
    return b"".join((name.ljust(100, b"\x00"), _BEFORE_SIZE, octal, _MTIME, checksum, _AFTER_CHECKSUM))


@lru_cache(maxsize=64)
def member_names(schema: Schema) -> tuple[str, ...]:
    """Return the name of each field in tar members, at most 40 bytes and unique regardless of case (SPEC.md §1).

    Bytes outside ``[A-Za-z0-9_-]`` are percent-encoded. A name that is too long, or equal to an earlier one except for
    case, is cut and ends in ``%-`` and the position of the field.
    """
    names: list[str] = []
    taken: set[str] = set()
    for place, field in enumerate(schema):
        name = _UNFIT.sub(lambda found: b"%%%02X" % found[0][0], field.encode()).decode()
        if len(name) > _MAX_FIELD or name.lower() in taken:
            mark = f"%-{place}"
            name = re.sub(r"%.?\Z", "", name[: _MAX_FIELD - len(mark)]) + mark
        names.append(name)
        taken.add(name.lower())
    return tuple(names)


@lru_cache(maxsize=4096)
def npy_header(kind: FieldType, length: int = 0) -> bytes:
    """Return the npy header of a member of type `kind`; `length` is the number of items of a ragged array."""
    return array_header(kind.numpy_dtype, (length,) if kind.kind == "ragged" else kind.shape)


def sniff_extension(payload: bytes | memoryview) -> str:
    """Return the file extension that matches the first 16 bytes of a payload, or ``bin``."""
    head = bytes(payload[:16])
    for offset, magic, extension in _MAGIC:
        if head.startswith(magic, offset):
            return extension
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12], "bin")
    # Two letters are a weak magic, so the size in the BMP header is compared too.
    if head[:2] == b"BM" and int.from_bytes(head[2:6], "little") == len(payload):
        return "bmp"
    # MPEG-1/2 layer III without ID3 tag: 11 sync bits, layer 3, valid bit rate and sampling rate.
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2 and head[1] & 0x18 != 0x08:
        return "mp3" if 0x10 <= head[2] < 0xF0 and head[2] & 0x0C != 0x0C else "bin"
    return "bin"


def member_extension(kind: FieldType, payload: bytes | memoryview) -> str:
    """Return the extension of the tar member of `payload`, by the conventions of webdataset."""
    if kind.kind == "bytes":
        return sniff_extension(payload)
    if kind.kind == "str":
        return "txt"
    if kind.kind == "json":
        return "json"
    if kind.is_whole:
        return "cls"
    return "bin" if kind.kind == "list" else "npy"


# ---- Blocks of members

_PADDING = tuple(bytes(size) for size in range(BLOCK))
MAX_DIGITS = 20
"""Maximum number of characters of a 64-bit integer, sign included."""


class TarEncoder:
    """Encode rows as blocks of a tar."""

    def __init__(self, schema: Schema) -> None:
        self._fields = [
            (f".{name}.", kind) for name, kind in zip(member_names(schema), schema.values(), strict=True)
        ]
        self._schema = schema

    def head(self) -> bytes:
        """Return no bytes: nothing precedes the first block."""
        return b""

    def encode(
        self, block: RowBlock
    ) -> tuple[list[EncodedBlock], NDArray[np.uint64] | None, NDArray[np.uint64] | None]:
        """Return the encoded blocks, and (rows, fields) offsets and sizes of the members' contents in their blocks."""
        blocks: list[EncodedBlock] = []
        ends = set(block.borders[1:])
        parts: list[bytes | memoryview] = []
        offsets: list[int] = []
        sizes: list[int] = []
        position = 0
        stored = dict(zip(self._schema.stored, map(payloads_of, block.columns), strict=True))
        columns = [_members_of(stored, name) for name in self._schema]
        for row, (key, *payloads) in enumerate(zip(block.keys, *columns, strict=True), 1):
            for (dotted, kind), payload in zip(self._fields, payloads, strict=True):
                if payload is None:
                    offsets.append(0)
                    sizes.append(0)
                    continue
                prefix, content = member_parts(kind, payload)
                size = len(prefix) + len(content)
                name = f"{key}{dotted}{member_extension(kind, payload)}"
                parts += (member_header(name.encode(), size), prefix, content, _PADDING[-size % BLOCK])
                offsets.append(position + BLOCK)
                sizes.append(size)
                position += BLOCK + padded(size)
            if payloads.count(None) == len(payloads):
                raise SampleError(
                    f"key {key!r}: no field has a value, and a sample of a tar is its members; leave it out, or "
                    'store them as arrow (--format arrow, format="arrow")'
                )
            if row in ends:
                raw = b"".join(parts)
                blocks.append(EncodedBlock(raw, len(raw)))
                parts.clear()
                position = 0
        shape = (len(block), len(self._fields))
        return (
            blocks,
            np.array(offsets, np.uint64).reshape(shape),
            np.array(sizes, np.uint64).reshape(shape),
        )

    def tail(self) -> bytes:
        """Return the two zero blocks that end an archive."""
        return TRAILER


def _members_of(
    stored: Mapping[str, Sequence[bytes | memoryview]], name: str
) -> Sequence[bytes | memoryview | None]:
    """Return the payloads of a field, None for missing values."""
    presence = stored.get(presence_of(name))
    if presence is None:
        return stored[name]
    return [payload if present[0] else None for payload, present in zip(stored[name], presence, strict=True)]


def member_parts(kind: FieldType, payload: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
    """Return (prefix, content) whose concatenation is the content of the member."""
    if kind.is_opaque:
        return b"", payload
    dtype = kind.numpy_dtype
    if kind.is_whole:
        value = int.from_bytes(payload, "little", signed=dtype.kind == "i")
        return b"", b"%d" % value
    return npy_header(kind, len(payload) // dtype.itemsize), payload


def member_bytes(kind: FieldType, payload_bytes: int) -> int:
    """Return the size of the tar member of a payload, header and padding included."""
    if kind.is_whole:
        return 2 * BLOCK
    return BLOCK + padded(payload_bytes + (0 if kind.is_opaque else len(npy_header(kind))))
