"""The plans of a run: from its configuration and its amendments, or from the history in its ledger."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

from shardkit.arrays import Int64s
from shardkit.dataset.costs import costs_of
from shardkit.dataset.samples import population_of, removed_samples
from shardkit.errors import IntegrityError, StateError
from shardkit.ledger.bindings import Amendment, active_amendments, read_events
from shardkit.manifest import Manifest
from shardkit.plan import Costs, Plan, Population
from shardkit.plan.mixers import mixer_text
from shardkit.plan.plan import plan_of
from shardkit.plan.settings import Settings


class _Dataset(Protocol):
    """The parts of `shardkit.dataset.Dataset` that amendments need."""

    manifest: Manifest

    def at(self, manifest: str) -> Self: ...

    def amend(self, plan: Plan, *, to: Any, from_step: int, **changes: Any) -> Plan: ...


_D = TypeVar("_D", bound=_Dataset)


class Versions(Generic[_D]):
    """Versions of a dataset by manifest id, opened once; they share the repository and locations of the first."""

    def __init__(self, dataset: _D) -> None:
        self.first, self._known = dataset, {dataset.manifest.id: dataset}

    def at(self, manifest: str) -> _D:
        """Return the version with this manifest id.

        Raises:
            NotFoundError: the repository does not have it.
        """
        if manifest not in self._known:
            self._known[manifest] = self.first.at(manifest)
        return self._known[manifest]

    def made(self, plan: Plan, amendment: Amendment) -> Plan:
        """Return the plan that an amendment makes of a plan.

        Raises:
            PlanError: the plan does not support it.
        """
        if amendment.is_rewind:
            return plan
        start, changes = amendment.from_step, amendment.changes
        if amendment.manifest == plan.population.identity:
            return plan.amend(from_step=start, **changes)
        first, other = self.at(plan.population.identity), self.at(amendment.manifest)
        return first.amend(plan, to=other, from_step=start, **changes)

    def amend(self, plan: Plan, amendment: Amendment) -> Plan:
        """Return the plan that an amendment makes of its parent.

        Raises:
            IntegrityError: it makes another plan than it names.
            PlanError: the plan does not support it.
        """
        made = self.made(plan, amendment)
        if made.digest != amendment.plan:
            raise IntegrityError(
                f"amendment {amendment.number} ({amendment}) makes the plan {made.digest[:12]}…, and the ledger "
                f"records {amendment.plan[:12]}… for it: it was changed, or belongs to another plan than "
                f"{plan.digest[:12]}…; run: shardkit audit RUN"
            )
        return made


def configured_plans(
    make: Callable[..., Plan],
    data: Mapping[str, Any],
    recorded: Mapping[str, Any],
    amendments: Sequence[Amendment],
    amend: Callable[[Plan, Amendment], Plan],
) -> list[Plan]:
    """Return the plans of a run, in the order of the steps from which they apply.

    Args:
        make: `Dataset.plan` of the dataset.
        data: the data section of a configuration, which asks for an initial plan and for stages.
        recorded: settings of the initial plan that the ledger recorded.
        amendments: amendments in force; at the same step they follow the stage.
        amend: applies an amendment to a plan.
    """
    chosen = {name: data.get(name) for name in ("lanes", "weights", "window_blocks", "cost", "balance")}
    settings = {name: recorded[name] for name in ("lanes", "window_blocks") if recorded.get(name)}
    settings |= {name: value for name, value in chosen.items() if value}
    plans = [make(global_batch=data["global_batch"], seed=data.get("seed", 0), **settings)]
    if data.get("mixer"):
        every = data["mixer_every"]
        plans = [plans[0].mixed(mixer_text(data["mixer"], every, data.get("mixer_arguments") or {}), every)]
    left = [one for one in amendments if not one.is_rewind]
    for stage in data.get("stages") or ():
        change = {name: stage[name] for name in ("from_step", "global_batch", "weights") if stage.get(name)}
        while left and left[0].from_step < change.get("from_step", 0):
            plans.append(amend(plans[-1], left.pop(0)))
        plans.append(plans[-1].amend(**change))
    for amendment in left:
        plans.append(amend(plans[-1], amendment))
    return plans


def apply_amendments(dataset: _D, plan: Plan, run: str | os.PathLike[str]) -> tuple[_D, Plan]:
    """Return the dataset and plan with which a run continues: those given, with the recorded amendments.

    Args:
        dataset: the dataset of the plan.
        plan: the plan before the amendments, or after some of them.
        run: the run directory.

    Raises:
        StateError: the amendments belong to another plan.
        IntegrityError: an amendment or the ledger was changed.
    """
    versions = Versions(dataset)
    for amendment in active_amendments(read_events(run)):
        if amendment.is_rewind:
            continue
        if amendment.parent == plan.digest:
            plan = versions.amend(plan, amendment)
        elif not _contains(plan, amendment.plan):
            raise StateError(
                f"{run}: amendment {amendment.number} ({amendment}) changes the plan {amendment.parent[:12]}…, and "
                f"this plan is {plan.digest[:12]}…; make the plan with the settings of the run, or take another run "
                "directory"
            )
    return versions.at(plan.population.identity), plan


def _contains(plan: Plan, digest: str) -> bool:
    """Return True if a plan, or a plan from which it was amended, has this digest."""
    found: Plan | None = plan
    while found is not None and found.digest != digest:
        found = found.parent
    return found is not None


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
