"""Compression settings, and zstd frames that are checked before they are opened."""

from __future__ import annotations

import re

from shardkit.errors import FormatError, SchemaError
from shardkit.formats import zstd

MAX_WINDOW = 8 << 20
"""Bytes of a zstd window; level 19 needs no more, and RFC 8878 recommends that every decoder supports it."""

MAX_LEVEL = 19
_ZSTD = re.compile(r"zstd(?::([1-9][0-9]?))?\Z")
MAX_RATIO = 1 << 16  # above what zstd can reach: a block of 128 KiB takes at least 4 bytes


def normalise_compression(text: object) -> str:
    """``none``, ``lz4`` or ``zstd:LEVEL``; ``zstd`` alone means level 3.

    Raises:
        SchemaError: nothing of the kind, or a level outside 1 to 19.
    """
    if text == "none" or text == "lz4":
        return str(text)
    match = _ZSTD.match(text) if isinstance(text, str) else None
    level = int(match.group(1) or 3) if match else 0
    if not 1 <= level <= MAX_LEVEL:
        raise SchemaError(
            f"compression {text!r} is unknown; expected none, zstd, zstd:1 to zstd:{MAX_LEVEL} or lz4"
        )
    return f"zstd:{level}"


def zstd_level(compression: str) -> int | None:
    """Level of a normalised zstd setting, None for the others."""
    return int(compression.partition(":")[2]) if compression.startswith("zstd") else None


def extension(format: str, compression: str) -> str:
    """File name extension of a shard: ``tar``, ``tar.zst`` or ``arrow``.

    Raises:
        SchemaError: unknown format, or a compression that the format does not have.
    """
    compression = normalise_compression(compression)
    if format == "arrow":
        return "arrow"
    if format != "tar":
        raise SchemaError(f"format {format!r} is unknown; expected tar or arrow")
    if compression == "lz4":
        raise SchemaError(
            "compression lz4 with format tar: no common tool reads it; use zstd, or format arrow"
        )
    return "tar" if compression == "none" else "tar.zst"


def compress_frame(raw: bytes | bytearray | memoryview, level: int) -> bytes:
    """One zstd frame with its content size and content checksum."""
    return zstd.compress(raw, level)


def decompress_frame(frame: bytes | memoryview, raw_bytes: int, what: str) -> bytes:
    """The `raw_bytes` bytes of exactly one zstd frame; nothing is allocated before its header agrees.

    Raises:
        FormatError: another size, no or several frames, a dictionary, an outsized window, or a broken frame.
    """
    try:
        header = zstd.read_header(frame)
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
        raw = zstd.decompress(frame)
    except (zstd.ZstdError, MemoryError) as error:
        raise FormatError(f"{what}: broken zstd frame ({error})") from None
    if len(raw) != raw_bytes:
        raise FormatError(f"{what}: zstd frame gave {len(raw)} bytes, expected {raw_bytes}")
    return raw
