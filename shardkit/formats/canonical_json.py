"""Digests and times as text, and untyped documents in canonical JSON (typed documents: `shardkit.documents`)."""

from __future__ import annotations

import datetime as dt
import re
import time
from typing import Any, Final

import xxhash

from shardkit.documents import DIGEST_PREFIX, decode_plain, encode, sha256_digest
from shardkit.errors import FormatError

__all__ = [
    "DIGEST", "dumps", "format_digest", "loads", "parse_digest", "seconds_of", "sha256_digest", "utc_text", "xxh3",
]  # fmt: skip

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


def format_digest(raw: bytes) -> str:
    """Return the text of a SHA-256 digest of 32 bytes.

    Raises:
        FormatError: `raw` does not have 32 bytes.
    """
    if len(raw) != 32:
        raise FormatError(f"a SHA-256 has 32 bytes, got {len(raw)}")
    return DIGEST_PREFIX + raw.hex()


def parse_digest(text: object) -> str:
    """Return the 64 hexadecimal digits of a digest text.

    Raises:
        FormatError: `text` is not ``sha256:`` and 64 lower-case hexadecimal digits.
    """
    if not isinstance(text, str) or DIGEST.fullmatch(text) is None:
        raise FormatError(f"{text!r} is no digest; expected sha256:<64 lower-case hexadecimal digits>")
    return text.removeprefix(DIGEST_PREFIX)


def xxh3(data: bytes | bytearray | memoryview) -> int:
    """Return the XXH3-64 of `data` with seed 0, as an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(data)


dumps = encode


def loads(data: bytes | bytearray | memoryview, max_bytes: int) -> Any:
    """Parse canonical JSON.

    Raises:
        FormatError: `data` is not what `dumps` writes, or has more than `max_bytes` bytes.
    """
    return decode_plain(data, "canonical JSON", max_bytes=max_bytes)


_TIME_FORM: Final = "%Y-%m-%dT%H:%M:%SZ"


def utc_text(seconds: float | None = None) -> str:
    """Return a time in seconds since 1970, by default the current time, as ``2026-11-20T19:00:00Z``."""
    moment = time.time() if seconds is None else seconds
    return dt.datetime.fromtimestamp(int(moment), dt.UTC).strftime(_TIME_FORM)


def seconds_of(text: str) -> int:
    """Return the seconds since 1970 of a text from `utc_text`.

    Raises:
        FormatError: The text is not such a time.
    """
    import calendar  # rarely needed

    try:
        return calendar.timegm(time.strptime(text, _TIME_FORM))
    except ValueError:
        raise FormatError(f"{text[:40]!r} is no moment; do not trust whoever wrote it") from None
