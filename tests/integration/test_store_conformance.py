"""Every store does what the protocol says."""

from __future__ import annotations

from pathlib import Path

from shardkit.stores.local import LocalStore
from shardkit.stores.store import Store
from shardkit.testing.memory_store import MemoryStore
from shardkit.testing.store_conformance import StoreConformance


class TestLocalStore(StoreConformance):
    def new_store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "not" / "yet" / "there")


class TestMemoryStore(StoreConformance):
    def new_store(self, tmp_path: Path) -> Store:
        return MemoryStore()

    def reopened(self, store: Store) -> Store:
        return store
