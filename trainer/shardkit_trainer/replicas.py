"""Checkpoints in several stores: verified copies, and forgetting old ones (SPEC.md §4)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from shardkit.errors import ShardkitError
from shardkit.formats.digest import parse_digest, sha256_digest
from shardkit.storage import Store, object_name, open_store
from shardkit.torch import checkpoint_names, read_checkpoint_manifest

__all__ = ["Replicas", "copy_checkpoint", "prune"]

REF_BYTES = 4096


def _objects(store: Store, name: str) -> tuple[str, dict[str, int]]:
    """The manifest's object of a checkpoint, and those of its tensors with their sizes."""
    manifest = read_checkpoint_manifest(store, name)
    ref = json.loads(store.get(f"checkpoints/{name}.json", max_bytes=REF_BYTES))
    sizes = {
        object_name(f"sha256:{extent[0]}", "tensor"): int(extent[1])
        for tensor in manifest["tensors"].values()
        for _, _, extents in tensor["chunks"]
        for extent in extents
    }
    return object_name(ref["checkpoint"], "checkpoint"), sizes


def copy_checkpoint(source: Store, target: Store, name: str) -> int:
    """Copy a checkpoint, in the order in which it is written; what the target has already is not read.

    Every object is verified on the way: damage does not spread.

    Returns:
        Bytes written.

    Raises:
        ShardkitError: the source is damaged, or the target cannot be written.
    """
    manifest, sizes = _objects(source, name)
    head = source.head(manifest)
    written = 0
    for found, size in (*sizes.items(), (manifest, head.size if head else 0)):
        known = target.head(found)
        if known is None or known.size != size:
            data = source.get(found, max_bytes=size)
            if parse_digest(sha256_digest(data)) not in found:
                raise ShardkitError(
                    f"checkpoint object {found} in {source.url} is damaged; it was not copied"
                )
            target.replace(found, data)
            written += size
    target.replace(f"checkpoints/{name}.json", source.get(f"checkpoints/{name}.json", max_bytes=REF_BYTES))
    return written


def prune(store: Store, keep: int) -> None:
    """Forget all but the newest ``keep`` checkpoints, then delete the objects that no checkpoint names.

    Refs go first: a crash in between leaves garbage for the next call, never a ref without objects.
    """
    names = checkpoint_names(store)
    for name in names[:-keep]:
        store.delete(f"checkpoints/{name}.json")
    reachable: set[str] = set()
    try:
        for name in names[-keep:]:
            manifest, sizes = _objects(store, name)
            reachable |= {manifest, *sizes}
    except ShardkitError:
        return  # a damaged one may still be repaired from a replica: keep every object
    for found in list(store.list_after("objects/")):
        if found.endswith((".tensor", ".checkpoint")) and found not in reachable:
            store.delete(found)


class Replicas:
    """Further stores that hold the newest checkpoints too. One that cannot be written costs an event, not the run."""

    def __init__(self, urls: Sequence[str], event: Callable[..., None]):
        self.stores = [open_store(url) for url in urls]
        self._event = event

    def copy(self, source: Store, name: str, keep: int) -> None:
        """Bring every replica up to checkpoint ``name``."""
        for store in self.stores:
            try:
                written = copy_checkpoint(source, store, name)
                if keep:
                    prune(store, keep)
                self._event("replica", name=name, store=store.url, new_bytes=written)
            except (ShardkitError, OSError) as error:
                self._event("replica-failed", name=name, store=store.url, error=str(error))

    def names(self) -> list[list[str]]:
        """The checkpoints of each replica; none of one that does not answer."""
        found: list[list[str]] = []
        for store in self.stores:
            try:
                found.append(checkpoint_names(store))
            except (ShardkitError, OSError) as error:
                found.append([])
                self._event("replica-failed", store=store.url, error=str(error))
        return found
