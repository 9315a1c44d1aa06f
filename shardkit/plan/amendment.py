"""Amendments: the leg of a plan from a step on under other settings, and the undrawn rows of passes (SPEC.md §6)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import PlanError

from .deal import Deal, assemble, permute_cells, ragged
from .deck import Recent
from .lengths import BucketGrid, JoinedGrid
from .natural import NaturalGrid
from .permutation import derive, derive_each
from .population import Population, group_strata, stratum_rows
from .settings import Settings, WeightsLike, resolve_weights
from .stage import first_step
from .tapes import Heads
from .weighted import WeightedGrid, Weights

Numbers = NDArray[np.int64]


class _BySource:
    """Base class of leftovers that takes ranges of columns lane by lane."""

    starts: Numbers

    def take(self, columns: Numbers, lo: Numbers, hi: Numbers) -> Numbers:
        """Return the sample numbers at [lo, hi) of each column, concatenated."""
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
    """Rows of an epoch of a natural grid that are not drawn before a step; columns are groups."""

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
        """Return (group, position in it) of a sample, or None if it has been drawn or dropped."""
        found = self.grid.place(sample, self.epoch)
        if found is None:
            return None
        group, lane, place = found
        place -= int(self.drawn[lane, group])
        return None if place < 0 else (group, int(self.starts[lane, group]) + place)


class StratumLeftover:
    """A natural leftover with strata as columns.

    The stream of the pool mixes its strata, so the pool's rest is drawn once and sorted by stratum. It takes memory for
    all its rows.
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
        """Return the sample numbers at [lo, hi) of each stratum, concatenated."""
        parts = []
        for s, a, b in zip(columns.tolist(), lo.tolist(), hi.tolist(), strict=True):
            if s in self._pool:
                parts.append(self._pool[s][a:b])
            else:
                parts.append(self.inner.take(self._group[s : s + 1], np.array([a]), np.array([b])))
        return np.concatenate(parts)

    def index(self, sample: int) -> tuple[int, int] | None:
        """Return (stratum, position in it) of a sample, or None if it has been drawn or dropped."""
        stratum = int(self.inner.grid.order.strata_of(np.array([sample]))[0])
        if stratum in self._pool:
            place = np.flatnonzero(self._pool[stratum] == sample)
            return (stratum, int(place[0])) if len(place) else None
        found = self.inner.index(sample)
        return None if found is None else (stratum, found[1])


class WeightedLeftover(_BySource):
    """Undrawn rows of one pass of each stratum, on the tapes of a weighted grid; columns are strata.

    Args:
        grid: grid that owns the tapes.
        number: int64[strata], number of each stratum's pass, as counted by `locate`.
        lo, hi: int64[lanes + 1, strata], tape positions; one row per lane, then one for the shared tapes.
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
        """Return (stratum, position in it) of a sample, or None if it has been drawn."""
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
    """Return the rows of an epoch that are not drawn before ``step`` of it, by stratum."""
    rests = [StratumLeftover(NaturalLeftover(grid, epoch, step))] if step else []
    return Heads(rests, np.full(len(grid.population.strata), epoch, dtype=np.int64), epoch + bool(step))


def weighted_heads(grid: WeightedGrid, step: int) -> Heads:
    """Return the undrawn rows of the current passes before a step, pass by pass.

    They reach to the end of the furthest pass that any tape of the stratum has begun, so that all rows of a stratum
    have been drawn equally often after the heads.
    """
    tapes, lanes = grid.tapes, np.arange(grid.lanes)[:, None]
    own, common = (np.flatnonzero((grid.rows > 0) & kind) for kind in (~grid.shared, grid.shared))
    at = np.concatenate([part.reshape(-1, len(grid.rows)) for part in grid.drawn(step)])

    def start(passes: Numbers) -> Numbers:
        """Return the tape positions at which passes of all strata start: (lanes + 1, strata)."""
        out = np.zeros_like(at)
        out[:-1, own] = tapes.pass_start(lanes, own, passes[own])
        out[-1, common] = tapes.shared_start(common, passes[common])
        return out

    number = np.zeros(at.shape, dtype=np.int64)  # current pass of each tape
    number[:-1, own] = tapes.pass_of(lanes, own, at[:-1, own])
    number[-1, common] = tapes.shared_pass_of(common, at[-1, common])
    last = number.max(axis=0)
    last += (start(last) < at).any(axis=0)
    last = np.maximum(last, tapes.rests)  # include rests of an earlier amendment
    while (
        lower := (last > tapes.rests) & (start(last - 1) >= at).all(axis=0)
    ).any():  # no row of the pass has been drawn
        last = last - lower
    rests: list[WeightedLeftover] = []
    end = last
    while (start(end) > at).any():
        lo = np.maximum(at, start(end - 1))
        rests.insert(0, WeightedLeftover(grid, tapes.heads.number + end - 1, lo, np.maximum(lo, start(end))))
        end = end - 1
    return Heads(rests, tapes.heads.number + end, grid.last_pass(step) + 1)


def _split(sorted_keys: Numbers, values: Numbers) -> tuple[Numbers, list[Numbers]]:
    starts = np.flatnonzero(np.diff(sorted_keys, prepend=-1))
    return sorted_keys[starts], np.split(values, starts[1:]) if len(starts) else []


_REST = 5  # purpose of a key derived from the seed
_CHUNK = 64


class RestGrid:
    """Grid of the rest of an epoch, followed by the epochs of ``after``.

    The rest has the groups of the grid that began the epoch, with rare groups pooled. Its rows keep the order in which
    that grid would have drawn them. They are cut into new hands, and each cell is permuted.

    Args:
        left: the rest of an epoch.
        after: grid of the following epochs, which also sets batch, lanes, seed and remainder.
    """

    def __init__(self, left: NaturalLeftover, after: NaturalGrid) -> None:
        self.left, self.after = left, after
        self.order = after.order
        self.lanes, self.cell_size = after.lanes, after.cell_size
        rows, batch = left.starts[-1].tolist(), after.global_batch
        groups = group_strata(range(len(rows)), rows, rows, batch)
        self.members = groups.strata
        sums = groups.cumulative() or [1]
        self.full_steps, spare = divmod(groups.total, batch)
        self.short = after.settings.remainder == "short" and spare > 0
        self.steps = self.full_steps + self.short
        self.deal = Deal(sums, batch, after.lanes, self.full_steps)
        drawn = self.deal.lane_prefix(np.full(after.lanes, self.full_steps), np.arange(after.lanes))
        self._drawn = np.diff(drawn, axis=1, prepend=0)
        hands = drawn + self.deal.short_step(spare) if self.short else drawn
        hands = np.diff(hands, axis=1, prepend=0)
        self._cut: Numbers = np.concatenate(
            (np.zeros((1, hands.shape[1]), np.int64), np.cumsum(hands, axis=0))
        )
        self._cells: Recent[tuple[int, int], Numbers] = Recent(3 * after.lanes)
        self.epoch = left.epoch

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first and end step of the rest or epoch that contains a step."""
        if step < self.steps:
            return 0, self.steps
        first, last = self.after.bounds(step + self.ahead)
        return first - self.ahead, last - self.ahead

    @property
    def ahead(self) -> int:
        """Number to add to a step of this grid to get the step of ``after``."""
        return (self.epoch + 1) * self.after.steps_per_epoch - self.steps

    def cells(self, start: int, stop: int, lane: int) -> Numbers:
        """Return cells of one lane for steps [start, stop): (steps, m) int64."""
        parts = []
        while start < min(stop, self.steps):
            number = start // _CHUNK if start < self.full_steps else -1
            first = number * _CHUNK if number >= 0 else self.full_steps
            cells = self._cells.get((lane, number), self._draw)
            count = min(stop - start, first + len(cells) - start)
            parts.append(cells[start - first : start - first + count])
            start += count
        if start < stop:
            parts.append(self.after.cells(start + self.ahead, stop + self.ahead, lane))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _draw(self, key: tuple[int, int]) -> Numbers:
        lane, number = key
        if number < 0:
            counts = (self._cut[lane + 1] - self._cut[lane] - self._drawn[lane])[None, :]
            first, low = self.full_steps, self._drawn[lane]
        else:
            first = number * _CHUNK
            steps = np.arange(first, min(self.full_steps, first + _CHUNK) + 1, dtype=np.int64)
            before = self.deal.lane_counts(steps, lane, np.arange(len(self.members)))
            counts, low = np.diff(before, axis=0), before[0]
        begin = self._cut[lane] + low
        draws = np.concatenate([self._take(g, int(a), int(a + n)) for g, (a, n) in
                                enumerate(zip(begin, counts.sum(axis=0), strict=True))])  # fmt: skip
        cells: Numbers = assemble(draws, counts[None], self.cell_size)[0]
        if self.after.shuffle != "none":
            steps = np.arange(first, first + len(cells), dtype=np.int64)
            base = derive(self.after.seed, _REST, self.epoch, lane)
            cells = permute_cells(
                cells, derive_each(base, steps), len(draws) if number < 0 else self.cell_size
            )
        cells.flags.writeable = False
        return cells

    def _take(self, group: int, lo: int, hi: int) -> Numbers:
        """Return rows [lo, hi) of a group of the rest; a pool is the concatenation of its members."""
        parts, base = [np.empty(0, dtype=np.int64)], 0
        for member in self.members[group]:
            rows = int(self.left.starts[-1, member])
            a, b = max(lo, base), min(hi, base + rows)
            if b > a:
                parts.append(self.left.take(*(np.array([v]) for v in (member, a - base, b - base))))
            base += rows
        return np.concatenate(parts)

    def locate(self, sample: int, number: int) -> tuple[int, int, int] | None:
        """Return (step, lane, slot) of a sample in the rest of the amended epoch or in a later epoch, or None."""
        if number > self.epoch:
            found = self.after.locate(sample, number)
            return None if found is None else (found[0] - self.ahead, found[1], found[2])
        place = self.left.index(sample) if number == self.epoch else None
        if place is None:
            return None
        group = next(g for g, m in enumerate(self.members) if place[0] in m)
        members = self.members[group]
        at = place[1] + sum(int(self.left.starts[-1, m]) for m in members[: members.index(place[0])])
        lane = int(np.searchsorted(self._cut[:, group], at, side="right")) - 1
        if lane >= self.lanes:
            return None  # the remainder of the rest is dropped
        at -= int(self._cut[lane, group])
        step, chosen = self.full_steps, np.array([group])
        if at < int(self._drawn[lane, group]):
            step = first_step(
                lambda k: int(self.deal.lane_counts(np.array([k]), lane, chosen)[0, 0]), at, self.full_steps
            )  # type: ignore[assignment]
        slot = int(np.flatnonzero(self.cells(step, step + 1, lane)[0] == sample)[0])
        return step, lane, slot


# ---- the leg that follows

AnyGrid = NaturalGrid | WeightedGrid | RestGrid | BucketGrid | JoinedGrid
"""Any grid of cells."""


class Leg(NamedTuple):
    """Settings, rows and grid of a plan from a step on.

    The step of the grid is the step of the run minus ``origin``. ``continues`` is True if the leg begins with the rest
    of an epoch.
    """

    settings: Settings
    population: Population
    grid: AnyGrid
    from_step: int = 0
    origin: int = 0
    continues: bool = False


@dataclass(frozen=True, kw_only=True)
class Change:
    """Change made by an amendment; fields that are None do not change.

    Attributes:
        from_step: first step of the run with the change.
        position: step of the parent that is continued at ``from_step``; later than ``from_step`` if steps are skipped.
    """

    from_step: int
    position: int
    weights: WeightsLike | None = None
    population: Population | None = None
    global_batch: int | None = None
    lanes: int | None = None


def amended(leg: Leg, change: Change) -> Leg:
    """Return the leg that follows ``leg`` after a change.

    Raises:
        PlanError: the plan does not support the change.
    """
    settings = replace(
        leg.settings,
        global_batch=change.global_batch or leg.settings.global_batch,
        lanes=_lanes(leg.settings, change),
    )
    if change.population is not None and change.population.identity != leg.population.identity:
        if isinstance(leg.grid, (BucketGrid, JoinedGrid)):
            raise PlanError(
                "plan: a plan with group_by or sequence does not change its manifest; make a new plan"
            )
        if settings.cost is not None:
            raise PlanError("plan: a plan with cost does not change its manifest; make a new plan")
        return _anew(leg, settings, change.population, change)
    if isinstance(leg.grid, (BucketGrid, JoinedGrid)):
        if change.weights is not None or settings != leg.settings:
            raise PlanError("plan: a plan with group_by or sequence is amended by skip only")
        return _skipped(leg, change)
    if isinstance(leg.grid, NaturalGrid) and leg.grid.costs is not None:
        if change.weights is not None or settings != leg.settings:
            raise PlanError("plan: a plan with cost is amended by skip only")
        return _skipped(leg, change)
    if isinstance(leg.grid, WeightedGrid):
        return _after_weighted(leg, leg.grid, settings, change)
    return _after_natural(leg, settings, change)


def _lanes(settings: Settings, change: Change) -> int:
    if change.lanes is not None:
        return change.lanes
    batch = change.global_batch or settings.global_batch
    fit = [lanes for lanes in range(settings.lanes, 0, -1) if batch % lanes == 0]
    return fit[0]


def _anew(leg: Leg, settings: Settings, population: Population, change: Change) -> Leg:
    """Return a leg over other rows: streams restart, with the same kind of weights."""
    rows = stratum_rows(population)
    weights = change.weights
    if weights is None and isinstance(leg.grid, WeightedGrid):
        known = leg.grid.weights_at(change.position - leg.origin)[0].masses
        weights = {n: m for n, m in zip(leg.population.strata, known, strict=True) if n in population.strata}
    if weights is None:
        settings = replace(settings, stages=())
        grid: AnyGrid = NaturalGrid(population, settings, rows)
    else:
        settings = replace(settings, stages=((0, resolve_weights(weights, population.strata, rows)),))
        grid = WeightedGrid(population, settings)
    return Leg(settings, population, grid, change.from_step, change.from_step)


def _after_weighted(leg: Leg, grid: WeightedGrid, settings: Settings, change: Change) -> Leg:
    position = change.position - leg.origin
    origin = change.from_step - position
    if change.weights is None and settings == leg.settings:
        return Leg(settings, leg.population, grid, change.from_step, origin)
    ahead = list(grid.weights_at(position))
    if change.weights is not None:
        ahead = [
            Weights(position, resolve_weights(change.weights, leg.population.strata, grid.rows.tolist()))
        ]
    ahead[0] = ahead[0]._replace(from_step=position)
    batch = settings.global_batch
    stages = [w._replace(global_batch=batch) for w in ahead]
    settings = replace(settings, stages=tuple((w.from_step, w.masses) for w in stages))
    if settings.lanes == grid.lanes:
        for weights in stages:
            grid = grid.extended(weights)
        return Leg(settings, leg.population, grid, change.from_step, origin)
    heads = weighted_heads(grid, position)
    moved = [w._replace(from_step=w.from_step - position) for w in stages]
    settings = replace(settings, stages=tuple((w.from_step, w.masses) for w in moved))
    fresh = WeightedGrid(leg.population, settings, heads)
    return Leg(settings, leg.population, fresh, change.from_step, change.from_step)


def _skipped(leg: Leg, change: Change) -> Leg:
    """Return a leg with the same grid; the epoch continues unless the skip leaves it."""
    position, grid = change.position - leg.origin, leg.grid
    assert not isinstance(grid, WeightedGrid)
    goes_on = position < grid.bounds(change.from_step - leg.origin)[1]
    return leg._replace(from_step=change.from_step, origin=change.from_step - position, continues=goes_on)


def _after_natural(leg: Leg, settings: Settings, change: Change) -> Leg:
    grid, position = leg.grid, change.position - leg.origin
    if change.weights is None and (settings.global_batch, settings.lanes) == (
        leg.settings.global_batch,
        leg.settings.lanes,
    ):
        return _skipped(leg, change)
    if isinstance(grid, RestGrid):
        if position < grid.steps:
            raise PlanError(
                f"plan: step {change.from_step} lies in an epoch whose rest was dealt anew already; "
                f"amend from step {leg.origin + grid.steps} on, where the next epoch begins"
            )
        position, grid = position + grid.ahead, grid.after
    assert isinstance(grid, NaturalGrid)
    epoch, step = divmod(position, grid.steps_per_epoch)
    rows = stratum_rows(leg.population)
    if change.weights is not None:
        masses = resolve_weights(change.weights, leg.population.strata, rows)
        settings = replace(settings, stages=((0, masses),))
        fresh = WeightedGrid(leg.population, settings, natural_heads(grid, epoch, step))
        return Leg(settings, leg.population, fresh, change.from_step, change.from_step)
    after = NaturalGrid(leg.population, settings, rows)
    if not step:
        return Leg(
            settings,
            leg.population,
            after,
            change.from_step,
            change.from_step - epoch * after.steps_per_epoch,
        )
    rest = RestGrid(NaturalLeftover(grid, epoch, step), after)
    return Leg(settings, leg.population, rest, change.from_step, change.from_step, continues=rest.steps > 0)
