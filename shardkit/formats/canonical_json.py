"""Canonical JSON of untyped values under the names of `json`, for programs that read or write documents themselves.

Typed documents, and everything else about canonical JSON, are in `shardkit.documents`.
"""

from __future__ import annotations

from typing import Any

from shardkit.documents import decode_plain, sha256_digest
from shardkit.documents import encode as dumps

__all__ = ["dumps", "loads", "sha256_digest"]


def loads(data: bytes | bytearray | memoryview, max_bytes: int) -> Any:
    """Parse canonical JSON.

    Raises:
        FormatError: `data` is not what `dumps` writes, or has more than `max_bytes` bytes.
    """
    return decode_plain(data, "canonical JSON", max_bytes=max_bytes)
