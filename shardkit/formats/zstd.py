"""zstd by the package zstandard, or where that is not installed by Python itself (3.14 and later: compression.zstd).

Free-threaded Python has no wheels of zstandard. Both compress by libzstd, whose version decides what the bytes are.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any, Final, NamedTuple

from shardkit.errors import MissingDependency

__all__ = ["FrameHeader", "ZstdError", "compress", "decompress", "new_decompressor", "read_header"]

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
    """The header of a frame.

    Raises:
        ZstdError: it is none of zstd's, or cut short.
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


def compress(raw: bytes | bytearray | memoryview, level: int) -> bytes:
    """One frame with its content size and a checksum of the content."""
    if _is_package:
        made: bytes = _library.ZstdCompressor(
            level=level, write_checksum=True, write_content_size=True
        ).compress(raw)
        return made
    names = _library.CompressionParameter
    options = {names.compression_level: level, names.checksum_flag: 1, names.content_size_flag: 1}
    return bytes(_library.compress(raw, options=options))


def decompress(frame: bytes | memoryview) -> bytes:
    """What exactly one frame holds, of the size that it declares: check that first.

    Raises:
        ZstdError: it is broken, or is followed by something.
        MemoryError: there is not enough.
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
    """Of one frame, piece by piece: ``decompress(data)``, ``eof``, ``unused_data``, as those of `bz2` and `lzma`."""
    if _is_package:
        return _library.ZstdDecompressor().decompressobj()
    return _library.ZstdDecompressor()
