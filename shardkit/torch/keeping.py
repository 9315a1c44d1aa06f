"""Checkpoints in several stores: verified copies, and forgetting old ones (the trainer's SPEC.md §4)."""

from __future__ import annotations

import json
import os

from shardkit.errors import ConfigurationError, ShardkitError
from shardkit.formats.canonical_json import parse_digest
from shardkit.stores.store import Store, object_name

from .checkpoint_format import (
    REF_BYTES,
    as_store,
    checkpoint_names,
    get_verified,
    read_checkpoint_manifest,
    ref_name,
)

__all__ = ["copy_checkpoint", "prune_checkpoints"]


def _objects(store: Store, name: str) -> dict[tuple[str, str], int]:
    """{(SHA-256, extension): bytes} of a checkpoint's objects in the order in which they are written."""
    manifest = read_checkpoint_manifest(store, name)
    ref = json.loads(store.get(ref_name(name), max_bytes=REF_BYTES))
    found = {
        (str(extent[0]), "tensor"): int(extent[1])
        for tensor in manifest["tensors"].values()
        for _, _, extents in tensor["chunks"]
        for extent in extents
    }
    return {**found, (parse_digest(ref["checkpoint"]), "checkpoint"): int(ref["size"])}


def copy_checkpoint(
    source: Store | str | os.PathLike[str], target: Store | str | os.PathLike[str], name: str
) -> int:
    """Copy a checkpoint, in the order in which it is written; what the target has already is not read.

    Every object is verified on the way: damage does not spread.

    Returns:
        Bytes of objects written.

    Raises:
        ShardkitError: the source is damaged, or the target cannot be written.
    """
    source, target = as_store(source), as_store(target)
    written = 0
    for (digest, extension), size in _objects(source, name).items():
        place = object_name(f"sha256:{digest}", extension)
        known = target.head(place)
        if known is None or known.size != size:
            target.replace(place, get_verified(source, digest, extension, size))
            written += size
    target.replace(ref_name(name), source.get(ref_name(name), max_bytes=REF_BYTES))
    return written


def prune_checkpoints(location: Store | str | os.PathLike[str], keep: int) -> None:
    """Forget all but the newest ``keep`` checkpoints (at least 1), then delete the objects that none names.

    Refs go first: a crash in between leaves garbage for the next call, never a ref without objects. Nobody may save
    into the run directory meanwhile: objects whose manifest is not written yet look like garbage.

    Raises:
        ConfigurationError: ``keep`` is less than 1.
    """
    if keep < 1:
        raise ConfigurationError(f"keep = {keep}: expected at least 1 checkpoint that stays")
    store = as_store(location)
    names = checkpoint_names(store)
    for name in names[:-keep]:
        store.delete(ref_name(name))
    reachable: set[str] = set()
    try:
        for name in names[-keep:]:
            reachable |= {object_name(f"sha256:{digest}", kind) for digest, kind in _objects(store, name)}
    except ShardkitError:
        return  # a damaged one may still be repaired from a copy: keep every object
    for found in list(store.list_after("objects/")):
        if found.endswith((".tensor", ".checkpoint")) and found not in reachable:
            store.delete(found)
