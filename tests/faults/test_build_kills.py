"""A build is killed, interrupted, or runs out of disk: the same call goes on, and the version is the same."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import shardkit
import shardkit_tools
from shardkit.dataset.scratch import ScratchFolder
from shardkit.errors import CommitConflict, ShardkitError, StoreError, StoreFullError
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import substituted
from shardkit.stores.store import parse_object_name
from shardkit_tools.building import build_run, engines
from shardkit_tools.importers import source_files
from tests.drills import drill_cases, drill_count
from tests.faults.faulty_operations import FaultyOperations

SETTINGS: dict[str, Any] = {"stratify": "label", "shard_size": "64KiB", "block_size": "8KiB"}

BUILDER = """
import os, signal, sys
import shardkit_tools
from shardkit_tools.building import engines
from shardkit_tools.importers import source_files

SETTINGS = {"stratify": "label", "shard_size": "64KiB", "block_size": "8KiB"}
engines.SMALL_BYTES = 0
source_files._TASK_BYTES = 15_000

def tell(now):
    print(now.phase, now.reused, flush=True)
    if interrupt and now.phase == "write" and now.rows:
        os.killpg(os.getpgrp(), signal.SIGINT)

if __name__ == "__main__":
    mode, source, root = sys.argv[1:]
    interrupt = mode == "interrupt"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
    try:
        result = shardkit_tools.build(source, root, **SETTINGS, jobs=2, progress=tell)
    except KeyboardInterrupt as error:
        print(f"said: {error}", flush=True)
        sys.exit(130)
    print(f"id {result.manifest.id} {result.reused_tasks} {result.reused_shards}", flush=True)
"""


def folder(root: Path, files: int = 60) -> str:
    for n in range(files):
        path = root / "abc"[n % 3] / f"{n:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hashlib.sha256(str(n).encode()).digest() * (10 + n % 50))
    return str(root)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "_TASK_BYTES", 15_000)
    monkeypatch.setattr(engines, "SMALL_BYTES", 0)


def build(source: str, root: Path, **settings: Any) -> str:
    result = shardkit_tools.build(source, root, **SETTINGS, **settings)
    assert result.manifest is not None
    return result.manifest.id


def check_nothing_torn(root: Path) -> None:
    """Whatever has a final name is complete; a commit, if there is one, can be read to the last sample."""
    store = Repository.open(root, read_only=True).store
    for name in store.list_after("objects/"):
        digest, _ = parse_object_name(name)
        assert f"sha256:{hashlib.sha256((root / name).read_bytes()).hexdigest()}" == digest
    if Repository.open(root, read_only=True).head().n > 0:
        ds = shardkit.open(root)
        assert sum(len(ds[n]["blob"]) > 0 for n in range(len(ds))) == 60


def start(mode: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, arguments[0], mode, *arguments[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its process group can be killed without ours
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "builder.py"
    path.write_text(BUILDER)
    return str(path)


@pytest.mark.usefixtures("small")
@pytest.mark.drill
@pytest.mark.parametrize("whole_group", drill_cases([True, False], [1]))
def test_two_jobs_killed_at_random_moments_and_resumed(
    tmp_path: Path, script: str, whole_group: bool
) -> None:
    """SIGKILL from outside, to all processes or to the parent alone, whose workers then end by themselves."""
    source = folder(tmp_path / "source")
    expected = build(source, tmp_path / "whole")
    moments = random.Random(whole_group)
    killed = 0
    for turn in range(drill_count(20)):
        root = tmp_path / str(turn)
        with start("run", script, source, str(root)) as process:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
            if turn:  # the first one at once: one is killed however fast it is
                time.sleep(moments.random() * 0.8)
            if whole_group:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            killed += process.wait() == -signal.SIGKILL
        check_nothing_torn(root)
        with start("run", script, source, str(root)) as process:
            output, errors = process.communicate(timeout=120)
        assert f"id {expected}" in output, errors
        check_nothing_torn(root)
    assert killed


@pytest.mark.usefixtures("small")
def test_interrupt_leaves_a_state_to_go_on_from_and_says_so(tmp_path: Path, script: str) -> None:
    source = folder(tmp_path / "source")
    root = tmp_path / "root"
    with start("interrupt", script, source, str(root)) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "run the same command again to go on" in output
    assert Repository.open(root).head().n == 0
    check_nothing_torn(root)
    result = shardkit_tools.build(source, root, **SETTINGS, jobs=2)
    assert result.reused_tasks >= 5
    assert result.manifest is not None
    assert result.manifest.id == build(source, tmp_path / "whole")


def job_of_a_stopped_build(source: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job directory with everything finished but the commit."""

    def refused(*_: object, **__: object) -> None:
        raise CommitConflict("another commit came first")

    with monkeypatch.context() as patch:
        patch.setattr(build_run, "commit_version", refused)
        with pytest.raises(CommitConflict):
            build(source, root)
    (job,) = (path for path in (root / "tmp").iterdir() if path.name.startswith("build-"))
    return job


@pytest.mark.usefixtures("small")
def test_finished_tasks_and_shards_are_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(tmp_path / "source")

    job_of_a_stopped_build(source, tmp_path / "root", monkeypatch)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "root" / "objects").rglob("*.*")}
    result = shardkit_tools.build(source, tmp_path / "root", **SETTINGS)
    assert result.reused_shards == result.shards
    assert result.reused_tasks >= 5
    assert result.commit is not None
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "root" / "objects").rglob("*.*")}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
def test_any_change_may_fail_and_the_next_run_goes_on(tmp_path: Path, number: int, forever: bool) -> None:
    source = folder(tmp_path / "source")
    counting = FaultyOperations(number)
    with substituted(counting):
        expected = build(source, tmp_path / "whole")
    step = max(1, counting.num_calls // drill_count(100))
    for at in range(random.Random(number + forever).randrange(step), counting.num_calls, step):
        root = tmp_path / str(at)
        error: ShardkitError | None = None
        with substituted(FaultyOperations(number, at, forever=forever, torn=True)):
            try:
                build(source, root)
            except ShardkitError as caught:
                error = caught
        if error is not None and type(error) is not StoreError:
            assert isinstance(error, StoreFullError) == (number == errno.ENOSPC) or "commit" in error.kind
        if error is not None:
            assert str(tmp_path) in str(error)
            assert ";" in str(error), "says what to do next"
        if (root / "shardkit.json").exists():
            check_nothing_torn(root)
        assert build(source, root) == expected
        check_nothing_torn(root)


@pytest.mark.parametrize("where", ["root", "scratch"])
def test_a_full_disk_under_create(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.dataset.scratch.RUN_BYTES", 1000)
    writer = shardkit.create(tmp_path / "root", {"blob": "bytes"})
    full = FaultyOperations(errno.ENOSPC, 0 if where == "scratch" else 6, forever=True, torn=True)

    def fill() -> None:
        with writer:
            for n in range(50):
                writer.add({"blob": bytes(300 + n)}, key=f"k{n}")

    with substituted(full), pytest.raises(StoreFullError, match=r"no room is left.*make room"):
        fill()
    assert Repository.open(tmp_path / "root").head().n == 0
    check_nothing_torn(tmp_path / "root")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_scratch_of_an_earlier_boot_is_verified_before_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    source = folder(tmp_path / "source")
    root = tmp_path / "root"
    job = job_of_a_stopped_build(source, root, monkeypatch)
    if damage == "flip":
        ScratchFolder(str(job)).put_record("boot", b"another boot")
    else:
        (job / "boot").write_bytes(b"")  # as a power cut may leave it
    part = sorted(path for path in job.iterdir() if path.name.startswith("part-"))[1]
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "remove":
        part.unlink()
    else:
        part.write_bytes(data if damage == "flip" else data[:-1])
    for path in job.iterdir():
        if path.suffix == ".done":
            path.unlink()
    result = shardkit_tools.build(source, root, **SETTINGS)
    assert result.manifest is not None
    assert result.reused_tasks >= 4
    assert result.manifest.id == build(source, tmp_path / "whole")
