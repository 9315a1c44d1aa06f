"""What checkpoints claim: read without torch, each byte checked against its digest (the trainer's SPEC.md §4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardkit.errors import IntegrityError, ShardkitError
from shardkit.formats.canonical_json import dumps, loads, sha256_digest
from shardkit.stores.store import Store, object_name
from shardkit.stores.urls import open_store

STEP_NAME: Final = re.compile(r"step-(\d{12})")
"""Name of a checkpoint that says its step."""
_MAX_REF: Final = 1 << 16
_MAX_CHECKPOINT: Final = 1 << 30


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint's claim: which steps it had consumed, and the ledger's head at that time.

    Attributes:
        name: of its ref; `inner_names` are those that the ref and the manifest say of themselves.
        digest: "sha256:…" of its manifest.
        step, manifest, plan, head: of its meta; a writer of one's own need not say them: the step is then that of its
            name or -1, the others are empty.
        says_step: whether its meta does.
        loader: state of the loader that it holds.
        objects: SHA-256 in hex → bytes, of its tensors.
    """

    name: str
    step: int
    manifest: str
    plan: str
    head: dict[str, Any] | None
    says_step: bool = True
    digest: str = ""
    inner_names: tuple[str, ...] = ()
    loader: Mapping[str, Any] = field(default_factory=dict)
    objects: Mapping[str, int] = field(default_factory=dict)


def read_checkpoints(run: Path) -> tuple[list[CheckpointRecord], list[tuple[str, str]]]:
    """(checkpoints by step, (name, what is wrong) of those that cannot be read)."""
    store = open_store(run)
    found: list[CheckpointRecord] = []
    broken: list[tuple[str, str]] = []
    for name in sorted(store.list_after("checkpoints/")):
        try:
            found.append(_claim(store, name))
        except (ShardkitError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            broken.append((name, f"cannot be read: {error}"))
    return sorted(found, key=lambda one: one.step), broken


def damaged_objects(run: Path, objects: Mapping[str, int], *, read: bool) -> dict[str, str]:
    """What is wrong with tensor objects, by SHA-256: gone, of another size, or (where they are read) other bytes."""
    store = open_store(run)
    found: dict[str, str] = {}
    for digest, size in objects.items():
        name = object_name(f"sha256:{digest}", "tensor")
        try:
            stat = store.head(name)
            if stat is None:
                found[digest] = "is missing"
            elif stat.size != size:
                found[digest] = f"has {stat.size} bytes, expected {size}"
            elif read and sha256_digest(store.get(name, max_bytes=size)) != f"sha256:{digest}":
                found[digest] = "holds other bytes than were written"
        except ShardkitError as error:
            found[digest] = f"cannot be read: {error}"
    return found


def _claim(store: Store, name: str) -> CheckpointRecord:
    ref, document = _read_checkpoint(store, name)
    meta = _decoded(document["meta"])
    head, loader = meta.get("ledger"), meta.get("loader")
    short = name.removeprefix("checkpoints/").removesuffix(".json")
    match = STEP_NAME.fullmatch(short)
    return CheckpointRecord(
        name=short,
        step=int(meta["step"]) if "step" in meta else int(match[1]) if match else -1,
        says_step="step" in meta,
        manifest=str(meta.get("manifest", "")),
        plan=str(meta.get("plan", "")),
        head=_checked_head(head) if isinstance(head, dict) else None,
        digest=str(ref["checkpoint"]),
        inner_names=(str(ref.get("name")), str(document.get("name"))),
        loader=loader if isinstance(loader, dict) else {},
        objects={
            str(digest): int(size)
            for tensor in document.get("tensors", {}).values()
            for _, _, extents in tensor["chunks"]
            for digest, size, _, _ in extents
        },
    )


def _checked_head(head: dict[str, Any]) -> dict[str, Any]:
    """The head with its parts in their types, whatever somebody has written there."""
    steps, events = head["steps"], head["events"]
    if min(steps["first"], steps["size"], events["size"]) < 0:
        raise ValueError("its head of the ledger has negative sizes")
    return {
        "steps": {"first": int(steps["first"]), "size": int(steps["size"]), "root": str(steps["root"])},
        "events": {"size": int(events["size"]), "root": str(events["root"])},
    }


def _read_checkpoint(store: Store, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ref, manifest), each checked against its digest."""
    body = loads(store.get(name, max_bytes=_MAX_REF), _MAX_REF)
    claimed = body.pop("digest", None)
    if claimed != sha256_digest(dumps(body)):
        raise IntegrityError("the ref is damaged: its digest does not fit")
    size = int(body["size"])
    data = store.get(object_name(body["checkpoint"], "checkpoint"), max_bytes=min(size, _MAX_CHECKPOINT))
    if sha256_digest(data) != body["checkpoint"]:
        raise IntegrityError(f"its manifest is not the object {body['checkpoint']}")
    return body, loads(data, size)


def _decoded(value: Any) -> Any:
    """A checkpoint's values spell their types out, as ``{"dict": [[key, value], …]}`` (the trainer's SPEC.md §4)."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, body),) = value.items()
    if kind == "dict":
        return {_decoded(name): _decoded(item) for name, item in body}
    if kind in ("list", "tuple"):
        return [_decoded(item) for item in body]
    return float.fromhex(body) if kind == "float" else value
