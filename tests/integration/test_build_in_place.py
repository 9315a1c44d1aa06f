"""Payloads that pass 2 reads from the source instead of from scratch: the same version, and no wrong sample."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
import shardkit_tools
from shardkit.dataset.about import unpack_sources
from shardkit.errors import CommitConflict, SourceError
from shardkit.storage import Repository
from shardkit_tools.building import build_run, engines, outcome, passes, source_digests
from shardkit_tools.building.outcome import fits_page_cache
from shardkit_tools.importers import folder, numpy_arrays, source_files
from shardkit_tools.importers.protocol import SourceFile

SETTINGS: dict[str, Any] = {"shard_size": "64KiB", "block_size": "16KiB"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sources are cut into many tasks; rows and files are worth being left where they are from 512 bytes on."""
    for module in (source_files, numpy_arrays):
        monkeypatch.setattr(module, "_TASK_BYTES", 40_000)
    monkeypatch.setattr(numpy_arrays, "_PIECE_BYTES", 9_000)
    monkeypatch.setattr(numpy_arrays, "_MIN_EXTENT_BYTES", 512)
    monkeypatch.setattr(folder, "_MIN_EXTENT_BYTES", 512)
    monkeypatch.setattr(engines, "SMALL_BYTES", 0)
    monkeypatch.setattr(source_digests, "_DIGESTED_BESIDE_BYTES", 0)


def arrays(root: Path, dtype: str = "<i4") -> str:
    """Rows of 1 KiB, rows that are too small, and labels."""
    root.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(5)
    np.save(root / "tokens.npy", random.integers(0, 2**15, (200, 256)).astype(dtype))
    np.save(root / "few.npy", random.random((200, 8)))
    np.save(root / "label.npy", np.arange(200) % 3)
    return str(root)


def files(root: Path) -> str:
    """Files of 64 to 4,000 bytes in two classes, each with a text."""
    for n in range(90):
        path = root / "ab"[n % 2] / f"{n:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((hashlib.sha256(str(n).encode()).digest() * 125)[: 64 + 44 * n])
        path.with_suffix(".txt").write_text(f"number {n}")
    return str(root)


SOURCES = {"arrays": arrays, "files": files}


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "available_memory", lambda: 0)


@pytest.mark.parametrize("format", ["arrow", "tar"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("kind", list(SOURCES))
def test_the_version_is_that_of_a_build_with_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, format: str, compression: str
) -> None:
    source = SOURCES[kind](tmp_path / "source")
    named = {**SETTINGS, "stratify": "label", "format": format, "compression": compression}
    in_place = shardkit_tools.build(source, tmp_path / "place", **named)
    two_jobs = shardkit_tools.build(source, tmp_path / "jobs", **named, jobs=2)
    in_order = shardkit_tools.build(source, tmp_path / "order", **named, shuffle=False)
    no_room(monkeypatch)
    spooled = shardkit_tools.build(source, tmp_path / "scratch", **named)
    assert in_place.scratch_bytes < spooled.scratch_bytes // 2
    assert spooled.scratch_bytes > in_place.source_bytes // 2
    assert in_place.manifest == two_jobs.manifest == spooled.manifest
    assert (
        in_order.manifest == shardkit_tools.build(source, tmp_path / "again", **named, shuffle=False).manifest
    )


def test_what_is_not_stored_as_it_stands_goes_through_scratch(tmp_path: Path) -> None:
    """Big-endian numbers, columns first, booleans: read, converted and encoded as before."""
    values = np.arange(40 * 300).reshape(40, 300)
    for name, array in {
        "big": values.astype(">i4"),
        "fortran": np.asfortranarray(values),
        "bool": (values % 3 == 0).repeat(2, axis=1),
    }.items():
        path = tmp_path / f"{name}.npy"
        np.save(path, array)
        result = shardkit_tools.build(path, tmp_path / name, **SETTINGS)
        assert result.scratch_bytes > array.nbytes
        ds = shardkit.open(tmp_path / name)
        for number in range(len(ds)):
            origin = ds.source(number)
            assert origin is not None
            assert (ds[number]["value"] == array[origin[1]]).all()


def test_rows_that_have_to_be_looked_at_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = arrays(tmp_path / "source")
    whole = shardkit_tools.build(source, tmp_path / "whole", **SETTINGS)
    monkeypatch.setattr(passes, "encode_columns", lambda *_: None)
    result = shardkit_tools.build(source, tmp_path / "root", **SETTINGS)
    assert result.manifest == whole.manifest
    assert result.scratch_bytes > whole.scratch_bytes


def stopped(monkeypatch: pytest.MonkeyPatch, where: str, source: str, root: Path) -> None:
    """A build that fails with everything done but one thing."""

    def refused(*_: object, **__: object) -> None:
        raise CommitConflict("another commit came first")

    with monkeypatch.context() as patch:
        patch.setattr(build_run, where, refused)
        with pytest.raises(CommitConflict):
            shardkit_tools.build(source, root, **SETTINGS)


@pytest.mark.parametrize("kind", list(SOURCES))
def test_a_build_is_gone_on_with_when_the_page_cache_has_shrunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = SOURCES[kind](tmp_path / "source")
    whole = shardkit_tools.build(source, tmp_path / "whole", **SETTINGS)
    root = tmp_path / "root"
    stopped(monkeypatch, "plan_version", source, root)
    (job,) = (root / "tmp").glob("build-*")
    records = sorted(job.glob("*.rows"))
    for path in records[::2]:
        path.unlink()
    no_room(monkeypatch)
    result = shardkit_tools.build(source, root, **SETTINGS)
    assert result.reused_tasks == len(records) - len(records[::2]) > 0
    assert result.manifest == whole.manifest


def test_digests_that_are_there_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = arrays(tmp_path / "source")
    root = tmp_path / "root"
    stopped(monkeypatch, "commit_version", source, root)

    def refused(*_: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(source_digests, "digest_file", refused)
    result = shardkit_tools.build(source, root, **SETTINGS)
    assert result.manifest is not None
    assert result.manifest.sources is not None
    listed = unpack_sources(Repository.open(root).get_object(result.manifest.sources, "sources"))
    assert {file.name: file.sha256 for file in listed.files} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(source).iterdir()
    }


@pytest.mark.parametrize("kind", list(SOURCES))
def test_a_source_that_changes_between_the_passes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One bit, with the size and the time of before; what is built next is what is there then."""
    source = SOURCES[kind](tmp_path / "source")
    path = Path(source) / {"arrays": "tokens.npy", "files": "a/080.bin"}[kind]
    real = build_run.BuildRun._write

    def meddling(*arguments: Any) -> Any:
        before = path.stat().st_mtime_ns
        data = bytearray(path.read_bytes())
        data[1000] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(before, before))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(build_run.BuildRun, "_write", meddling)
        with pytest.raises(SourceError, match=rf"{path.name}: changed.*nobody writes to"):
            shardkit_tools.build(source, tmp_path / "root", **SETTINGS)
    assert Repository.open(tmp_path / "root").head() is None
    result = shardkit_tools.build(source, tmp_path / "root", **SETTINGS)
    assert result.manifest == shardkit_tools.build(source, tmp_path / "clean", **SETTINGS).manifest


def test_a_file_that_cannot_be_hashed_stops_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = arrays(tmp_path / "source")
    real = source_digests.digest_file

    def meddling(file: SourceFile, *rest: Any) -> Any:
        found = real(file, *rest)
        os.utime(file.path, ns=(1, 1))
        return found

    monkeypatch.setattr(source_digests, "digest_file", meddling)
    with pytest.raises(SourceError, match="changed while it was read"):
        shardkit_tools.build(source, tmp_path / "root", **SETTINGS)
    assert Repository.open(tmp_path / "root").head() is None


@pytest.mark.parametrize(("compression", "processes"), [("none", 0), ("zstd", 2)])
def test_no_process_is_started_for_what_threads_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, processes: int
) -> None:
    monkeypatch.setattr(engines, "SMALL_BYTES", 100_000)
    monkeypatch.setattr(numpy_arrays, "_TASK_BYTES", 1_000_000)
    np.save(tmp_path / "a.npy", np.zeros((1000, 1024), np.int32))
    started = []
    real = engines.LocalEngine._free

    def free(self: engines.LocalEngine) -> Any:
        one = real(self)
        started.append(one.process.pid)
        return one

    monkeypatch.setattr(engines.LocalEngine, "_free", free)
    named: dict[str, Any] = {"shard_size": "1MiB", "format": "arrow", "compression": compression}
    result = shardkit_tools.build(tmp_path / "a.npy", tmp_path / "root", **named, jobs=2)
    assert result.shards == 4
    assert len(set(started)) == processes


def test_every_file_is_hashed_once_and_none_by_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = arrays(tmp_path / "source")
    hashed: list[str] = []
    real = source_digests.digest_file

    def counting(file: SourceFile, *rest: Any) -> Any:
        hashed.append(file.name)
        return real(file, *rest)

    monkeypatch.setattr(source_digests, "digest_file", counting)
    shardkit_tools.build(source, tmp_path / "root", **SETTINGS, dry_run=True)
    assert hashed == []
    for least in (0, 3000, 10**9):
        monkeypatch.setattr(source_digests, "_DIGESTED_BESIDE_BYTES", least)
        shardkit_tools.build(source, tmp_path / str(least), **SETTINGS)
        assert sorted(hashed) == ["few.npy", "label.npy", "tokens.npy"]
        hashed.clear()
    no_room(monkeypatch)
    shardkit_tools.build(source, tmp_path / "scratch", **SETTINGS)
    assert sorted(hashed) == ["few.npy", "label.npy", "tokens.npy"]


def test_what_the_page_cache_holds() -> None:
    local = [SourceFile(str(n), f"/data/{n}", 100, "1") for n in range(5)]
    assert fits_page_cache(local, 1000)
    assert not fits_page_cache(local, 999)
    assert not fits_page_cache([*local, SourceFile("x", "https://host/x", 1, "e")], 2000)
    assert not fits_page_cache(local[:1], 0)
