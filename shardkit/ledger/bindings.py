"""Claims that a ledger binds: names of checkpoints, run.json, dealt lanes; and the heads that checkpoints hold.

The process that makes a claim records its event, durably, before it makes the claim (SPEC.md, "Bindings").
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
from shardkit.ledger.ledger import Ledger
from shardkit.ledger.merging import Merge, Source, merge_journals
from shardkit.plan import Plan
from shardkit.stores.file_operations import explained

CHECKPOINT: Final = "checkpoint"
"""Kind of the event that precedes the ref of a checkpoint."""
CONFIGURATION: Final = "configuration"
"""Kind of the event of a start with new settings."""
DEALT: Final = "dealt"
"""Kind of the event of a start whose lanes were dealt by where data is cached."""


def bind_checkpoint(
    run: str | os.PathLike[str], *, name: str, checkpoint: str, step: int | None = None
) -> None:
    """Record, durably, which checkpoint a name will have. Call it when its bytes are written, before its ref is.

    The journals are merged up to `step`: from here on, nothing can be added about the steps before it.

    Args:
        run: the run directory.
        name: name of the checkpoint.
        checkpoint: "sha256:…" of its manifest, which names every tensor object by digest.
        step: number of steps that the run has taken; by default the number of steps in the ledger.

    Raises:
        IntegrityError: the ledger was cut or damaged.
        StoreError: the ledger cannot be written.
    """
    with Ledger(Path(run), writing=True) as ledger:
        Merge(ledger, step)
        event: dict[str, Any] = {
            "kind": CHECKPOINT, "step": ledger.next_step if step is None else step, "name": name,
            "checkpoint": checkpoint, "merged": ledger.next_step,
        }  # fmt: skip
        known = _last(ledger, CHECKPOINT, name=name)
        if known is not None:
            event["replaces"] = known["checkpoint"]
        if known is None or known["checkpoint"] != checkpoint:
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
    """Record, durably, the settings that the run continues with, unless they are those recorded last.

    Args:
        run: the run directory.
        record: "sha256:…" of run.json.
        settings: the whole configuration, as in run.json.
        changed: (key, old, new) of the settings that differ from those before.
        allowed: keys among them that change the data or the model, and were allowed to.

    Raises:
        IntegrityError: run.json is not the one that was recorded, or the ledger was cut or damaged.
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
    """The settings that were recorded last; None if there are none (runs of other trainers)."""
    if not (Path(run) / "ledger").is_dir():
        return None
    known = _last(Ledger(Path(run)), CONFIGURATION)
    return None if known is None else dict(json.loads(known["settings"]))


def bind_assignment(run: str | os.PathLike[str], *, owners: Sequence[int], nodes: Sequence[str]) -> None:
    """Record, durably, which rank begins with which lanes, unless `bound_assignment` returns the same.

    Args:
        run: the run directory.
        owners: rank of each lane.
        nodes: node of each rank.

    Raises:
        IntegrityError: the ledger was cut or damaged.
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
    """The owners of lanes that were recorded last for these ranks on these nodes; None if there are none."""
    if not (Path(run) / "ledger").is_dir():
        return None
    known = _last(Ledger(Path(run)), DEALT, nodes=list(nodes), lanes=lanes)
    return None if known is None else tuple(known["owners"])


def recorded_plan(run: str | os.PathLike[str], digest: str) -> dict[str, Any] | None:
    """The resolved settings of the plan that a run began with; None if it is not recorded.

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
    make: Callable[..., Plan], data: Mapping[str, Any], recorded: Mapping[str, Any]
) -> list[Plan]:
    """The plans of the data section of a configuration: the one that a run begins with, then each stage's."""
    chosen = {name: data.get(name) for name in ("lanes", "weights", "window_blocks", "cost", "balance")}
    settings = {name: recorded[name] for name in ("lanes", "window_blocks") if recorded.get(name)}
    settings |= {name: value for name, value in chosen.items() if value}
    plans = [make(global_batch=data["global_batch"], seed=data.get("seed", 0), **settings)]
    for stage in data.get("stages") or ():
        change = {name: stage[name] for name in ("from_step", "global_batch", "weights") if stage.get(name)}
        plans.append(plans[-1].amend(**change))
    return plans


def setting_differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(section.key, old, new) of every setting that differs; None for a missing key."""
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
"""Size of merged journals that stay, so that single cells can be looked up. Beyond it, the oldest are removed."""


def ledger_head(run: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """Merge the journals into the ledger, durably, and return its heads, to be stored in a checkpoint.

    One process calls it at a checkpoint after `step` steps, when all ranks have been handed those steps. Journal files
    that are merged and will not be written again are removed beyond `KEEP_BYTES`.

    Returns:
        ``{"steps": {"first", "size", "root"}, "events": {"size", "root"}}``, roots in hex; only the steps before `step`
        if it is given.

    Raises:
        IntegrityError: the ledger was cut or damaged.
        StoreError: the ledger cannot be written.
    """
    with Ledger(Path(run), writing=True) as ledger:
        merge = Merge(ledger, step)
        head = ledger.head(step)
        ledger.commit()
        _prune(merge)
    return head


def _prune(merge: Merge) -> None:
    """Remove journal files that are merged, have a successor, and have no writer; the oldest first."""
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
            pass  # still written to
        finally:
            os.close(descriptor)
    return False
