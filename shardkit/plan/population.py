"""The input of a plan: selected rows of one manifest, strata combined into groups, and the base order of each group.

The base order of a group is its rows in manifest order. It is not stored as an array of rows: a coarse table holds the
number of rows of each group before every chunk of segments, and a look-up scans only the chunks that it needs. The
table has at most about 2**20 entries, for any number of rows.

A `RowSet` holds the rows that a pass has not drawn, as a bitmap, and numbers them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardkit.arrays import Int64s
from shardkit.errors import PlanError

from .deal import ragged


@dataclass(frozen=True, eq=False)
class Population:
    """Selected rows of a manifest, in manifest order (shard order, then row order).

    Sample numbers count selected rows in that order: segment ``i`` covers
    ``[sum(segment_rows[:i]), sum(segment_rows[:i + 1]))``. The arrays are not copied and must not change.

    Attributes:
        identity: manifest id; part of the plan's digest.
        strata: names; a stratum's number is its index in this tuple.
        segment_shard: int32[n], shard of each segment, not decreasing.
        segment_stratum: int32[n], stratum of each segment.
        segment_rows: int64[n], selected rows of each segment; 0 is allowed.
        shard_block_rows: int32[S], rows of a whole block of each shard (scaled down if only some rows are selected).
        shard_bytes: int64[S] or None, bytes of each shard, for reports and placement.
        mean_block_bytes: mean raw bytes of a block, for the default window; 0 if unknown.
    """

    identity: str
    strata: tuple[str, ...]
    segment_shard: NDArray[np.int32]
    segment_stratum: NDArray[np.int32]
    segment_rows: NDArray[np.int64]
    shard_block_rows: NDArray[np.int32]
    shard_bytes: NDArray[np.int64] | None = None
    mean_block_bytes: int = 0

    def __post_init__(self) -> None:
        num = len(self.segment_shard)
        for name in ("segment_stratum", "segment_rows"):
            if len(getattr(self, name)) != num:
                raise PlanError(f"population: {name} has {len(getattr(self, name))} entries, expected {num}")
        if self.shard_bytes is not None and len(self.shard_bytes) != len(self.shard_block_rows):
            raise PlanError(
                f"population: shard_bytes has {len(self.shard_bytes)} entries, "
                f"expected {len(self.shard_block_rows)}"
            )
        if num and not _valid(self):
            raise PlanError(
                "population: segment columns are out of range; expected shards in order, strata below "
                f"{len(self.strata)}, rows >= 0 and rows per block >= 1"
            )

    @classmethod
    def of(
        cls,
        identity: str,
        strata: Sequence[str],
        segments: ArrayLike,
        block_rows: int | ArrayLike = 64,
        shard_bytes: ArrayLike | None = None,
    ) -> Population:
        """Build a population from (shard, stratum, rows) triples, for tests and examples."""
        table = np.asarray(segments, dtype=np.int64).reshape(-1, 3)
        shards = int(table[:, 0].max()) + 1 if len(table) else 0
        rows = np.broadcast_to(np.asarray(block_rows, dtype=np.int32), (shards,))
        return cls(
            identity,
            tuple(strata),
            table[:, 0].astype(np.int32),
            table[:, 1].astype(np.int32),
            np.ascontiguousarray(table[:, 2]),
            np.ascontiguousarray(rows),
            None if shard_bytes is None else np.asarray(shard_bytes, dtype=np.int64),
        )

    @property
    def rows(self) -> int:
        """Number of selected rows."""
        return int(self.segment_rows.sum(dtype=np.int64)) if len(self.segment_rows) else 0

    @property
    def num_shards(self) -> int:
        """Number of shards, including shards without selected rows."""
        return len(self.shard_block_rows)


def _valid(population: Population) -> bool:
    shard, stratum = population.segment_shard, population.segment_stratum
    return bool(
        shard[0] >= 0
        and shard[-1] < population.num_shards
        and (shard[1:] >= shard[:-1]).all()
        and stratum.min() >= 0
        and stratum.max() < len(population.strata)
        and population.segment_rows.min() >= 0
        and population.shard_block_rows.min() >= 1
    )


class Groups(msgspec.Struct, frozen=True, eq=False):
    """Strata combined into groups, ordered by (-mass, name), with all rare strata pooled in the last group."""

    masses: tuple[int, ...]  # mass of each group: rows (natural weights) or weights, as Python integers
    rows: tuple[int, ...]  # selected rows of each group
    strata: tuple[tuple[int, ...], ...]  # stratum numbers of each group; one number, except in the pool
    group_of: NDArray[np.int32]  # int32[strata], group of each stratum; -1 for strata without mass
    pooled: bool  # True if the last group is the pool of rare strata

    def __len__(self) -> int:
        return len(self.masses)

    @property
    def total(self) -> int:
        """Sum of the masses."""
        return sum(self.masses)

    def cumulative(self) -> list[int]:
        """Return the total mass of groups 0..g, for each g."""
        sums, total = [], 0
        for mass in self.masses:
            total += mass
            sums.append(total)
        return sums


def each_alone(rows: Sequence[int]) -> Groups:
    """Make each stratum its own group, of any size; group numbers equal stratum numbers."""
    counts = tuple(int(r) for r in rows)
    strata = tuple((s,) for s in range(len(counts)))
    return Groups(counts, counts, strata, np.arange(len(counts), dtype=np.int32), pooled=False)


def stratum_rows(population: Population) -> list[int]:
    """Return the number of selected rows of each stratum, as Python integers."""
    rows = np.zeros(len(population.strata), dtype=np.int64)
    slab = 1 << 18  # bounds temporaries; the float64 sums of bincount are exact below 2**53 rows per slab
    for first in range(0, len(population.segment_rows), slab):
        part = slice(first, first + slab)
        sums = np.bincount(
            population.segment_stratum[part], population.segment_rows[part], len(population.strata)
        )
        rows += sums.astype(np.int64)
    return [int(r) for r in rows]


def group_strata(
    names: Sequence[str] | range, rows: Sequence[int], masses: Sequence[int], global_batch: int
) -> Groups:
    """Sort strata by (-mass, name) and pool strata expected less than once per global batch in the last group.

    Only the last group may be rare: for any other, cumulative counts would not be monotone.
    """
    total = sum(m for m, r in zip(masses, rows, strict=True) if r)
    alive = [s for s in range(len(names)) if rows[s] and masses[s]]
    alive.sort(key=lambda s: (-masses[s], names[s]))
    common = [s for s in alive if global_batch * masses[s] >= total]
    rare = alive[len(common) :]
    members = [(s,) for s in common] + ([tuple(rare)] if rare else [])
    group_of = np.full(len(names), -1, dtype=np.int32)
    for group, strata in enumerate(members):
        group_of[list(strata)] = group
    return Groups(
        tuple(sum(masses[s] for s in strata) for strata in members),
        tuple(sum(rows[s] for s in strata) for strata in members),
        tuple(members),
        group_of,
        bool(rare),
    )


_ENTRIES = 1 << 20
_MIN_CHUNK = 256


class Pieces(NamedTuple):
    """Runs of rows inside segments, ordered by (group, base position), or by (hand, base position)."""

    group: NDArray[np.int64]  # int64[n], group, or hand if hands were requested
    base: NDArray[np.int64]  # int64[n], position of the first row in the base order of its group
    sample: NDArray[np.int64]  # int64[n], sample number of the first row
    row: NDArray[np.int64]  # int64[n], index of the first row in its segment
    rows: NDArray[np.int64]  # int64[n], number of rows
    shard: NDArray[np.int64]  # int64[n], shard of the segment


class Blocks(NamedTuple):
    """Blocks, cut at the borders of hands, ordered by (hand, base position)."""

    sample: NDArray[np.int64]  # int64[n], sample number of the first row
    rows: NDArray[np.int64]  # int64[n], number of rows
    per_hand: NDArray[np.int64]  # int64[hands], number of blocks of each hand


class BaseOrder:
    """Look-ups between base positions and sample numbers."""

    def __init__(self, population: Population, groups: Groups) -> None:
        self.population, self.groups = population, groups
        num, width = len(population.segment_rows), max(1, len(groups))
        self._chunk = max(_MIN_CHUNK, 1 << max(0, (num * width // _ENTRIES)).bit_length())
        self._num = num
        chunks = -(-num // self._chunk)
        table = np.zeros((chunks + 1, width), dtype=np.int64)
        samples = np.zeros(chunks + 1, dtype=np.int64)
        step = max(1, (1 << 18) // self._chunk)  # chunks per iteration: bounds temporaries
        for first in range(0, chunks, step):
            last = min(chunks, first + step)
            part = slice(first * self._chunk, min(num, last * self._chunk))
            rows = population.segment_rows[part]
            group = groups.group_of[population.segment_stratum[part]].astype(np.int64)
            place = np.arange(len(rows), dtype=np.int64) // self._chunk
            sums = np.bincount(place, rows, last - first).astype(np.int64)
            samples[first + 1 : last + 1] = sums
            held = group >= 0
            if not held.all():
                place, group, rows = place[held], group[held], rows[held]
            sums = np.bincount(place * width + group, rows, (last - first) * width).astype(np.int64)
            table[first + 1 : last + 1] = sums.reshape(-1, width)
        # by_group[g, c]: rows of group g before chunk c; one contiguous row per group for searchsorted
        self._by_group: NDArray[np.int64] = np.ascontiguousarray(np.cumsum(table, axis=0).T)
        self._samples: NDArray[np.int64] = np.cumsum(samples)
        self._group_rows = np.array(groups.rows, dtype=np.int64)

    def pieces(
        self,
        group: NDArray[np.int64],
        lo: NDArray[np.int64],
        hi: NDArray[np.int64],
        hand: NDArray[np.int64] | None = None,
    ) -> Pieces:
        """Return the runs of rows in base ranges [lo, hi) of groups, labelled with ``hand`` if given."""
        keep = hi > lo
        hand = (group if hand is None else hand)[keep]
        group, lo, hi = group[keep], lo[keep], hi[keep]
        found = self._scan(self._chunk_runs(group, lo, hi))
        # with the base orders of all groups concatenated, one bisection finds the pieces of all ranges
        offset = np.cumsum(self._group_rows) - self._group_rows
        at = offset[found.group] + found.base
        ranks = np.argsort(at)
        begins, ends = at[ranks], at[ranks] + found.rows[ranks]
        first = np.searchsorted(ends, offset[group] + lo, side="right")
        count = np.searchsorted(begins, offset[group] + hi, side="left") - first
        of = np.repeat(np.arange(len(lo)), count)
        segment = ranks[ragged(first, count)]
        base = found.base[segment]
        begin = np.maximum(base, lo[of])
        end = np.minimum(base + found.rows[segment], hi[of])
        skip = begin - base
        ranks = np.lexsort((begin, hand[of]))
        columns = (hand[of], begin, found.sample[segment] + skip, skip, end - begin, found.shard[segment])
        return Pieces(*(column[ranks] for column in columns))

    def blocks(
        self,
        group: NDArray[np.int64],
        lo: NDArray[np.int64],
        hi: NDArray[np.int64],
        hand: NDArray[np.int64],
        hands: int,
    ) -> Blocks:
        """Return `pieces` of ``hands`` hands, cut at block borders; blocks restart at every segment border."""
        pieces = self.pieces(group, lo, hi, hand)
        size = self.population.shard_block_rows[pieces.shard].astype(np.int64)
        first = pieces.row // size
        count = (pieces.row + pieces.rows - 1) // size + 1 - first
        at = np.repeat(np.arange(len(count)), count)
        number = ragged(first, count)
        start = np.maximum(number * size[at], pieces.row[at])
        stop = np.minimum((number + 1) * size[at], (pieces.row + pieces.rows)[at])
        return Blocks(
            pieces.sample[at] + start - pieces.row[at],
            stop - start,
            np.bincount(pieces.group[at], minlength=hands),
        )

    def find(self, sample: int) -> tuple[int, int] | None:
        """Return (group, base position) of a sample, or None if its stratum is in no group."""
        chunk = int(np.searchsorted(self._samples, sample, side="right")) - 1
        part = slice(chunk * self._chunk, min(self._num, (chunk + 1) * self._chunk))
        rows = self.population.segment_rows[part]
        ends = self._samples[chunk] + np.cumsum(rows)
        place = int(np.searchsorted(ends, sample, side="right"))
        of = self.groups.group_of[self.population.segment_stratum[part]]
        group = int(of[place])
        if group < 0:
            return None
        before = int(rows[:place][of[:place] == group].sum())
        return group, int(self._by_group[group, chunk]) + before + sample - int(ends[place] - rows[place])

    def segments_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the segment of each sample, int64[n]; scans only the chunks that contain the samples."""
        chunk = np.searchsorted(self._samples, samples, side="right") - 1
        out = np.empty(len(samples), dtype=np.int64)
        for number in np.unique(chunk).tolist():
            here = np.flatnonzero(chunk == number)
            part = slice(number * self._chunk, min(self._num, (number + 1) * self._chunk))
            ends = self._samples[number] + np.cumsum(self.population.segment_rows[part])
            out[here] = np.searchsorted(ends, samples[here], side="right") + part.start
        return out

    def blocks_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the distinct (shard, block in the shard) pairs of samples: (n, 2) int64, ascending."""
        population = self.population
        segment, first = np.unique(self.segments_of(samples), return_inverse=True)
        shard = population.segment_shard[segment]
        block = np.empty(len(samples), dtype=np.int64)
        for number, at in enumerate(segment.tolist()):  # far fewer segments than rows
            begin, before = self._segment_start(at)
            here = first == number
            block[here] = before + (samples[here] - begin) // int(population.shard_block_rows[shard[number]])
        pairs = np.stack([shard[first].astype(np.int64), block], axis=1)
        distinct: NDArray[np.int64] = np.unique(pairs, axis=0)
        return distinct

    def _segment_start(self, segment: int) -> tuple[int, int]:
        """Return the first sample of a segment and the number of blocks before it in its shard."""
        rows, shards = self.population.segment_rows, self.population.segment_shard
        chunk = segment // self._chunk
        begin = int(self._samples[chunk]) + int(rows[chunk * self._chunk : segment].sum())
        shard = int(shards[segment])
        head = int(np.searchsorted(shards, shard))
        before = -(-rows[head:segment] // int(self.population.shard_block_rows[shard]))
        return begin, int(before.sum())

    def strata_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the stratum of each sample, int64[n]."""
        return self.population.segment_stratum[self.segments_of(samples)].astype(np.int64)

    def _chunk_runs(
        self, group: NDArray[np.int64], lo: NDArray[np.int64], hi: NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        """Return the runs of chunks that contain the ranges."""
        mark = np.zeros(self._by_group.shape[1] + 1, dtype=np.int64)
        ranks = np.argsort(group, kind="stable")
        group = group[ranks]
        borders = np.flatnonzero(np.diff(group, prepend=-1, append=-1)).tolist()
        for a, b in itertools.pairwise(borders):
            row, here = self._by_group[group[a]], ranks[a:b]
            np.add.at(mark, np.searchsorted(row, lo[here], side="right") - 1, 1)
            np.subtract.at(mark, np.searchsorted(row, hi[here], side="left"), 1)
        inside = np.cumsum(mark) > 0
        edges = np.flatnonzero(np.diff(np.concatenate(([False], inside, [False])).astype(np.int8)))
        return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]

    def _scan(self, runs: list[tuple[int, int]]) -> Pieces:
        """Return all segments in runs of chunks with their base positions, in no particular order."""
        out: list[tuple[NDArray[np.int64], ...]] = []
        for first, last in runs:
            part = slice(first * self._chunk, min(self._num, last * self._chunk))
            group = self.groups.group_of[self.population.segment_stratum[part]].astype(np.int64)
            rows = self.population.segment_rows[part]
            sample = self._samples[first] + np.cumsum(rows) - rows
            kept = np.flatnonzero((group >= 0) & (rows > 0))
            ranks = kept[np.argsort(_narrow(group[kept], len(self.groups)), kind="stable")]
            group, rows = group[ranks], rows[ranks]
            before = np.cumsum(rows) - rows  # includes rows of smaller groups in this run, subtracted below
            starts = np.flatnonzero(np.diff(group, prepend=-1))
            lengths = np.diff(starts, append=len(group))
            base = before + np.repeat(self._by_group[group[starts], first] - before[starts], lengths)
            shard = self.population.segment_shard[part][ranks].astype(np.int64)
            out.append((group, base, sample[ranks], np.zeros_like(rows), rows, shard))
        if not out:
            return Pieces(*([np.empty(0, dtype=np.int64)] * 6))
        return Pieces(*(np.concatenate(c) for c in zip(*out, strict=True)))


def _narrow(values: NDArray[np.int64], limit: int) -> NDArray[np.generic]:
    """Convert to the smallest unsigned dtype that fits: numpy's stable sort is a radix sort up to 16 bits."""
    return values.astype(np.uint8 if limit <= 1 << 8 else np.uint16 if limit <= 1 << 16 else np.uint32)


# ---- Sets of sample numbers

_PART = 1 << 20  # members that are numbered again at once
_BYTES = 16  # bytes of a bitmap per entry of its table of counts
_BITS: NDArray[np.uint8] = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
_COUNT: NDArray[np.int64] = _BITS.sum(axis=1, dtype=np.int64)
# _PLACE[b, i]: place of the i-th set bit of byte b, from the most significant bit
_PLACE: NDArray[np.int64] = np.argsort(1 - _BITS, axis=1, kind="stable").astype(np.int64)


class RowSet:
    """Set of sample numbers below ``size``; takes 1.5 bits per number below ``size``.

    The rank of a member is the number of smaller members.

    Args:
        size: number of samples of the population.
        parts: arrays of the members, int64, in any order.
    """

    def __init__(self, size: int, parts: Iterable[Int64s]) -> None:
        self._size = size
        bits = np.zeros((size // (8 * _BYTES) + 1) * _BYTES, dtype=np.uint8)
        for part in parts:
            np.bitwise_or.at(bits, part >> 3, (128 >> (part & 7)).astype(np.uint8))
        self._bits: NDArray[np.uint8] = bits.reshape(-1, _BYTES)
        counts = np.bitwise_count(self._bits).sum(axis=1, dtype=np.int64)
        self._before: Int64s = np.concatenate(([0], np.cumsum(counts)))

    def __len__(self) -> int:
        return int(self._before[-1])

    def __contains__(self, sample: int) -> bool:
        place = sample & (8 * _BYTES - 1)
        return bool(int(self._bits[sample // (8 * _BYTES), place >> 3]) & 128 >> (place & 7))

    def all(self) -> Int64s:
        """Return all members, ascending: int64."""
        return self.members(np.arange(len(self), dtype=np.int64))

    def members(self, ranks: Int64s) -> Int64s:
        """Return the members with these ranks: int64, of the same shape; -1 for rank -1."""
        out, filled = ranks.copy(), ranks >= 0
        number = ranks[filled]
        entry = np.searchsorted(self._before, number, side="right") - 1
        rest = number - self._before[entry]
        found = self._bits[entry]  # (n, 16)
        sums = np.cumsum(_COUNT[found], axis=1)
        byte = (sums <= rest[:, None]).sum(axis=1)
        each = np.arange(len(number))
        rest -= sums[each, byte] - _COUNT[found[each, byte]]
        out[filled] = (entry * _BYTES + byte) * 8 + _PLACE[found[each, byte], rest]
        return out

    def ranks(self, samples: Int64s) -> Int64s:
        """Return the number of members below each of these numbers, which may equal ``size``: int64."""
        entry, place = np.divmod(samples, 8 * _BYTES)
        found = self._bits[entry]
        whole = np.where(np.arange(_BYTES) < (place >> 3)[:, None], _COUNT[found], 0).sum(axis=1)
        byte = found[np.arange(len(found)), place >> 3].astype(np.int64)
        ranks: Int64s = self._before[entry] + whole + _COUNT[byte & (0xFF00 >> (place & 7)) & 0xFF]
        return ranks

    def without(self, removed: Int64s) -> RowSet:
        """Return the set after some sample numbers are removed and all others are numbered again.

        Args:
            removed: ascending sample numbers, int64.
        """
        return RowSet(self._size - len(removed), self._renumber(removed))

    def _renumber(self, removed: Int64s) -> Iterator[Int64s]:
        for first in range(0, len(self), _PART):
            numbers = self.members(np.arange(first, min(len(self), first + _PART), dtype=np.int64))
            before = np.searchsorted(removed, numbers)
            stays = np.append(removed, -1)[before] != numbers
            yield numbers[stays] - before[stays]

    def of(self, population: Population) -> Population:
        """Return the population of the members only; its sample numbers are their ranks."""
        borders = np.concatenate(([0], np.cumsum(population.segment_rows)))
        return replace(population, segment_rows=np.diff(self.ranks(borders)))
