"""A writer is killed at a random moment: nothing torn has a name, nothing acknowledged is lost, leftovers are swept."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore, temporary_name
from shardkit.stores.store import parse_object_name
from tests.drills import drill_count

WRITER = """
import sys
from shardkit.repository.repository import Repository

repository = Repository.create(sys.argv[1])
turn = 0
while True:
    turn += 1
    with repository.stage_object("tar") as stage:
        for piece in range(8):
            stage.write(bytes([turn % 251]) * 50_000)
        shard = repository.publish(stage, "tar")
    manifest = repository.put_object(f"{sys.argv[2]} {turn} {shard.digest}".encode(), "manifest")
    entry = repository.commit({"main": manifest.digest}, message=str(turn))
    print(entry.n, manifest.digest, flush=True)
"""


@pytest.mark.drill
def test_kill_at_random_moments(tmp_path: Path) -> None:
    root = tmp_path / "root"
    source = random.Random(20261120)
    acknowledged: dict[int, str] = {}
    leftovers = 0
    for turn in range(drill_count(60)):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root), str(turn)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline()]  # it has begun; the kill comes somewhere in what follows
            time.sleep(source.random() * 0.05)
            writer.send_signal(signal.SIGKILL)
            lines += writer.stdout.read().splitlines()
        for line in lines:
            number, _, manifest = line.strip().partition(" ")
            if len(manifest) == 71:
                acknowledged[int(number)] = manifest
        leftovers += len(list((root / "tmp").iterdir()))
        check(root, acknowledged)
        assert list((root / "tmp").iterdir()) == [], "opening sweeps what dead writers left"
    assert acknowledged
    print(f"{len(acknowledged)} commits acknowledged, {leftovers} leftovers swept")


def check(root: Path, acknowledged: dict[int, str]) -> None:
    repository = Repository.open(root)
    for name in repository.store.list_after("objects/"):
        digest, _ = parse_object_name(name)
        assert f"sha256:{hashlib.sha256((root / name).read_bytes()).hexdigest()}" == digest
    entries = {entry.n: entry for entry in repository.log()}
    for number, manifest in acknowledged.items():
        assert entries[number].refs["main"] == manifest
    for entry in entries.values():
        content = repository.get_object(entry.refs["main"], "manifest").decode()
        repository.get_object(content.split()[2], "tar", 400_000)


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
