"""How a plan goes on from a step under other settings (SPEC.md §6)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardkit.errors import PlanError

from .leftover import NaturalLeftover, RestGrid, natural_heads, weighted_heads
from .lengths import BucketGrid, JoinedGrid
from .natural import NaturalGrid
from .population import Population, stratum_rows
from .settings import Settings, WeightsLike, resolve_weights
from .weighted import WeightedGrid, Weights

AnyGrid = NaturalGrid | WeightedGrid | RestGrid | BucketGrid | JoinedGrid
"""Any way of dealing samples to cells."""


@dataclass(frozen=True, eq=False)
class Leg:
    """Settings, rows and grid that hold from a step on.

    The grid's step is the run's minus ``origin``; ``continues`` where it begins with the rest of an epoch; ``revised``
    where the amendment is not dealt as release 0.1 dealt it.
    """

    settings: Settings
    population: Population
    grid: AnyGrid
    from_step: int = 0
    origin: int = 0
    continues: bool = False
    revised: bool = False


@dataclass(frozen=True, kw_only=True)
class Change:
    """What an amendment changes; None leaves it as it was.

    Attributes:
        from_step: first step of the run that it holds for.
        position: the step of the parent that it goes on from: ``from_step``, or later where steps are skipped.
    """

    from_step: int
    position: int
    weights: WeightsLike | None = None
    population: Population | None = None
    global_batch: int | None = None
    lanes: int | None = None


def amended(leg: Leg, change: Change) -> Leg:
    """The leg that follows ``leg``.

    Raises:
        PlanError: the change cannot start where it should.
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
    """Other rows: streams begin afresh, under the same kind of weights."""
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
    ahead[0] = replace(ahead[0], from_step=position)
    batch = settings.global_batch
    stages = [replace(w, global_batch=batch) for w in ahead]
    settings = replace(settings, stages=tuple((w.from_step, w.masses) for w in stages))
    if settings.lanes == grid.lanes:
        revised = False
        for weights in stages:
            grid = grid.extended(weights)
            revised |= grid.revised
        return Leg(settings, leg.population, grid, change.from_step, origin, revised=revised)
    heads, revised = weighted_heads(grid, position)
    moved = [replace(w, from_step=w.from_step - position) for w in stages]
    settings = replace(settings, stages=tuple((w.from_step, w.masses) for w in moved))
    fresh = WeightedGrid(leg.population, settings, heads)
    return Leg(settings, leg.population, fresh, change.from_step, change.from_step, revised=revised)


def _skipped(leg: Leg, change: Change) -> Leg:
    """The same grid; the epoch goes on where the skip does not leave it."""
    position, grid = change.position - leg.origin, leg.grid
    assert not isinstance(grid, WeightedGrid)
    goes_on = position < grid.bounds(change.from_step - leg.origin)[1]
    return replace(
        leg, from_step=change.from_step, origin=change.from_step - position, continues=goes_on, revised=False
    )


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
