"""Further stores that hold the newest checkpoints too (SPEC.md §4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shardkit.errors import ShardkitError
from shardkit.stores.store import Store
from shardkit.stores.urls import open_store
from shardkit.torch import checkpoint_names, copy_checkpoint, prune_checkpoints

__all__ = ["Replicas"]


class Replicas:
    """Further stores that hold the newest checkpoints too. One that cannot be written costs an event, not the run."""

    def __init__(self, urls: Sequence[str], event: Callable[..., None]):
        self.stores = [open_store(url) for url in urls]
        self._event = event

    def copy(self, source: Store, name: str, keep: int) -> None:
        """Bring every replica up to checkpoint ``name``."""
        for store in self.stores:
            with self._told(store, name=name):
                written = copy_checkpoint(source, store, name)
                if keep:
                    prune_checkpoints(store, keep)
                self._event("replica", name=name, store=store.url, new_bytes=written)

    def names(self) -> list[list[str]]:
        """The checkpoints of each replica; none of one that does not answer."""
        found: list[list[str]] = [[] for _ in self.stores]
        for store, names in zip(self.stores, found, strict=True):
            with self._told(store):
                names += checkpoint_names(store)
        return found

    @contextmanager
    def _told(self, store: Store, **details: str) -> Iterator[None]:
        try:
            yield
        except (ShardkitError, OSError) as error:
            self._event("replica-failed", store=store.url, error=str(error), **details)
