"""Audit a run: check its records against each other and the plan, and the data against the manifest."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardkit.audit.amendments import check_amendments
from shardkit.audit.events import short
from shardkit.audit.mixtures import check_decisions
from shardkit.audit.plans import Leg, RunPlan, check_pending, find_plans, legs
from shardkit.audit.replay import replay
from shardkit.audit.result import Audit, AuditProgress, Severity
from shardkit.audit.run_record import (
    STEP_NAME,
    CheckpointRecord,
    RunRecord,
    damaged_objects,
    load_run,
    read_settings,
)
from shardkit.copies.shard_checks import Level
from shardkit.copies.verify import verify
from shardkit.errors import ShardkitError
from shardkit.ledger import MASKED, SUBSTITUTED, setting_differences
from shardkit.ledger.bindings import AMENDMENT, CHECKPOINT, CONFIGURATION, DEALT, LOSSES, UNDO
from shardkit.ledger.decisions import DECISION
from shardkit.ledger.events import JOURNALED
from shardkit.ledger.losses import digest_of_losses
from shardkit.plan import Plan
from shardkit.plan.mixers import MixFunction
from shardkit.telemetry.records import json_object


def audit_run(
    path: str | os.PathLike[str],
    *,
    dataset: str | None = None,
    level: Level | None = "read",
    sample: Fraction | float | str = 1,
    jobs: int = 1,
    statement: dict[str, Any] | None = None,
    mixer: MixFunction | None = None,
    report: AuditProgress | None = None,
) -> Audit:
    """Run all checks of SPEC.md on a run. Nothing is written.

    Args:
        path: the run directory.
        dataset: URL of the dataset; by default, the recorded places are tried.
        level: level of the shard check, as in `verify`. None skips the check of shards.
        sample: share of the shards to check.
        jobs: number of processes for the replay and the shard check.
        statement: statement of an earlier audit, from `verify_envelope`, which must still hold.
        mixer: function of a run whose mixer is a `FunctionMixer`, to compute its decisions again.
        report: called with (activity, done, total).

    Raises:
        NotFoundError: the path is not a run directory.
    """
    record = load_run(Path(path))
    audit = Audit(os.fspath(path), software=record.settings.get("software", {}))
    _describe(record, audit)
    plans = find_plans(record, dataset)
    check_amendments(record, plans)
    check_decisions(record, {one.number: one.plan for one in plans.values()}, mixer)
    check_steps(record, plans, audit, jobs, report)
    check_pending(record, plans)
    check_coverage(record, audit)
    check_checkpoints(record, audit)
    check_bound_settings(record)
    check_losses(record, audit)
    check_tensors(record, audit, read=level in ("read", "decode"))
    check_end(record, audit)
    explain_events(record)
    if statement is not None:
        check_statement(record, statement, audit)
    if level is not None:
        _verify_data(record, plans, audit, level, sample, jobs, report)
    audit.findings = record.findings
    return audit


def _describe(record: RunRecord, audit: Audit) -> None:
    branch = record.branch
    if len(branch):
        audit.first, audit.steps = int(branch[0]["step"]), int(branch[-1]["step"]) + 1
        audit.samples = int(branch["rows"].sum(dtype=np.int64))
        numbers = {one["number"]: one for one in record.plans}
        last = numbers.get(int(branch[-1]["plan"]), {})
        audit.manifest, audit.plan = last.get("manifest", ""), last.get("plan", "")
    if record.ledger is not None:
        audit.head = record.ledger.head()
    audit.starts = [event for event in record.events if event["kind"] == "start"]
    audit.event_counts = dict(sorted(Counter(event["kind"] for event in record.events).items()))


def _verify_data(
    record: RunRecord,
    plans: dict[int, RunPlan],
    audit: Audit,
    level: Level,
    sample: Fraction | float | str,
    jobs: int,
    report: AuditProgress | None,
) -> None:
    roots = {
        (part.repository.url, part.manifest.id): part
        for one in plans.values()
        for part in one.dataset.version.parts
    }
    total: dict[str, Any] = {"level": level, "shards": 0, "shards_seen": 0, "objects": 0, "stored_bytes": 0}
    for url, manifest in roots:
        try:
            result = verify(
                f"{url}@{manifest}", level=level, sample=sample, jobs=jobs,
                report=None if report is None else lambda done, of: report("shards", done, of),
            )  # fmt: skip
        except ShardkitError as error:
            record.add("unknown", "data", url, str(error))
            continue
        for name in ("shards", "shards_seen", "objects", "stored_bytes"):
            total[name] += getattr(result, name)
        for finding in (*result.damaged, *result.unknown):
            blocks = f", blocks {', '.join(map(str, finding.blocks[:8]))}" if finding.blocks else ""
            record.add(
                "violated" if finding.is_damage else "unknown", "shard" if finding.blocks else "object", finding.name,
                f"expected {finding.expected}, got {finding.got}{blocks}; {finding.action}",
            )  # fmt: skip
    audit.verified = total


_SHOWN = 20
_REPLAY_ALONE = 30_000_000  # samples below which starting processes does not pay


def check_steps(
    record: RunRecord, plans: dict[int, RunPlan], audit: Audit, jobs: int, report: AuditProgress | None
) -> None:
    """Check every record, including abandoned branches, against its plan, and compute coverage of the branch."""
    started = time.perf_counter()
    wrong: list[tuple[int, str]] = []
    for leg in legs(record, plans):
        if leg.plan is not None:
            wrong += _compare(leg, leg.plan.plan, audit, jobs, report)
    for step, text in wrong[:_SHOWN]:
        record.add("violated", "step", f"step {step}", text)
    if len(wrong) > _SHOWN:
        more = len(wrong) - _SHOWN
        record.add("violated", "step", f"{more} more steps", "are not those of the plan either")
    audit.replay_s = time.perf_counter() - started


def _compare(
    leg: Leg, plan: Plan, audit: Audit, jobs: int, report: AuditProgress | None
) -> Iterator[tuple[int, str]]:
    """Yield (step, error) of each step that is neither the plan's nor explained by confirmed substitutions."""
    first, end = leg.first, leg.end
    if (end - first) * plan.global_batch < _REPLAY_ALONE:
        jobs = 1
    for chunk in replay(plan, first, end, jobs=jobs, coverage=audit.coverage if leg.is_branch else None):
        at = chunk.first - first
        stored = leg.records[at : at + len(chunk.digests)]
        unequal = (stored["digest"] != chunk.digests).any(axis=1) | (stored["rows"] != chunk.rows)
        for place in np.flatnonzero(unequal).tolist():
            step, found, planned = (
                chunk.first + place,
                bytes(stored[place]["digest"]),
                bytes(chunk.digests[place]),
            )
            recorded, rows = int(stored[place]["rows"]), int(chunk.rows[place])
            if found != planned and (step, found) not in leg.record.replaced:
                text = (
                    f"its digest is {found.hex()[:16]}…, the plan's is {planned.hex()[:16]}…: the run consumed other "
                    "samples than planned, or its record was changed"
                )
                yield step, text
            elif recorded != rows:
                yield (
                    step,
                    f"is recorded with {recorded} samples, and the plan has {rows}: its record was changed",
                )
        audit.checked += len(chunk.digests)
        if report is not None:
            report("steps", chunk.first + len(chunk.digests) - first, end - first)


def check_coverage(record: RunRecord, audit: Audit) -> None:
    """Check that no epoch holds a sample twice or lacks more than its remainder."""
    for one in audit.coverage:
        if not one.is_exact:
            record.add(
                "violated", "coverage", f"epoch {one.epoch}",
                f"{one.drawn:,} samples were drawn and {one.distinct:,} are different ones, of {one.rows:,}",
            )  # fmt: skip


def check_checkpoints(record: RunRecord, audit: Audit) -> None:
    """Check each checkpoint against itself, the events that record it, and the heads that the ledger once had."""
    bound: dict[str, list[dict[str, Any]]] = {}
    for event in record.events:
        if event["kind"] == CHECKPOINT:
            bound.setdefault(event["name"], []).append(event)
    for one in record.checkpoints:
        fits, wrong = _check_head(record, one, audit)
        wrong += _contradictions(one)
        if one.name in bound:
            wrong += _against_events(record, one, bound[one.name])
        else:
            wrong.append("the ledger does not record it: it was put there, or renamed, by somebody else")
        for text in wrong:
            record.add("violated", "checkpoint", one.name, text)
        audit.checkpoints.append((one.name, one.step, fits))
        audit.bound_checkpoints += not wrong
    gone = sorted(set(bound) - {one.name for one in record.checkpoints})
    if gone:
        record.add("note", "checkpoint", f"{gone[0]} … {gone[-1]}" if len(gone) > 1 else gone[0],
                   f"{len(gone)} recorded checkpoints are not there: pruned, or removed")  # fmt: skip


def _check_head(record: RunRecord, one: CheckpointRecord, audit: Audit) -> tuple[bool | None, list[str]]:
    """Return (True if some branch of the ledger once had its head, None if that is unknown; errors)."""
    known = {(plan["manifest"], plan["plan"]) for plan in record.plans}
    if known and one.manifest and one.plan and (one.manifest, one.plan) not in known:
        return False, [
            f"is of another run: manifest {one.manifest[:19]}…, plan {one.plan[:12]}… are not this run's"
        ]
    if one.head is None:
        text = "holds no head of the ledger: it proves nothing about it"
        record.add("note", "checkpoint", one.name, text)
    elif record.roots is not None:
        fits = record.roots.holds(one.head)
        return fits, [] if fits else [_head_text(one.head, audit)]
    return None, []


def _head_text(head: dict[str, Any], audit: Audit) -> str:
    end, events = head["steps"]["first"] + head["steps"]["size"], head["events"]["size"]
    if end > audit.steps:
        return (
            f"was saved when {end} steps were recorded; the ledger now ends at step {audit.steps}: it was cut, or this "
            "checkpoint is of another run"
        )
    return (
        f"holds a head (root {head['steps']['root'][:12]}…, {end} steps, {events} events) which the ledger never had: "
        "the ledger was changed, or this checkpoint is of another run"
    )


def _contradictions(one: CheckpointRecord) -> Iterator[str]:
    for inner in one.inner_names:
        if inner not in ("None", one.name):
            yield f"calls itself {inner}: it was renamed"
            break
    match = STEP_NAME.fullmatch(one.name)
    if match and int(match[1]) != one.step:
        yield f"its name says step {int(match[1])}, it holds step {one.step}"
    for name, own in (("step", one.step), ("manifest", one.manifest), ("plan", one.plan)):
        if name in one.loader and own not in ("", -1) and one.loader[name] != own:
            yield f"its loader's {name} is {short(one.loader[name])}, its own is {short(own)}"
    if one.head is not None:
        end = one.head["steps"]["first"] + one.head["steps"]["size"]
        if one.step >= 0 and end != one.step:
            yield f"holds the ledger's head of step {end}, and calls itself step {one.step}"


def _against_events(record: RunRecord, one: CheckpointRecord, events: list[dict[str, Any]]) -> Iterator[str]:
    newest = short(events[-1]["checkpoint"])
    same = [event for event in events[-2:] if event["checkpoint"] == one.digest]
    if not same:
        yield f"is {short(one.digest)}, and the ledger records {newest} under this name: it was replaced"
    elif one.says_step and same[-1]["step"] != one.step:
        yield f"holds step {one.step}, and the ledger records it for step {same[-1]['step']}"
    elif same[-1] is not events[-1]:
        text = f"was saved again as {newest}, and a kill came before its ref: the ref is of the save before"
        record.add("note", "checkpoint", one.name, text)


def check_end(record: RunRecord, audit: Audit) -> None:
    """Check that the trainer's logs do not continue after the end of the ledger."""
    if record.ledger is not None and record.reached > audit.steps:
        record.add(
            "violated", "ledger", f"steps {audit.steps} to {record.reached - 1}",
            f"are not recorded, and the trainer's own logs speak of {record.reached} steps: the ledger was cut",
        )  # fmt: skip


def check_statement(record: RunRecord, statement: dict[str, Any], audit: Audit) -> None:
    """Check that a signed statement is about this run and a former head of its ledger, and still holds."""
    signed = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    head = statement["predicate"]["head"]
    problems: list[str] = []
    if (head["steps"]["root"], head["events"]["root"]) != (
        signed.get("ledger/steps"),
        signed.get("ledger/events"),
    ):
        problems.append("its head and its subjects contradict each other")
    pairs = {(one["manifest"].removeprefix("sha256:"), one["plan"]) for one in record.plans}
    if (signed.get("manifest"), signed.get("plan")) not in pairs:
        problems.append("is about another manifest or plan than this run's")
    elif record.roots is None or not record.roots.holds(head):
        problems.append(
            f"was made for a ledger of {head['steps']['size']} steps with root {head['steps']['root'][:12]}…, which "
            "this ledger never was: it was changed since, or is another run's"
        )
    else:
        problems += _bound_again(record, head)
    for text in problems:
        record.add("violated", "signature", "signed statement", text)
    if not problems:
        record.add(
            "note", "signature", "signed statement",
            f"is good and covers {head['steps']['size']} of the {audit.steps - audit.first} steps; it said: "
            f"{statement['predicate']['verdict']}",
        )  # fmt: skip


def _bound_again(record: RunRecord, head: dict[str, Any]) -> Iterator[str]:
    """Yield errors for later events that change checkpoints or steps covered by the signed head."""
    size = head["events"]["size"]
    covered, later = record.events[:size], record.events[size:]
    end = head["steps"]["first"] + head["steps"]["size"]
    names = {event["name"] for event in covered if event["kind"] == CHECKPOINT}
    starts = {event["start"] for event in covered if event["kind"] == "start"}
    for event in later:
        if event["kind"] == CHECKPOINT and event["name"] in names:
            yield f"covers the checkpoint {event['name']}, which was bound again to {short(event['checkpoint'])}"
        elif event["kind"] in JOURNALED and event["start"] in starts and event["step"] < end:
            yield f"covers step {event['step']}, about which an event {event['kind']!r} was added since"


_UNTOLD: Final = ("plan", "assignment", CHECKPOINT, CONFIGURATION, DEALT, AMENDMENT, UNDO, LOSSES, DECISION)
_SLOT: Final = "step {step} lane {lane} slot {slot}"
_TOLD: Final[dict[str, tuple[Severity, str, str, str]]] = {
    SUBSTITUTED: ("explained", SUBSTITUTED, _SLOT, "sample {sample} was replaced by {by}: {field}: {reason}"),
    MASKED: ("explained", MASKED, _SLOT, "sample {sample} was masked: {field}: {reason}"),
    "conflict": ("violated", "conflict", "step {step} lane {lane}",
                 "was consumed twice, with digests {before} and {now}"),
    "fork": ("note", "fork", "step {step}", ("the run continued from here in another way; what it had consumed before, "
                                             "up to step {end}, is an abandoned branch")),
    "start": ("note", "restart", "step {step}", ("start {start} on {ranks} ranks; the one before had come to step "
                                                 "{reached}, {repeats} steps were repeated")),
}  # fmt: skip
"""Kind of an event → (severity, kind, subject, text) of its finding. Other kinds give notes with all fields."""


def explain_events(record: RunRecord) -> None:
    """Add findings for recorded deviations, with their reasons, and notes for other events."""
    seen: set[tuple[object, ...]] = set()
    for event in record.events:
        kind = event["kind"]
        if kind in _UNTOLD or (kind == "start" and not event["start"]):
            continue
        if kind in (SUBSTITUTED, MASKED):
            place = (event["step"], event["lane"], event["slot"], event["by"])
            if place in seen:  # recorded again by a restart
                continue
            seen.add(place)
        if kind in _TOLD:
            left = event.get("abandoned", {})
            known = event | {"end": left.get("first", 0) + left.get("size", 0)}
            severity, name, where, text = _TOLD[kind]
            record.add(severity, name, where.format_map(known), text.format_map(known))
        else:
            others = (
                f"{name} {_event_value(value)}"
                for name, value in event.items()
                if name not in ("kind", "step")
            )
            record.add("note", kind, f"step {event['step']}", ", ".join(others))


def _event_value(value: object) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {one}" for name, one in value.items())
    return str(value)


_LISTED: Final = 8


def check_losses(record: RunRecord, audit: Audit) -> None:
    """Check the digests of losses that events cover."""
    events = [event for event in record.events if event["kind"] == LOSSES]
    if not events or record.ledger is None:
        return
    audit.losses = hashlib.sha256("".join(event["digest"] for event in events).encode()).hexdigest()
    at = 0
    try:
        records = record.ledger.loss_records()
        for event in events:
            own = records[event["first"] : event["end"]]
            if digest_of_losses(record.ledger, own, at) != event["digest"]:
                text = "losses noted up to this step were changed: their digest is not the recorded one"
                record.add("violated", LOSSES, f"step {event['step']}", text)
            at += int(own["count"].sum(dtype=np.int64))
    except ShardkitError as error:
        record.add("violated", LOSSES, "ledger/", str(error))


def check_tensors(record: RunRecord, audit: Audit, *, read: bool) -> None:
    """Check existence and size of each checkpoint's tensor objects and, if `read` is set, their SHA-256."""
    objects = {digest: size for one in record.checkpoints for digest, size in one.objects.items()}
    damaged = damaged_objects(record.path, objects, read=read)
    audit.tensors = len(objects)
    for one in record.checkpoints:
        bad = [digest for digest in one.objects if digest in damaged]
        for digest in bad[:_LISTED]:
            record.add("violated", "checkpoint", one.name, f"tensor object {digest[:16]}… {damaged[digest]}")
        if len(bad) > _LISTED:
            record.add(
                "violated", "checkpoint", one.name, f"{len(bad) - _LISTED} more tensor objects are damaged"
            )


def check_bound_settings(record: RunRecord) -> None:
    """Check the digest of run.json against the ledger. Add findings for changes of settings during the run."""
    events = record.configuration_events
    digest = read_settings(record.path)[1]
    if not events:
        if digest is not None:
            text = "is not recorded by the ledger: only its data section was checked, against the plan"
            record.add("note", "settings", "run.json", text)
        return
    if digest is None:
        record.add(
            "violated", "settings", "run.json", f"is gone; the ledger records {short(events[0]['run'])}"
        )
    elif digest != events[0]["run"]:
        recorded = json_object(events[0]["settings"]) or {}
        changed = setting_differences(recorded, record.settings.get("configuration") or {})
        what = ", ".join(f"{key} is {json.dumps(new)}, the ledger records {json.dumps(old)}"
                         for key, old, new in changed[:_LISTED])  # fmt: skip
        record.add("violated", "settings", "run.json",
                   f"was changed: {what or 'its bytes are not those that the ledger records'}")  # fmt: skip
    for event in events:
        for key, old, new in event["changed"]:
            if key in event["allowed"]:
                record.add("explained", "settings", f"step {event['step']}",
                           f"{key} {old} → {new}, allowed by --allow-changes")  # fmt: skip
            else:
                record.add("note", "settings", f"step {event['step']}", f"{key} {old} → {new}")
