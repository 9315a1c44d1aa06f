"""Digests: SHA-256 names things, XXH3-64 finds flipped bits quickly."""

from __future__ import annotations

import hashlib
import re

import xxhash

from shardkit.errors import FormatError

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
