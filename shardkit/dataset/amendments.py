"""Apply the amendments that a run directory records to a plan and its dataset."""

from __future__ import annotations

import os
from typing import Any, Generic, Protocol, Self, TypeVar

from shardkit.errors import IntegrityError, StateError
from shardkit.ledger.amendments import Amendment, active_amendments, read_events
from shardkit.manifest import Manifest
from shardkit.plan import Plan


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
