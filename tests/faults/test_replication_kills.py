"""Builds with copies, replicate, place and gc killed at any of their file operations; disks that fill up or fail."""

from __future__ import annotations

import errno
import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shardkit
from shardkit.copies.collecting import collect
from shardkit.copies.place import PlacementChange, place
from shardkit.copies.placement import find_needed, look
from shardkit.copies.replicate import replicate
from shardkit.copies.walk import CheckSettings
from shardkit.errors import ShardkitError
from shardkit.reading.inventory import take_inventory
from shardkit.repository.locations import LocationRecord, read_table
from shardkit.repository.policy import Policy
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import substituted
from tests.drills import drill_cases, drill_count
from tests.faults.faulty_operations import FaultyOperations

# One process forks a child per kill, so that the interpreter starts once. A child dies at its n-th change, from 1.
DRIVER = """
import json, sys
import shardkit
import shardkit.dataset.creating, shardkit.repository.garbage, shardkit.copies.replicate
from shardkit.repository.repository import Repository
from shardkit.copies import collecting
from shardkit.copies.collecting import collect
from shardkit.stores.file_operations import substituted
from shardkit.repository.locations import LocationRecord
from shardkit.copies.place import PlacementChange, place
from shardkit.copies.walk import CheckSettings
from shardkit.copies.replicate import replicate
from tests.faults.killed_operations import KilledOperations, run_in_child

def build(root, folder):
    with shardkit.create(root, {"value": "int64"}, ref="new", shard_size="512B", block_size="128B") as writer:
        for number in range(120):
            writer.add({"value": 500 + number})

def copy(root, folder):
    replicate(Repository.open(root), settings=CheckSettings(jobs=2))

def move(root, folder):
    change = PlacementChange(locations=(LocationRecord.parse(f"c={folder}/c"),), empty=("a",))
    place(Repository.open(root), change, grace_s=0)

collecting._PAUSE_S = 0

def sweep(root, folder):
    for _ in range(2):
        collect(Repository.open(root), delete=True, grace_s=0, history_s=0)

folder, scenario = sys.argv[1], sys.argv[2]
work = {"build": build, "replicate": copy, "place": move, "gc": sweep}[scenario]
for line in sys.stdin:
    at = json.loads(line)

    def attempt(at=at):
        killer = KilledOperations(at)
        with substituted(killer):
            work(folder + "/root", folder)
        with open(folder + "/done", "w") as file:
            file.write(str(killer.count))

    print(json.dumps(run_in_child(attempt)), flush=True)
"""


def add_version(root: Path, ref: str, first: int) -> None:
    with shardkit.create(root, {"value": "int64"}, ref=ref, shard_size="512B", block_size="128B") as writer:
        for number in range(120):
            writer.add({"value": first + number})


def make(folder: Path, scenario: str) -> Path:
    """A root with copies in a and b as the policy asks for, and whatever the scenario works on."""
    root = folder / "root"
    add_version(root, "main", 0)
    repository = Repository.open(root)
    locations = tuple(LocationRecord.parse(f"{name}={folder / name}") for name in ("a", "b"))
    place(
        repository,
        PlacementChange(locations=locations, policy=lambda old: old.changed(copies=2, mode="sync")),
    )
    if scenario == "replicate":
        place(repository, PlacementChange(policy=lambda old: old.changed(mode="async")))
        add_version(root, "more", 300)
        place(
            repository, PlacementChange(policy=lambda old: old.changed(mode="sync", copies=2)), grace_s=10**6
        )
        for path in list((folder / "a").glob("objects/**/*.*"))[::2]:
            path.unlink()
    if scenario == "gc":
        add_version(root, "old", 300)
        Repository.open(root).commit({"old": None}, message="dropped")
    return root


def torn(folder: Path) -> list[Path]:
    """Objects of any location whose bytes are not those that their names promise."""
    return [
        path
        for path in folder.glob("*/objects/**/*.*")
        if hashlib.sha256(path.read_bytes()).hexdigest() != path.name.partition(".")[0]
    ]


def missing_copies(root: Path) -> list[str]:
    """Copies below the policy of the table that holds."""
    repository = Repository.open(root, read_only=True)
    table = read_table(repository.store, repository.id)
    assert table is not None
    needed = find_needed(repository, table, repository.versions)
    return [f"{one.location}: {one.name}" for one in look(repository, table, needed).missing]


def values(root: Path, ref: str) -> list[int]:
    ds = shardkit.open(f"{root}@{ref}")
    return sorted(int(ds[i]["value"]) for i in range(len(ds)))


def check_after_kill(folder: Path, scenario: str, *, acknowledged: bool) -> None:
    root = folder / "root"
    assert torn(folder) == []
    assert values(root, "main") == list(range(120))
    if scenario != "replicate":  # whichever table holds, and whichever refs: what was promised is there
        assert missing_copies(root) == []
    if acknowledged and scenario == "build":
        assert values(root, "new") == list(range(500, 620))


def check_after_repeat(folder: Path, scenario: str) -> None:
    """The same work done once more leaves what an undisturbed run leaves, and nothing else."""
    root = folder / "root"
    assert torn(folder) == []
    assert missing_copies(root) == []
    assert values(root, "main") == list(range(120))
    for _ in range(2):
        collect(Repository.open(root), delete=True, grace_s=0, history_s=0)
    repository = Repository.open(root)
    needed = {
        name
        for manifest in repository.refs.values()
        for name, _ in take_inventory(repository.store, manifest).names()
    }
    assert set(repository.store.list_after("objects/")) == needed
    table = read_table(repository.store, repository.id)
    assert table is not None
    assert (scenario == "place") == (table.find("c") is not None)
    for path in folder.glob("*/tmp/*"):
        assert "seat" in path.name or not path.is_file(), f"{path} was not swept"
    repository.log()
    if scenario == "place":
        assert not list((folder / "a").glob("objects/**/*.*"))


@pytest.mark.drill
@pytest.mark.parametrize("scenario", ["build", "replicate", "place", "gc"])
def test_killed_at_random_points(
    tmp_path: Path, scenario: str, record_property: Callable[[str, object], None]
) -> None:
    folder, original = tmp_path / "work", tmp_path / "original"
    folder.mkdir()
    make(folder, scenario)
    shutil.copytree(folder, original)
    chance = random.Random(f"{scenario} 20261120")
    killed = 0
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), scenario], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:  # fmt: skip
        assert driver.stdin is not None
        assert driver.stdout is not None

        def attempt(at: int) -> int:
            assert driver.stdin is not None
            assert driver.stdout is not None
            driver.stdin.write(f"{at}\n")
            driver.stdin.flush()
            return int(json.loads(driver.stdout.readline()))

        assert attempt(0) == 0
        total = int((folder / "done").read_text())
        for _ in range(drill_count(60)):
            shutil.rmtree(folder)
            shutil.copytree(original, folder)
            code = attempt(chance.randrange(1, total + 1))
            acknowledged = (folder / "done").exists()
            assert code == (0 if acknowledged else -9)
            killed += code == -9
            check_after_kill(folder, scenario, acknowledged=acknowledged)
            if chance.random() < 0.5:
                attempt(chance.randrange(1, total // 2 + 2))  # the one that goes on is killed, too
            assert attempt(0) == 0
            check_after_repeat(folder, scenario)
        driver.communicate("", timeout=60)
    record_property("killed", killed)
    print(f"{scenario}: killed {killed}, {total} operations")
    assert killed


# Disks


def _calls(folder: Path, work: str) -> int:
    operations = FaultyOperations(errno.EIO)
    with substituted(operations):
        _work(folder, work)
    return operations.num_calls


def _work(folder: Path, work: str) -> None:
    repository = Repository.open(folder / "root")
    if work == "replicate":
        done = replicate(repository, settings=CheckSettings(jobs=1))
        if done.exit_code:
            raise OSError(done.locations[-1].problem)
    else:
        change = PlacementChange(locations=(LocationRecord.parse(f"c={folder / 'c'}"),), empty=("a",))
        placing = place(repository, change, grace_s=0)
        if any(one.state != "ok" for one in placing.copies.locations) or placing.drops.problems:
            raise OSError("a location failed")


def _failing_points(total: int, share: int) -> Iterator[int]:
    """Every k-th call, all of them in full drills."""
    step = max(1, total // drill_count(share))
    yield from range(0, total, step)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("work", "error", "torn_write"),
    drill_cases(
        [(work, *failure) for work in ("replicate", "place")
         for failure in ((errno.EIO, True), (errno.ENOSPC, False), (errno.ENOSPC, True))],
        [0, 5],
    ),
)  # fmt: skip
def test_disks_that_fail_or_fill_up(tmp_path: Path, work: str, error: int, torn_write: bool) -> None:
    folder, original = tmp_path / "work", tmp_path / "original"
    folder.mkdir()
    make(folder, work)
    shutil.copytree(folder, original)
    total = _calls(folder, work)
    failed = 0
    for at in _failing_points(total, 100):
        shutil.rmtree(folder)
        shutil.copytree(original, folder)
        operations = FaultyOperations(error, at, torn=torn_write, forever=error == errno.ENOSPC)
        with substituted(operations):
            try:
                _work(folder, work)
            except (ShardkitError, OSError):
                failed += 1
        assert torn(folder) == []
        assert values(folder / "root", "main") == list(range(120))
        if work == "place":
            assert missing_copies(folder / "root") == []
        _work(folder, work)  # the disk is well again
        assert torn(folder) == []
        assert missing_copies(folder / "root") == []
    assert failed > 0


def test_policy_of_the_scenarios_is_the_one_that_is_meant(tmp_path: Path) -> None:
    root = make(tmp_path, "build")
    repository = Repository.open(root)
    table = read_table(repository.store, repository.id)
    assert table is not None
    assert table.policy == Policy(copies=2, mode="sync")
    assert missing_copies(root) == []
