"""The audit of a run: its record against itself, against the plan, and the plan's data against its manifest."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.audit.findings import Finding
from shardkit.audit.plans import RunPlan, find_plans
from shardkit.audit.replay import Coverage, replay
from shardkit.audit.run_record import RunRecord, load_run
from shardkit.dataset.verify import Level, verify
from shardkit.errors import ShardkitError
from shardkit.ledger.records import StepRecords, step_digest

__all__ = ["Audit", "audit_run"]

_SHOWN = 20
_REPLAY_ALONE = 30_000_000  # samples below which starting processes does not pay
_UNSYNCHRONISED = 64

Report = Callable[[str, int, int], None]


@dataclass
class Audit:
    """What an audit found.

    Attributes:
        run: the run directory.
        exit_code: 0 clean, 1 deviations that the ledger explains, 2 violated, 3 could not be checked.
        manifest, plan: of the last step.
        first, steps: the run consumed steps [first, steps).
        samples: that they hold.
        checked: steps whose digest was recomputed from the plan.
        replay_s: how long that took.
        head: heads of both trees.
        coverage: per epoch.
        starts: the launches of the run: start, step, ranks, repeats.
        event_counts: events by kind.
        checkpoints: (name, step, whether its head is one of the ledger's; None: it has none).
        verified: what the check of the shards saw; None where it was not asked for.
        findings: everything else.
        software: versions that run.json recorded.
    """

    run: str
    manifest: str = ""
    plan: str = ""
    first: int = 0
    steps: int = 0
    samples: int = 0
    checked: int = 0
    replay_s: float = 0.0
    head: dict[str, Any] = field(default_factory=dict)
    coverage: list[Coverage] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    event_counts: dict[str, int] = field(default_factory=dict)
    checkpoints: list[tuple[str, int, bool | None]] = field(default_factory=list)
    verified: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)
    software: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """See above."""
        kinds = {finding.severity for finding in self.findings}
        return 2 if "violated" in kinds else 3 if "unknown" in kinds else 1 if "explained" in kinds else 0

    @property
    def verdict(self) -> str:
        """In words."""
        return {
            0: "clean: the run consumed exactly what its plan says",
            1: "explained: the run consumed what its plan says, but for the deviations listed",
            2: "violated",
            3: "could not be checked in full",
        }[self.exit_code]


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
        sample: share of the shards that is looked at.
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
    _check_steps(record, plans, audit, jobs, report)
    _check_pending(record, plans)
    _check_coverage(record, audit)
    _check_checkpoints(record, audit)
    _check_end(record, audit)
    _explain_events(record)
    if statement is not None:
        _check_statement(record, statement, audit)
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


# ---- steps


def _check_steps(
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
    for chunk in replay(plan.recipe, first, last, plan=plan.plan, jobs=jobs, coverage=coverage):
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
    substituted = [
        event for event in record.events if event.get("kind") == "substituted" and event.get("step") == step
    ]
    if substituted and found == _digest_with(plan, step, substituted):
        return []
    text = f"its digest is {found.hex()[:16]}…, the plan's is {planned.hex()[:16]}…"
    if substituted:
        text += f"; the {len(substituted)} recorded substitutions do not account for it"
    return [(step, f"{text}: the run consumed other samples than planned, or its record was changed")]


def _digest_with(plan: RunPlan, step: int, substituted: list[dict[str, Any]]) -> bytes:
    cells = plan.plan.step(step).copy()
    for event in substituted:
        cells[event["lane"], event["slot"]] = event["by"]
    digests, _ = plan.cell_digests(cells)
    return step_digest(plan.plan.population.identity, plan.plan.digest, step, digests)


def _check_pending(record: RunRecord, plans: dict[int, RunPlan]) -> None:
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


def _check_coverage(record: RunRecord, audit: Audit) -> None:
    for one in audit.coverage:
        if not one.is_exact:
            record.add(
                "violated", "coverage", f"epoch {one.epoch}",
                f"{one.drawn:,} samples were drawn and {one.distinct:,} are different ones, of {one.rows:,}",
            )  # fmt: skip


# ---- checkpoints, end, events


def _check_checkpoints(record: RunRecord, audit: Audit) -> None:
    known = {(one["manifest"], one["plan"]) for one in record.plans}
    for one in record.checkpoints:
        fits: bool | None = None
        if known and (one.manifest, one.plan) not in known:
            fits = False
            record.add(
                "violated", "checkpoint", one.name,
                f"is of another run: manifest {one.manifest[:19]}…, plan {one.plan[:12]}… are not this run's",
            )  # fmt: skip
        elif one.head is None:
            record.add(
                "note", "checkpoint", one.name, "holds no head of the ledger: it proves nothing about it"
            )
        elif record.roots is not None:
            fits = record.roots.holds(one.head)
            if not fits:
                record.add("violated", "checkpoint", one.name, _head_text(one.head, audit))
        audit.checkpoints.append((one.name, one.step, fits))


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


def _check_end(record: RunRecord, audit: Audit) -> None:
    if record.ledger is not None and record.reached > audit.steps:
        record.add(
            "violated", "ledger", f"steps {audit.steps} to {record.reached - 1}",
            f"are not recorded, and the trainer's own logs speak of {record.reached} steps: the ledger was cut",
        )  # fmt: skip


def _check_statement(record: RunRecord, statement: dict[str, Any], audit: Audit) -> None:
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


def _explain_events(record: RunRecord) -> None:
    """Deviations with their reasons; what else happened, as notes."""
    seen: set[tuple[object, ...]] = set()
    for event in record.events:
        kind, where = event.get("kind"), f"step {event.get('step')}"
        if kind in ("substituted", "masked"):
            place = (kind, event.get("step"), event.get("lane"), event.get("slot"))
            if place in seen:  # recorded again by a restart
                continue
            seen.add(place)
            done = f"replaced by {event.get('by')}" if kind == "substituted" else "masked"
            record.add(
                "explained", str(kind), f"{where} lane {event.get('lane')} slot {event.get('slot')}",
                f"sample {event.get('sample')} was {done}: {event.get('field')}: {event.get('reason')}",
            )  # fmt: skip
        elif kind == "conflict":
            record.add(
                "violated", "conflict", f"{where} lane {event.get('lane')}",
                f"was consumed twice, with digests {event.get('before')} and {event.get('now')}",
            )  # fmt: skip
        elif kind == "fork":
            left = event.get("abandoned", {})
            record.add(
                "note", "fork", where,
                f"the run went on from here in another way; what it had consumed before, up to step "
                f"{left.get('first', 0) + left.get('size', 0)}, is kept as an abandoned branch",
            )  # fmt: skip
        elif kind == "start" and event.get("start"):
            record.add(
                "note", "restart", where,
                f"start {event.get('start')} on {event.get('ranks')} ranks; the one before had come to step "
                f"{event.get('reached')}, {event.get('repeats')} steps were repeated",
            )  # fmt: skip
        elif kind not in ("plan", "assignment", "start"):
            details = {name: value for name, value in event.items() if name not in ("kind", "step")}
            record.add(
                "note", str(kind), where, ", ".join(f"{name} {value}" for name, value in details.items())
            )


# ---- data


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
