"""Digests of source files: each file is hashed once, by its task or by a thread beside the passes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit_tools
from shardkit.dataset.about import unpack_sources
from shardkit.errors import CommitConflict, SourceError
from shardkit.repository.repository import Repository
from shardkit_tools.building import build_run, engines, source_digests
from shardkit_tools.importers import numpy_arrays
from shardkit_tools.importers.protocol import SourceFile

SETTINGS: dict[str, Any] = {"shard_size": "64KiB", "block_size": "16KiB"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sources are cut into many tasks, which share their files."""
    monkeypatch.setattr(numpy_arrays, "_TASK_BYTES", 40_000)
    monkeypatch.setattr(numpy_arrays, "PIECE_BYTES", 9_000)
    monkeypatch.setattr(engines, "SMALL_BYTES", 0)


def arrays(root: Path) -> str:
    root.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(5)
    np.save(root / "tokens.npy", random.integers(0, 2**15, (200, 256)).astype("<i4"))
    np.save(root / "few.npy", random.random((200, 8)))
    np.save(root / "label.npy", np.arange(200) % 3)
    return str(root)


def test_digests_of_a_stopped_build_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = arrays(tmp_path / "source")
    root = tmp_path / "root"

    def refuse(*_: object, **__: object) -> None:
        raise CommitConflict("another commit came first")

    with monkeypatch.context() as patch:
        patch.setattr(build_run, "commit_version", refuse)
        with pytest.raises(CommitConflict):
            shardkit_tools.build(source, root, **SETTINGS)

    def fail(*_: object) -> None:
        raise AssertionError("hashed again")

    monkeypatch.setattr(source_digests, "digest_file", fail)
    result = shardkit_tools.build(source, root, **SETTINGS)
    assert result.manifest is not None
    assert result.manifest.sources is not None
    listed = unpack_sources(Repository.open(root).get_object(result.manifest.sources, "sources"))
    assert {file.name: file.sha256 for file in listed.files} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(source).iterdir()
    }


def test_a_file_that_changes_while_it_is_hashed_stops_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = arrays(tmp_path / "source")
    real = source_digests.digest_file

    def change(file: SourceFile, *rest: Any) -> Any:
        found = real(file, *rest)
        os.utime(file.path, ns=(1, 1))
        return found

    monkeypatch.setattr(source_digests, "digest_file", change)
    with pytest.raises(SourceError, match="changed while it was read"):
        shardkit_tools.build(source, tmp_path / "root", **SETTINGS)
    assert Repository.open(tmp_path / "root").head().n == 0


def test_every_file_is_hashed_once_and_none_by_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = arrays(tmp_path / "source")
    hashed: list[str] = []
    real = source_digests.digest_file

    def count(file: SourceFile, *rest: Any) -> Any:
        hashed.append(file.name)
        return real(file, *rest)

    monkeypatch.setattr(source_digests, "digest_file", count)
    shardkit_tools.build(source, tmp_path / "dry", **SETTINGS, dry_run=True)
    assert hashed == []
    for task_bytes in (40_000, 10**9):  # several tasks per file, and one
        monkeypatch.setattr(numpy_arrays, "_TASK_BYTES", task_bytes)
        shardkit_tools.build(source, tmp_path / str(task_bytes), **SETTINGS)
        assert sorted(hashed) == ["few.npy", "label.npy", "tokens.npy"]
        hashed.clear()


@pytest.mark.parametrize(("compression", "processes"), [("none", 0), ("zstd", 2)])
def test_no_process_is_started_for_what_threads_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, processes: int
) -> None:
    monkeypatch.setattr(engines, "SMALL_BYTES", 5_000_000)
    monkeypatch.setattr(numpy_arrays, "_TASK_BYTES", 1_000_000)
    np.save(tmp_path / "a.npy", np.zeros((1000, 1024), np.int32))
    started = []
    real = engines.LocalEngine._free

    def free(self: engines.LocalEngine) -> Any:
        one = real(self)
        started.append(one.process.pid)
        return one

    monkeypatch.setattr(engines.LocalEngine, "_free", free)
    if compression == "zstd":
        monkeypatch.setattr(engines, "SMALL_BYTES", 100_000)
    named: dict[str, Any] = {"shard_size": "1MiB", "format": "arrow", "compression": compression}
    result = shardkit_tools.build(tmp_path / "a.npy", tmp_path / "root", **named, jobs=2)
    assert result.shards == 4
    assert len(set(started)) == processes
