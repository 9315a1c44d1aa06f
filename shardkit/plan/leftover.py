"""What a pass has left at a step: the rows that an amended plan begins with (SPEC.md §6)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .natural import NaturalGrid
from .recent import Recent
from .weighted import WeightedGrid

__all__ = ["NaturalLeftover", "StratumLeftover", "WeightedLeftover"]

Numbers = NDArray[np.int64]


class _BySource:
    """Takes ranges of columns by going through the few lanes that they touch."""

    starts: Numbers

    def take(self, columns: Numbers, lo: Numbers, hi: Numbers) -> Numbers:
        """Sample numbers at [lo, hi) of each column, concatenated."""
        out = np.empty(int((hi - lo).sum()), dtype=np.int64)
        first = np.cumsum(hi - lo) - (hi - lo) - lo
        begin, end = self.starts[:-1, columns], self.starts[1:, columns]
        touched = (end > lo) & (begin < hi) & (end > begin)
        for source in np.flatnonzero(touched.any(axis=1)).tolist():
            here = np.flatnonzero(touched[source])
            a, b = np.maximum(lo[here], begin[source, here]), np.minimum(hi[here], end[source, here])
            draws = self._rest(source, columns[here], a - begin[source, here], b - begin[source, here])
            lengths = b - a
            ends = np.cumsum(lengths)
            out[np.arange(len(draws)) + np.repeat(first[here] + a - (ends - lengths), lengths)] = draws
        return out

    def _rest(self, source: int, columns: Numbers, lo: Numbers, hi: Numbers) -> Numbers:
        raise NotImplementedError


def _starts(counts: Numbers) -> Numbers:
    return np.concatenate((np.zeros((1, counts.shape[1]), dtype=np.int64), np.cumsum(counts, axis=0)))


class NaturalLeftover(_BySource):
    """Rest of an epoch of a natural grid; columns are its groups."""

    def __init__(self, grid: NaturalGrid, epoch: int, step: int) -> None:
        self.grid, self.epoch = grid, epoch
        tables = grid.epoch(epoch)
        lanes = np.arange(grid.lanes)
        drawn = tables.deal.lane_prefix(np.full(grid.lanes, min(step, grid.full_steps)), lanes)
        self.drawn: Numbers = np.diff(drawn, axis=1, prepend=0)
        hands = np.diff(tables.cut, axis=0)
        if step > grid.full_steps:
            self.drawn = hands
        self.starts = _starts(hands - self.drawn)

    def _rest(self, source: int, columns: Numbers, lo: Numbers, hi: Numbers) -> Numbers:
        deck = self.grid.deck(self.epoch, (source,))
        at = deck.start[columns] + self.drawn[source, columns]
        return deck.take(at + lo, at + hi)

    def index(self, sample: int) -> tuple[int, int] | None:
        """(group, place) of a sample; None where it has been drawn or dropped."""
        found = self.grid.place(sample, self.epoch)
        if found is None:
            return None
        group, lane, place = found
        place -= int(self.drawn[lane, group])
        return None if place < 0 else (group, int(self.starts[lane, group]) + place)


class StratumLeftover:
    """A natural leftover by stratum: groups of one stratum as they are, the pool's rest sorted by stratum.

    The pool's stream mixes its strata, so its rest is drawn once: memory is that of the pool's rows.
    """

    def __init__(self, inner: NaturalLeftover, num_strata: int) -> None:
        self.inner, groups = inner, inner.grid.groups
        totals = np.zeros(num_strata, dtype=np.int64)
        self._group: Numbers = np.full(num_strata, -1, dtype=np.int64)
        self._pool: dict[int, Numbers] = {}
        for group, strata in enumerate(groups.strata):
            if len(strata) == 1:
                self._group[strata[0]] = group
                totals[strata[0]] = inner.starts[-1, group]
        if groups.pooled and len(groups.strata[-1]) > 1:
            last = len(groups) - 1
            rest = int(inner.starts[-1, last])
            rows = (
                inner.take(*(np.array([v]) for v in (last, 0, rest))) if rest else np.empty(0, dtype=np.int64)
            )
            of = inner.grid.order.strata_of(rows)
            ranks = np.argsort(of, kind="stable")
            for stratum, part in zip(*_split(of[ranks], rows[ranks]), strict=True):
                self._pool[int(stratum)] = part
                totals[stratum] = len(part)
        self.starts: Numbers = _starts(totals[None, :])

    def take(self, columns: Numbers, lo: Numbers, hi: Numbers) -> Numbers:
        """Sample numbers at [lo, hi) of each stratum, concatenated."""
        parts = []
        for s, a, b in zip(columns.tolist(), lo.tolist(), hi.tolist(), strict=True):
            if s in self._pool:
                parts.append(self._pool[s][a:b])
            else:
                parts.append(self.inner.take(self._group[s : s + 1], np.array([a]), np.array([b])))
        return np.concatenate(parts)

    def index(self, sample: int) -> tuple[int, int] | None:
        """(stratum, place) of a sample; None where it has been drawn or dropped."""
        stratum = int(self.inner.grid.order.strata_of(np.array([sample]))[0])
        if stratum in self._pool:
            place = np.flatnonzero(self._pool[stratum] == sample)
            return (stratum, int(place[0])) if len(place) else None
        found = self.inner.index(sample)
        return None if found is None else (stratum, found[1])


class WeightedLeftover(_BySource):
    """Rests of the passes in which the tapes of a weighted grid stand; columns are strata."""

    def __init__(self, grid: WeightedGrid, step: int) -> None:
        self.grid = grid
        handed, shared = grid.drawn(step)
        tapes, strata = grid.tapes, np.arange(len(grid.rows))
        some = np.flatnonzero((grid.rows > 0) & ~grid.shared)
        ends = handed.copy()
        for lane in range(grid.lanes):
            ends[lane, some] = tapes.pass_end(lane, some, handed[lane, some])
        ends[:, grid.shared] = handed[:, grid.shared]
        rest = tapes.shared_end(strata, shared) - shared
        rest[~grid.shared] = 0
        self._at = np.concatenate((handed, shared[None, :]))
        self.starts = _starts(np.concatenate((ends - handed, rest[None, :])))
        self._columns: Recent[int, Numbers] = Recent(8)

    def _rest(self, source: int, columns: Numbers, lo: Numbers, hi: Numbers) -> Numbers:
        at = self._at[source, columns]
        if source < self.grid.lanes:
            return self.grid.tapes.take(source, columns, at + lo, at + hi)
        parts = []
        for s, a, b in zip(columns.tolist(), (at + lo).tolist(), (at + hi).tolist(), strict=True):
            parts.append(self.grid.tapes.take_shared(s, np.arange(a, b, dtype=np.int64)))
        return np.concatenate(parts)

    def index(self, sample: int) -> tuple[int, int] | None:
        """(stratum, place) of a sample; None where it has been drawn. Looks through the stratum's rest."""
        found = self.grid.order.find(sample)
        if found is None:
            return None
        column = self._columns.get(found[0], self._whole)
        place = np.flatnonzero(column == sample)
        return (found[0], int(place[0])) if len(place) else None

    def _whole(self, stratum: int) -> Numbers:
        rest = int(self.starts[-1, stratum])
        if not rest:
            return np.empty(0, dtype=np.int64)
        return self.take(np.array([stratum]), np.array([0]), np.array([rest]))


def _split(sorted_keys: Numbers, values: Numbers) -> tuple[Numbers, list[Numbers]]:
    starts = np.flatnonzero(np.diff(sorted_keys, prepend=-1))
    return sorted_keys[starts], np.split(values, starts[1:]) if len(starts) else []
