"""What the steps of one rank cost, with the plan's order and without: a table for telemetry (telemetry/SPEC.md §5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardkit.plan import Plan
from shardkit.plan.natural import NaturalGrid
from shardkit.plan.waits import cell_costs

__all__ = ["StepCosts"]

_RECENT, _SPARSE, _EVERY = 32, 32, 16  # the last steps, and those before of which each is a multiple of 16


class StepCosts:
    """Works when it is polled, for steps that it has not told before; nothing is counted where steps are made.

    Args:
        plan: of the loader.
        lanes: gives the lanes of the rank.
        handed_out: gives the step after the last one handed out.
    """

    def __init__(self, plan: Plan, lanes: Callable[[], Sequence[int]], handed_out: Callable[[], int]) -> None:
        self._plan, self._lanes, self._handed_out = plan, lanes, handed_out
        self._plain: Plan | None = None
        self._known: dict[int, tuple[float, float]] = {}

    def table(self) -> list[list[float]]:
        """Rows of (step, its cost, its cost if the plan had no costs); empty where the plan has none.

        Ranks are told at different moments: with the last steps alone, those of fast steps would have none in common.
        """
        grid, end = self._plan.grid, self._handed_out()
        if not isinstance(grid, NaturalGrid) or grid.costs is None:
            return []
        recent = range(max(self._plan.from_step, end - _RECENT), end)
        sparse = range(recent.start // _EVERY * _EVERY, self._plan.from_step - 1, -_EVERY)[:_SPARSE]
        wanted = sorted({*recent, *(step for step in sparse if step < end)})
        missing = [step for step in wanted if step not in self._known]
        if self._plain is None:
            self._plain = self._plan.without_costs()
        lanes = list(self._lanes())
        for span in _runs(missing):
            both = [
                cell_costs(plan, grid.costs, span, lanes).sum(axis=1) for plan in (self._plan, self._plain)
            ]
            self._known |= zip(span, zip(*(one.tolist() for one in both), strict=True), strict=True)
        self._known = {step: self._known[step] for step in wanted}
        return [[step, *self._known[step]] for step in wanted]


def _runs(steps: Sequence[int]) -> list[range]:
    """Ascending numbers as runs of neighbours."""
    found: list[range] = []
    for step in steps:
        if found and found[-1].stop == step:
            found[-1] = range(found[-1].start, step + 1)
        else:
            found.append(range(step, step + 1))
    return found
