"""Writing behind: waited for, and no error is lost, neither of a write nor of a sync."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.dataset import shard_writing
from shardkit.dataset.shard_writing import WriteBehind
from shardkit.errors import StoreError, StoreFullError
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import substituted
from tests.faults.faulty_operations import FaultyOperations


class Sink:
    def __init__(self, fails_at: int = -1) -> None:
        self.data = bytearray()
        self.calls = 0
        self.fails_at = fails_at
        self.threads: set[str] = set()

    def write(self, data: bytes | memoryview, /) -> int:
        self.threads.add(threading.current_thread().name)
        self.calls += 1
        if self.calls == self.fails_at:
            raise StoreError("the disk is gone")
        taken = max(1, len(data) // 2)  # may take less than it is given
        self.data += data[:taken]
        return taken


@pytest.mark.parametrize("is_small", [False, True])
def test_what_is_done_beside_is_waited_for_and_fails_where_it_is_asked_for(is_small: bool) -> None:
    def fails() -> int:
        raise StoreError("no room for the index")

    with WriteBehind(Sink(), lambda: None, is_small=is_small) as behind:
        good, bad = behind.beside(lambda: 7), behind.beside(fails)
        behind.write(b"x")
        behind.flush()
        assert good() == 7
        with pytest.raises(StoreError, match="the index"):
            bad()


@pytest.mark.parametrize("what", ["write", "sync"])
def test_no_error_is_lost(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(shard_writing, "_SYNC_BYTES", 100)
    monkeypatch.setattr(shard_writing, "_WRITTEN_TOGETHER", 1)
    failed: list[int] = []

    def sync() -> None:
        if what == "sync" and not failed:
            failed.append(1)  # the kernel reports it once
            raise StoreError("the disk is gone")

    def write() -> None:
        with WriteBehind(Sink(3 if what == "write" else -1), sync, is_small=False) as behind:
            for _ in range(10):
                behind.write(b"x" * 60)
            behind.flush()

    with pytest.raises(StoreError, match="gone"):
        write()


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_shard_of_a_failing_disk_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(shard_writing, "_SMALL_BYTES", 0)
    monkeypatch.setattr(shard_writing, "_SYNC_BYTES", 10_000)
    monkeypatch.setattr(
        shard_writing, "_WRITTEN_TOGETHER", 1
    )  # so that the second call is one of the shard's
    Repository.create(tmp_path)
    operations = FaultyOperations(28, 2, calls=[call])

    def create() -> None:
        with shardkit.create(tmp_path, {"n": "int32[500]"}, block_size="4KiB") as writer:
            for n in range(200):
                writer.add({"n": np.full(500, n, np.int32)})

    with pytest.raises(StoreFullError), substituted(operations):
        create()
    assert operations.failed == [call]
    assert Repository.open(tmp_path).head().n == 0
    names = [path.name for path in (tmp_path / "objects").rglob("*.tar")]
    assert names == []
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == []
