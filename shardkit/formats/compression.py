"""Compression settings, and zstd frames that are checked before they are opened.

zstd is that of the package zstandard, or where that is not installed of Python itself (3.14 and later:
compression.zstd); free-threaded Python has no wheels of zstandard. Both compress by libzstd, whose version decides what
the bytes are.
"""

from __future__ import annotations

import importlib
import re
import threading
from typing import Any, Final, NamedTuple

from shardkit.errors import FormatError, MissingDependency, SchemaError

MAX_WINDOW = 8 << 20
"""Bytes of a zstd window; level 19 needs no more, and RFC 8878 recommends that every decoder supports it."""

MAX_LEVEL = 19
_ZSTD = re.compile(r"zstd(?::([1-9][0-9]?))?\Z")
MAX_RATIO = 1 << 16  # above what zstd can reach: a block of 128 KiB takes at least 4 bytes


def normalise_compression(format: str, text: object) -> str:
    """Return a compression that shards of a format have: ``none``, or for arrow also ``zstd:LEVEL``.

    ``zstd`` alone is level 3.

    Raises:
        SchemaError: unknown format or compression, or one that the format does not have.
    """
    if format not in ("tar", "arrow"):
        raise SchemaError(f"format {format!r} is unknown; expected tar or arrow")
    if text == "none":
        return "none"
    match = _ZSTD.match(text) if isinstance(text, str) else None
    level = int(match.group(1) or 3) if match else 0
    if not 1 <= level <= MAX_LEVEL:
        raise SchemaError(
            f"compression {text!r} is unknown; expected none, zstd or zstd:1 to zstd:{MAX_LEVEL}"
        )
    if format == "tar":
        raise SchemaError(
            f"compression {text!r}: tar shards are not compressed, since media already are; use format arrow"
        )
    return f"zstd:{level}"


def zstd_level(compression: str) -> int | None:
    """Return the level of a normalised compression, or None for ``none``."""
    return int(compression.partition(":")[2]) if compression.startswith("zstd") else None


def decompress_frame(frame: bytes | memoryview, raw_bytes: int, what: str) -> bytes:
    """The `raw_bytes` bytes of exactly one zstd frame; nothing is allocated before its header agrees."""
    try:
        header = read_header(frame)
        # The declared size is what gets allocated.
        if header.content_size != raw_bytes:
            raise FormatError(
                f"{what}: zstd frame declares {header.content_size} bytes, expected {raw_bytes}"
            )
        if header.dictionary or header.window_size > max(MAX_WINDOW, raw_bytes):
            raise FormatError(
                f"{what}: zstd frame wants a dictionary or a window of {header.window_size} bytes"
            )
        if raw_bytes > MAX_RATIO * len(frame):
            raise FormatError(f"{what}: zstd frame of {len(frame)} bytes cannot hold {raw_bytes}")
        raw = decompress(frame)
    except (ZstdError, MemoryError) as error:
        raise FormatError(f"{what}: broken zstd frame ({error})") from None
    if len(raw) != raw_bytes:
        raise FormatError(f"{what}: zstd frame gave {len(raw)} bytes, expected {raw_bytes}")
    return raw


# ---- zstd, whichever library has it

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_own = threading.local()  # a decompressor of each thread: to make one costs as much as a small frame


def _find(*names: str) -> Any:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise MissingDependency("zstd needs Python 3.14 or the package zstandard; run: pip install zstandard")


_library: Final = _find("zstandard", "compression.zstd")
_is_package: Final = _library.__name__ == "zstandard"

ZstdError: Final[type[Exception]] = _library.ZstdError


class FrameHeader(NamedTuple):
    """What a frame says of itself (RFC 8878 §3.1.1.1)."""

    content_size: int | None
    window_size: int
    dictionary: int  # its id, 0: none
    has_checksum: bool
    size: int  # of the header


def read_header(frame: bytes | memoryview) -> FrameHeader:
    """The header of a frame."""
    head = bytes(frame[:18])
    if len(head) < 6 or head[:4] != _MAGIC or head[4] & 8:
        raise ZstdError("no zstd frame begins here")
    flags, at = head[4], 5
    is_single = bool(flags & 32)
    window = 0
    if not is_single:
        window = (8 + (head[5] & 7)) << (7 + (head[5] >> 3))
        at = 6
    dictionary_bytes = (0, 1, 2, 4)[flags & 3]
    content_bytes = (int(is_single), 2, 4, 8)[flags >> 6]
    end = at + dictionary_bytes + content_bytes
    if len(head) < end:
        raise ZstdError("its header is cut short")
    dictionary = int.from_bytes(head[at : at + dictionary_bytes], "little")
    content = None
    if content_bytes:
        content = int.from_bytes(head[end - content_bytes : end], "little") + 256 * (content_bytes == 2)
    return FrameHeader(content, window if content is None or not is_single else content, dictionary,
                       bool(flags & 4), end)  # fmt: skip


def compress_frame(raw: bytes | bytearray | memoryview, level: int) -> bytes:
    """One zstd frame with its content size and a checksum of the content."""
    if _is_package:
        made: bytes = _library.ZstdCompressor(
            level=level, write_checksum=True, write_content_size=True
        ).compress(raw)
        return made
    names = _library.CompressionParameter
    options = {names.compression_level: level, names.checksum_flag: 1, names.content_size_flag: 1}
    return bytes(_library.compress(raw, options=options))


def decompress(frame: bytes | memoryview) -> bytes:
    """What exactly one frame holds, of the size that it declares: check that first."""
    if _is_package:
        if (decompressor := getattr(_own, "decompressor", None)) is None:
            decompressor = _own.decompressor = _library.ZstdDecompressor()
        whole: bytes = decompressor.decompress(frame, allow_extra_data=False)
        return whole
    decompressor = _library.ZstdDecompressor()
    raw: bytes = decompressor.decompress(frame, max_length=1 + (read_header(frame).content_size or 0))
    if not decompressor.eof or decompressor.unused_data:
        raise ZstdError("the data is not one whole frame")
    return raw


def new_decompressor() -> Any:
    """Of one frame, piece by piece: ``decompress(data)``, ``eof``, ``unused_data``, as those of `bz2` and `lzma`."""
    if _is_package:
        return _library.ZstdDecompressor().decompressobj()
    return _library.ZstdDecompressor()
