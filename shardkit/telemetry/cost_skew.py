"""How unequal the ranks' shares of steps are, by what samples cost (SPEC.md §5). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from shardkit.telemetry.records import Record

__all__ = ["cost_skew"]

_ORDERS: Final = ("plan", "plain")  # as rows of `step_costs` have them, behind the step


def cost_skew(newest: Iterable[Record]) -> dict[str, float] | None:
    """The dearest rank's cost over the mean rank's, in the steps that all ranks tell of; None where there are none.

    Args:
        newest: the newest record of each rank; those of further workers are left out.

    Returns:
        ``steps``: how many; ``plan`` and ``plain``: the mean over them, as the plan is and as it were without costs;
        ``plan_p95`` and ``plain_p95``: the 95th percentiles.
    """
    ranks = {record.rank: record for record in newest if not record.worker}
    world = max((record.world for record in ranks.values()), default=0)
    told: dict[int, list[tuple[float, ...]]] = {}
    for record in ranks.values():
        for row in record.tables.get("step_costs", ()):
            if len(row) == 3 and all(type(one) in (int, float) and 0 <= one < math.inf for one in row):
                told.setdefault(int(row[0]), []).append(tuple(row[1:]))
    common = [shares for shares in told.values() if len(shares) == world]
    found: dict[str, float] = {}
    for place, order in enumerate(_ORDERS):
        columns = [[share[place] for share in shares] for shares in common]
        skews = sorted(max(one) * world / sum(one) for one in columns if sum(one))
        if not skews:
            return None
        found |= {"steps": len(skews), order: sum(skews) / len(skews)}
        found[f"{order}_p95"] = skews[math.ceil(0.95 * len(skews)) - 1]
    return found
