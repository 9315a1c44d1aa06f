"""Settings of a plan: validated, resolved to integers and names, and serialized canonically."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fnmatch import fnmatchcase
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np

from shardkit.errors import ConfigurationError, PlanError
from shardkit.ranges import Range, shown

from .costs import BALANCES
from .deal import divisors
from .deck import SHUFFLES
from .population import Population

WINDOW_BYTES = 256 << 20  # target size of the windows of all lanes
LEAST_WINDOW, MOST_WINDOW = 4, 16  # blocks
# windows that balance costs are larger: costs of small windows differ too much between lanes
COST_WINDOW_BYTES, LEAST_COST_WINDOW, MOST_COST_WINDOW = 1 << 30, 16, 64  # all lanes; blocks; blocks
MOST_COST_CELLS = 16  # rows per cell at which these limits double: a window of large cells has fewer steps

TARGET_LANES = 64
LEAST_LANES = 8
GLOBAL_BATCH = Range(1, 2**31 - 1)
MANY_LANES, MOST_LANES = 32, 256
WORLDS = 64  # largest world size considered when lanes are chosen
REMAINDERS = ("drop", "short")
_OPTIONAL = ("epoch_steps", "mix_every")  # numbers that may be None


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
    mixer: str | None = None
    mix_every: int | None = None

    def __post_init__(self) -> None:
        self._set("global_batch", GLOBAL_BATCH)
        self._set("seed", Range(0, 2**63 - 1))
        for name in ("lanes", "window_blocks", *_OPTIONAL):
            self._set(name, Range(1, 2**63 - 1))
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

    def _set(self, name: str, allowed: Range) -> None:
        """Check a whole number and convert it to a Python int, which the canonical form requires."""
        value = getattr(self, name)
        if value is not None or name not in _OPTIONAL:
            object.__setattr__(self, name, whole(f"plan: {name}", value, allowed))

    def canonical(self) -> dict[str, object]:
        """Return the settings as values for canonical JSON, without unset fields."""
        values = {name: getattr(self, name) for name in sorted(self.__dataclass_fields__)}
        return {name: value for name, value in values.items() if value not in (None, ())}

    @classmethod
    def from_canonical(cls, values: Mapping[str, object]) -> Settings:
        """Return settings from the values of `canonical`, parsed from JSON."""
        given = {name: _tuples(value) for name, value in values.items() if value not in (None, [], {})}
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            names = ", ".join(sorted(unknown))
            raise PlanError(f"plan settings {names} are unknown; run the shardkit that began the run")
        return cls(**given)


def default_lanes(population: Population, global_batch: int) -> int:
    """Return the default number of lanes: a divisor of the batch that most world sizes share evenly (SPEC.md §4).

    At least 32 if the batch has such a divisor. Fewer for datasets with fewer than 4 blocks per lane.
    """
    return _best_lanes(global_batch, _most_lanes(population))


def _most_lanes(population: Population) -> int:
    return max(LEAST_LANES, num_blocks(population) // 4)


def few_lanes(population: Population, global_batch: int) -> str:
    """Return a warning if `default_lanes` gives fewer than 8 lanes for a batch of at least 8, otherwise "".

    The warning names the nearest smaller and larger batch sizes that allow at least 8 lanes.
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
    """Choose among the divisors of B from 32 to 256, or to 512 if none of those fits.

    Criteria, most important first: even if B is even; a multiple of gcd(B, 16), for nodes of 16 ranks; shared evenly by
    the most world sizes; near 64. An even batch with a divisor from 32 to 256 has an even divisor of at most 512, so
    two ranks can always share it.
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
    """Return the default blocks per window, 4 to 16, so that the windows of all lanes take about 256 MiB.

    The result depends only on manifest and lanes, so a plan is the same on every machine.
    """
    return _blocks_of(population, lanes, WINDOW_BYTES, LEAST_WINDOW, MOST_WINDOW)


def default_cost_window(population: Population, lanes: int, cell_size: int) -> int:
    """Return the default blocks per window of a plan with costs: 16 to 64, about 1 GiB in 64 lanes.

    The size and the upper limit grow to twice as much for cells of 16 rows or more: costs of ranks differ less if a
    window spans more steps.
    Lanes beyond 64 do not shrink the window: they serve more ranks, so the memory per rank is the same.
    """
    eighths = max(8, min(MOST_COST_CELLS, cell_size))
    size, most = COST_WINDOW_BYTES * eighths // 8, MOST_COST_WINDOW * eighths // 8
    return _blocks_of(population, min(lanes, TARGET_LANES), size, LEAST_COST_WINDOW, most)


def _blocks_of(population: Population, lanes: int, size: int, least: int, most: int) -> int:
    mean = population.mean_block_bytes
    return most if not mean else max(least, min(most, size // (lanes * mean)))


def check_rows(rows: int, settings: Settings) -> None:
    """Raise PlanError if a plan over ``rows`` rows has no step."""
    if not rows:
        raise PlanError("plan: the dataset has no selected row")
    if settings.remainder == "drop" and rows < settings.global_batch:
        raise PlanError(
            f"plan: {rows} rows make no full step of {settings.global_batch}; the largest batch "
            f'that fits is {rows}, or take remainder="short"'
        )


def num_blocks(population: Population) -> int:
    """Return the number of blocks with a selected row; blocks restart at segment borders."""
    total, slab = 0, 1 << 18
    for first in range(0, len(population.segment_rows), slab):
        part = slice(first, first + slab)
        size = population.shard_block_rows[population.segment_shard[part]]
        total += int((-(-population.segment_rows[part] // size)).sum())
    return total


def whole(name: str, value: object, allowed: Range) -> int:
    """Check a whole number of any integer type and return it as an int.

    Raises:
        PlanError: ``value`` is not a whole number or is outside ``allowed``.
    """
    try:
        number: int = allowed.check(name, value)
    except ConfigurationError as error:
        raise PlanError(str(error)) from error
    return number


def check_range(name: str, value: object, allowed: Range, kind: type[int] | type[float] = int) -> None:
    """Check a number; raise PlanError if it is outside ``allowed``."""
    try:
        allowed.check(name, value, kind)
    except ConfigurationError as error:
        raise PlanError(str(error)) from error


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise PlanError(f"plan: {name} is {value!r}, expected one of {', '.join(choices)}")


def _tuples(value: object) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# ---- weights, resolved to one integer per stratum

WeightsLike = Mapping[str, int | float | Fraction | Decimal]
"""Mapping from globs over strata to weights."""

MAX_WEIGHT = 2**30
"""Exclusive bound of the sum of weights without common factors, so that draws of a pool times masses fit int64."""


def resolve_weights(
    weights: WeightsLike | None, strata: Sequence[str], rows: Sequence[int]
) -> tuple[int, ...]:
    """Resolve weights to one integer per stratum without common factors; None means row counts.

    Raises:
        PlanError: a weight is invalid or matches no stratum, all weights are 0, or their sum is too large.
    """
    if weights is None:
        masses = [int(r) for r in rows]
    else:
        if not isinstance(weights, Mapping):
            raise PlanError(
                f"plan: weights is {shown(weights)}, expected a mapping of globs over strata to weights"
            )
        exact = [Fraction(1)] * len(strata)
        for pattern, weight in weights.items():
            value = _fraction(pattern, weight)
            hits = [s for s, name in enumerate(strata) if fnmatchcase(name, pattern)]
            if not hits:
                known = ", ".join(strata[:8]) + (", …" if len(strata) > 8 else "")
                raise PlanError(f"plan: weight {pattern!r} matches no stratum; expected a glob over: {known}")
            for stratum in hits:
                exact[stratum] = value
        exact = [mass if rows[s] else Fraction(0) for s, mass in enumerate(exact)]
        scale = lcm(*(mass.denominator for mass in exact))
        masses = [int(mass * scale) for mass in exact]
    if not any(masses):
        raise PlanError("plan: no stratum with rows has a weight above 0")
    common = gcd(*masses)
    masses = [mass // common for mass in masses]
    total = sum(masses)
    if total >= MAX_WEIGHT:
        if weights is not None:
            raise PlanError(
                f"plan: as whole numbers the weights are {shown(masses)} and add up to {total}, expected less than "
                f"{MAX_WEIGHT}; use fewer digits, or fractions.Fraction"
            )
        masses = [max(1, mass * (MAX_WEIGHT // 2) // total) if mass else 0 for mass in masses]
    return tuple(masses)


def resolve_stages(
    weights: WeightsLike | None,
    stages: Sequence[tuple[int, WeightsLike | None]] | None,
    strata: Sequence[str],
    rows: Sequence[int],
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Resolve weights and stages to (from_step, weights per stratum) in ascending order, the first from step 0.

    The result is empty for natural weights.
    """
    if stages is not None and not _are_pairs(stages):
        raise PlanError(
            f"plan: stages is {shown(stages)}, expected pairs of a first step and weights, such as "
            '[(1000, {"*": 1})]'
        )
    if weights is None and not stages:
        return ()
    resolved = [(0, resolve_weights(weights, strata, rows))]
    for step, stage in stages or ():
        step = whole("plan: stages: from_step", step, Range(resolved[-1][0], 2**63 - 1))
        if step == resolved[-1][0]:
            resolved.pop()
        resolved.append((int(step), resolve_weights(stage, strata, rows)))
    return tuple(resolved)


def resolve_masses(weights: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    """Check whole weights, one per stratum, and return them.

    Raises:
        PlanError: there are other numbers of them, one is invalid, one of a stratum without rows is above 0, none is
            above 0, or their sum is too large.
    """
    if len(weights) != len(rows):
        raise PlanError(f"plan: {len(weights)} weights for {len(rows)} strata")
    masses = tuple(whole("plan: weight", one, Range(0, MAX_WEIGHT - 1)) for one in weights)
    if any(mass and not some for mass, some in zip(masses, rows, strict=True)):
        raise PlanError(f"plan: weights {shown(masses)}: a stratum without rows has a weight")
    if not 0 < sum(masses) < MAX_WEIGHT:
        raise PlanError(f"plan: weights {shown(masses)}: expected a sum from 1 to {MAX_WEIGHT - 1}")
    return masses


def is_pair(value: object) -> bool:
    """Return True for a list or tuple of two values."""
    return isinstance(value, list | tuple) and len(value) == 2


def _are_pairs(values: object) -> bool:
    return isinstance(values, list | tuple) and all(map(is_pair, values))


def _fraction(pattern: object, weight: Any) -> Fraction:
    """Return the exact value of a weight; a float counts as the decimal number that it prints as."""
    if isinstance(weight, bool | np.bool_) or not isinstance(weight, numbers.Real | Decimal):
        number = None
    elif isinstance(weight, numbers.Rational):
        number = Fraction(int(weight.numerator), int(weight.denominator))
    else:
        in_range = weight == 0 or 1e-30 < abs(float(weight)) < 1e30  # 1e300 has 300 digits; false for nan
        number = Fraction(str(weight)) if in_range else None
    if not isinstance(pattern, str) or number is None or number < 0:
        raise PlanError(
            f"plan: the weight of {shown(pattern)} is {shown(weight)}, expected 0 or a number from 1e-30 to 1e30 for a "
            "glob over strata"
        )
    return number
