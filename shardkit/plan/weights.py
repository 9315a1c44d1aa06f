"""Weights as a caller writes them, resolved to one integer per stratum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import gcd

import numpy as np

from shardkit.errors import PlanError

__all__ = ["MAX_WEIGHT", "WeightsLike", "resolve_stages", "resolve_weights"]

WeightsLike = Mapping[str, int]
"""Stratum → integer weight."""

MAX_WEIGHT = 2**30
"""Largest sum of the weights of a plan, common factors taken out: draws of a pool times masses stay in int64."""


def resolve_weights(
    weights: WeightsLike | None, strata: Sequence[str], rows: Sequence[int]
) -> tuple[int, ...]:
    """One weight per stratum.

    Args:
        weights: glob over stratum names to integer weight of *each* stratum that it matches; of several globs the
            last that matches counts; 1 where none matches, 0 leaves a stratum out. None: weights like the rows.
        strata: names.
        rows: selected rows; strata without rows weigh nothing.

    Raises:
        PlanError: a glob matches nothing, a weight is no integer >= 0, all weigh nothing, or they are too large.
    """
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
