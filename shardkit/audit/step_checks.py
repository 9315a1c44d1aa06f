"""Every step of the record against the plan it names, and what the steps cover."""

from __future__ import annotations

import time

import numpy as np

from shardkit.audit.plans import RunPlan
from shardkit.audit.replay import Coverage, replay
from shardkit.audit.result import Audit, Report
from shardkit.audit.run_record import Place, RunRecord
from shardkit.ledger.records import StepRecords, step_digest

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
    substituted = record.substitutions(step, step + 1)
    if substituted and found == _digest_with(plan, step, substituted):
        return []
    text = f"its digest is {found.hex()[:16]}…, the plan's is {planned.hex()[:16]}…"
    if substituted:
        text += f"; the {len(substituted)} recorded substitutions do not account for it"
    return [(step, f"{text}: the run consumed other samples than planned, or its record was changed")]


def _digest_with(plan: RunPlan, step: int, substituted: dict[Place, tuple[int, int]]) -> bytes:
    cells = plan.plan.step(step).copy()
    for (_, lane, slot), (_, by) in substituted.items():
        cells[lane, slot] = by
    digests, _ = plan.cell_digests(cells)
    return step_digest(plan.plan.population.identity, plan.plan.digest, step, digests)


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
