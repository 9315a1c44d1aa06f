"""What passes have left at a step: the rows that an amended plan begins with (SPEC.md §6)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .natural import NaturalGrid
from .rounding import ragged
from .tapes import Heads
from .weighted import WeightedGrid

__all__ = ["NaturalLeftover", "StratumLeftover", "WeightedLeftover", "natural_heads", "weighted_heads"]

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
            out[ragged(first[here] + a, b - a)] = draws
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

    def __init__(self, inner: NaturalLeftover) -> None:
        self.inner, groups = inner, inner.grid.groups
        num_strata = len(inner.grid.population.strata)
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
    """Rest of one pass of each stratum, on the tapes of a weighted grid; columns are strata.

    Args:
        grid: whose tapes.
        number: int64[strata], the number of each stratum's pass, as `locate` counts them.
        lo, hi: int64[lanes + 1, strata], tape positions: of all lanes, then of the shared tapes.
    """

    def __init__(self, grid: WeightedGrid, number: Numbers, lo: Numbers, hi: Numbers) -> None:
        self.grid, self.number, self._lo = grid, number, lo
        self.starts = _starts(hi - lo)

    def _rest(self, source: int, columns: Numbers, lo: Numbers, hi: Numbers) -> Numbers:
        at = self._lo[source, columns]
        if source < self.grid.lanes:
            return self.grid.tapes.take(source, columns, at + lo, at + hi)
        parts = []
        for s, a, b in zip(columns.tolist(), (at + lo).tolist(), (at + hi).tolist(), strict=True):
            parts.append(self.grid.tapes.take_shared(s, np.arange(a, b, dtype=np.int64)))
        return np.concatenate(parts)

    def index(self, sample: int) -> tuple[int, int] | None:
        """(stratum, place) of a sample; None where it has been drawn."""
        stratum = int(self.grid.order.strata_of(np.array([sample]))[0])
        found = self.grid.place(sample, int(self.number[stratum]))
        if found is None:
            return None
        _, lane, position = found
        source = lane if lane >= 0 else self.grid.lanes
        begin, end = self.starts[source : source + 2, stratum].tolist()
        place = begin + position - int(self._lo[source, stratum])
        return (stratum, place) if begin <= place < end else None


def natural_heads(grid: NaturalGrid, epoch: int, step: int) -> Heads:
    """What an epoch has left before a step of it, by stratum."""
    rests = [StratumLeftover(NaturalLeftover(grid, epoch, step))] if step else []
    return Heads(rests, np.full(len(grid.population.strata), epoch, dtype=np.int64), epoch + bool(step))


def weighted_heads(grid: WeightedGrid, step: int) -> tuple[Heads, bool]:
    """What the passes under way have left before a step; and whether they were not the same one in all lanes.

    Every tape is read to the end of the furthest pass that one of its stratum is in, pass by pass: behind the heads all
    rows of a stratum have come equally often.
    """
    tapes, lanes = grid.tapes, np.arange(grid.lanes)[:, None]
    own, common = (np.flatnonzero((grid.rows > 0) & kind) for kind in (~grid.shared, grid.shared))
    at = np.concatenate([part.reshape(-1, len(grid.rows)) for part in grid.drawn(step)])

    def start(passes: Numbers) -> Numbers:
        """Tape positions at which passes of all strata start: (lanes + 1, strata)."""
        out = np.zeros_like(at)
        out[:-1, own] = tapes.pass_start(lanes, own, passes[own])
        out[-1, common] = tapes.shared_start(common, passes[common])
        return out

    number = np.zeros(at.shape, dtype=np.int64)  # the pass that each tape is in, or is about to begin
    number[:-1, own] = tapes.pass_of(lanes, own, at[:-1, own])
    number[-1, common] = tapes.shared_pass_of(common, at[-1, common])
    last = number.max(axis=0)
    last += (start(last) < at).any(axis=0)
    last = np.maximum(last, tapes.rests)  # rests of an amendment before this one
    while (
        lower := (last > tapes.rests) & (start(last - 1) >= at).all(axis=0)
    ).any():  # nothing of it came yet
        last = last - lower
    rests: list[WeightedLeftover] = []
    end = last
    while (start(end) > at).any():
        lo = np.maximum(at, start(end - 1))
        rests.insert(0, WeightedLeftover(grid, tapes.heads.number + end - 1, lo, np.maximum(lo, start(end))))
        end = end - 1
    here, within = at[:-1, own], number[:-1, own]
    own_end = tapes.pass_start(lanes, own, within + (tapes.pass_start(lanes, own, within) < here))
    own_end = np.maximum(own_end, tapes.pass_start(lanes, own, np.array([tapes.rests])))
    apart = bool((own_end != start(last)[:-1, own]).any())
    return Heads(rests, tapes.heads.number + end, grid.last_pass(step) + 1), apart


def _split(sorted_keys: Numbers, values: Numbers) -> tuple[Numbers, list[Numbers]]:
    starts = np.flatnonzero(np.diff(sorted_keys, prepend=-1))
    return sorted_keys[starts], np.split(values, starts[1:]) if len(starts) else []
