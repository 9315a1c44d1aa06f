"""Canonical JSON, one text for one value, and the digests of bytes: SHA-256 names things, XXH3-64 finds flipped bits.

Sorted keys, no spaces, UTF-8 unescaped, integers below 2**63 in magnitude, no floats: the subset of RFC 8785
in which every implementation agrees.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NoReturn

import xxhash

from shardkit.errors import FormatError, UsageError

MAX_DEPTH = 64

_LIMIT = 2**63


def dumps(value: object) -> bytes:
    """The canonical bytes of `value`.

    Raises:
        UsageError: `value` holds something other than str, int (magnitude below 2**63), bool, None, list,
        tuple and
            dict with str keys, or nests deeper than `MAX_DEPTH`.
    """
    _check(value, 0)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"canonical JSON: text that is not Unicode (lone surrogate): {error}") from None


def loads(data: bytes | bytearray | memoryview, max_bytes: int) -> Any:
    """Parse canonical JSON; anything that `dumps` would not have written is refused.

    Raises:
        FormatError: longer than `max_bytes`, no JSON, not canonical (order, spaces, escapes, duplicate keys),
        a float,
            an integer out of range, or nested too deep.
    """
    if len(data) > max_bytes:
        raise FormatError(f"canonical JSON: {len(data)} bytes, expected at most {max_bytes}")
    raw = bytes(data)
    try:
        value = json.loads(raw.decode(), parse_float=_refuse_float, parse_constant=_refuse_float)
        again = dumps(value)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"canonical JSON: {error}; expected the canonical form") from None
    if again != raw:
        raise FormatError(
            "canonical JSON: bytes are not in canonical form (order, spaces, escapes or duplicate keys)"
        )
    return value


def _refuse_float(text: str) -> NoReturn:
    raise FormatError(f"canonical JSON: number {text[:40]} is no integer")


def _check(value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise UsageError(f"canonical JSON: nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, (bool, str)):
        return
    if isinstance(value, int):
        if not -_LIMIT < value < _LIMIT:
            raise UsageError(
                f"canonical JSON: integer {value} is out of range, expected magnitude below 2**63"
            )
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"canonical JSON: key {key!r} is no str")
            if type(item) is not str or depth == MAX_DEPTH:  # most are, and a call each is most of the time
                _check(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            if type(item) is not str or depth == MAX_DEPTH:
                _check(item, depth + 1)
    else:
        raise UsageError(f"canonical JSON: {type(value).__name__} value {value!r:.80} is not allowed")


DIGEST_PREFIX = "sha256:"
"""Stands before the hex digits of a digest in text."""

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z")


def sha256_digest(data: bytes | bytearray | memoryview) -> str:
    """Digest text ``sha256:<64 hex>`` of `data`: what `sha256sum`, S3 and OCI use."""
    return DIGEST_PREFIX + hashlib.sha256(data).hexdigest()


def format_digest(raw: bytes) -> str:
    """Digest text of the 32 bytes of a SHA-256."""
    if len(raw) != 32:
        raise FormatError(f"a SHA-256 has 32 bytes, got {len(raw)}")
    return DIGEST_PREFIX + raw.hex()


def parse_digest(text: object) -> str:
    """The 64 hexadecimal digits of a digest text.

    Raises:
        FormatError: `text` is not ``sha256:`` and 64 lower-case hexadecimal digits.
    """
    match = _DIGEST.match(text) if isinstance(text, str) else None
    if match is None:
        raise FormatError(f"{text!r} is no digest; expected sha256:<64 lower-case hexadecimal digits>")
    return match.group(1)


def xxh3(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of `data` with seed 0, as an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(data)
