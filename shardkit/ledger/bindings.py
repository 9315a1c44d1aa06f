"""Bind claims to the ledger: checkpoint names, settings and lane owners. Return the heads stored in checkpoints.

A process records the event of a claim durably before it makes the claim (SPEC.md, "Events").
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardkit.errors import IntegrityError
from shardkit.ledger.amendments import Amendment, abandoned_checkpoints
from shardkit.ledger.ledger import Ledger
from shardkit.ledger.losses import bind_losses
from shardkit.ledger.merging import Merge, Source, merge_journals
from shardkit.plan import Plan
from shardkit.plan.mixers import mixer_text
from shardkit.stores.file_operations import explained

CHECKPOINT: Final = "checkpoint"
"""Kind of the event recorded before the ref of a checkpoint is written."""
CONFIGURATION: Final = "configuration"
"""Kind of the event of a start with changed settings."""
DEALT: Final = "dealt"
"""Kind of the event of a start whose lanes were distributed by cached data."""


def bind_checkpoint(
    run: str | os.PathLike[str], *, name: str, checkpoint: str, step: int | None = None
) -> None:
    """Record durably which checkpoint a name refers to.

    Call it after the bytes of the checkpoint are written and before its ref. The journals are merged up to `step`;
    later additions about earlier steps are rejected by the audit.

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
        Merge(ledger, step)
        bind_losses(ledger)
        event: dict[str, Any] = {
            "kind": CHECKPOINT, "step": ledger.next_step if step is None else step, "name": name,
            "checkpoint": checkpoint, "merged": ledger.next_step,
        }  # fmt: skip
        known = _last(ledger, CHECKPOINT, name=name)
        if known is not None:
            event["replaces"] = known["checkpoint"]
        is_abandoned = name in abandoned_checkpoints(ledger.event_documents())
        if known is None or known["checkpoint"] != checkpoint or is_abandoned:
            ledger.add_event(event)
        ledger.commit()


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
        known = _last(ledger, CONFIGURATION)
        if known is not None and known.get("run") != record:
            raise IntegrityError(
                f"{run}/run.json was changed: its digest is {record}, and the ledger records {known.get('run')}; "
                "restore it from a copy"
            )
        if known is not None and known.get("settings") == text:
            return
        changes = [[key, json.dumps(old), json.dumps(new)] for key, old, new in changed]
        ledger.add_event(
            {"kind": CONFIGURATION, "step": ledger.next_step, "run": record, "settings": text,
             "changed": changes, "allowed": sorted(allowed)}
        )  # fmt: skip
        ledger.commit()


def bound_settings(run: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the last recorded settings, or None if no trainer recorded any."""
    if not (Path(run) / "ledger").is_dir():
        return None
    known = _last(Ledger(Path(run)), CONFIGURATION)
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
        known = _last(ledger, DEALT, nodes=list(nodes), lanes=len(owners))
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
    if not (Path(run) / "ledger").is_dir():
        return None
    known = _last(Ledger(Path(run)), DEALT, nodes=list(nodes), lanes=lanes)
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


def configured_plans(
    make: Callable[..., Plan],
    data: Mapping[str, Any],
    recorded: Mapping[str, Any],
    amendments: Sequence[Amendment] = (),
    amend: Callable[[Plan, Amendment], Plan] | None = None,
) -> list[Plan]:
    """Return the plans of a run, in the order of the steps from which they apply.

    Args:
        make: `Dataset.plan` of the dataset.
        data: the data section of a configuration, which asks for an initial plan and for stages.
        recorded: settings of the initial plan that the ledger recorded.
        amendments: amendments in force; at the same step they follow the stage.
        amend: applies an amendment to a plan.
    """
    chosen = {name: data.get(name) for name in ("lanes", "weights", "window_blocks", "cost", "balance")}
    settings = {name: recorded[name] for name in ("lanes", "window_blocks") if recorded.get(name)}
    settings |= {name: value for name, value in chosen.items() if value}
    plans = [make(global_batch=data["global_batch"], seed=data.get("seed", 0), **settings)]
    if data.get("mixer"):
        every = data["mixer_every"]
        plans = [plans[0].mixed(mixer_text(data["mixer"], every, data.get("mixer_arguments") or {}), every)]
    left = [one for one in amendments if not one.is_rewind]
    for stage in data.get("stages") or ():
        change = {name: stage[name] for name in ("from_step", "global_batch", "weights") if stage.get(name)}
        while amend is not None and left and left[0].from_step < change.get("from_step", 0):
            plans.append(amend(plans[-1], left.pop(0)))
        plans.append(plans[-1].amend(**change))
    while amend is not None and left:
        plans.append(amend(plans[-1], left.pop(0)))
    return plans


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


def _last(ledger: Ledger, kind: str, **values: object) -> dict[str, Any] | None:
    event: dict[str, Any]
    for event in reversed(ledger.event_documents()):
        if event.get("kind") == kind and all(event.get(name) == value for name, value in values.items()):
            return event
    return None


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
        merge = Merge(ledger, step)
        bind_losses(ledger)
        head = ledger.head(step)
        ledger.commit()
        _prune(merge)
    return head


def _prune(merge: Merge) -> None:
    """Remove merged journal files that have a successor and no writer, the oldest first."""
    newest: dict[int, str] = {}
    for source in merge.sources:
        newest[source.header.rank] = max(newest.get(source.header.rank, ""), source.name)
    excess = sum(source.settled[0] for source in merge.sources) - KEEP_BYTES
    for source in sorted(merge.sources, key=lambda one: one.header.started):
        if excess <= 0:
            return
        if source.name != newest[source.header.rank] and _remove(source):
            excess -= source.settled[0]


def _remove(source: Source) -> bool:
    path = source.file.path
    with explained(f"remove {path}", writing=True), contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_size == source.settled[0]:
                os.unlink(path)
                return True
        except BlockingIOError:
            pass  # the writer is alive
        finally:
            os.close(descriptor)
    return False
