"""Base order: the rows of each group in manifest order, without an array of rows.

No sort of all segments either: a coarse table holds, for every run of `chunk` segments, how many rows of
each group come before it, and a look-up scans only the chunks it needs. Memory is at most 2**20 entries,
whatever the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .population import Population
from .rounding import ragged
from .strata import Groups

__all__ = ["BaseOrder", "Blocks", "Pieces"]

_ENTRIES = 1 << 20
_MIN_CHUNK = 256


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of rows inside segments, ordered by (group, base position).

    Attributes:
        group, base: int64[n], group and position in its base order of the first row.
        sample: int64[n], sample number of the first row.
        row: int64[n], place of the first row inside its segment.
        rows: int64[n].
        shard: int64[n].
    """

    group: NDArray[np.int64]
    base: NDArray[np.int64]
    sample: NDArray[np.int64]
    row: NDArray[np.int64]
    rows: NDArray[np.int64]
    shard: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks, or the parts of them that a hand holds, ordered by (group, base position).

    Attributes:
        sample: int64[n], sample number of the first row.
        rows: int64[n].
        per_group: int64[groups], how many of them belong to each group.
    """

    sample: NDArray[np.int64]
    rows: NDArray[np.int64]
    per_group: NDArray[np.int64]


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
        step = max(1, (1 << 18) // self._chunk)  # chunks taken at once: bounded temporaries
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

    def pieces(self, group: NDArray[np.int64], lo: NDArray[np.int64], hi: NDArray[np.int64]) -> Pieces:
        """What base ranges [lo, hi) of groups hold; ranges of one group must not overlap."""
        keep = hi > lo
        group, lo, hi = group[keep], lo[keep], hi[keep]
        found = self._scan(self._needed(group, lo, hi))
        out: list[tuple[NDArray[np.int64], ...]] = []
        for turn in range(int(np.bincount(group, minlength=1).max(initial=0))):
            # one range per group and turn: the ranges of a group, in ascending order
            first, last = self._ranges(group, lo, hi, turn)
            begin = np.maximum(found.base, first[found.group])
            end = np.minimum(found.base + found.rows, last[found.group])
            hit = np.flatnonzero(end > begin)
            skip = begin[hit] - found.base[hit]
            out.append((found.group[hit], begin[hit], found.sample[hit] + skip, skip, end[hit] - begin[hit],
                        found.shard[hit]))  # fmt: skip
        columns = [np.concatenate(c) for c in zip(*out, strict=True)] if out else [np.empty(0, np.int64)] * 6
        ranks = np.lexsort((columns[1], columns[0]))
        return Pieces(*(c[ranks] for c in columns))

    def blocks(self, group: NDArray[np.int64], lo: NDArray[np.int64], hi: NDArray[np.int64]) -> Blocks:
        """`pieces` cut at block borders; a block restarts at every segment border."""
        pieces = self.pieces(group, lo, hi)
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
            np.bincount(pieces.group[at], minlength=len(self.groups)),
        )

    def find(self, sample: int) -> tuple[int, int] | None:
        """(group, base position) of a sample; None where its stratum is in no group."""
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
        """The segment of each sample; scans only the chunks that hold them."""
        chunk = np.searchsorted(self._samples, samples, side="right") - 1
        out = np.empty(len(samples), dtype=np.int64)
        for number in np.unique(chunk).tolist():
            here = np.flatnonzero(chunk == number)
            part = slice(number * self._chunk, min(self._num, (number + 1) * self._chunk))
            ends = self._samples[number] + np.cumsum(self.population.segment_rows[part])
            out[here] = np.searchsorted(ends, samples[here], side="right") + part.start
        return out

    def blocks_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Distinct (shard, block in the shard) of samples: (n, 2) int64, ascending."""
        population = self.population
        segment, first = np.unique(self.segments_of(samples), return_inverse=True)
        shard = population.segment_shard[segment]
        block = np.empty(len(samples), dtype=np.int64)
        for number, at in enumerate(segment.tolist()):  # segments are few beside their rows
            begin, before = self._segment_start(at)
            here = first == number
            block[here] = before + (samples[here] - begin) // int(population.shard_block_rows[shard[number]])
        pairs = np.stack([shard[first].astype(np.int64), block], axis=1)
        distinct: NDArray[np.int64] = np.unique(pairs, axis=0)
        return distinct

    def _segment_start(self, segment: int) -> tuple[int, int]:
        """First sample of a segment, and the blocks of its shard before it."""
        rows, shards = self.population.segment_rows, self.population.segment_shard
        chunk = segment // self._chunk
        begin = int(self._samples[chunk]) + int(rows[chunk * self._chunk : segment].sum())
        shard = int(shards[segment])
        head = int(np.searchsorted(shards, shard))
        before = -(-rows[head:segment] // int(self.population.shard_block_rows[shard]))
        return begin, int(before.sum())

    def strata_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The stratum of each sample."""
        return self.population.segment_stratum[self.segments_of(samples)].astype(np.int64)

    def _ranges(
        self, group: NDArray[np.int64], lo: NDArray[np.int64], hi: NDArray[np.int64], turn: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        first = np.zeros(len(self.groups), dtype=np.int64)
        last = np.zeros(len(self.groups), dtype=np.int64)
        ranks = np.lexsort((lo, group))
        ordered = group[ranks]
        place = np.arange(len(ordered)) - np.searchsorted(ordered, ordered, side="left")
        chosen = ranks[place == turn]
        first[group[chosen]], last[group[chosen]] = lo[chosen], hi[chosen]
        return first, last

    def _needed(
        self, group: NDArray[np.int64], lo: NDArray[np.int64], hi: NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        """Runs of chunks that hold the ranges."""
        mark = np.zeros(self._by_group.shape[1] + 1, dtype=np.int64)
        for g, a, b in zip(group.tolist(), lo.tolist(), hi.tolist(), strict=True):
            row = self._by_group[g]
            mark[np.searchsorted(row, a, side="right") - 1] += 1
            mark[np.searchsorted(row, b, side="left")] -= 1
        inside = np.cumsum(mark) > 0
        edges = np.flatnonzero(np.diff(np.concatenate(([False], inside, [False])).astype(np.int8)))
        return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]

    def _scan(self, runs: list[tuple[int, int]]) -> Pieces:
        """All segments of runs of chunks, with their base positions; in no particular order."""
        out: list[tuple[NDArray[np.int64], ...]] = []
        for first, last in runs:
            part = slice(first * self._chunk, min(self._num, last * self._chunk))
            group = self.groups.group_of[self.population.segment_stratum[part]].astype(np.int64)
            rows = self.population.segment_rows[part]
            sample = self._samples[first] + np.cumsum(rows) - rows
            kept = np.flatnonzero((group >= 0) & (rows > 0))
            ranks = kept[np.argsort(_narrow(group[kept], len(self.groups)), kind="stable")]
            group, rows = group[ranks], rows[ranks]
            before = (
                np.cumsum(rows) - rows
            )  # rows of smaller groups in this run count too: taken off again below
            starts = np.flatnonzero(np.diff(group, prepend=-1))
            lengths = np.diff(starts, append=len(group))
            base = before + np.repeat(self._by_group[group[starts], first] - before[starts], lengths)
            shard = self.population.segment_shard[part][ranks].astype(np.int64)
            out.append((group, base, sample[ranks], np.zeros_like(rows), rows, shard))
        if not out:
            return Pieces(*([np.empty(0, dtype=np.int64)] * 6))
        return Pieces(*(np.concatenate(c) for c in zip(*out, strict=True)))


def _narrow(values: NDArray[np.int64], limit: int) -> NDArray[np.generic]:
    """The smallest unsigned dtype that holds them: numpy's stable sort is a radix sort up to 16 bits."""
    return values.astype(np.uint8 if limit <= 1 << 8 else np.uint16 if limit <= 1 << 16 else np.uint32)
