"""Rebuild plans from the history that a ledger records."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from shardkit.arrays import Int64s
from shardkit.dataset.amendments import Versions
from shardkit.dataset.costs import costs_of
from shardkit.dataset.samples import population_of, removed_samples
from shardkit.plan import Costs, Plan, Population
from shardkit.plan.plan import plan_of
from shardkit.plan.settings import Settings


def recorded_plan_of(versions: Versions[Any], history: Sequence[Mapping[str, Any]]) -> Plan:
    """Rebuild a plan from its recorded `Plan.history()` over versions of one repository."""

    def rows_of(manifest: str) -> Population:
        found = versions.at(manifest)
        return population_of(found.manifest, found.table)

    def removed(earlier: str, later: str) -> Int64s:
        return removed_samples(versions.at(earlier), versions.at(later))

    return made_again(history, rows_of, partial(costs_of, versions.at(history[0]["manifest"])), removed)


def made_again(
    history: Sequence[Mapping[str, Any]],
    population_of: Callable[[str], Population],
    costs_of: Callable[[str], Costs],
    removed: Callable[[str, str], Int64s],
) -> Plan:
    """Rebuild a plan from its recorded `Plan.history()`."""
    first, *rest = history
    population, settings = population_of(first["manifest"]), Settings.from_canonical(first["settings"])
    plan = plan_of(settings, population, None if settings.cost is None else costs_of(settings.cost))
    for one in rest:
        change = {name: value for name, value in one["change"].items() if value is not None}
        if change.pop("removed", None) is not None:
            change["removed"] = removed(population.identity, one["manifest"])
        if one["manifest"] != population.identity:
            change["manifest"] = population = population_of(one["manifest"])
        if change.pop("weights", False):
            change["weights"] = _by_name(population, one["settings"]["stages"][0][1])
        plan = plan.amend(**change | ({"skip": tuple(change["skip"])} if "skip" in change else {}))
    return plan


def _by_name(population: Population, weights: list[int]) -> dict[str, int]:
    """Return weights by stratum as a mapping of escaped names that resolves to the same weights."""
    return {glob.escape(name): int(weight) for name, weight in zip(population.strata, weights, strict=True)}
