"""Events that a process records durably before it acts: checkpoints, settings, lane owners and amendments of the plan.

SPEC.md, "Events", has the rules. Functions read the events back; `ledger_head` merges the journals and returns the
head that a checkpoint stores.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardkit.errors import IntegrityError, StateError
from shardkit.ledger.ledger import Ledger
from shardkit.ledger.losses import digest_of_losses
from shardkit.ledger.merging import Merge, Source, merge_journals
from shardkit.stores.file_operations import explained

_log = logging.getLogger("shardkit.ledger")

CHECKPOINT: Final = "checkpoint"
"""Kind of the event recorded before the ref of a checkpoint is written."""
CONFIGURATION: Final = "configuration"
"""Kind of the event of a start with changed settings."""
DEALT: Final = "dealt"
"""Kind of the event of a start whose lanes were distributed by cached data."""
LOSSES: Final = "losses"
"""Kind of the event of losses that were merged since the last such event."""
AMENDMENT: Final = "amendment"
"""Kind of the event of a change of the plan, recorded before a start applies it."""
UNDO: Final = "undo"
"""Kind of the event that takes back the newest amendment before a start has applied it."""
SWITCH: Final = "switch"
"""Kind of the event with which a running job agrees to apply an amendment; it cannot be undone from then on."""


def bind_checkpoint(
    run: str | os.PathLike[str], *, name: str, checkpoint: str, step: int | None = None
) -> None:
    """Record durably which checkpoint a name refers to.

    Call it after the bytes of the checkpoint are written and before its ref. The journals are merged; later additions
    about steps before `step` are rejected by the audit.

    Args:
        run: the run directory.
        name: name of the checkpoint.
        checkpoint: "sha256:…" of its manifest, which names every tensor object by digest.
        step: number of steps that the run has taken; by default, the number of steps in the ledger.

    Raises:
        IntegrityError: the ledger was truncated or damaged.
        StoreError: the ledger cannot be written.
    """
    with Ledger(Path(run), writing=True) as ledger:
        Merge(ledger)
        _bind_losses(ledger)
        event: dict[str, Any] = {
            "kind": CHECKPOINT, "step": ledger.next_step if step is None else step, "name": name,
            "checkpoint": checkpoint, "merged": ledger.next_step,
        }  # fmt: skip
        known = _last(ledger.event_documents(), CHECKPOINT, name=name)
        if known is not None:
            event["replaces"] = known["checkpoint"]
        is_abandoned = name in abandoned_checkpoints(ledger.event_documents())
        if known is None or known["checkpoint"] != checkpoint or is_abandoned:
            ledger.add_event(event)
        ledger.commit()


def _bind_losses(ledger: Ledger) -> None:
    """Add an event with the digest of the losses merged since the last such event: later heads cover them."""
    known = _last(ledger.event_documents(), LOSSES)
    first = 0 if known is None else known["end"]
    records = ledger.loss_records(first)
    if len(records):
        before = ledger.state.loss_values - int(records["count"].sum(dtype=np.int64))
        ledger.add_event(
            {"kind": LOSSES, "step": ledger.next_step, "first": first, "end": first + len(records),
             "digest": digest_of_losses(ledger, records, before)}
        )  # fmt: skip


def bind_configuration(
    run: str | os.PathLike[str],
    *,
    record: str,
    settings: Mapping[str, Any],
    changed: Sequence[tuple[str, object, object]] = (),
    allowed: Sequence[str] = (),
) -> None:
    """Record durably the settings that the run continues with, unless they equal the last recorded settings.

    Args:
        run: the run directory.
        record: "sha256:…" of run.json.
        settings: the whole configuration, as in run.json.
        changed: (key, old, new) of each changed setting.
        allowed: changed keys that affect the data or the model and that the user allowed to change.

    Raises:
        IntegrityError: run.json differs from the recorded digest, or the ledger was truncated or damaged.
    """
    text = json.dumps(settings, sort_keys=True)
    with Ledger(Path(run), writing=True) as ledger:
        known = _last(ledger.event_documents(), CONFIGURATION)
        if known is not None and known["run"] != record:
            raise IntegrityError(
                f"{run}/run.json was changed: its digest is {record}, and the ledger records {known.get('run')}; "
                "restore it from a copy"
            )
        if known is not None and known["settings"] == text:
            return
        changes = [[key, json.dumps(old), json.dumps(new)] for key, old, new in changed]
        ledger.add_event(
            {"kind": CONFIGURATION, "step": ledger.next_step, "run": record, "settings": text,
             "changed": changes, "allowed": sorted(allowed)}
        )  # fmt: skip
        ledger.commit()


def bound_settings(run: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the last recorded settings, or None if no trainer recorded any."""
    known = _last(read_events(run), CONFIGURATION)
    return None if known is None else dict(json.loads(known["settings"]))


def bind_assignment(run: str | os.PathLike[str], *, owners: Sequence[int], nodes: Sequence[str]) -> None:
    """Record durably the owner of each lane at a start, unless `bound_assignment` returns the same.

    Args:
        run: the run directory.
        owners: rank of each lane.
        nodes: node of each rank.

    Raises:
        IntegrityError: the ledger was truncated or damaged.
        StoreError: the ledger cannot be written.
    """
    with Ledger(Path(run), writing=True) as ledger:
        known = _last(ledger.event_documents(), DEALT, nodes=list(nodes), lanes=len(owners))
        if known is None or known["owners"] != list(owners):
            ledger.add_event(
                {"kind": DEALT, "step": ledger.next_step, "nodes": list(nodes), "lanes": len(owners),
                 "owners": list(owners)}
            )  # fmt: skip
            ledger.commit()


def bound_assignment(
    run: str | os.PathLike[str], *, lanes: int, nodes: Sequence[str]
) -> tuple[int, ...] | None:
    """Return the last recorded rank of each lane for these nodes, or None if none is recorded."""
    known = _last(read_events(run), DEALT, nodes=list(nodes), lanes=lanes)
    return None if known is None else tuple(known["owners"])


def recorded_plan(run: str | os.PathLike[str], digest: str) -> dict[str, Any] | None:
    """Return the resolved settings of the plan that a run began with, or None if they are not recorded.

    Args:
        run: the run directory.
        digest: digest of the plan, before any amendment.
    """
    if not (Path(run) / "journal").is_dir():
        return None
    for ledger in (Ledger(Path(run)), merge_journals(Path(run))[0]):
        for event in ledger.event_documents():
            if event.get("kind") == "plan" and event.get("plan") == digest and event.get("history"):
                return dict(event["history"][0]["settings"])
    return None


def setting_differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (section.key, old, new) of each differing setting. A missing key has the value None."""
    found = []
    for section in dict.fromkeys((*old, *new)):
        before, after = (one.get(section) or {} for one in (old, new))
        if not isinstance(before, dict) or not isinstance(after, dict):
            found += [(str(section), before, after)] if before != after else []
            continue
        found += [(f"{section}.{key}", before.get(key), after.get(key))
                  for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)]  # fmt: skip
    return found


def read_events(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of a run's ledger, none if it has no ledger.

    Raises:
        IntegrityError, FormatError: the ledger was truncated or damaged.
    """
    if not (Path(run) / "ledger").is_dir():
        return []
    return Ledger(Path(run)).event_documents()


def _last(events: list[dict[str, Any]], kind: str, **values: object) -> dict[str, Any] | None:
    found = (
        event
        for event in reversed(events)
        if event["kind"] == kind and all(event[name] == value for name, value in values.items())
    )
    return next(found, None)


# ---- amendments of the plan


@dataclass(frozen=True)
class Amendment:
    """A change of a run's plan."""

    number: int  # number of the amendment in the run, from 0
    from_step: int  # first step with the change
    resume_from: int  # checkpoints of later steps that were saved before the amendment are abandoned
    parent: str  # hex digest of the plan that it changes
    plan: str  # hex digest of the result
    manifest: str  # "sha256:…" of the version that the steps from `from_step` on read
    skip: int | None  # step of the parent that is continued at `from_step`; None: none is skipped
    weights: Mapping[str, str] | None  # pattern over strata → weight, as text; None: as before
    excluded: str | None  # "sha256:…" of the list of samples that were left out; None: none
    author: str  # who made it
    message: str  # why
    time: int  # when, in nanoseconds since 1970
    step: int  # number of recorded steps at that time

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Amendment:
        """Return the amendment of a ledger event."""
        return cls(**{name: event[name] for name in cls.__dataclass_fields__})

    @property
    def is_rewind(self) -> bool:
        """True if the run goes back to a checkpoint and keeps its plan."""
        return self.plan == self.parent

    @property
    def changes(self) -> dict[str, Any]:
        """The arguments `skip` and `weights` of `Plan.amend`."""
        found: dict[str, Any] = {}
        if self.skip is not None:
            found["skip"] = (self.from_step, self.skip)
        if self.weights is not None:
            found["weights"] = {pattern: Fraction(weight) for pattern, weight in self.weights.items()}
        return found

    def __str__(self) -> str:
        if self.is_rewind:
            return f"go back to step {self.resume_from}"
        parts = [] if self.skip is None else [f"skip {self.from_step}:{self.skip}"]
        parts += [] if self.excluded is None else [f"exclude the list {self.excluded[:19]}…"]
        parts += [f"weight {pattern}={weight}" for pattern, weight in (self.weights or {}).items()]
        return f"{', '.join(parts)} from step {self.from_step}"


def amendment_states(events: Iterable[Mapping[str, Any]]) -> list[list[Amendment]]:
    """Return the amendments in force after each amendment and undo, in order; the first state is empty.

    An amendment ends the amendments of later steps, unless it only goes back. An undo returns to the amendments before
    the newest one.
    """
    states: list[list[Amendment]] = [[]]
    before: list[list[Amendment]] = []
    for event in events:
        if event["kind"] == AMENDMENT:
            one = Amendment.of(event)
            before.append(states[-1])
            left = [known for known in states[-1] if one.is_rewind or known.from_step <= one.from_step]
            states.append([*left, one])
        elif event["kind"] == UNDO and before:
            states.append(before.pop())
    return states


def active_amendments(events: Iterable[Mapping[str, Any]]) -> list[Amendment]:
    """Return the amendments in force, in the order in which they apply."""
    return amendment_states(events)[-1]


def is_applied(amendment: Amendment, events: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a start has applied an amendment, or a running job has agreed to, according to the events."""
    made = next(
        i
        for i, event in enumerate(events)
        if event["kind"] == AMENDMENT and event["number"] == amendment.number
    )
    if any(event["kind"] == SWITCH and event["number"] == amendment.number for event in events):
        return True
    if amendment.is_rewind:
        return any(event["kind"] == "start" for event in events[made:])
    return any(event["kind"] == "plan" and event["plan"] == amendment.plan for event in events)


def abandoned_checkpoints(events: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of checkpoints of steps that an amendment in force abandoned."""
    active = {one.number for one in active_amendments(events)}
    steps: dict[str, int] = {}
    found: set[str] = set()
    for event in events:
        if event["kind"] == "checkpoint":
            steps[event["name"]] = event["step"]
            found.discard(event["name"])
        elif event["kind"] == AMENDMENT and event["number"] in active:
            found |= {name for name, step in steps.items() if step > event["resume_from"]}
    return found


def bind_amendment(
    run: str | os.PathLike[str],
    fields: Mapping[str, Any],
    *,
    message: str = "",
    author: str = "",
    known: Sequence[Amendment] | None = None,
) -> Amendment:
    """Record an amendment durably; the next start applies it.

    Args:
        run: the run directory.
        fields: from_step, resume_from, parent, plan, manifest, skip, weights and excluded, as in `Amendment`.
        message: why.
        author: who; by default the name of the user of this process.
        known: amendments in force when the plan was made; None: not compared.

    Raises:
        StateError: other amendments are in force by now.
        IntegrityError: the ledger was truncated or damaged.
        StoreError: the ledger cannot be written.
    """
    with Ledger(Path(run), writing=True) as ledger:
        Merge(ledger)
        if known is not None and active_amendments(ledger.event_documents()) != list(known):
            raise StateError(
                f"{run}: another process has amended the run, or undone an amendment, in the meantime; run the "
                "command again"
            )
        number = sum(event["kind"] == AMENDMENT for event in ledger.event_documents())
        event = {"kind": AMENDMENT, **_author_fields(ledger, message, author), "number": number, **fields}
        ledger.add_event(event)
        ledger.commit()
    return Amendment.of(event)


def bind_switches(run: str | os.PathLike[str], step: int, known: Collection[int]) -> list[Amendment]:
    """Record durably which amendments the job that trains in a run applies, and return the amendments in force.

    An amendment whose first step is at most `step` can no longer be undone. If the job does not know it and has read
    that step, it is undone.

    The job does not read the samples of `step` yet, and its plan has the amendments with the numbers `known`.
    """
    with Ledger(Path(run), writing=True) as ledger:
        events = ledger.event_documents()
        while active := active_amendments(events):
            due = [one for one in active if one.from_step <= step and not is_applied(one, events)]
            if not due:
                break
            event: dict[str, Any] = {"kind": SWITCH, "step": ledger.next_step, "number": due[0].number}
            if due[0].from_step < step and due[0].number not in known:
                message = f"recorded after step {due[0].from_step} was read"
                event = {
                    "kind": UNDO,
                    **_author_fields(ledger, message, "the running job"),
                    "number": active[-1].number,
                }
            ledger.add_event(event)
            events.append(event)
        ledger.commit()
    return active


def undo_amendment(run: str | os.PathLike[str], *, message: str = "", author: str = "") -> Amendment:
    """Take back the newest amendment in force, and return it.

    Raises:
        StateError: there is none, or a start has applied it.
    """
    with Ledger(Path(run), writing=True) as ledger:
        Merge(ledger)
        events = ledger.event_documents()
        active = active_amendments(events)
        if not active:
            raise StateError(f"{run}: no amendment is in force, so there is none to undo")
        newest = active[-1]
        if is_applied(newest, events):
            raise StateError(
                f"{run}: a start or the running job has applied amendment {newest.number} ({newest}), so it cannot be "
                "undone; amend the run from a later step on"
            )
        ledger.add_event({"kind": UNDO, **_author_fields(ledger, message, author), "number": newest.number})
        ledger.commit()
    return newest


def _author_fields(ledger: Ledger, message: str, author: str) -> dict[str, Any]:
    return {
        "step": ledger.next_step,
        "message": message,
        "author": author or _user(),
        "time": time.time_ns(),
    }


def _user() -> str:
    """Return the name of the user of this process, or its number if it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


# ---- the head in a checkpoint

MANY_PENDING: Final = 1 << 10
"""Number of recorded steps without all cells from which a checkpoint warns: a rank's journal does not arrive."""

KEEP_BYTES: Final = 1 << 24
"""Bytes of merged journals that are kept for looking up single cells. The oldest files beyond it are removed."""


def ledger_head(run: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """Merge the journals durably into the ledger and return its head, to be stored in a checkpoint.

    One process calls it at a checkpoint after `step` steps, once all ranks have received those steps. Merged and
    finished journal files beyond `KEEP_BYTES` are removed.

    Returns:
        ``{"steps": {"first", "size", "root"}, "events": {"size", "root"}}``, roots in hex. If `step` is given, the
        tree of steps is cut to the steps before it.

    Raises:
        IntegrityError: the ledger was truncated or damaged.
        StoreError: the ledger cannot be written.
    """
    with Ledger(Path(run), writing=True) as ledger:
        ledger.head_step = step
        merge = Merge(ledger)
        _bind_losses(ledger)
        head = ledger.head(step)
        ledger.commit()
        _prune(merge)
    waiting = merge.pending_steps()
    if len(waiting) > MANY_PENDING:
        _log.warning(
            "%s: %d steps from step %d on wait for cells of other ranks, and ledger/state.json grows with each; do all "
            "ranks write to this run directory?", run, len(waiting), waiting[0],
        )  # fmt: skip
    return head


def _prune(merge: Merge) -> None:
    """Remove merged journal files that have a successor and no writer, the oldest first."""
    newest: dict[int, str] = {}
    for source in merge.sources:
        newest[source.header.rank] = max(newest.get(source.header.rank, ""), source.name)
    excess = sum(source.end for source in merge.sources) - KEEP_BYTES
    for source in sorted(merge.sources, key=lambda one: one.header.started):
        if excess <= 0:
            return
        if source.name != newest[source.header.rank] and _remove(source):
            excess -= source.end


def _remove(source: Source) -> bool:
    path = source.file.path
    with explained(f"remove {path}", writing=True), contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_size == source.end:
                os.unlink(path)
                return True
        except BlockingIOError:
            pass  # the writer is alive
        finally:
            os.close(descriptor)
    return False
