"""Amendments: the leg of a plan from a step on under other settings, and the undrawn rows of passes (SPEC.md §6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from shardkit.arrays import Int64s
from shardkit.errors import PlanError
from shardkit.ranges import Range, shown

from .lengths import BucketGrid, JoinedGrid
from .mixed import MixedGrid
from .natural import NaturalGrid
from .permutation import derive
from .population import Population, RowSet, stratum_rows
from .settings import GLOBAL_BATCH, Settings, WeightsLike, is_pair, resolve_weights, whole
from .tapes import Heads
from .weighted import WeightedGrid, Weights

_REST = 5  # purpose of a key derived from the seed


class RestGrid:
    """Grid of the rest of an epoch, followed by the epochs of ``after``.

    The rest is one epoch of a natural grid over the rows that are left.

    Args:
        rows: the rows that are left.
        epoch: number of the epoch.
        after: grid of the following epochs, which also sets batch, lanes, seed and remainder.
    """

    def __init__(self, rows: RowSet, epoch: int, after: NaturalGrid) -> None:
        self.rows, self.epoch, self.after = rows, epoch, after
        self.order, self.lanes = after.order, after.lanes
        self._inner: NaturalGrid | None = None
        settings = after.settings
        if len(rows) >= (settings.global_batch if settings.remainder == "drop" else 1):
            settings = replace(settings, seed=derive(settings.seed, _REST, epoch) >> 1)
            self._inner = NaturalGrid(rows.of(after.population), settings)
        self.steps = 0 if self._inner is None else self._inner.steps_per_epoch

    @property
    def ahead(self) -> int:
        """Number to add to a step of this grid to get the step of ``after``."""
        return (self.epoch + 1) * self.after.steps_per_epoch - self.steps

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first and end step of the rest or epoch that contains a step."""
        if step < self.steps:
            return 0, self.steps
        first, last = self.after.bounds(step + self.ahead)
        return first - self.ahead, last - self.ahead

    def cells(self, start: int, stop: int, lane: int) -> Int64s:
        """Return cells of one lane for steps [start, stop): (steps, m) int64."""
        parts = []
        if self._inner is not None and start < self.steps:
            cells = self.rows.members(self._inner.cells(start, min(stop, self.steps), lane))
            cells.flags.writeable = False
            parts.append(cells)
        if stop > self.steps:
            parts.append(self.after.cells(max(start, self.steps) + self.ahead, stop + self.ahead, lane))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def rest(self, step: int) -> RowSet:
        """Return the rows that the rest of the epoch draws from a step of it on."""
        if self._inner is None:
            return self.rows
        left = self._inner.rest(0, step)
        return RowSet(self.after.population.rows, [self.rows.members(left.all())])

    def locate(self, sample: int, number: int) -> tuple[int, int, int] | None:
        """Return (step, lane, slot) of a sample in the rest of the amended epoch or in a later epoch, or None."""
        if number > self.epoch:
            found = self.after.locate(sample, number)
            return None if found is None else (found[0] - self.ahead, found[1], found[2])
        if number < self.epoch or self._inner is None or sample not in self.rows:
            return None
        return self._inner.locate(int(self.rows.ranks(np.array([sample]))[0]), 0)


def weighted_heads(grid: WeightedGrid, step: int) -> Heads:
    """Return the undrawn rows of the current passes before a step, pass by pass.

    They reach to the end of the furthest pass that any tape of the stratum has begun, so that all rows of a stratum
    have been drawn equally often after the heads.
    """
    tapes, lanes = grid.tapes, np.arange(grid.lanes)[:, None]
    own, common = (np.flatnonzero((grid.rows > 0) & kind) for kind in (~grid.shared, grid.shared))
    at = np.concatenate([part.reshape(-1, len(grid.rows)) for part in grid.drawn(step)])

    def start(passes: Int64s) -> Int64s:
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
    rests: list[RowSet] = []
    end = last
    while (start(end) > at).any():
        lo = np.maximum(at, start(end - 1))
        parts = _tape_rows(grid, lo, np.maximum(lo, start(end)))
        rests.insert(0, RowSet(grid.population.rows, parts))
        end = end - 1
    key = grid.last_pass(step) + 1 + len(rests)  # above the keys of all passes of the grid
    return Heads(tuple(rests), tapes.heads.number + end, key)


def _tape_rows(grid: WeightedGrid, lo: Int64s, hi: Int64s) -> Iterator[Int64s]:
    """Yield the rows at positions [lo, hi) of all tapes: (lanes + 1, strata), the last row for shared tapes."""
    for lane in range(grid.lanes):
        some = np.flatnonzero(hi[lane] > lo[lane])
        if len(some):
            yield grid.tapes.take(lane, some, lo[lane, some], hi[lane, some])
    for stratum in np.flatnonzero(hi[-1] > lo[-1]).tolist():
        yield grid.tapes.take_shared(stratum, np.arange(lo[-1, stratum], hi[-1, stratum], dtype=np.int64))


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


class Change(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Change made by an amendment; fields that are None do not change.

    Attributes:
        from_step: first step of the run with the change.
        position: step of the parent that is continued at ``from_step``; later than ``from_step`` if steps are skipped.
        removed: ascending sample numbers of the parent that the population does not have, if passes continue.
    """

    from_step: int
    position: int
    weights: WeightsLike | None = None
    population: Population | None = None
    removed: Int64s | None = None
    global_batch: int | None = None
    lanes: int | None = None

    def describe(self) -> dict[str, object]:
        """Return the change as values for canonical JSON; they are part of the digest of the plan."""
        described: dict[str, object] = {
            "from_step": self.from_step,
            "skip": None if self.position == self.from_step else (self.from_step, self.position),
            "lanes": self.lanes,
            "global_batch": self.global_batch,
            "weights": self.weights is not None,
        }
        if self.removed is not None:
            described["removed"] = len(self.removed)
        return described


def make_change(
    leg: Leg,
    *,
    from_step: int | None,
    weights: WeightsLike | None,
    manifest: Population | None,
    removed: ArrayLike | None,
    global_batch: int | None,
    lanes: int | None,
    skip: tuple[int, int] | None,
) -> Change:
    """Return the change of a leg that the arguments of `Plan.amend` ask for.

    Raises:
        PlanError: nothing changes, or arguments are invalid or contradict each other.
    """
    if skip is not None and not is_pair(skip):
        raise PlanError(f"plan: skip is {shown(skip)}, expected two steps, such as (4000, 4100)")
    if manifest is not None and not isinstance(manifest, Population):
        raise PlanError(f"plan: manifest is {shown(manifest)}, expected a Population; use Dataset.amend")
    if skip is not None and from_step not in (None, skip[0]):
        raise PlanError(f"plan: skip is {skip} from step {from_step}, expected ({from_step}, a later step)")
    start = skip[0] if from_step is None and skip is not None else from_step
    if start is None:
        raise PlanError(
            "plan: amend needs the first step that may differ: pass from_step=, such as "
            "from_step=loader.state_dict()['step']"
        )
    start = position = whole("plan: from_step", start, Range(leg.from_step, 2**63 - 1))
    if skip is not None:
        position = whole("plan: skip to a later step", skip[1], Range(start + 1, 2**63 - 1))
    changes = (weights, manifest, removed, global_batch, lanes, skip)
    if all(one is None for one in changes):
        raise PlanError(
            "plan: the amendment changes nothing; name weights, manifest, global_batch, lanes or skip"
        )
    if global_batch is not None:
        global_batch = whole("plan: global_batch", global_batch, GLOBAL_BATCH)
    return Change(
        from_step=start,
        position=position,
        weights=weights,
        population=manifest,
        removed=None if removed is None else _check_removal(leg.population, manifest, removed),
        global_batch=global_batch,
        lanes=None if lanes is None else whole("plan: lanes", lanes, GLOBAL_BATCH),
    )


def _check_removal(population: Population, manifest: Population | None, removed: ArrayLike) -> Int64s:
    """Return the numbers of the removed samples; raise PlanError unless `manifest` has all others."""
    gone = np.asarray(removed, dtype=np.int64)
    if manifest is None:
        raise PlanError("plan: removed needs manifest=, the version without these samples")
    rows = population.rows
    if gone.ndim != 1 or (np.diff(gone, prepend=-1) <= 0).any() or (len(gone) and gone[-1] >= rows):
        raise PlanError(f"plan: removed must be ascending sample numbers below {rows}")
    unknown = sorted(set(manifest.strata) - set(population.strata))
    if manifest.rows != rows - len(gone) or unknown:
        raise PlanError(
            f"plan: the other version has {manifest.rows} samples"
            + (f" and the stratum {unknown[0]!r}" if unknown else "")
            + f", expected the {rows} samples of this plan without {len(gone)}"
        )
    return gone


def amend_leg(leg: Leg, change: Change) -> Leg:
    """Return the leg that follows ``leg`` after a change.

    Raises:
        PlanError: the plan does not support the change.
    """
    settings = replace(
        leg.settings,
        global_batch=change.global_batch or leg.settings.global_batch,
        lanes=_lanes(leg.settings, change),
    )
    if isinstance(leg.grid, MixedGrid):
        raise PlanError("plan: a plan with a mixer is not amended; begin another run with other settings")
    if change.population is not None and change.population.identity != leg.population.identity:
        if isinstance(leg.grid, (BucketGrid, JoinedGrid)):
            raise PlanError(
                "plan: a plan with group_by or sequence does not change its manifest; make a new plan"
            )
        if settings.cost is not None:
            raise PlanError("plan: a plan with cost does not change its manifest; make a new plan")
        if change.removed is None:
            return _anew(leg, settings, change.population, change)
        if isinstance(leg.grid, WeightedGrid):
            return _weighted_without(leg, leg.grid, settings, change, change.population, change.removed)
        return _natural_without(leg, settings, change, change.population, change.removed)
    if isinstance(leg.grid, (BucketGrid, JoinedGrid)):
        if change.weights is not None or settings != leg.settings:
            raise PlanError("plan: a plan with group_by or sequence is amended by skip only")
        return _skip(leg, change)
    if leg.settings.cost is not None and (change.weights is not None or settings != leg.settings):
        raise PlanError("plan: a plan with cost is amended by skip only")
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


def _skip(leg: Leg, change: Change) -> Leg:
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
        return _skip(leg, change)
    epoch, rows_left = _remaining_rows(grid, position)
    return _epoch_over(leg.population, rows_left, epoch, settings, change)


def _remaining_rows(grid: AnyGrid, position: int) -> tuple[int, RowSet | None]:
    """Return the epoch of a position of a natural grid, and its rows that are left; None at the epoch's start."""
    if isinstance(grid, RestGrid):
        if position < grid.steps:
            return grid.epoch, grid.rest(position)
        position, grid = position + grid.ahead, grid.after
    assert isinstance(grid, NaturalGrid)
    epoch, step = divmod(position, grid.steps_per_epoch)
    return epoch, grid.rest(epoch, step) if step else None


def _epoch_over(
    population: Population, rows_left: RowSet | None, epoch: int, settings: Settings, change: Change
) -> Leg:
    """Return a leg that begins with the rows that an epoch has left."""
    rows = stratum_rows(population)
    if change.weights is not None:
        masses = resolve_weights(change.weights, population.strata, rows)
        settings = replace(settings, stages=((0, masses),))
        rests = () if rows_left is None else (rows_left,)
        number = np.full(len(rows), epoch, dtype=np.int64)
        fresh = WeightedGrid(population, settings, Heads(rests, number, epoch + len(rests)))
        return Leg(settings, population, fresh, change.from_step, change.from_step)
    after = NaturalGrid(population, settings, rows)
    if rows_left is None:
        origin = change.from_step - epoch * after.steps_per_epoch
        return Leg(settings, population, after, change.from_step, origin)
    rest = RestGrid(rows_left, epoch, after)
    return Leg(settings, population, rest, change.from_step, change.from_step, continues=rest.steps > 0)


def _natural_without(
    leg: Leg, settings: Settings, change: Change, population: Population, removed: Int64s
) -> Leg:
    epoch, left = _remaining_rows(leg.grid, change.position - leg.origin)
    return _epoch_over(population, None if left is None else left.without(removed), epoch, settings, change)


def _weighted_without(
    leg: Leg, grid: WeightedGrid, settings: Settings, change: Change, population: Population, removed: Int64s
) -> Leg:
    """Return a leg over fewer rows with explicit weights: passes continue with what they have left."""
    position = change.position - leg.origin
    rows = stratum_rows(population)
    place = {name: number for number, name in enumerate(leg.population.strata)}
    of = [place[name] for name in population.strata]
    ahead = [
        (
            max(0, w.from_step - position),
            tuple(w.masses[s] if n else 0 for s, n in zip(of, rows, strict=True)),
        )
        for w in grid.weights_at(position)
    ]
    if change.weights is not None:
        ahead = [(0, resolve_weights(change.weights, population.strata, rows))]
    if not any(ahead[0][1]):
        raise PlanError("plan: the weights leave no stratum with rows")
    heads = weighted_heads(grid, position)
    heads = Heads(tuple(rest.without(removed) for rest in heads.rests), heads.number[of], heads.key)
    settings = replace(settings, stages=tuple(ahead))
    return Leg(
        settings, population, WeightedGrid(population, settings, heads), change.from_step, change.from_step
    )
