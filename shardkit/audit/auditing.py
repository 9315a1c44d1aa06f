"""The audit of a run: its record against itself, against the plan, and the plan's data against its manifest."""

from __future__ import annotations

import os
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.audit.checks import (
    check_bound_checkpoints,
    check_bound_settings,
    check_checkpoints,
    check_coverage,
    check_end,
    check_pending,
    check_statement,
    check_steps,
    check_tensors,
    explain_events,
)
from shardkit.audit.plans import RunPlan, find_plans
from shardkit.audit.result import Audit, Report
from shardkit.audit.run_record import RunRecord, load_run
from shardkit.copies.verify import Level, verify
from shardkit.errors import ShardkitError


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
