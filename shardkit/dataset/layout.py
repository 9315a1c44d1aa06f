"""Assign rows to splits, shards, segments and blocks: a pure function of row table and settings (SPEC.md §2).

Everything is numpy over one entry per row; payloads are not needed and nothing is read or written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError, UsageError
from shardkit.ranges import Range

# The largest object that every object store accepts in one PUT, less room for trailers and incompressible
# data.
MAX_SHARD_BYTES = 5 * 2**30 - 16 * 2**20

MAX_STRATA = 65_536

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class RowTable:
    """Row data that the layout depends on, in ordinal order."""

    identity: NDArray[np.uint64]  # (n, 2), 128-bit hash of key, source or ordinal (SPEC.md §1)
    stratum: NDArray[np.int32]  # (n,), index into the sorted strata
    raw_bytes: NDArray[np.int64]  # (n,), size in a shard before compression

    def __len__(self) -> int:
        return len(self.stratum)


BLOCK_BYTES: Final = 2**18
"""Default raw bytes per block: a loader holds some hundred blocks in memory."""

_LARGE_BLOCK_BYTES: Final = 2**20
_ROWS_OF_LARGE: Final = 8
_LEAST_FOR_LARGE: Final = 256 * 2**20  # total bytes: 64 lanes have four large blocks each


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """Settings of the layout; sizes in raw bytes."""

    seed: int = 0
    shuffle: bool = True
    shard_size: int = 256 * 2**20
    block_size: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        Range(0, 2**63 - 1).check("seed", self.seed)
        Range(1, MAX_SHARD_BYTES).check("shard_size in bytes", self.shard_size)
        Range(1, 2**30).check("block_size in bytes", self.block_size)


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows in manifest order, with the borders of shards, segments and blocks."""

    rows: NDArray[np.int64]  # (n,), ordinals in manifest order
    shard_start: NDArray[np.int64]  # (S + 1,), positions in `rows`
    block_rows: NDArray[np.int64]  # (S,), rows per block of each shard
    segment_shard: NDArray[np.int32]  # (G,)
    segment_stratum: NDArray[np.int32]  # (G,), the pool has number `len(pooled)`
    segment_start: NDArray[np.int64]  # (G + 1,), positions in `rows`
    pooled: NDArray[np.bool_]  # (strata,), True for strata in the pool

    @property
    def shards(self) -> int:
        return len(self.shard_start) - 1

    def segments_of(self, shard: int) -> slice:
        first, last = np.searchsorted(self.segment_shard, [shard, shard + 1])
        return slice(int(first), int(last))


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the splitmix64 finaliser (Steele, Lea, Flood 2014), elementwise: a bijection of 64-bit words."""
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def order_keys(identity: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return (n,) uint64, the shuffle keys of rows: a keyed hash of their identities. Ties are possible."""
    key = mix64(np.array([seed], dtype=np.uint64))
    return mix64(identity[:, 0] ^ mix64(identity[:, 1] ^ key))


def lay_out(
    table: RowTable,
    strata: int,
    settings: LayoutSettings,
    pooling: NDArray[np.int8] | None = None,
    *,
    large_blocks: bool = False,
) -> Layout:
    """Distribute rows over shards, evenly by stratum, and cut shards into segments and blocks.

    Args:
        table: the rows.
        strata: number of strata.
        settings: layout settings.
        pooling: (strata,) int8 of an append: 1 for strata pooled in the base, -1 for strata with segments
            there, 0 for new ones; None: all are new.
        large_blocks: large rows get blocks of up to 1 MiB if `settings` has the default block size (SPEC.md §2).
    """
    if strata > MAX_STRATA:
        raise UsageError(
            f"{strata} strata are more than the {MAX_STRATA} that a manifest holds; "
            "stratify by a field with fewer values"
        )
    if len(table) and int(table.raw_bytes.max()) > MAX_SHARD_BYTES:
        row = int(table.raw_bytes.argmax())
        raise UsageError(
            f"row {row} takes {table.raw_bytes[row]} bytes; a shard holds at most {MAX_SHARD_BYTES}"
        )
    order = _row_order(table, settings)
    large = (table.raw_bytes > settings.shard_size)[order]
    dealt = order[~large]
    shards = _number_of_shards(table.raw_bytes[dealt], settings.shard_size)
    while True:
        pooled = _strata_to_pool(table.stratum[dealt], strata, shards, pooling)
        shard_of = _deal(table, dealt, pooled, shards)
        shard_bytes = np.bincount(shard_of, weights=table.raw_bytes[dealt], minlength=shards)
        # Only sizes that differ by orders of magnitude within a stratum exceed the limit; more shards hold
        # less each.
        if shards == len(dealt) or shard_bytes.max() <= MAX_SHARD_BYTES:
            break
        shards = min(len(dealt), 2 * shards)
    if not settings.shuffle and bool((np.diff(shard_of) >= 0).all()):
        # A row larger than a shard gets its own shard, between the shards of the rows before and after it.
        runs = -1 - order
        runs[~large] = shard_of
        shard = np.cumsum(np.diff(runs, prepend=runs[:1]) != 0)
        return _assemble(table, order, shard, pooled, settings.block_size)
    # A row larger than a shard gets its own shard, after all others and in row order.
    rows = np.concatenate([dealt, order[large]])
    shard = np.concatenate([shard_of, np.arange(shards, shards + len(rows) - len(dealt))])
    large_blocks = (
        large_blocks
        and settings.shuffle
        and settings.block_size == BLOCK_BYTES
        and int(table.raw_bytes.sum()) >= _LEAST_FOR_LARGE
    )
    return _assemble(table, rows, shard, pooled, settings.block_size, _ROWS_OF_LARGE if large_blocks else 1)


def _row_order(table: RowTable, settings: LayoutSettings) -> NDArray[np.int64]:
    """Return ordinals in shuffle order, or in ascending order without shuffle."""
    if not settings.shuffle:
        return np.arange(len(table), dtype=np.int64)
    keys = order_keys(table.identity, settings.seed)
    order = np.argsort(keys, kind="stable")
    ranked = keys[order]
    tied = np.flatnonzero(ranked[1:] == ranked[:-1])
    if len(tied):
        # Ties of the 64-bit keys are broken by the 128-bit identity, then by the ordinal.
        among = np.union1d(tied, tied + 1)
        group = order[among]
        order[among] = group[
            np.lexsort((group, table.identity[group, 1], table.identity[group, 0], keys[group]))
        ]
    return order.astype(np.int64, copy=False)


def _number_of_shards(raw_bytes: NDArray[np.int64], shard_size: int) -> int:
    return min(len(raw_bytes), max(1, -(-int(raw_bytes.sum()) // shard_size)))


def _strata_to_pool(
    stratum: NDArray[np.int32], strata: int, shards: int, pooling: NDArray[np.int8] | None
) -> NDArray[np.bool_]:
    """Return the strata to pool: those with rows, but not enough for one in every shard."""
    rows = np.bincount(stratum, minlength=strata)[:strata]
    rare = (rows > 0) & (rows < shards)
    return rare if pooling is None else (rare & (pooling == 0)) | (pooling == 1)


def _deal(
    table: RowTable, dealt: NDArray[np.int64], pooled: NDArray[np.bool_], shards: int
) -> NDArray[np.int64]:
    """Return each row's shard: every stratum is cut, in order, into runs that differ by at most one row."""
    shard_of = np.zeros(len(dealt), dtype=np.int64)
    if shards <= 1:
        return shard_of
    stratum = _with_pool(table.stratum[dealt], pooled)
    by_stratum = np.argsort(stratum, kind="stable")
    counts = np.bincount(stratum, minlength=len(pooled) + 1)
    ends = np.cumsum(counts)
    size_before = np.concatenate([[0], np.cumsum(table.raw_bytes[dealt][by_stratum])])
    shard_bytes = np.zeros(shards, dtype=np.int64)
    numbers = np.arange(shards, dtype=np.int64)
    phase = 0
    for index in np.flatnonzero(counts):
        each, extra = divmod(int(counts[index]), shards)
        lengths = each + _extra_rows(extra, shard_bytes, phase)
        phase = (phase + extra) % shards
        bounds = int(ends[index] - counts[index]) + np.concatenate([[0], np.cumsum(lengths)])
        shard_bytes += np.diff(size_before[bounds])
        shard_of[by_stratum[bounds[0] : bounds[-1]]] = np.repeat(numbers, lengths)
    return shard_of


def _extra_rows(extra: int, shard_bytes: NDArray[np.int64], phase: int) -> NDArray[np.int64]:
    """Return 0 or 1 per shard, with ``extra`` ones: the shards that get one row more of a stratum.

    The shards are divided into as many neighbourhoods as there are rows to give (or to withhold, if those are
    fewer). In each, the emptiest shard gets a row (or the fullest gets none). Sizes stay even, and no run of
    shards has more of a stratum than another, on which the locality of lanes depends. ``phase`` shifts the
    neighbourhoods from stratum to stratum, so that they do not always consist of the same shards.
    """
    shards = len(shard_bytes)
    giving = 2 * extra <= shards
    places = extra if giving else shards - extra
    chosen = np.zeros(shards, dtype=np.int64)
    if places:
        numbers = np.arange(shards, dtype=np.int64)
        neighbourhood = (numbers * places + phase) // shards % places
        ranked = np.lexsort((numbers, shard_bytes if giving else -shard_bytes, neighbourhood))
        _, first = np.unique(neighbourhood[ranked], return_index=True)
        chosen[ranked[first]] = 1
    return chosen if giving else 1 - chosen


def _with_pool(stratum: NDArray[np.int32], pooled: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the number to group rows by: their stratum, or the pool, which comes last."""
    return np.where(pooled[stratum], np.int32(len(pooled)), stratum).astype(np.int32, copy=False)


def _assemble(
    table: RowTable,
    rows: NDArray[np.int64],
    shard: NDArray[np.int64],
    pooled: NDArray[np.bool_],
    block_size: int,
    rows_of_large: int = 1,
) -> Layout:
    stratum = _with_pool(table.stratum[rows], pooled)
    # Stable sorts by stratum and then by shard keep the row order inside each segment.
    by_stratum = np.argsort(stratum, kind="stable")
    position = by_stratum[np.argsort(shard[by_stratum], kind="stable")]
    rows, shard, stratum = rows[position], shard[position], stratum[position]
    # Rare strata that may not be pooled can leave a shard empty; empty shards are dropped.
    shard = np.cumsum(np.diff(shard, prepend=shard[:1]) != 0)
    shards = int(shard[-1]) + 1 if len(rows) else 0
    shard_rows = np.bincount(shard, minlength=shards)
    shard_bytes = np.add.reduceat(table.raw_bytes[rows], _starts(shard_rows)[:-1]) if shards else shard_rows
    small, large = (
        size * shard_rows // np.maximum(1, shard_bytes) for size in (block_size, _LARGE_BLOCK_BYTES)
    )
    border = np.flatnonzero((np.diff(shard) != 0) | (np.diff(stratum) != 0)) + 1
    first = np.concatenate([[0], border])[: None if len(rows) else 0]
    return Layout(
        rows=rows,
        shard_start=_starts(shard_rows),
        block_rows=np.maximum(np.maximum(1, small), np.minimum(rows_of_large, large)),
        segment_shard=shard[first].astype(np.int32),
        segment_stratum=stratum[first],
        segment_start=np.concatenate([first, [len(rows)]]).astype(np.int64),
        pooled=pooled,
    )


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


# ---- Splits: by a keyed hash of the identity or of a field that groups rows, or by folder

# Independent of the shuffle seed: another seed must not move a row from val to train.
_SPLIT_KEY = np.uint64(0x73706C69742D6F66)  # "split-of"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Split:
    """Named shares of a dataset."""

    names: tuple[str, ...]  # names of the splits; each becomes a ref
    # exact, in the same order, sum at most 1; the remainder belongs to no split
    shares: tuple[Fraction, ...]
    by: str | None = None  # field whose equal values stay together, or None
    # splits are the first folders of the source; there are no shares
    folders: bool = False

    @property
    def is_noted(self) -> bool:
        """True if rows carry the hash of the value that decides their split (`split_value`)."""
        return self.by is not None or self.folders

    def to_json(self) -> dict[str, object]:
        """Return the form stored in the manifest: shares as texts, because JSON has no exact fractions."""
        if self.folders:
            return {"folders": True}
        shares = [[name, str(share)] for name, share in zip(self.names, self.shares, strict=True)]
        return {"by": self.by, "shares": shares}


def parse_split(
    shares: Mapping[str, float | str | Fraction], by: str | None = None, *, ref: str = "main"
) -> Split:
    """Return a split from ``{"train": 0.9, "val": 0.1}``; a float means the decimal that it prints as.

    Raises:
        ConfigurationError: A name cannot be a ref, or a share or the sum of shares is out of range.
    """
    if not shares:
        raise ConfigurationError("split is empty; give names and shares such as train=0.9,val=0.1")
    exact: dict[str, Fraction] = {}
    _check_names(shares, ref)
    for name, share in shares.items():
        try:
            exact[name] = Fraction(str(share))
        except (ValueError, ZeroDivisionError):
            raise ConfigurationError(
                f"split {name} has the share {share!r}; give a number such as 0.1"
            ) from None
        if not 0 < exact[name] <= 1:
            raise ConfigurationError(f"split {name} has the share {share}; give a number above 0, at most 1")
    total = sum(exact.values())
    if total > 1:
        raise ConfigurationError(f"the shares of split add up to {float(total)}; give at most 1 in all")
    return Split(tuple(exact), tuple(exact.values()), by)


def folder_split(names: Iterable[str], *, ref: str = "main") -> Split:
    """Return a split by the first folder of each row's source."""
    listed = tuple(names)
    _check_names(listed, ref)
    return Split(listed, (), folders=True)


def split_value(text: str) -> int:
    """Return the 64-bit hash that decides the split of all rows with this value."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8"))


def _check_names(names: Iterable[str], ref: str) -> None:
    for name in names:
        if _NAME.fullmatch(name) is None or name == ref:
            raise ConfigurationError(
                f"split {name!r} cannot be a ref: give letters, digits, '.', '_' and '-', and not {ref!r}, "
                "which stands for all rows"
            )


def split_of(
    split: Split, identity: NDArray[np.uint64], group: NDArray[np.uint64] | None
) -> NDArray[np.int16]:
    """Return the split of each row.

    Returns:
        (n,) int16, index into ``split.names``, or -1 for rows in no split.
    """
    if split.folders:
        assert group is not None, "rows of folders come with their splits"
        hashes = np.array([split_value(name) for name in split.names], dtype=np.uint64)
        order = np.argsort(hashes).astype(np.int16)
        place = np.minimum(np.searchsorted(hashes[order], group), len(order) - 1)
        return np.where(hashes[order][place] == group, order[place], np.int16(-1)).astype(np.int16)
    values = mix64(identity[:, 0] ^ mix64(identity[:, 1])) if group is None else group
    drawn = mix64(values ^ _SPLIT_KEY)
    ends = np.cumsum(np.array(split.shares, dtype=object))
    # A row belongs to the first split whose end is above its draw; an end of 1 is above every 64-bit number.
    limits = np.array([min(int(end * 2**64), 2**64 - 1) for end in ends], dtype=np.uint64)
    index = np.searchsorted(limits, drawn, side="right").astype(np.int16)
    if ends[-1] == 1:
        return np.minimum(index, np.int16(len(limits) - 1))
    return np.where(index == len(limits), np.int16(-1), index)
