"""Checkpoints, signed statements and the trainer's logs against the ledger; what its events say."""

from __future__ import annotations

from typing import Any

from shardkit.audit.result import Audit
from shardkit.audit.run_record import RunRecord
from shardkit.ledger import MASKED, SUBSTITUTED
from shardkit.ledger.bindings import CHECKPOINT, CONFIGURATION

__all__ = ["check_checkpoints", "check_end", "check_statement", "explain_events"]


def check_checkpoints(record: RunRecord, audit: Audit) -> None:
    """Every checkpoint is of this run, and some branch of the ledger once had its head."""
    known = {(one["manifest"], one["plan"]) for one in record.plans}
    for one in record.checkpoints:
        fits: bool | None = None
        if known and one.manifest and one.plan and (one.manifest, one.plan) not in known:
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


def explain_events(record: RunRecord) -> None:
    """Deviations with their reasons; what else happened, as notes."""
    seen: set[tuple[object, ...]] = set()
    for event in record.events:
        kind, where = event.get("kind"), f"step {event.get('step')}"
        if kind in (SUBSTITUTED, MASKED):
            place = (kind, event.get("step"), event.get("lane"), event.get("slot"))
            if place in seen:  # recorded again by a restart
                continue
            seen.add(place)
            done = f"replaced by {event.get('by')}" if kind == SUBSTITUTED else "masked"
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
        elif kind not in ("plan", "assignment", "start", CHECKPOINT, CONFIGURATION):
            details = {name: value for name, value in event.items() if name not in ("kind", "step")}
            record.add(
                "note", str(kind), where, ", ".join(f"{name} {value}" for name, value in details.items())
            )
