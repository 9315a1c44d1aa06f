"""Amend the plan of a run, and check recorded amendments against the plans that they name."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardkit.audit.plans import RunPlan, find_plans
from shardkit.audit.run_record import RunRecord, load_run, recent_step_seconds
from shardkit.dataset import Dataset
from shardkit.dataset.committing import move_refs, standing_refs
from shardkit.dataset.lookups import check_absent, list_samples
from shardkit.dataset.run_plans import Versions
from shardkit.dataset.selecting import put_selected
from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StateError, UsageError
from shardkit.extras import shell_word
from shardkit.formats import sha256_digest
from shardkit.ledger.bindings import (
    AMENDMENT,
    UNDO,
    Amendment,
    abandoned_checkpoints,
    active_amendments,
    bind_amendment,
    is_applied,
)
from shardkit.plan import Plan
from shardkit.repository.repository import Repository

_READS: Final = 4
_AHEAD_S: Final = 10.0
_LEAST_AHEAD: Final = 4  # a job reads three steps ahead
_UNKNOWN_AHEAD: Final = 64  # steps, if the job has recorded no times


@dataclass(frozen=True, kw_only=True)
class ChangeRequest:
    """The changes requested of an amendment; at least one of `skip`, `exclude`, `weights` and `resume_from` is given.

    Attributes:
        skip: (a, b): leave out steps a to b - 1.
        exclude: values that name samples to leave out, as for `shardkit.dataset.lookups.list_samples`.
        field: the field of these values; None: keys, or numbers if none is a key.
        allow_absent: leave out values that the dataset does not have.
        weights: pattern over strata → weight, as text such as "2" or "1/3".
        from_step: first step with the change; None: the first skipped step, or the step at which the run continues.
        resume_from: step of the checkpoint from which the next start continues; None: the newest one that is not
            later than `from_step`. Alone, the run goes back and keeps its plan.
    """

    skip: tuple[int, int] | None = None
    exclude: Sequence[str] | None = None
    field: str | None = None
    allow_absent: bool = False
    weights: Mapping[str, str] | None = None
    from_step: int | None = None
    resume_from: int | None = None

    def __post_init__(self) -> None:
        if self.is_rewind and self.resume_from is None:
            raise UsageError("an amendment changes something: give --skip, --exclude or --weights")
        if self.skip is not None and self.from_step not in (None, self.skip[0]):
            raise UsageError(
                f"--skip {self.skip[0]}:{self.skip[1]} begins at step {self.skip[0]}: leave out --from-step"
            )

    @property
    def is_rewind(self) -> bool:
        """True if the plan stays as it is."""
        return self.skip is None and self.exclude is None and self.weights is None

    @property
    def list_digest(self) -> str | None:
        """Digest of the values of `exclude`."""
        return None if self.exclude is None else sha256_digest("\n".join(self.exclude).encode())


def amend_run(
    run: str | os.PathLike[str],
    request: ChangeRequest,
    *,
    message: str = "",
    author: str = "",
    dataset: str | None = None,
) -> Amendment:
    """Record an amendment of a run's plan; the next start of the run applies it.

    If a job trains in the run, the change applies in it, at a step that it has not read: `from_step`, the first skipped
    step, or a step about 10 seconds ahead.

    With `exclude`, a version without the samples is committed to the dataset's repository. A request that equals the
    newest amendment in force changes nothing.

    Args:
        run: the run directory.
        request: the change.
        message: why, for the ledger.
        author: who, for the ledger; by default the name of the user.
        dataset: URL of the dataset; by default, the recorded places are tried.

    Raises:
        NotFoundError: the run, its plan, its dataset or the checkpoint of `resume_from` does not exist.
        IntegrityError: the record of the run is not sound.
        PlanError: the plan does not support the change.
        StateError: a job trains in the run, and the change begins at a step that it may have read; or the run was
            amended in the meantime.
    """
    for attempt in range(_READS if running_job(run) else 1):
        time.sleep(attempt)  # a running job may have committed while its record was read
        record = load_run(Path(run))
        plans = find_plans(record, dataset)
        check_amendments(record, plans)
        if not record.violations:
            break
    else:
        one = record.violations[0]
        raise IntegrityError(
            f"{run}: the record is not sound ({one.subject}: {one.text}); run: shardkit audit {shell_word(run)}"
        )
    if not plans:
        wrong = "; ".join(one.text for one in record.findings)[:500]
        raise NotFoundError(f"{run}: the plan cannot be made again: {wrong}")
    versions = Versions(next(iter(plans.values())).dataset)
    points = _resume_points(record)
    if request.resume_from is not None and request.resume_from not in points:
        known = ", ".join(map(str, points)) or "none"
        raise NotFoundError(
            f"{run}: no checkpoint of step {request.resume_from}; there are those of steps: {known}"
        )
    start = _first_step(record, request, points)
    if job := running_job(run):
        start = _step_ahead(record, request, job)
    resume_from = start if request.resume_from is None else request.resume_from
    if resume_from > start:
        raise UsageError(
            f"step {start} is before the checkpoint of step {resume_from}: choose an earlier checkpoint"
        )
    fields: dict[str, Any] = {
        "from_step": start, "resume_from": resume_from, "skip": None if request.skip is None else request.skip[1],
        "weights": None if request.weights is None else dict(request.weights), "excluded": request.list_digest,
    }  # fmt: skip
    active = record.amendments()[-1]
    if active and all(getattr(active[-1], name) == value for name, value in fields.items()):
        return active[-1]
    parent = _newest_plan(record, plans, versions)
    if request.is_rewind:  # keep the later amendments
        fields |= {"parent": parent.digest, "plan": parent.digest, "manifest": parent.population.identity}
        return bind_amendment(run, fields, message=message, author=author, known=active)
    while parent.parent is not None and start < parent.from_step:
        parent = parent.parent
    first = other = versions.at(parent.population.identity)
    if request.exclude is not None:
        other = _version_without(first, request)
    draft = Amendment(
        **fields, number=len(active), parent=parent.digest, plan="", manifest=other.manifest.id, author=author,
        message=message, time=0, step=0,
    )  # fmt: skip
    made = versions.made(parent, draft)
    if request.exclude is not None:  # after the plan has been made: a change that is refused commits nothing
        _commit_version(other, message=message or "amend a run", author=author)
    fields |= {"parent": parent.digest, "plan": made.digest, "manifest": other.manifest.id}
    return bind_amendment(run, fields, message=message, author=author, known=active)


def _resume_points(record: RunRecord) -> list[int]:
    """Return the steps of the checkpoints from which the run may continue, ascending."""
    gone = abandoned_checkpoints(record.events)
    return [one.step for one in record.checkpoints if one.name not in gone]


def next_start(run: str | os.PathLike[str]) -> str:
    """Say from which checkpoint the next start of the trainer continues."""
    points = _resume_points(load_run(Path(run)))
    return f"step {points[-1]}" if points else "the beginning, or the state that your program loads"


def _first_step(record: RunRecord, request: ChangeRequest, points: list[int]) -> int:
    if request.skip is not None:
        return request.skip[0]
    if request.from_step is not None:
        return request.from_step
    if request.resume_from is not None:
        return request.resume_from
    assert record.ledger is not None, "the record is sound"
    return points[-1] if points else record.ledger.next_step


def running_job(run: str | os.PathLike[str]) -> str:
    """Return the id of the process of the bundled trainer that trains in a run; empty if none does."""
    try:
        descriptor = os.open(Path(run) / "lock", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode(errors="replace") or "?"
    finally:
        os.close(descriptor)
    return ""


def _step_ahead(record: RunRecord, request: ChangeRequest, job: str) -> int:
    """Return the first step of a change that a running job applies.

    Raises:
        StateError: the job may have read the step that was asked for.
    """
    assert record.ledger is not None, "the record is sound"
    taken = record.ledger.next_step
    asked = request.from_step if request.skip is None else request.skip[0]
    if request.resume_from is not None or (asked is not None and asked < taken + _LEAST_AHEAD):
        raise StateError(
            f"{record.path}: process {job} trains in it and has taken {taken} steps; an earlier step is changed by a "
            f"start: stop the job first, or choose a step from {taken + _LEAST_AHEAD} on"
        )
    if asked is not None:
        return asked
    seconds = sorted(recent_step_seconds(record.path))
    if not seconds:
        return taken + _UNKNOWN_AHEAD
    return taken + max(_LEAST_AHEAD, math.ceil(_AHEAD_S / max(1e-4, seconds[len(seconds) // 2])))


def _newest_plan(record: RunRecord, plans: dict[int, RunPlan], versions: Versions[Dataset]) -> Plan:
    """Return the plan with which the next start would continue."""
    if record.stage_plans:
        return record.stage_plans[-1][-1]
    assert record.ledger is not None, "the record is sound"
    digest = record.ledger.state.start.shape[0]
    plan = next((one.plan for one in plans.values() if one.plan.digest == digest), plans[max(plans)].plan)
    for amendment in record.amendments()[-1]:
        if amendment.parent == plan.digest:
            plan = versions.amend(plan, amendment)
    return plan


def _version_without(dataset: Dataset, request: ChangeRequest) -> Dataset:
    """Return the version of a dataset that lacks the listed samples; it is stored, and no ref names it yet."""
    listed = list_samples(dataset, request.exclude or (), request.field)
    if not request.allow_absent:
        check_absent(listed.absent, "the list of samples to exclude")
    kept = np.setdiff1d(np.arange(len(dataset), dtype=np.int64), listed.samples, assume_unique=True)
    repository = Repository.open(dataset.repository.url)
    manifest = put_selected(repository, dataset.select(rows=kept).version, {"rows": "all but listed"})
    return dataset.at(manifest.id)


def _commit_version(dataset: Dataset, *, message: str, author: str) -> None:
    """Commit a version under a ref of its own."""
    manifest, repository = dataset.manifest.id, Repository.open(dataset.repository.url)
    ref = f"amended-{manifest.removeprefix('sha256:')[:16]}"
    move_refs(repository, {ref: manifest}, standing_refs(repository, [ref]), message=message, author=author)


def check_amendments(record: RunRecord, plans: dict[int, RunPlan]) -> None:
    """Check that each amendment makes the plan that it names, and add findings that say who made it and why."""
    if not plans:  # reported by `find_plans`
        return
    versions = Versions(plans[min(plans)].dataset)
    known: dict[str, Plan] = {}
    for found in [
        *(one.plan for one in plans.values()),
        *(stages[-1] for stages in record.stage_plans if stages),
    ]:
        one: Plan | None = found
        while one is not None and one.digest not in known:
            known[one.digest] = one
            one = one.parent
    active = {one.number for one in active_amendments(record.events)}
    for event in record.events:
        if event["kind"] == UNDO:
            record.add(
                "note", UNDO, f"amendment {event['number']}", f"undone by {event['author']}{_why(event)}"
            )
        if event["kind"] != AMENDMENT:
            continue
        amendment = Amendment.of(event)
        subject = f"amendment {amendment.number}"
        parent = known.get(amendment.parent)
        try:
            if parent is None:
                raise IntegrityError(
                    f"it changes the plan {amendment.parent[:12]}…, which is none of this run"
                )
            known[amendment.plan] = versions.amend(parent, amendment)
        except IntegrityError as error:
            record.add("violated", AMENDMENT, subject, str(error))
            continue
        except ShardkitError as error:
            record.add("unknown", AMENDMENT, subject, str(error))
            continue
        state = "" if is_applied(amendment, record.events) else "; not applied yet"
        if amendment.number not in active:
            state = "; undone, or ended by a later one"
        record.add("explained", AMENDMENT, subject, f"{amendment}, by {amendment.author}{_why(event)}{state}")


def _why(event: Mapping[str, Any]) -> str:
    return f": {event['message']}" if event["message"] else ""
