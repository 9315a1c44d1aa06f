"""What a caller chooses, checked, resolved to integers and names, and written canonically."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

import numpy as np

from shardkit.errors import ConfigurationError, PlanError
from shardkit.ranges import Range

from .costs import BALANCES
from .deal import divisors
from .deck import SHUFFLES
from .population import Population

WINDOW_BYTES = 256 << 20  # of all lanes together, about
LEAST_WINDOW, MOST_WINDOW = 4, 16  # blocks
# windows that balance costs are larger: the sums of small ones differ too much between lanes
COST_WINDOW_BYTES, LEAST_COST_WINDOW, MOST_COST_WINDOW = 1 << 30, 16, 64  # of all lanes; blocks
MOST_COST_CELLS = 16  # and twice as large for cells of so many rows, of which a window has fewer steps

TARGET_LANES = 64
LEAST_LANES = 8
MANY_LANES, MOST_LANES = 32, 256
WORLDS = 64  # sizes up to here decide how many lanes
REMAINDERS = ("drop", "short")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Resolved settings; every field is part of the plan's digest."""

    global_batch: int
    lanes: int
    seed: int = 0
    remainder: str = "drop"
    window_blocks: int = MOST_WINDOW
    shuffle: str = "window"
    stages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    epoch_steps: int | None = None
    buckets: tuple[tuple[int, tuple[int, ...]], ...] = ()
    join: int | None = None
    cost: str | None = None
    balance: str | None = None

    def __post_init__(self) -> None:
        _at_least("global_batch", self.global_batch, 1)
        _at_least("lanes", self.lanes, 1)
        _at_least("window_blocks", self.window_blocks, 1)
        if self.epoch_steps is not None:
            _at_least("epoch_steps", self.epoch_steps, 1)
        _at_least("seed", self.seed, 0)
        if self.global_batch % self.lanes:
            fit = [d for d in divisors(self.global_batch) if d <= 1024]
            raise PlanError(
                f"plan: lanes is {self.lanes}, expected a divisor of the global batch "
                f"{self.global_batch}: {fit}"
            )
        _one_of("remainder", self.remainder, REMAINDERS)
        _one_of("shuffle", self.shuffle, SHUFFLES)
        if self.balance is not None:
            _one_of("balance", self.balance, BALANCES)

    def canonical(self) -> dict[str, object]:
        """Return the settings as canonical JSON takes them, without those that are not set."""
        values = {name: getattr(self, name) for name in sorted(self.__dataclass_fields__)}
        return {name: value for name, value in values.items() if value not in (None, ())}

    @classmethod
    def from_canonical(cls, values: Mapping[str, object]) -> Settings:
        """Return the settings that `canonical` wrote, read back from JSON."""
        given = {name: _tuples(value) for name, value in values.items() if value not in (None, [], {})}
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            names = ", ".join(sorted(unknown))
            raise PlanError(f"plan settings {names} are unknown; run the shardkit that began the run")
        return cls(**given)


def default_lanes(population: Population, global_batch: int) -> int:
    """A divisor of the batch that lets most world sizes share it evenly (SPEC.md §4).

    At least 32 where the batch has such a divisor; fewer (but not below 8) for datasets with fewer than 4 blocks per
    lane.
    """
    _at_least("global_batch", global_batch, 1)
    return _best_lanes(global_batch, _most_lanes(population))


def _most_lanes(population: Population) -> int:
    return max(LEAST_LANES, num_blocks(population) // 4)


def few_lanes(population: Population, global_batch: int) -> str:
    """What to say where `default_lanes` leaves fewer than 8 lanes for a larger batch; empty where it does not.

    Names the nearest batch below and the nearest above that allow more.
    """
    most = _most_lanes(population)
    lanes = _best_lanes(global_batch, most)
    if lanes >= LEAST_LANES or global_batch < LEAST_LANES:
        return ""
    below, above = (
        next(
            b for b in range(global_batch, global_batch + 9 * way, way) if _best_lanes(b, most) >= LEAST_LANES
        )
        for way in (-1, 1)
    )
    near = " or ".join(f"{batch} ({_best_lanes(batch, most)} lanes)" for batch in (below, above))
    return (
        f"a global batch of {global_batch} divides into {lanes} lane{'s' * (lanes > 1)} only, and no more ranks than "
        f"that can work; a batch of {near} allows more, or pass lanes="
    )


def _nearest_lanes(global_batch: int, most: int) -> int:
    fit = [d for d in divisors(global_batch) if d <= most] or [1]
    return min(fit, key=lambda d: (abs(d - TARGET_LANES), -d))


def _best_lanes(global_batch: int, most: int) -> int:
    """Of the divisors from 32 to 256 (or 512): even if B is, for whole nodes of 16, most worlds, near 64.

    An even batch that has a divisor from 32 to 256 has an even one up to 512: two ranks can always share it.
    """
    fit = [d for d in divisors(global_batch) if MANY_LANES <= d <= most and d % gcd(global_batch, 2) == 0]
    fit = [d for d in fit if d <= MOST_LANES] or [d for d in fit if d <= 2 * MOST_LANES]
    if not fit:
        return _nearest_lanes(global_batch, most)
    whole = gcd(global_batch, 16)
    fit = [d for d in fit if d % whole == 0] or fit

    def merit(lanes: int) -> tuple[int, float, int]:
        worlds = sum(lanes % world == 0 for world in range(1, WORLDS + 1))
        return worlds, min(lanes / TARGET_LANES, TARGET_LANES / lanes), -lanes

    return max(fit, key=merit)


def default_window_blocks(population: Population, lanes: int) -> int:
    """Blocks that a lane keeps open, so that those of all lanes take about 256 MiB: from 4 to 16.

    A function of manifest and lanes alone: a plan is the same on every machine, whatever memory a loader has.
    """
    return _blocks_of(population, lanes, WINDOW_BYTES, LEAST_WINDOW, MOST_WINDOW)


def default_cost_window(population: Population, lanes: int, cell_size: int) -> int:
    """The same of a plan with costs: 1 GiB in 64 lanes, from 16 to 64 blocks; up to twice as many for large cells.

    What ranks cost differs as the sums of their windows do, the less the more steps a window has. Lanes beyond 64 are
    for more ranks, so that those of a rank take no more.
    """
    eighths = max(8, min(MOST_COST_CELLS, cell_size))
    size, most = COST_WINDOW_BYTES * eighths // 8, MOST_COST_WINDOW * eighths // 8
    return _blocks_of(population, min(lanes, TARGET_LANES), size, LEAST_COST_WINDOW, most)


def _blocks_of(population: Population, lanes: int, size: int, least: int, most: int) -> int:
    _at_least("lanes", lanes, 1)
    mean = population.mean_block_bytes
    return most if not mean else max(least, min(most, size // (lanes * mean)))


def check_rows(rows: int, settings: Settings) -> None:
    """Refuse a plan without a step."""
    if not rows:
        raise PlanError("plan: the dataset has no selected row")
    if settings.remainder == "drop" and rows < settings.global_batch:
        raise PlanError(
            f"plan: {rows} rows make no full step of {settings.global_batch}; the largest batch "
            f'that fits is {rows}, or take remainder="short"'
        )


def num_blocks(population: Population) -> int:
    """Blocks of the dataset that hold a selected row; blocks restart at segment borders."""
    total, slab = 0, 1 << 18
    for first in range(0, len(population.segment_rows), slab):
        part = slice(first, first + slab)
        size = population.shard_block_rows[population.segment_shard[part]]
        total += int((-(-population.segment_rows[part] // size)).sum())
    return total


def _at_least(name: str, value: object, least: int) -> None:
    check_range(f"plan: {name}", value, Range(least, 2**63 - 1))


def check_range(name: str, value: object, allowed: Range, kind: type[int] | type[float] = int) -> None:
    """A number of a plan."""
    try:
        allowed.check(name, value, kind)
    except ConfigurationError as error:
        raise PlanError(str(error)) from None


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(f"plan: {name} is {value!r}, expected one of {', '.join(choices)}")


def _tuples(value: object) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# ---- weights as a caller writes them, resolved to one integer per stratum

WeightsLike = Mapping[str, int]
"""Stratum → integer weight."""

MAX_WEIGHT = 2**30
"""Largest sum of the weights of a plan, common factors taken out: draws of a pool times masses stay in int64."""


def resolve_weights(
    weights: WeightsLike | None, strata: Sequence[str], rows: Sequence[int]
) -> tuple[int, ...]:
    """One weight per stratum."""
    if weights is None:
        masses = [int(r) for r in rows]
    else:
        masses = [1] * len(strata)
        for pattern, weight in weights.items():
            if not _is_integer(weight) or weight < 0:
                raise PlanError(
                    f"plan: weight of {pattern!r} is {weight!r}, expected an integer >= 0; scale fractions up"
                )
            hits = [s for s, name in enumerate(strata) if fnmatchcase(name, pattern)]
            if not hits:
                known = ", ".join(strata[:8]) + (", …" if len(strata) > 8 else "")
                raise PlanError(f"plan: weight {pattern!r} matches no stratum; expected a glob over: {known}")
            for stratum in hits:
                masses[stratum] = int(weight)
        masses = [mass if rows[s] else 0 for s, mass in enumerate(masses)]
    if not any(masses):
        raise PlanError("plan: no stratum with rows has a weight above 0")
    common = gcd(*masses)
    masses = [mass // common for mass in masses]
    total = sum(masses)
    if total >= MAX_WEIGHT:
        if weights is not None:
            raise PlanError(
                f"plan: weights add up to {total}, expected less than {MAX_WEIGHT}; use smaller integers"
            )
        masses = [max(1, mass * (MAX_WEIGHT // 2) // total) if mass else 0 for mass in masses]
    return tuple(masses)


def resolve_stages(
    weights: WeightsLike | None,
    stages: Sequence[tuple[int, WeightsLike | None]] | None,
    strata: Sequence[str],
    rows: Sequence[int],
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(from_step, weights per stratum) in ascending order, the first from step 0; empty for natural weights."""
    if weights is None and not stages:
        return ()
    resolved = [(0, resolve_weights(weights, strata, rows))]
    for step, stage in stages or ():
        if not _is_integer(step) or step < resolved[-1][0]:
            raise PlanError(f"plan: stage from step {step!r}, expected integers in ascending order from 0")
        if step == resolved[-1][0]:
            resolved.pop()
        resolved.append((int(step), resolve_weights(stage, strata, rows)))
    return tuple(resolved)


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
