"""Rebuild the plans of a run from its record and the manifest, and confirm events against them."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.audit.replay import cell_digests
from shardkit.audit.run_record import RunRecord
from shardkit.dataset import Dataset, open_dataset
from shardkit.dataset.costs import costs_of
from shardkit.dataset.dataset import population_of
from shardkit.dataset.samples import removed_samples
from shardkit.errors import (
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreError,
)
from shardkit.ledger import MASKED, SUBSTITUTED, step_digest
from shardkit.ledger.bindings import configured_plans
from shardkit.plan import Costs, Plan, Population
from shardkit.plan.plan import plan_of
from shardkit.plan.settings import Settings
from shardkit.repository.log import parse_dataset_url


@dataclass(frozen=True)
class RunPlan:
    """A plan of a run with its dataset and its number in the ledger."""

    number: int
    dataset: Dataset
    plan: Plan

    def consumed(self, record: RunRecord, first: int, last: int, *, branch: bool = True) -> NDArray[np.int64]:
        """Return (steps, lanes, m) samples consumed in steps [first, last), -1 in empty slots.

        Confirmed substitutions are included. `branch` selects substitutions of the branch or, if False, of other
        records.
        """
        cells = self.plan.steps(first, last).copy()
        for (step, lane, slot), (_, by) in record.substitutions(first, last, branch=branch).items():
            cells[step - first, lane, slot] = by
        return cells

    def digest(self, step: int, cells: NDArray[np.int64]) -> bytes:
        """Return the digest of a step with these cells, (lanes, m)."""
        return step_digest(
            self.plan.population.identity, self.plan.digest, step, b"".join(map(cell_digest, cells))
        )


def cell_digest(cell: NDArray[np.int64]) -> bytes:
    """Return the digest of a cell, (m,). Slots with -1 are empty and may be at any position."""
    return cell_digests(cell[cell >= 0][None])[0]


def find_plans(record: RunRecord, dataset: str | None = None) -> dict[int, RunPlan]:
    """Return the plans of the run that can be rebuilt, by number, and confirm substitutions in the record.

    A plan that cannot be rebuilt, or that contradicts the record, becomes a finding.
    """
    found: dict[int, RunPlan] = {}
    _check_settings(record)
    for event in record.plans:
        try:
            opened = open_recorded(record, event, dataset)
        except (IntegrityError, FormatError) as error:
            record.add("violated", "manifest", event["manifest"], str(error))
            continue
        except ShardkitError as error:
            record.add("unknown", "manifest", event["manifest"], f"{error}; say where it is: --dataset ROOT")
            continue
        plan = _make_plan(record, event, opened)
        if plan is not None:
            found[event["number"]] = plan
    _check_stages(record)
    if not record.plans and record.ledger is not None:
        record.add("unknown", "plan", "ledger", "no step was ever recorded: there is nothing to check")
    confirm_events(record, found)
    return found


def open_recorded(record: RunRecord, event: dict[str, Any], dataset: str | None = None) -> Dataset:
    """Open the dataset of a recorded plan at the recorded manifest.

    Args:
        record: the run.
        event: event of the plan.
        dataset: URL of the dataset; by default, the recorded places are tried in turn.

    Raises:
        ShardkitError: the dataset cannot be opened at any place, or holds another manifest.
    """
    manifest = event["manifest"]
    refused: ShardkitError | None = None
    for place in [dataset] if dataset is not None else _places(record, event):
        try:
            opened = open_dataset(
                place if isinstance(place, Mapping) else f"{parse_dataset_url(place)[0]}@{manifest}"
            )
        except (NotFoundError, StoreError) as error:  # a damaged dataset raises other errors, at once
            refused = refused or error
            continue
        if opened.manifest.id == manifest:
            return opened
        refused = refused or IntegrityError(
            f"the dataset is {opened.manifest.id} now, and the run consumed {manifest}"
        )
    raise refused or NotFoundError("the run does not say where its dataset lies")


def _places(record: RunRecord, event: dict[str, Any]) -> Iterator[str | dict[str, str]]:
    """Yield places where the dataset may be, independent of the working directory if possible.

    The first is the place in run.json if it is absolute, otherwise the place where the loader found the dataset. The
    next is the same place relative to the run directory, in case both were moved. The last is a relative place of
    run.json, resolved in the working directory.
    """
    data = record.settings.get("configuration", {}).get("data", {})
    parts = dict(record.settings.get("parts") or data.get("parts") or {})
    configured = list(map(str, parts.values())) if parts else [str(data.get("dataset") or "")]
    found = [str(url) for url in event.get("dataset") or ()]
    beside = [str(one) for one in event.get("beside") or ()]
    moved = [str(record.path.absolute() / one) for one in beside] if all(beside) else []
    is_whole = all("://" in place or os.path.isabs(place) for place in configured)
    refs = [parse_dataset_url(place)[1] for place in configured] if parts else []
    for roots in (configured, moved) if is_whole else (found, moved, configured):
        if parts and len(roots) == len(parts):
            pinned = [
                f"{parse_dataset_url(root)[0]}@{ref}" if ref else root
                for root, ref in zip(roots, refs, strict=True)
            ]
            yield dict(zip(parts, pinned, strict=True))
        elif not parts and roots and roots[0]:
            yield roots[0]


def _make_plan(record: RunRecord, event: dict[str, Any], dataset: Dataset) -> RunPlan | None:
    population = population_of(dataset.manifest, dataset.table)
    history: Sequence[Mapping[str, Any]] = event.get("history") or ()
    expected = event["plan"]
    subject = f"plan {expected[:12]}…"
    candidates: list[tuple[str, Plan]] = []

    @cache
    def version(manifest: str) -> Dataset:
        if manifest == dataset.manifest.id:
            return dataset
        # the plan was amended from another version of the dataset
        return open_dataset(f"{dataset.repository.url}@{manifest}")

    def rows_of(manifest: str) -> Population:
        found = version(manifest)
        return population if found is dataset else population_of(found.manifest, found.table)

    def removed(earlier: str, later: str) -> NDArray[np.int64]:
        return removed_samples(version(earlier), version(later))

    costs_found = partial(costs_of, dataset)
    try:
        first, last = (history[0], history[-1]) if history else ({"settings": {}},) * 2
        if history:
            candidates.append(("the ledger's settings", made_again(history, rows_of, costs_found, removed)))
        if record.settings.get("configuration"):
            candidates.append(("run.json", _configured_plan(record, dataset, expected, first["settings"])))
    except ShardkitError as error:
        record.add("unknown", "plan", subject, f"cannot be made again: {error}")
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
        record.add(
            "violated", "plan", subject, f"cannot be made again, its settings are no settings: {error!r}"
        )
    for source, plan in candidates:
        if plan.digest != expected:
            differing = _differences(last["settings"], plan)
            record.add(
                "violated", "plan", subject,
                f"{source} make the plan {plan.digest[:12]}…, which is another than the run followed"
                + (f": {differing}" if differing else "; were data.stages changed?"),
            )  # fmt: skip
    if not candidates:
        record.add("unknown", "plan", subject, "its settings are not recorded")
    chosen = next((plan for _, plan in candidates if plan.digest == expected), None)
    return None if chosen is None else RunPlan(event["number"], dataset, chosen)


def made_again(
    history: Sequence[Mapping[str, Any]],
    population_of: Callable[[str], Population],
    costs_of: Callable[[str], Costs],
    removed: Callable[[str, str], NDArray[np.int64]],
) -> Plan:
    """Rebuild a plan from its recorded `Plan.history()`.

    Args:
        history: entries of `Plan.history()`.
        population_of: returns the population of a manifest id.
        costs_of: returns the costs of a cost column.
        removed: returns the samples of a manifest that a later one does not have.
    """
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


def _configured_plan(record: RunRecord, dataset: Dataset, expected: str, recorded: Mapping[str, Any]) -> Plan:
    """Return the configured plan with the expected digest.

    If no configured plan has it, return the last plan of run.json, to report in which settings they differ.
    """
    made: list[Plan] = []
    for configuration in record.configurations():
        data = configuration.get("data")
        if not isinstance(data, Mapping) or "global_batch" not in data:
            raise ConfigurationError(
                "run.json: configuration.data.global_batch is missing; was it written by hand?"
            )
        plans = configured_plans(dataset.plan, data, recorded)
        made += plans
        stages = [0, *(int(one["from_step"]) for one in data.get("stages") or ())]
        record.stage_plans.append([(step, plan.digest) for step, plan in zip(stages, plans, strict=True)])
    last = made[len(record.stage_plans[0]) - 1]
    return next((plan for plan in made if plan.digest == expected), last)


def _check_stages(record: RunRecord) -> None:
    """Check that every range of steps under one plan is a stage of one of the run's configurations."""
    digests = {event["number"]: event["plan"] for event in record.plans}
    for number, first, end in record.legs() if record.stage_plans else ():
        last, digest = end - 1, digests.get(number, "")
        if not any(_follows(stages, first, last, digest) for stages in record.stage_plans):
            record.add(
                "violated", "plan", f"steps {first} to {last}",
                f"followed the plan {digest[:12]}…, and no data.stages of run.json ask for it at all of these steps",
            )  # fmt: skip


def _follows(stages: list[tuple[int, str]], first: int, last: int, digest: str) -> bool:
    in_force = [one for one in stages if one[0] <= first][-1:]
    in_force += [one for one in stages if first < one[0] <= last]
    return all(digest == found for _, found in in_force)


def _differences(settings: dict[str, Any], plan: Plan) -> str:
    own = plan.settings.canonical()
    return ", ".join(
        f"{name} {settings[name]} in the ledger, {own.get(name)} there"
        for name in sorted(settings)
        if _plain(own.get(name)) != _plain(settings[name])
    )


def _plain(value: object) -> object:
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _check_settings(record: RunRecord) -> None:
    """Check that run.json names a manifest and a plan that the ledger records."""
    for name in ("manifest", "plan"):
        stated = record.settings.get(name)
        if stated and record.plans and stated not in [event[name] for event in record.plans]:
            record.add(
                "violated", name, "run.json",
                f"names {name} {str(stated)[:19]}…, and the ledger records {record.plans[0][name][:19]}…",
            )  # fmt: skip


# ---- events that the digests must confirm


def confirm_events(record: RunRecord, plans: dict[int, RunPlan]) -> None:
    """Confirm substitutions that turn the plan's digest into the recorded digest; add findings for false events.

    A mask must name the planned sample of its slot. A stage event must be a stage of a plan.
    """
    by_step: dict[int, list[dict[str, Any]]] = {}
    for event in record.events:
        if event["kind"] in (SUBSTITUTED, MASKED):
            by_step.setdefault(event["step"], []).append(event)
        elif (
            event["kind"] == "stage"
            and plans
            and not any(_has_stage(one.plan, event) for one in plans.values())
        ):
            record.add(
                "violated", "event", f"step {event['step']}", f"no plan has its stage {event['number']} here"
            )
    if not by_step:
        return
    confirmed: list[dict[str, Any]] = []
    for is_branch, records in ((True, record.branch), (False, record.abandoned())):
        for stored in records[np.isin(records["step"], list(by_step))]:
            plan, step = plans.get(int(stored["plan"])), int(stored["step"])
            if plan is None:  # reported by `find_plans`
                confirmed += by_step[step]
            else:
                cells = plan.plan.steps(step, step + 1)[0]
                is_recorded = _recorded_step(plan, step, bytes(stored["digest"]))
                confirmed += _believed(record, plan, cells, by_step[step], is_recorded, is_branch)
    for plan, step, lane, digest in _pending(record, plans, by_step):
        cells = plan.plan.steps(step, step + 1)[0]
        own = [event for event in by_step[step] if event["lane"] == lane]
        is_recorded = _recorded_cell(lane, digest)
        confirmed += _believed(record, plan, cells, own, is_recorded, False)
    known = {id(event) for event in confirmed}
    for event in (one for events in by_step.values() for one in events if id(one) not in known):
        record.add(
            "violated", event["kind"], f"step {event['step']} lane {event['lane']} slot {event['slot']}",
            f"an event says that sample {event['sample']} was {event['kind']}, by {event['by']}, and the digest of the "
            "step, or its plan, says that it was not",
        )  # fmt: skip


Recorded = Callable[[NDArray[np.int64]], bool]
"""Returns True if these cells of a step, (lanes, m), have the recorded digest."""


def _recorded_step(plan: RunPlan, step: int, digest: bytes) -> Recorded:
    return lambda cells: plan.digest(step, cells) == digest


def _recorded_cell(lane: int, digest: str) -> Recorded:
    return lambda cells: cell_digest(cells[lane]).hex() == digest


def _has_stage(plan: Plan, event: dict[str, Any]) -> bool:
    stages = plan.settings.stages
    return 0 < event["number"] < len(stages) and bool(stages[event["number"]][0] == event["step"])


def _pending(
    record: RunRecord, plans: dict[int, RunPlan], steps: Container[int]
) -> Iterator[tuple[RunPlan, int, int, str]]:
    """Yield (plan, step, lane, digest) of recorded cells of the given steps that no ledger record covers."""
    by_digest = {one.plan.digest: one for one in plans.values()}
    for digest, step, lane, found in () if record.merge is None else record.merge.pending_cells():
        if step in steps and digest in by_digest and lane < by_digest[digest].plan.lanes:
            yield by_digest[digest], step, lane, found


def _believed(
    record: RunRecord,
    plan: RunPlan,
    cells: NDArray[np.int64],
    events: list[dict[str, Any]],
    is_recorded: Recorded,
    is_branch: bool,
) -> list[dict[str, Any]]:
    """Return the events of a step that its digest confirms, and store their substitutions in the record."""
    lanes, slots = cells.shape
    fitting = [
        event
        for event in events
        if event["lane"] < lanes and event["slot"] < slots and event["by"] < plan.plan.population.rows
        and cells[event["lane"], event["slot"]] == event["sample"]
    ]  # fmt: skip
    for choice in _choices([event for event in fitting if event["kind"] == SUBSTITUTED]):
        changed = cells.copy()
        for event in choice:
            changed[event["lane"], event["slot"]] = event["by"]
        if is_recorded(changed):
            break
    else:
        return []
    for event in choice:
        place = (event["step"], event["lane"], event["slot"])
        record.replaced[is_branch][place] = (event["sample"], event["by"])
    changed_places = {(event["lane"], event["slot"]): event["by"] for event in choice}
    return [
        event
        for event in fitting
        if changed_places.get((event["lane"], event["slot"]))
        == (event["by"] if event["kind"] == SUBSTITUTED else None)
    ]


def _choices(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the sets of substitutions that may apply at a step: none, all, then one set per start."""
    yield []
    places = {(event["lane"], event["slot"]): event for event in events}
    if places:
        yield list(places.values())
    for start in {event["start"] for event in events}:
        yield [event for event in events if event["start"] == start]
