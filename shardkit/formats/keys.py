"""Keys: the names of samples inside a shard; never used as a path."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from shardkit.errors import SampleError, UsageError

from .schema import FieldType

__all__ = ["MAX_KEY_BYTES", "check_key", "check_keys", "fit_key", "is_key", "max_key_bytes"]

MAX_KEY_BYTES = 80
"""Bytes of a key in a shard; longer ones are kept beside a name that is made up."""

MAX_MEMBER_NAME = 100  # the name field of a ustar header
MAX_EXTENSION = (
    4  # the longest extension that `media.py` gives: jpeg-like names are three, flac and tiff-like four
)
_KEY = re.compile(r"[A-Za-z0-9_-]{1,80}\Z")
_KEYS = re.compile(r"[A-Za-z0-9_-]+(?:,[A-Za-z0-9_-]+)*")
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")
_HASH_DIGITS = 16


def is_key(text: str) -> bool:
    """Whether `text` can stand as a key in a shard: ``[A-Za-z0-9_-]{1,80}``."""
    return _KEY.match(text) is not None


def check_key(key: object, limit: int) -> None:
    """Refuse a key that a shard cannot hold.

    Raises:
        SampleError: other characters than ``[A-Za-z0-9_-]``, empty, or longer than `limit`.
    """
    if not isinstance(key, str) or not _KEY.match(key) or len(key) > limit:
        raise SampleError(f"key {key!r:.120}: expected 1 to {limit} of A-Z a-z 0-9 _ -; use fit_key")


def check_keys(keys: Sequence[str], limit: int) -> None:
    """`check_key` of many keys, at once where they are all good.

    Raises:
        SampleError: the first key that a shard cannot hold.
    """
    try:
        joined = ",".join(keys)
    except TypeError:
        joined = ""
    # A key with a comma in it would pass for two.
    is_good = joined.count(",") == len(keys) - 1 and _KEYS.fullmatch(joined) is not None
    if is_good and max(map(len, keys)) <= min(limit, MAX_KEY_BYTES):
        return
    for key in keys:
        check_key(key, limit)


def fit_key(original: str, limit: int = MAX_KEY_BYTES) -> str:
    """A valid key for any text, the same one always; `original` itself where it fits.

    Otherwise the text with other characters replaced by ``_``, cut, and ``-`` with 16 hexadecimal digits of
    the SHA-256 of the original, so that different originals stay different.

    Raises:
        UsageError: `limit` has no room for the hash, or is above 80.
    """
    if not _HASH_DIGITS + 2 <= limit <= MAX_KEY_BYTES:
        raise UsageError(f"key limit {limit}: expected {_HASH_DIGITS + 2} to {MAX_KEY_BYTES}")
    if _KEY.match(original) and len(original) <= limit:
        return original
    digest = hashlib.sha256(original.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    head = _UNFIT.sub("_", original)[: limit - _HASH_DIGITS - 1]
    return f"{head}-{digest}" if head else digest


def max_key_bytes(schema: Mapping[str, FieldType], format: str) -> int:
    """Longest key that a shard of `schema` can hold; tar member names end at 100 bytes."""
    if format != "tar":
        return MAX_KEY_BYTES
    longest = max(len(name) for name in schema)
    return min(MAX_KEY_BYTES, MAX_MEMBER_NAME - longest - MAX_EXTENSION - 2)
