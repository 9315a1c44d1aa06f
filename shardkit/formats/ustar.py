"""POSIX ustar headers, deterministic to write and strict to read.

Source: IEEE Std 1003.1, pax utility, "ustar Interchange Format".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError, SampleError

__all__ = ["BLOCK", "MAX_MEMBER_SIZE", "TRAILER", "iter_members", "member_header", "member_headers", "padded"]

BLOCK = 512
"""Bytes: the unit of a tar (POSIX.1-1988 ustar)."""

TRAILER = bytes(2 * BLOCK)
"""Two blocks of zeros, which end a tar."""

MAX_MEMBER_SIZE = 8**11 - 1  # eleven octal digits: 8 GiB - 1
"""Bytes that fit into the eleven octal digits of a header."""

_NAME = re.compile(rb"[A-Za-z0-9_-]{1,80}(?:\.[A-Za-z0-9_]+)+\Z")
_SIZE = re.compile(rb"[0-7]{11}\x00\Z")
_BEFORE_SIZE = b"0000644\x00" + b"0000000\x00" + b"0000000\x00"  # mode, uid, gid
_MTIME = b"00000000000\x00"
_AFTER_CHECKSUM = (
    b"0" + bytes(100) + b"ustar\x00" + b"00" + bytes(64) + b"0000000\x00" + b"0000000\x00" + bytes(155 + 12)
)
# Sum of everything but name and size, with the checksum field counted as eight spaces.
_FIXED_SUM = sum(_BEFORE_SIZE) + sum(_MTIME) + 8 * 0x20 + sum(_AFTER_CHECKSUM)


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


def iter_members(data: memoryview, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Members in ``data[start:end]``, which holds whole members and nothing else.

    Reads headers and padding only, so a sparse file of any size costs nothing.

    Yields:
        (name, offset of the content in `data`, size).

    Raises:
        FormatError: a byte differs from what `member_header` writes, padding is not zero, or a member is cut
        short.
    """
    position = start
    while position < end:
        header = bytes(data[position : position + BLOCK])
        name = header[:100].rstrip(b"\x00")
        digits = header[124:136]
        if position + BLOCK > end or not _NAME.match(name) or not _SIZE.match(digits):
            raise FormatError(f"tar header at {position}: no plain file with a name that shardkit writes")
        size = int(digits[:11], 8)
        if header != member_header(name, size):
            raise FormatError(
                f"tar header at {position} ({name.decode()}): not the ustar header that shardkit writes"
            )
        content = position + BLOCK
        position = content + padded(size)
        if position > end or any(data[content + size : position]):
            raise FormatError(f"tar member {name.decode()} at {content}: cut short, or padding is not zero")
        yield name.decode(), content, size
