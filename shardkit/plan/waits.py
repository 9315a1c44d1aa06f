"""How long ranks wait for the one whose samples cost most (SPEC.md §11): from a plan and its costs alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .costs import Costs, decode_costs
from .plan import Plan

__all__ = ["cell_costs", "predicted_waits", "rank_skew"]

_RUNS, _RUN = 8, 16  # places of the epoch that are looked at, and steps at each


def cell_costs(
    plan: Plan, costs: Costs, steps: range, lanes: Sequence[int] | None = None
) -> NDArray[np.float64]:
    """(steps, lanes) what each cell costs; empty slots cost nothing."""
    cells = plan.steps(steps.start, steps.stop, lanes)
    there = cells >= 0
    found = np.zeros(cells.shape)
    found[there] = decode_costs(costs.codes[cells[there]])
    sums: NDArray[np.float64] = found.sum(axis=2)
    return sums


def rank_skew(cells: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    """(steps,) the dearest rank over the mean one, where rank r of R has lanes r·L/R to (r+1)·L/R − 1."""
    lanes = cells.shape[1]
    shares = np.add.reduceat(cells, np.arange(ranks) * lanes // ranks, axis=1)
    skew: NDArray[np.float64] = shares.max(axis=1) / shares.mean(axis=1)
    return skew


def predicted_waits(plan: Plan, costs: Costs, worlds: Sequence[int]) -> list[dict[str, float]]:
    """What a world of each size would wait, with a plan and with the same one without costs.

    Looks at up to 128 steps over the epoch. Where the time of a step is that of its dearest rank, the mean skew is how
    much longer steps take than if all ranks cost the same.

    Args:
        plan: with costs.
        costs: of the samples.
        worlds: numbers of ranks, at most as many as lanes.

    Returns:
        Per world ``ranks``, and ``plain`` and ``plan``: the mean of the dearest rank over the mean one, and their 95th
        percentiles, ``plain_p95`` and ``plan_p95``.
    """
    full = plan.population.rows // plan.global_batch
    firsts = sorted({max(0, min(full - _RUN, number * full // _RUNS)) for number in range(_RUNS)})
    spans = [range(first, min(full, first + _RUN)) for first in firsts]
    cells = {
        name: np.concatenate([cell_costs(one, costs, span) for span in spans if span])
        for name, one in (("plain", plan.without_costs()), ("plan", plan))
    }
    found = []
    for ranks in worlds:
        row: dict[str, float] = {"ranks": ranks}
        for name, each in cells.items():
            skew = rank_skew(each, ranks)
            row[name] = round(float(skew.mean()), 3)
            row[f"{name}_p95"] = round(float(np.quantile(skew, 0.95)), 3)
        found.append(row)
    return found
