"""What killed writers leave is swept, and what living ones write is left alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardkit.stores.local import LocalStore, temporary_name

SLEEPER = """
import sys, time
from shardkit.stores.local import LocalStore

with LocalStore(sys.argv[1]).stage("tar") as stage:
    stage.write(b"still being written")
    print("ready", flush=True)
    sys.stdin.readline()
    stage.publish("objects/x")
"""


def test_sweep_takes_the_dead_and_leaves_the_living(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with contextlib.ExitStack() as children:
        writers = [children.enter_context(_sleeper(root)) for _ in range(2)]
        _sweep_beside(root, writers)


def _sleeper(root: Path) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


def _sweep_beside(root: Path, writers: list[subprocess.Popen[str]]) -> None:
    foreign = root / "tmp" / "notes of somebody"
    foreign.write_text("not ours")
    with LocalStore(root).stage() as mine:
        mine.write(b"this process is alive")
        assert len(list((root / "tmp").iterdir())) == 4
        writers[0].kill()
        writers[0].wait()
        LocalStore(root, read_only=True)
        assert len(list((root / "tmp").iterdir())) == 4, "opened for reading: nothing is swept"
        LocalStore(root)
        assert len(list((root / "tmp").iterdir())) == 3
        assert mine.publish("objects/mine") is True
    writers[1].communicate("go on\n")
    assert writers[1].returncode == 0
    assert LocalStore(root).get("objects/x", max_bytes=100) == b"still being written"
    assert list((root / "tmp").iterdir()) == [foreign]


def test_sweep_is_careful_with_writers_of_other_machines(tmp_path: Path) -> None:
    """Another boot may be this machine's last one, or another machine that shares the root: age and lock decide."""
    store = LocalStore(tmp_path)
    store.put_new("x", b"")
    boot, namespace, pid, start, tail = temporary_name("tar").split("-")
    other_boot = f"{'0' * len(boot)}-{namespace}-{pid}-{start}-{tail}"
    other_container = f"{boot}-{int(namespace) + 1}-{pid}-{start}-{tail}"
    for name in (other_boot, other_container):
        (tmp_path / "tmp" / name).write_bytes(b"?")
    assert store.sweep() == 0, "written just now"
    day_ago = time.time() - 25 * 3600
    for name in (other_boot, other_container):
        os.utime(tmp_path / "tmp" / name, (day_ago, day_ago))
    import fcntl

    with open(tmp_path / "tmp" / other_container, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert store.sweep() == 1, "somebody holds the other one"
    assert store.sweep() == 1


def test_sweep_knows_a_pid_that_was_given_away_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_new("x", b"")
    boot, namespace, pid, start, tail = temporary_name().split("-")
    if start == "0":
        pytest.skip("the system does not tell when a process started")
    (tmp_path / "tmp" / f"{boot}-{namespace}-{pid}-{int(start) - 1}-{tail}").write_bytes(
        b"an earlier process"
    )
    (tmp_path / "tmp" / f"{boot}-{namespace}-{pid}-{start}-{tail}").write_bytes(b"this process")
    assert store.sweep() == 1
    assert [path.read_bytes() for path in (tmp_path / "tmp").iterdir()] == [b"this process"]
