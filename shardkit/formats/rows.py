"""Rows on their way into a shard: their keys, and blocks of them, field by field.

Encoders take blocks, so that nothing is done row by row that need not be.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SampleError, UsageError

from .schema import Schema
from .tar_members import member_names

MAX_KEY_BYTES = 80
"""Bytes of a key in a shard; longer ones are kept beside a name that is made up."""

MAX_MEMBER_NAME = 100  # the name field of a ustar header
MAX_EXTENSION = 4  # the longest that `member_extension` gives: most have three letters, flac and tiff four
_KEY = re.compile(r"[A-Za-z0-9_-]{1,80}\Z")
_KEYS = re.compile(r"[A-Za-z0-9_-]+(?:,[A-Za-z0-9_-]+)*")
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")
_HASH_DIGITS = 16


class Row(NamedTuple):
    """A sample as the writer takes it.

    `payloads` are the canonical bytes of the fields in schema order (`Schema.encode`). `original_key` is the
    source's key where it had to be rewritten, `source` the (source name, row number in it), `stratum` an
    index into the manifest's strata, needed only where rare strata are pooled.
    """

    key: str
    payloads: tuple[bytes, ...]
    original_key: str | None = None
    source: tuple[str, int] | None = None
    stratum: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class JoinedPayloads:
    """Payloads that lie one behind the other already."""

    data: NDArray[np.uint8]  # uint8 (sum of the sizes,), contiguous
    sizes: NDArray[np.int64]  # int64 (rows,)

    def __len__(self) -> int:
        return len(self.sizes)


PayloadColumn = Sequence[bytes | memoryview] | NDArray[np.uint8] | JoinedPayloads
"""Canonical payloads of one field: one buffer per row, uint8 (rows, bytes) whose rows are contiguous, or joined."""


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Rows on their way into a shard.

    Buffers are borrowed until the block is written.
    """

    keys: Sequence[str]  # of the rows
    columns: Sequence[PayloadColumn]  # one per column of `Schema.stored`, in its order
    # (place, the source's key) of the rows whose key had to be rewritten
    originals: Sequence[tuple[int, str]] = ()
    source_names: tuple[str, ...] = ()  # that `source_id` indexes; empty where no row has a source
    source_id: NDArray[np.int32] | None = None  # (n,), -1 for none
    source_row: NDArray[np.int64] | None = None  # (n,), 0 for none
    stratum: NDArray[np.int32] | None = None  # (n,), -1 for none; None where no row has one

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, rows: Sequence[Row], num_fields: int) -> RowBlock:
        """The same rows, field by field.

        Raises:
            SampleError: a row has another number of payloads.
        """
        for row in rows:
            if len(row.payloads) != num_fields:
                raise SampleError(f"key {row.key!r}: {len(row.payloads)} payloads for {num_fields} fields")
        names = tuple(dict.fromkeys(row.source[0] for row in rows if row.source is not None))
        number = {name: place for place, name in enumerate(names)}
        has_stratum = any(row.stratum is not None for row in rows)
        return cls(
            keys=[row.key for row in rows],
            columns=[[row.payloads[place] for row in rows] for place in range(num_fields)],
            originals=[
                (place, row.original_key) for place, row in enumerate(rows) if row.original_key is not None
            ],
            source_names=names,
            source_id=np.array([-1 if r.source is None else number[r.source[0]] for r in rows], np.int32),
            source_row=np.array([0 if row.source is None else row.source[1] for row in rows], np.int64),
            stratum=np.array([-1 if row.stratum is None else row.stratum for row in rows], np.int32)
            if has_stratum
            else None,
        )


def payloads_of(column: PayloadColumn) -> Sequence[bytes | memoryview]:
    """One buffer per row."""
    if isinstance(column, JoinedPayloads):
        stops = np.cumsum(column.sizes)
        view = column.data.data
        starts = (stops - column.sizes).tolist()
        return [view[start:stop] for start, stop in zip(starts, stops.tolist(), strict=True)]
    if not isinstance(column, np.ndarray):
        return column
    flat, size = np.ascontiguousarray(column).reshape(-1).data, column.shape[1]
    return [flat[start : start + size] for start in range(0, len(column) * size, size)]


def sizes_of(column: PayloadColumn) -> NDArray[np.int64]:
    """Bytes of each row's payload: int64[n]."""
    if isinstance(column, JoinedPayloads):
        return column.sizes
    if isinstance(column, np.ndarray):
        return np.full(len(column), column.shape[1], np.int64)
    return np.fromiter(map(len, column), np.int64, len(column))


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


def max_key_bytes(schema: Schema, format: str) -> int:
    """Longest key that a shard of `schema` can hold; tar member names end at 100 bytes."""
    if format != "tar":
        return MAX_KEY_BYTES
    longest = max(map(len, member_names(schema)))
    return min(MAX_KEY_BYTES, MAX_MEMBER_NAME - longest - MAX_EXTENSION - 2)
