"""What checkpoints claim: read without torch, each byte checked against its digest (the trainer's SPEC.md §4)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardkit.errors import IntegrityError, ShardkitError
from shardkit.formats.canonical_json import dumps, loads
from shardkit.formats.digest import sha256_digest
from shardkit.storage import Store, object_name, open_store

__all__ = ["CheckpointRecord", "read_checkpoints"]

_MAX_REF: Final = 1 << 16
_MAX_CHECKPOINT: Final = 1 << 30


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint's claim: which steps it had consumed, and the ledger's head at that time."""

    name: str
    step: int
    manifest: str
    plan: str
    head: dict[str, Any] | None


def read_checkpoints(run: Path) -> tuple[list[CheckpointRecord], list[tuple[str, str]]]:
    """(checkpoints by step, (name, what is wrong) of those that cannot be read)."""
    store = open_store(run)
    found: list[CheckpointRecord] = []
    broken: list[tuple[str, str]] = []
    for name in sorted(store.list_after("checkpoints/")):
        try:
            found.append(_claim(store, name))
        except (ShardkitError, KeyError, TypeError, ValueError) as error:
            broken.append((name, f"cannot be read: {error}"))
    return sorted(found, key=lambda one: one.step), broken


def _claim(store: Store, name: str) -> CheckpointRecord:
    meta = _checkpoint_meta(store, name)
    head = meta.get("ledger")
    return CheckpointRecord(
        name.removeprefix("checkpoints/").removesuffix(".json"),
        int(meta["step"]),
        str(meta.get("manifest")),
        str(meta.get("plan")),
        head if isinstance(head, dict) else None,
    )


def _checkpoint_meta(store: Store, name: str) -> dict[str, Any]:
    """The meta of a checkpoint: its ref and its manifest are checked against their digests."""
    body = loads(store.get(name, max_bytes=_MAX_REF), _MAX_REF)
    claimed = body.pop("digest", None)
    if claimed != sha256_digest(dumps(body)):
        raise IntegrityError("the ref is damaged: its digest does not fit")
    size = int(body["size"])
    data = store.get(object_name(body["checkpoint"], "checkpoint"), max_bytes=min(size, _MAX_CHECKPOINT))
    if sha256_digest(data) != body["checkpoint"]:
        raise IntegrityError(f"its manifest is not the object {body['checkpoint']}")
    meta = loads(data, size)["meta"]
    decoded = _decoded(meta)
    return decoded if isinstance(decoded, dict) else {}


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
