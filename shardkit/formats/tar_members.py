"""Members of a tar: ustar headers, the npy headers of arrays, and the extensions that tell readers how to decode them.

All are deterministic to write and strict to read. Sources: IEEE Std 1003.1, pax utility, "ustar Interchange Format";
numpy.lib.format, version 1.0: magic, version, little-endian uint16 header length, a Python literal padded with spaces
and ended by a newline so that the data begins at a multiple of 64 bytes. Reading an npy header evaluates nothing: it is
compared with the one that the schema calls for, the same under every NumPy. Only where somebody else's tar is adopted
is a header parsed, once, by NumPy's own parser of literals; what reading needs of it goes into the index.
"""

from __future__ import annotations

import io
import re
from functools import lru_cache
from math import prod

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from shardkit.errors import FormatError, SampleError

from .packed import array_header
from .schema import FieldType, Schema

BLOCK = 512
"""Bytes: the unit of a tar (POSIX.1-1988 ustar)."""

TRAILER = bytes(2 * BLOCK)
"""Two blocks of zeros, which end a tar."""

MAX_MEMBER_SIZE = 8**11 - 1  # eleven octal digits: 8 GiB - 1
"""Bytes that fit into the eleven octal digits of a header."""

_MAX_FIELD = 40
_UNFIT = re.compile(rb"[^A-Za-z0-9_-]")
_BEFORE_SIZE = b"0000644\x00" + b"0000000\x00" + b"0000000\x00"  # mode, uid, gid
_MTIME = b"00000000000\x00"
_AFTER_CHECKSUM = (
    b"0" + bytes(100) + b"ustar\x00" + b"00" + bytes(64) + b"0000000\x00" + b"0000000\x00" + bytes(155 + 12)
)
# Sum of everything but name and size, with the checksum field counted as eight spaces.
_FIXED_SUM = sum(_BEFORE_SIZE) + sum(_MTIME) + 8 * 0x20 + sum(_AFTER_CHECKSUM)


_MAX_HEADER_BYTES = 10_000  # of a literal that is parsed; honest ones have about a hundred

RAGGED_HEADER_BYTES = 128
"""Of any one-dimensional array: no length has enough digits for 192."""


# (offset, magic bytes, extension); the first match wins. Four letters at most (`rows.MAX_EXTENSION`).
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
    """`size` rounded up to whole 512-byte tar blocks."""
    return -(-size // BLOCK) * BLOCK


def member_header(name: bytes, size: int) -> bytes:
    """The 512-byte header of a regular file: mode 0644, owner 0, time 0.

    Raises:
        SampleError: the name is longer than 100 bytes or the size above 8 GiB - 1.
    """
    if len(name) > 100 or not 0 <= size <= MAX_MEMBER_SIZE:
        raise SampleError(
            f"tar member {name.decode(errors='replace')!r} of {size} bytes: name above 100 bytes or too big"
        )
    octal = b"%011o\x00" % size
    checksum = b"%06o\x00 " % (_FIXED_SUM + sum(name) + sum(octal))
    return b"".join((name.ljust(100, b"\x00"), _BEFORE_SIZE, octal, _MTIME, checksum, _AFTER_CHECKSUM))


def member_headers(names: NDArray[np.uint8], sizes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """`member_header` of many members whose names are equally long: uint8 (members, 512).

    Args:
        names: uint8 (members, bytes), at most 100 bytes.
        sizes: of the members, at most `MAX_MEMBER_SIZE`.
    """
    count, length = names.shape
    headers = np.empty((count, BLOCK), np.uint8)
    headers[:] = np.frombuffer(member_header(b"-" * length, 0), np.uint8)
    headers[:, :length] = names
    headers[:, 124:135] = _octal(sizes, 11)
    sums = _FIXED_SUM + names.sum(axis=1, dtype=np.int64) + headers[:, 124:136].sum(axis=1, dtype=np.int64)
    headers[:, 148:154] = _octal(sums, 6)
    return headers


def _octal(numbers: NDArray[np.int64], digits: int) -> NDArray[np.uint8]:
    shifts = np.arange(3 * (digits - 1), -1, -3)
    found: NDArray[np.uint8] = (((numbers[:, None] >> shifts) & 7) + ord("0")).astype(np.uint8)
    return found


@lru_cache(maxsize=64)
def member_names(schema: Schema) -> tuple[str, ...]:
    """What stands for each field in the names of tar members: its own name where that fits (SPEC.md §3).

    Other characters are percent-encoded. What is too long then, or equal to an earlier one but for case, ends in ``%-``
    and the field's place, which no other name does.
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
    """Header of a member of type `kind`; `length` is the number of items of a ragged one."""
    return array_header(kind.numpy_dtype, (length,) if kind.kind == "ragged" else kind.shape)


def npy_payload_offset(data: bytes | memoryview, kind: FieldType) -> int:
    """Where the canonical payload of type `kind` begins in an npy file that NumPy, or anybody, wrote.

    Raises:
        FormatError: The member is no npy file, or its items do not lie there as `kind` calls for: another dtype or
            shape, big-endian, column by column, pickled, or cut short.
    """
    stream = io.BytesIO(bytes(data[: 12 + _MAX_HEADER_BYTES]))
    try:
        version = npy_format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version[0]}.{version[1]}")
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, columns_first, dtype = read(stream, max_header_size=_MAX_HEADER_BYTES)
    except (ValueError, EOFError, TypeError, SyntaxError, OverflowError, RecursionError) as error:
        raise FormatError(f"not a readable .npy member ({str(error)[:100]})") from None
    if dtype.hasobject:
        raise FormatError("a pickled array, which is never read")
    if dtype != kind.numpy_dtype or dtype.byteorder == ">":
        raise FormatError(f"an array of dtype {dtype.str}, expected {kind.numpy_dtype.str}")
    if len(shape) != 1 if kind.kind == "ragged" else tuple(shape) != kind.shape:
        raise FormatError(f"an array of shape {shape}, expected {kind}")
    if columns_first and len(shape) > 1:
        raise FormatError("an array that is stored column by column (Fortran order)")
    expected = stream.tell() + np.dtype(dtype).itemsize * prod(shape)
    if expected != len(data):
        raise FormatError(f"{len(data)} bytes, but the array's header asks for {expected}")
    return stream.tell()


def sniff_extension(payload: bytes | memoryview) -> str:
    """Extension for opaque bytes by their first 16 bytes; ``bin`` where nothing is recognised."""
    head = bytes(payload[:16])
    for offset, magic, extension in _MAGIC:
        if head.startswith(magic, offset):
            return extension
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12], "bin")
    # Two letters are a weak magic: the size that a BMP repeats in its header makes it a strong one.
    if head[:2] == b"BM" and int.from_bytes(head[2:6], "little") == len(payload):
        return "bmp"
    # MPEG-1/2 layer III without ID3 tag: 11 sync bits, layer 3, a bit rate and a sampling rate that exist.
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2 and head[1] & 0x18 != 0x08:
        return "mp3" if 0x10 <= head[2] < 0xF0 and head[2] & 0x0C != 0x0C else "bin"
    return "bin"


def member_extension(kind: FieldType, payload: bytes | memoryview) -> str:
    """Extension of the tar member that holds `payload`, by webdataset's conventions."""
    if kind.kind == "bytes":
        return sniff_extension(payload)
    if kind.kind == "str":
        return "txt"
    if kind.kind == "json":
        return "json"
    if kind.is_whole:
        return "cls"
    return "bin" if kind.kind == "list" else "npy"
