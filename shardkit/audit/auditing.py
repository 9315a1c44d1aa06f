"""The audit of a run: its record against itself, against the plan, and the plan's data against its manifest."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardkit.audit.plans import RunPlan, cell_digests, find_plans, replay
from shardkit.audit.result import Audit, Coverage, Report, Severity
from shardkit.audit.run_record import (
    STEP_NAME,
    CheckpointRecord,
    RunRecord,
    damaged_objects,
    load_run,
)
from shardkit.copies.verify import Level, verify
from shardkit.errors import ShardkitError
from shardkit.formats.canonical_json import sha256_digest
from shardkit.ledger import MASKED, SUBSTITUTED, setting_differences
from shardkit.ledger.bindings import CHECKPOINT, CONFIGURATION, DEALT
from shardkit.ledger.journal import BINDINGS
from shardkit.ledger.ledger import StepRecords, read_file, step_digest
from shardkit.telemetry.records import json_object


def audit_run(
    path: str | os.PathLike[str],
    *,
    dataset: str | None = None,
    level: Level | None = "read",
    sample: Fraction | float | str = 1,
    jobs: int = 1,
    statement: dict[str, Any] | None = None,
    report: Report | None = None,
) -> Audit:
    """Check everything that can be checked of a run. Nothing is written.

    Args:
        path: the run directory.
        dataset: where the dataset lies now, if not where the run found it.
        level: of the check of the shards, as in `verify`; None checks the manifest alone.
        sample: share of the shards that is checked.
        jobs: processes for the replay.
        statement: of an earlier audit, from `verify_envelope`: what it says must still hold.
        report: called with (what, done, of).

    Raises:
        NotFoundError: there is no run.
    """
    record = load_run(Path(path))
    audit = Audit(os.fspath(path), software=record.settings.get("software", {}))
    _describe(record, audit)
    plans = find_plans(record, dataset)
    check_steps(record, plans, audit, jobs, report)
    check_pending(record, plans)
    check_coverage(record, audit)
    check_checkpoints(record, audit)
    check_bound_checkpoints(record, audit)
    check_bound_settings(record)
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
        audit.manifest, audit.plan = str(last.get("manifest", "")), str(last.get("plan", ""))
    if record.ledger is not None:
        audit.head = record.ledger.head()
    audit.starts = [event for event in record.events if event.get("kind") == "start"]
    audit.event_counts = dict(sorted(Counter(str(event.get("kind")) for event in record.events).items()))


def _verify_data(
    record: RunRecord,
    plans: dict[int, RunPlan],
    audit: Audit,
    level: Level,
    sample: Fraction | float | str,
    jobs: int,
    report: Report | None,
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
_UNSYNCHRONISED = 64  # steps that ranks without collectives may be apart


def check_steps(
    record: RunRecord, plans: dict[int, RunPlan], audit: Audit, jobs: int, report: Report | None
) -> None:
    """Every record against the plan it names, abandoned branches included; coverage over the branch."""
    started = time.perf_counter()
    wrong: list[tuple[int, str]] = []
    for records, is_branch in _stretches(record):
        plan = plans.get(int(records[0]["plan"]))
        if plan is None:
            continue
        coverage = audit.coverage if is_branch else None
        wrong += _compare(record, plan, records, coverage, audit, jobs, report)
    for step, text in wrong[:_SHOWN]:
        record.add("violated", "step", f"step {step}", text)
    if len(wrong) > _SHOWN:
        more = len(wrong) - _SHOWN
        record.add("violated", "step", f"{more} more steps", "are not those of the plan either")
    audit.replay_s = time.perf_counter() - started


def _stretches(record: RunRecord) -> list[tuple[StepRecords, bool]]:
    """Runs of records of consecutive steps and one plan; the branch's first, then what was abandoned."""
    found = [(one, True) for one in _consecutive(record.branch)]
    if len(record.branch) != len(record.records):
        kept = set(record.branch["check"].tolist())
        left = record.records[[int(one) not in kept for one in record.records["check"]]]
        found += [(one, False) for one in _consecutive(left)]
    return found


def _consecutive(records: StepRecords) -> list[StepRecords]:
    if not len(records):
        return []
    steps, plans = records["step"].astype(np.int64), records["plan"]
    cuts = np.flatnonzero((np.diff(steps) != 1) | (plans[1:] != plans[:-1])) + 1
    return np.split(records, cuts)


def _compare(
    record: RunRecord,
    plan: RunPlan,
    records: StepRecords,
    coverage: list[Coverage] | None,
    audit: Audit,
    jobs: int,
    report: Report | None,
) -> list[tuple[int, str]]:
    first, last = int(records[0]["step"]), int(records[-1]["step"]) + 1
    if (last - first) * plan.plan.global_batch < _REPLAY_ALONE:
        jobs = 1
    wrong: list[tuple[int, str]] = []
    for chunk in replay(plan.plan, first, last, jobs=jobs, coverage=coverage):
        at = chunk.first - first
        stored = records[at : at + len(chunk.digests)]
        unequal = (stored["digest"] != chunk.digests).any(axis=1) | (stored["rows"] != chunk.rows)
        for place in np.flatnonzero(unequal).tolist():
            wrong += _explain_step(record, plan, stored[place], chunk.digests[place].tobytes())
        audit.checked += len(chunk.digests)
        if report is not None:
            report("steps", chunk.first + len(chunk.digests) - first, last - first)
    return wrong


def _explain_step(record: RunRecord, plan: RunPlan, stored: np.void, planned: bytes) -> list[tuple[int, str]]:
    """Empty where recorded substitutions account for the difference."""
    step, found = int(stored["step"]), bytes(stored["digest"])
    substituted = record.substitutions(step, step + 1)
    if substituted and found == _consumed_digest(record, plan, step):
        return []
    text = f"its digest is {found.hex()[:16]}…, the plan's is {planned.hex()[:16]}…"
    if substituted:
        text += f"; the {len(substituted)} recorded substitutions do not account for it"
    return [(step, f"{text}: the run consumed other samples than planned, or its record was changed")]


def _consumed_digest(record: RunRecord, plan: RunPlan, step: int) -> bytes:
    (cells,) = plan.consumed(record, step, step + 1)
    digests = [cell_digests(cell[cell >= 0][None])[0] for cell in cells]  # empty slots are anywhere in a cell
    return step_digest(plan.plan.population.identity, plan.plan.digest, step, b"".join(digests))


def check_pending(record: RunRecord, plans: dict[int, RunPlan]) -> None:
    """Cells that are recorded and not in the tree: of steps under way when the run was killed, or behind a gap."""
    merge, ledger = record.merge, record.ledger
    if merge is None or ledger is None or not merge.pending:
        return
    by_digest = {one.plan.digest: one.plan for one in plans.values()}
    for digest, step, lane, found in merge.pending_cells():
        plan = by_digest.get(digest)
        if plan is not None and plan.cell_digest(step, lane) != found:
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


def check_coverage(record: RunRecord, audit: Audit) -> None:
    """No epoch holds a sample twice, or lacks more than its remainder."""
    for one in audit.coverage:
        if not one.is_exact:
            record.add(
                "violated", "coverage", f"epoch {one.epoch}",
                f"{one.drawn:,} samples were drawn and {one.distinct:,} are different ones, of {one.rows:,}",
            )  # fmt: skip


def check_checkpoints(record: RunRecord, audit: Audit) -> None:
    """Every checkpoint is of this run, and some branch of the ledger once had its head."""
    known = {(one["manifest"], one["plan"]) for one in record.plans}
    for one in record.checkpoints:
        fits: bool | None = None
        wrong = ""
        if known and one.manifest and one.plan and (one.manifest, one.plan) not in known:
            wrong = (
                f"is of another run: manifest {one.manifest[:19]}…, plan {one.plan[:12]}… are not this run's"
            )
        elif one.head is None:
            text = "holds no head of the ledger: it proves nothing about it"
            record.add("note", "checkpoint", one.name, text)
        elif record.roots is not None:
            fits = record.roots.holds(one.head)
            wrong = "" if fits else _head_text(one.head, audit)
        if wrong:
            record.add("violated", "checkpoint", one.name, wrong)
        audit.checkpoints.append((one.name, one.step, False if wrong else fits))


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


def check_end(record: RunRecord, audit: Audit) -> None:
    """The trainer's own logs do not go on behind the ledger's end."""
    if record.ledger is not None and record.reached > audit.steps:
        record.add(
            "violated", "ledger", f"steps {audit.steps} to {record.reached - 1}",
            f"are not recorded, and the trainer's own logs speak of {record.reached} steps: the ledger was cut",
        )  # fmt: skip


def check_statement(record: RunRecord, statement: dict[str, Any], audit: Audit) -> None:
    """What was signed must be of this run: its manifest, its plan, and a head that its ledger once had."""
    signed = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    head = statement["predicate"]["head"]
    if (head["steps"]["root"], head["events"]["root"]) != (
        signed.get("ledger/steps"),
        signed.get("ledger/events"),
    ):
        record.add(
            "violated", "signature", "signed statement", "its head and its subjects contradict each other"
        )
    pairs = {(one["manifest"].removeprefix("sha256:"), one["plan"]) for one in record.plans}
    if (signed.get("manifest"), signed.get("plan")) not in pairs:
        record.add(
            "violated", "signature", "signed statement", "is about another manifest or plan than this run's"
        )
    elif record.roots is None or not record.roots.holds(head):
        record.add(
            "violated", "signature", "signed statement",
            f"was made for a ledger of {head['steps']['size']} steps with root {head['steps']['root'][:12]}…, which "
            "this ledger never was: it was changed since, or is another run's",
        )  # fmt: skip
    else:
        record.add(
            "note", "signature", "signed statement",
            f"is good and covers {head['steps']['size']} of the {audit.steps - audit.first} steps; it said: "
            f"{statement['predicate']['verdict']}",
        )  # fmt: skip


_UNTOLD: Final = ("plan", "assignment", CHECKPOINT, CONFIGURATION, DEALT)
_SLOT: Final = "step {step} lane {lane} slot {slot}"
_TOLD: Final[dict[str, tuple[Severity, str, str, str]]] = {
    SUBSTITUTED: ("explained", SUBSTITUTED, _SLOT, "sample {sample} was replaced by {by}: {field}: {reason}"),
    MASKED: ("explained", MASKED, _SLOT, "sample {sample} was masked: {field}: {reason}"),
    "conflict": ("violated", "conflict", "step {step} lane {lane}",
                 "was consumed twice, with digests {before} and {now}"),
    "fork": ("note", "fork", "step {step}", ("the run went on from here in another way; what it had consumed before, "
                                             "up to step {end}, is kept as an abandoned branch")),
    "start": ("note", "restart", "step {step}", ("start {start} on {ranks} ranks; the one before had come to step "
                                                 "{reached}, {repeats} steps were repeated")),
}  # fmt: skip
"""Kind of an event → a finding of it: severity, kind, subject, text; of other kinds all that they hold is told."""


def explain_events(record: RunRecord) -> None:
    """Deviations with their reasons; what else happened, as notes."""
    seen: set[tuple[object, ...]] = set()
    for event in record.events:
        kind = str(event.get("kind"))
        if kind in _UNTOLD or (kind == "start" and not event.get("start")):
            continue
        if kind in (SUBSTITUTED, MASKED):
            place = (kind, event.get("step"), event.get("lane"), event.get("slot"))
            if place in seen:  # recorded again by a restart
                continue
            seen.add(place)
        if kind in _TOLD:
            left = event.get("abandoned", {})
            known = defaultdict(lambda: None, event, end=left.get("first", 0) + left.get("size", 0))
            severity, name, where, text = _TOLD[kind]
            record.add(severity, name, where.format_map(known), text.format_map(known))
        else:
            others = (f"{name} {value}" for name, value in event.items() if name not in ("kind", "step"))
            record.add("note", kind, f"step {event.get('step')}", ", ".join(others))


_LISTED: Final = 8
_UNBOUND: Final = "not bound (0.1)"


def check_bound_checkpoints(record: RunRecord, audit: Audit) -> None:
    """Name, step, loader state and head of every checkpoint say the same, and the ledger records the checkpoint."""
    known: dict[str, list[dict[str, Any]]] = {}
    for event in record.events:
        if event.get("kind") == CHECKPOINT:
            known.setdefault(str(event.get("name")), []).append(event)
    unbound = []
    for one in record.checkpoints:
        wrong = list(_contradictions(one))
        if one.name in known:
            wrong += _against_events(one, known[one.name])
        elif _must_be_bound(record, one):
            wrong.append("the ledger does not record it: it was put there, or renamed, by somebody else")
        else:
            unbound.append(one.name)
        for text in wrong:
            record.add("violated", "checkpoint", one.name, text)
        audit.bound_checkpoints += one.name in known and not wrong
    if unbound:
        record.add("note", "checkpoint", ", ".join(unbound[:_LISTED]),
                   f"{_UNBOUND}: the ledger was written by a version that does not record checkpoints")  # fmt: skip
    present = {one.name for one in record.checkpoints}
    gone = sorted(set(known) - present)
    if gone:
        record.add("note", "checkpoint", f"{gone[0]} … {gone[-1]}" if len(gone) > 1 else gone[0],
                   f"{len(gone)} recorded checkpoints are not there: pruned, or removed")  # fmt: skip


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
            yield f"its loader's {name} is {_short(one.loader[name])}, its own is {_short(own)}"
    if one.head is not None:
        end = one.head["steps"]["first"] + one.head["steps"]["size"]
        if one.step >= 0 and end != one.step:
            yield f"holds the ledger's head of step {end}, and calls itself step {one.step}"


def _against_events(one: CheckpointRecord, events: list[dict[str, Any]]) -> Iterator[str]:
    same = [event for event in events if event.get("checkpoint") == one.digest]
    if not same:
        recorded = _short(events[-1].get("checkpoint"))
        yield f"is {_short(one.digest)}, and the ledger records {recorded} under this name: it was replaced"
    elif one.says_step and same[-1].get("step") != one.step:
        yield f"holds step {one.step}, and the ledger records it for step {same[-1].get('step')}"


def _must_be_bound(record: RunRecord, one: CheckpointRecord) -> bool:
    """Whether the ledger was written by a version that binds checkpoints when this one was taken."""
    kinds = (CHECKPOINT, CONFIGURATION)
    first = next((at for at, event in enumerate(record.events) if event.get("kind") in kinds or BINDINGS in event),
                 None)  # fmt: skip
    if first is None:
        return False
    earlier = any(event.get("kind") == "plan" and BINDINGS not in event for event in record.events[:first])
    return not earlier or one.head is None or one.head["events"]["size"] > first


def check_tensors(record: RunRecord, audit: Audit, *, read: bool) -> None:
    """The tensor objects of every checkpoint are there, and (where they are read) hold what was written."""
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
    """run.json is the one that the ledger records; changes on the way are said."""
    events = record.configuration_events
    data = read_file(record.path / "run.json")
    if not events:
        if data is not None:
            record.add(
                "note", "settings", "run.json", f"{_UNBOUND}: the ledger does not record these settings"
            )
        return
    if data is None:
        record.add(
            "violated", "settings", "run.json", f"is gone; the ledger records {_short(events[0].get('run'))}"
        )
    elif any(sha256_digest(data) != event.get("run") for event in events):
        changed = setting_differences(
            json_object(events[0].get("settings")) or {}, record.settings.get("configuration") or {}
        )
        what = ", ".join(f"{key} is {json.dumps(new)}, the ledger records {json.dumps(old)}"
                         for key, old, new in changed[:_LISTED])  # fmt: skip
        record.add("violated", "settings", "run.json",
                   f"was changed: {what or 'its bytes are not those that the ledger records'}")  # fmt: skip
    first_step = int(record.branch[0]["step"]) if len(record.branch) else 0
    if isinstance(events[0].get("step"), int) and events[0]["step"] > first_step:
        record.add("note", "settings", f"steps {first_step} to {events[0]['step'] - 1}",
                   f"{_UNBOUND}: the settings are recorded from step {events[0]['step']} on")  # fmt: skip
    for event in events:
        _say_changes(record, event)


def _say_changes(record: RunRecord, event: dict[str, Any]) -> None:
    changed, allowed = event.get("changed"), event.get("allowed")
    if not isinstance(changed, list) or not isinstance(allowed, list):
        return
    for one in changed:
        key, old, new = (str(part) for part in one)
        if key in allowed:
            record.add("explained", "settings", f"step {event.get('step')}",
                       f"{key} {old} → {new}, allowed by --allow-changes")  # fmt: skip
        else:
            record.add("note", "settings", f"step {event.get('step')}", f"{key} {old} → {new}")


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:19]}…" if len(text) > 24 else text
