"""An in-memory store, the model that real stores are compared with. For tests only."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

from shardkit.errors import NotFoundError
from shardkit.stores.store import DirectStore, ObjectStat, Stage, check_name, check_prefix


class MemoryStore(DirectStore):
    """Objects in a dict; implements `shardkit.stores.store.Store`. `head` returns digests, as object stores do."""

    _read_only = False

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return "memory"

    def get(self, name: str, *, max_bytes: int) -> bytes:
        data = self._find(name)
        self._check_size(name, len(data), max_bytes)
        return data

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        data = self._find(name)
        self._check_range(name, offset, length, len(data))
        return data[offset : offset + length]

    def put_new(self, name: str, data: bytes) -> bool:
        check_name(name)
        with self._lock:
            if name in self.objects:
                return False
            self.objects[name] = bytes(data)
            return True

    def replace(self, name: str, data: bytes) -> None:
        check_name(name)
        self.objects[name] = bytes(data)

    def head(self, name: str) -> ObjectStat | None:
        check_name(name)
        data = self.objects.get(name)
        return None if data is None else ObjectStat(len(data), hashlib.sha256(data).hexdigest())

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        check_prefix(prefix)
        yield from sorted(name for name in self.objects if name.startswith(prefix) and name > after)

    def delete(self, name: str) -> None:
        check_name(name)
        self.objects.pop(name, None)

    @contextlib.contextmanager
    def stage(self, suffix: str = "") -> Iterator[MemoryStage]:
        yield MemoryStage(self)

    def local_path(self, name: str) -> Path | None:
        check_name(name)
        return None

    def _find(self, name: str) -> bytes:
        check_name(name)
        if name not in self.objects:
            raise NotFoundError(f"{name} is not in memory")
        return self.objects[name]


class MemoryStage(Stage):
    """A stage that collects the bytes in memory."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__("memory")
        self._store = store
        self._data = bytearray()

    def _append(self, data: memoryview) -> int:
        self._data += data
        return len(data)

    def publish(self, name: str, *, replace: bool = False) -> bool:
        if replace:
            self._store.replace(name, bytes(self._data))
            return True
        return self._store.put_new(name, bytes(self._data))
