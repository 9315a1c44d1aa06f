"""What the run directory claims beside its steps, against the events that bind it: checkpoints and settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from shardkit.audit.checkpoint_records import STEP_NAME, CheckpointRecord, damaged_objects
from shardkit.audit.result import Audit
from shardkit.audit.run_record import RunRecord
from shardkit.formats.digest import sha256_digest
from shardkit.ledger import setting_differences
from shardkit.ledger.bindings import BINDINGS, CHECKPOINT, CONFIGURATION
from shardkit.ledger.ledger import read_file

__all__ = ["check_bound_checkpoints", "check_bound_settings", "check_tensors"]

_SHOWN: Final = 8
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
        record.add("note", "checkpoint", ", ".join(unbound[:_SHOWN]),
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
        for digest in bad[:_SHOWN]:
            record.add("violated", "checkpoint", one.name, f"tensor object {digest[:16]}… {damaged[digest]}")
        if len(bad) > _SHOWN:
            record.add(
                "violated", "checkpoint", one.name, f"{len(bad) - _SHOWN} more tensor objects are damaged"
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
        changed = setting_differences(_settings(events[0]), record.settings.get("configuration") or {})
        what = ", ".join(f"{key} is {json.dumps(new)}, the ledger records {json.dumps(old)}"
                         for key, old, new in changed[:_SHOWN])  # fmt: skip
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


def _settings(event: dict[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(str(event.get("settings")))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:19]}…" if len(text) > 24 else text
