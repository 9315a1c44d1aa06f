"""Compression settings, and zstd frames whose headers are checked before decompression.

zstd comes from the package zstandard or, if it is not installed, from Python 3.14 and later (compression.zstd), because
zstandard has no wheels for free-threaded Python. Both use libzstd, whose version determines the compressed bytes.
"""

from __future__ import annotations

import importlib
import re
import threading
from typing import Any, Final, NamedTuple

from shardkit.errors import ConfigurationError, FormatError, MissingDependency

MAX_WINDOW = 8 << 20
"""Bytes of a zstd window; level 19 needs no more, and RFC 8878 recommends that every decoder supports it."""

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
PACKED_HEADS: Final = {b"\x1f\x8b": "gz", _MAGIC: "zst", b"\xfd7zXZ": "xz", b"BZh": "bz2"}
"""First bytes of compressed files → extension of their names."""

MAX_LEVEL = 19
_ZSTD = re.compile(r"zstd(?::([1-9][0-9]?))?\Z")
MAX_RATIO = (
    1 << 16
)  # raw bytes per stored byte; zstd cannot reach it: a block of 128 KiB takes at least 4 bytes


def normalise_compression(format: object, text: object) -> str:
    """Return a compression setting in its normal form: ``none``, or for arrow also ``zstd:LEVEL``.

    ``zstd`` is level 3.

    Raises:
        ConfigurationError: Format or compression are unknown, or do not go together.
    """
    if not isinstance(format, str) or format not in ("tar", "arrow"):
        raise ConfigurationError(f"format {format!r} is unknown; expected tar or arrow")
    if isinstance(text, str) and text == "none":
        return "none"
    match = _ZSTD.match(text) if isinstance(text, str) else None
    level = int(match.group(1) or 3) if match else 0
    if not 1 <= level <= MAX_LEVEL:
        raise ConfigurationError(
            f"compression {text!r} is unknown; expected none, zstd or zstd:1 to zstd:{MAX_LEVEL}"
        )
    if format == "tar":
        raise ConfigurationError(
            f"compression {text!r}: tar shards are not compressed, since media already are; use format arrow"
        )
    return f"zstd:{level}"


def zstd_level(compression: str) -> int | None:
    """Return the level of a normalised compression, or None for ``none``."""
    return int(compression.partition(":")[2]) if compression.startswith("zstd") else None


def decompress_frame(frame: bytes | memoryview, raw_bytes: int, what: str) -> bytes:
    """Decompress exactly one zstd frame, after its header has been compared with the limits.

    Args:
        frame: The frame.
        raw_bytes: Expected size of the content.
        what: Name of the frame in messages.

    Raises:
        FormatError: The frame is damaged, or declares another size, a dictionary or too large a window.
    """
    try:
        header = read_header(frame)
        # zstd allocates the declared size.
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


# ---- zstd of either library

_own = (
    threading.local()
)  # one decompressor per thread: creating one takes as long as decompressing a small frame


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
    """The header of a zstd frame (RFC 8878 §3.1.1.1)."""

    content_size: int | None
    window_size: int
    dictionary: int  # id, 0 for none
    has_checksum: bool
    size: int  # bytes of the header


def read_header(frame: bytes | memoryview) -> FrameHeader:
    """Parse the header of a frame.

    Raises:
        ZstdError: `frame` does not begin with a complete header.
    """
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
    """Return one zstd frame with content size and content checksum."""
    if _is_package:
        made: bytes = _library.ZstdCompressor(
            level=level, write_checksum=True, write_content_size=True
        ).compress(raw)
        return made
    names = _library.CompressionParameter
    options = {names.compression_level: level, names.checksum_flag: 1, names.content_size_flag: 1}
    return bytes(_library.compress(raw, options=options))


def decompress(frame: bytes | memoryview) -> bytes:
    """Decompress exactly one frame; check its declared size first, because that much memory is allocated.

    Raises:
        ZstdError: The data is not one complete frame.
    """
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
    """Return an incremental decompressor of one frame, with the interface of `bz2` and `lzma` decompressors."""
    if _is_package:
        return _library.ZstdDecompressor().decompressobj()
    return _library.ZstdDecompressor()
