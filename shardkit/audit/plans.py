"""Rebuild the plans of a run from its record and the manifest, and confirm events against them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.audit.mixtures import has_decisions
from shardkit.audit.run_record import RunRecord
from shardkit.dataset import Dataset, open_dataset
from shardkit.dataset.run_plans import Versions, configured_plans, recorded_plan_of
from shardkit.errors import (
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreError,
)
from shardkit.ledger import MASKED, SUBSTITUTED, step_digest
from shardkit.ledger.ledger import StepRecords, consecutive
from shardkit.plan import Plan, cell_digest
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
            self.plan.population.identity,
            self.plan.digest,
            step,
            bytes.fromhex("".join(map(cell_digest, cells))),
        )


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
        if plan is not None and has_decisions(record, plan.number, plan.plan):
            found[event["number"]] = plan
    _check_stages(record)
    if not record.plans and record.ledger is not None:
        record.add("unknown", "plan", "ledger", "no step was ever recorded: there is nothing to check")
    confirm_events(record, found)
    return found


def open_recorded(record: RunRecord, event: dict[str, Any], dataset: str | None = None) -> Dataset:
    """Open the dataset of a recorded plan at the recorded manifest.

    Without `dataset`, a URL, the recorded places are tried in turn.

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
    history: Sequence[Mapping[str, Any]] = event.get("history") or ()
    expected = event["plan"]
    subject = f"plan {expected[:12]}…"
    candidates: list[tuple[str, Plan]] = []
    versions = Versions(dataset)  # the plan may have been amended from another version of the dataset

    try:
        first, last = (history[0], history[-1]) if history else ({"settings": {}},) * 2
        if history:
            candidates.append(("the ledger's settings", recorded_plan_of(versions, history)))
        if record.settings.get("configuration"):
            candidates.append(("run.json", _configured_plan(record, versions, first, expected)))
    except IntegrityError as error:
        record.add("violated", "plan", subject, str(error))
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


def _configured_plan(
    record: RunRecord, versions: Versions[Dataset], first: Mapping[str, Any], expected: str
) -> Plan:
    """Return the configured plan with the expected digest.

    `first` is the first entry of the plan's recorded history.

    If no configured plan has it, return the last plan of run.json, to report in which settings they differ.
    """
    dataset = versions.at(first["manifest"]) if "manifest" in first else versions.first
    made: list[Plan] = []
    for configuration in record.configurations():
        data = configuration.get("data")
        if not isinstance(data, Mapping) or "global_batch" not in data:
            raise ConfigurationError(
                "run.json: configuration.data.global_batch is missing; was it written by hand?"
            )
        for amendments in record.amendments():
            plans = configured_plans(dataset.plan, data, first["settings"], amendments, versions.amend)
            made += plans
            record.stage_plans.append(plans)
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
                f"followed the plan {digest[:12]}…, and neither data.stages of run.json nor amendments ask for it "
                "at all of these steps",
            )  # fmt: skip


def _follows(stages: list[Plan], first: int, last: int, digest: str) -> bool:
    in_force = [plan for plan in stages if plan.from_step <= first][-1:]
    in_force += [plan for plan in stages if first < plan.from_step <= last]
    return all(digest == plan.digest for plan in in_force)


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


# ---- ranges and cells with their plans


def planned_ranges(
    record: RunRecord, plans: dict[int, RunPlan]
) -> Iterator[tuple[StepRecords, RunPlan | None, bool]]:
    """Yield (records, plan, True if on the branch) of each range of steps under one plan.

    The plan is None if it cannot be rebuilt.
    """
    is_gone = ~np.isin(record.records["check"], record.branch["check"])
    for records, is_branch in ((record.branch, True), (record.records[is_gone], False)):
        for one in consecutive(records):
            yield one, plans.get(int(one[0]["plan"])), is_branch


def pending_cells(record: RunRecord, plans: dict[int, RunPlan]) -> Iterator[tuple[RunPlan, int, int, str]]:
    """Yield (plan, step, lane, digest) of the recorded cells of rebuilt plans that no ledger record covers."""
    by_digest = {one.plan.digest: one for one in plans.values()}
    for digest, step, lane, found in () if record.merge is None else record.merge.pending_cells():
        if digest in by_digest:
            yield by_digest[digest], step, lane, found


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
    for records, plan, is_branch in planned_ranges(record, plans):
        for stored in records[np.isin(records["step"], list(by_step))]:
            step = int(stored["step"])
            if plan is None:  # reported by `find_plans`
                confirmed += by_step[step]
            else:
                is_recorded = _recorded_step(plan, step, bytes(stored["digest"]))
                confirmed += _confirm_events(record, plan.plan, step, by_step[step], is_recorded, is_branch)
    for found, step, lane, digest in pending_cells(record, plans):
        own = [event for event in by_step.get(step, ()) if event["lane"] == lane < found.plan.lanes]
        if own:
            confirmed += _confirm_events(record, found.plan, step, own, _recorded_cell(lane, digest), False)
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
    return lambda cells: cell_digest(cells[lane]) == digest


def _has_stage(plan: Plan, event: dict[str, Any]) -> bool:
    stages = plan.settings.stages
    return 0 < event["number"] < len(stages) and bool(stages[event["number"]][0] == event["step"])


def _confirm_events(
    record: RunRecord,
    plan: Plan,
    step: int,
    events: list[dict[str, Any]],
    is_recorded: Recorded,
    is_branch: bool,
) -> list[dict[str, Any]]:
    """Return the events of a step that its digest confirms, and store their substitutions in the record."""
    cells = plan.steps(step, step + 1)[0]
    lanes, slots = cells.shape
    fitting = [
        event
        for event in events
        if event["lane"] < lanes and event["slot"] < slots and event["by"] < plan.population.rows
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


# ---- steps that are not in the tree

_UNSYNCHRONISED = 64  # largest expected distance in steps between ranks without collectives


def check_pending(record: RunRecord, plans: dict[int, RunPlan]) -> None:
    """Check recorded cells of steps that are not in the tree: interrupted by a kill, or after a gap."""
    merge, ledger = record.merge, record.ledger
    if merge is None or ledger is None or not merge.pending:
        return
    for plan, step, lane, found in pending_cells(record, plans):
        if not _is_planned(record, plan, step, lane, found):
            record.add("violated", "step", f"step {step} lane {lane}", "a recorded cell is not the plan's")
    open_steps = [step for step in merge.pending_steps() if step >= ledger.next_step]
    if merge.complete_behind_gap():
        record.add(
            "violated", "step", f"step {ledger.next_step}",
            f"is missing: the ledger ends before it, and steps {open_steps[0]} to {open_steps[-1]} are recorded",
        )  # fmt: skip
    elif open_steps:
        many = len(open_steps) > _UNSYNCHRONISED
        record.add(
            "unknown" if many else "note", "step", f"steps {open_steps[0]} to {open_steps[-1]}",
            "were under way when the run ended: not all lanes of them are recorded"
            + ("; is the journal of a rank missing?" if many else ""),
        )  # fmt: skip


def _is_planned(record: RunRecord, plan: RunPlan, step: int, lane: int, digest: str) -> bool:
    """Return True if a cell of an incomplete step is the plan's, with or without confirmed substitutions."""
    if lane >= plan.plan.lanes:
        return False
    (cells,) = plan.consumed(record, step, step + 1, branch=False)
    return digest in (plan.plan.cell_digest(step, lane), cell_digest(cells[lane]))
