"""Rebuild the plans of a run from its record and the manifest, and confirm events against them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardkit.audit.mixtures import has_decisions
from shardkit.audit.run_record import Replacements, RunRecord
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
from shardkit.extras import shell_word
from shardkit.ledger import MASKED, SUBSTITUTED, step_digest
from shardkit.ledger.bindings import Amendment
from shardkit.ledger.ledger import StepRecords, consecutive
from shardkit.plan import Plan, cell_digest
from shardkit.repository.log import parse_dataset_url

_T = TypeVar("_T")


@dataclass(frozen=True)
class RunPlan:
    """A plan of a run with its dataset and its number in the ledger."""

    number: int
    dataset: Dataset
    plan: Plan

    def digest(self, step: int, cells: NDArray[np.int64]) -> bytes:
        """Return the digest of a step with these cells, (lanes, m)."""
        return step_digest(
            self.plan.population.identity,
            self.plan.digest,
            step,
            bytes.fromhex("".join(map(cell_digest, cells))),
        )


@dataclass(frozen=True)
class Leg:
    """A range of recorded steps under one plan.

    Attributes:
        record: the run.
        plan: the plan; None if it cannot be rebuilt.
        records: records of the steps.
        is_branch: True if the steps are leaves of the tree of steps, False if the run abandoned them.
    """

    record: RunRecord
    plan: RunPlan | None
    records: StepRecords
    is_branch: bool

    @property
    def first(self) -> int:
        """The first step."""
        return int(self.records[0]["step"])

    @property
    def end(self) -> int:
        """The step after the last one."""
        return int(self.records[-1]["step"]) + 1

    def substitutions(self, first: int, end: int) -> Replacements:
        """Return the confirmed substitutions of steps [first, end) of the leg."""
        found: Replacements = {}
        for (step, digest), replaced in self.record.replaced.items():
            if first <= step < end and bytes(self.records[step - self.first]["digest"]) == digest:
                found |= replaced
        return found

    def consumed(self, first: int, end: int) -> NDArray[np.int64]:
        """Return (steps, lanes, m) samples consumed in steps [first, end) of the leg, -1 in empty slots.

        Confirmed substitutions are included.

        Raises:
            NotFoundError: the plan cannot be rebuilt.
        """
        cells = self.known_plan.plan.steps(first, end).copy()
        for (step, lane, slot), (_, by) in self.substitutions(first, end).items():
            cells[step - first, lane, slot] = by
        return cells

    @property
    def known_plan(self) -> RunPlan:
        """The plan. Raises NotFoundError if it cannot be rebuilt."""
        if self.plan is None:
            raise NotFoundError(
                f"the plan of steps {self.first} to {self.end - 1} cannot be made again; run: "
                f"shardkit audit {shell_word(self.record.path)}"
            )
        return self.plan


def legs(record: RunRecord, plans: Mapping[int, RunPlan]) -> Iterator[Leg]:
    """Yield the legs of the branch in order, then the legs that the run abandoned."""
    is_gone = ~np.isin(record.records["check"], record.branch["check"])
    for records, is_branch in ((record.branch, True), (record.records[is_gone], False)):
        for one in consecutive(records):
            yield Leg(record, plans.get(int(one[0]["plan"])), one, is_branch)


def leg_of(record: RunRecord, plans: Mapping[int, RunPlan], step: int) -> Leg:
    """Return the leg of the branch with a step.

    Raises:
        NotFoundError: the run did not consume this step.
    """
    for leg in legs(record, plans):
        if leg.is_branch and leg.first <= step < leg.end:
            return leg
    steps = record.branch["step"]
    holds = f"steps {steps[0]} to {steps[-1]}" if len(steps) else "no step"
    raise NotFoundError(f"step {step} was not consumed: the run's ledger holds {holds}")


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
        plan = _recorded_plan(record, event, opened)
        if plan is not None and has_decisions(record, event["number"], plan):
            found[event["number"]] = RunPlan(event["number"], opened, plan)
    if found and record.settings.get("configuration"):
        _check_configured(record, found[min(found)])
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


def _recorded_plan(record: RunRecord, event: dict[str, Any], dataset: Dataset) -> Plan | None:
    """Return the plan that the settings in an event make, None if it is not the plan that the event names."""
    history, subject = event.get("history"), f"plan {event['plan'][:12]}…"
    if not history:
        record.add("unknown", "plan", subject, "its settings are not recorded")
        return None
    # the plan may have been amended from another version of the dataset
    plan = _attempt(record, subject, lambda: recorded_plan_of(Versions(dataset), history))
    if plan is not None and plan.digest != event["plan"]:
        _say_other(record, event, "the ledger's settings", plan)
        return None
    return plan


def _attempt(record: RunRecord, subject: str, make: Callable[[], _T]) -> _T | None:
    """Return what a function makes, None with a finding if it fails."""
    try:
        return make()
    except IntegrityError as error:
        record.add("violated", "plan", subject, str(error))
    except ShardkitError as error:
        record.add("unknown", "plan", subject, f"cannot be made again: {error}")
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
        record.add(
            "violated", "plan", subject, f"cannot be made again, its settings are no settings: {error!r}"
        )
    return None


def _say_other(record: RunRecord, event: dict[str, Any], source: str, plan: Plan) -> None:
    """Add a finding: settings make another plan than the run followed."""
    settings, own = event["history"][-1]["settings"], plan.settings.canonical()
    differing = ", ".join(
        f"{name} {settings[name]} in the ledger, {own.get(name)} there"
        for name in sorted(settings)
        if _plain(own.get(name)) != _plain(settings[name])
    )
    record.add(
        "violated", "plan", f"plan {event['plan'][:12]}…",
        f"{source} make the plan {plan.digest[:12]}…, which is another than the run followed"
        + (f": {differing}" if differing else "; were data.stages changed?"),
    )  # fmt: skip


def _plain(value: object) -> object:
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _check_configured(record: RunRecord, first: RunPlan) -> None:
    """Make the plans of all configurations under all states of amendments; check the plans that the run followed."""
    history = next(event["history"] for event in record.plans if event["number"] == first.number)
    versions = Versions(first.dataset)
    for configuration in record.configurations():
        for amendments in record.amendments():
            plans = _attempt(
                record, "run.json", partial(_configured, versions, history[0], configuration, amendments)
            )
            if plans is None:
                return
            record.stage_plans.append(plans)
    made = {plan.digest for plans in record.stage_plans for plan in plans}
    for event in record.plans:
        if event["plan"] not in made and event.get("history"):
            _say_other(record, event, "run.json", record.stage_plans[0][-1])
    digests = {event["number"]: event["plan"] for event in record.plans}
    for number, begin, end in record.legs():
        last, digest = end - 1, digests.get(number, "")
        if not any(_follows(plans, begin, last, digest) for plans in record.stage_plans):
            record.add(
                "violated", "plan", f"steps {begin} to {last}",
                f"followed the plan {digest[:12]}…, and neither data.stages of run.json nor amendments ask for it "
                "at all of these steps",
            )  # fmt: skip


def _configured(
    versions: Versions[Dataset],
    recorded: Mapping[str, Any],
    configuration: Mapping[str, Any],
    amendments: list[Amendment],
) -> list[Plan]:
    data = configuration.get("data")
    if not isinstance(data, Mapping) or "global_batch" not in data:
        raise ConfigurationError(
            "run.json: configuration.data.global_batch is missing; was it written by hand?"
        )
    make = versions.at(recorded["manifest"]).plan
    return configured_plans(make, data, recorded["settings"], amendments, versions.amend)


def _follows(stages: list[Plan], first: int, last: int, digest: str) -> bool:
    in_force = [plan for plan in stages if plan.from_step <= first][-1:]
    in_force += [plan for plan in stages if first < plan.from_step <= last]
    return all(digest == plan.digest for plan in in_force)


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


def pending_cells(record: RunRecord, plans: dict[int, RunPlan]) -> Iterator[tuple[RunPlan, int, int, bytes]]:
    """Yield (plan, step, lane, digest) of the recorded cells of rebuilt plans that no ledger record covers."""
    by_digest = {one.plan.digest: one for one in plans.values()}
    for digest, step, lane, found in () if record.merge is None else record.merge.pending_cells():
        if digest in by_digest:
            yield by_digest[digest], step, lane, bytes.fromhex(found)


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
    for leg in legs(record, plans):
        for stored in leg.records[np.isin(leg.records["step"], list(by_step))]:
            step, plan = int(stored["step"]), leg.plan
            if plan is None:  # reported by `find_plans`
                confirmed += by_step[step]
            else:
                digest_of = partial(plan.digest, step)
                confirmed += _confirm(record, plan.plan, by_step[step], bytes(stored["digest"]), digest_of)
    for plan, step, lane, digest in pending_cells(record, plans):
        own = [event for event in by_step.get(step, ()) if event["lane"] == lane < plan.plan.lanes]
        confirmed += _confirm(record, plan.plan, own, digest, partial(_digest_of_lane, lane)) if own else []
    known = {id(event) for event in confirmed}
    for event in (one for events in by_step.values() for one in events if id(one) not in known):
        record.add(
            "violated", event["kind"], f"step {event['step']} lane {event['lane']} slot {event['slot']}",
            f"an event says that sample {event['sample']} was {event['kind']}, by {event['by']}, and the digest of the "
            "step, or its plan, says that it was not",
        )  # fmt: skip


def _digest_of_lane(lane: int, cells: NDArray[np.int64]) -> bytes:
    return bytes.fromhex(cell_digest(cells[lane]))


def _has_stage(plan: Plan, event: dict[str, Any]) -> bool:
    stages = plan.settings.stages
    return 0 < event["number"] < len(stages) and bool(stages[event["number"]][0] == event["step"])


def _confirm(
    record: RunRecord,
    plan: Plan,
    events: list[dict[str, Any]],
    digest: bytes,
    digest_of: Callable[[NDArray[np.int64]], bytes],
) -> list[dict[str, Any]]:
    """Return the events of a step that a recorded digest confirms, and store their substitutions in the record.

    `digest_of` returns the digest of cells of the step, (lanes, m).
    """
    step = events[0]["step"]
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
        if digest_of(changed) == digest:
            break
    else:
        return []
    substitutes = {(step, event["lane"], event["slot"]): (event["sample"], event["by"]) for event in choice}
    if substitutes:
        record.replaced[step, digest] = substitutes
    return [
        event
        for event in fitting
        if substitutes.get((step, event["lane"], event["slot"]))
        == ((event["sample"], event["by"]) if event["kind"] == SUBSTITUTED else None)
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
        is_planned = lane < plan.plan.lanes and bytes.fromhex(plan.plan.cell_digest(step, lane)) == found
        if not is_planned and (step, found) not in record.replaced:
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
