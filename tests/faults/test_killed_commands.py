"""Commands killed at any of their file operations, or whose disk fails: nothing is torn or lost, the next run finishes.

A child is forked for each kill and dies at its n-th change of a file. So a kill comes where it is meant to come,
however fast the machine is.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardkit
import shardkit_tools
from shardkit.copies import collecting
from shardkit.copies.collecting import collect
from shardkit.copies.place import PlacementChange, place
from shardkit.copies.placement import find_needed, look
from shardkit.copies.repair import encode_parity, repair
from shardkit.copies.replicate import replicate
from shardkit.copies.scrub import scrub
from shardkit.copies.verify import verify
from shardkit.copies.walk import CheckSettings
from shardkit.dataset.removing import erase, resume_erasures
from shardkit.errors import AbsentError, ShardkitError
from shardkit.reading.attestations import read_attestations
from shardkit.reading.inventory import take_inventory
from shardkit.reading.parity.sets import find_records
from shardkit.repository.locations import read_table
from shardkit.repository.policy import LocationRecord, Parity, Policy
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import FileOperations, substituted
from shardkit_tools.adopting.adoption import adopt
from shardkit_tools.building import engines
from shardkit_tools.importers import source_files
from tests.drills import drill_cases, drill_count
from tests.faults.faulty_operations import FaultyOperations
from tests.faults.killed_operations import KilledOperations, run_in_child


class Folders(NamedTuple):
    """Folders of a scenario."""

    work: Path
    """Where the command is killed; always the same path, because tables of locations hold paths."""
    before: Path
    """What was there before the command."""
    whole: Path
    """What the command leaves if it is not killed."""

    def restore(self) -> None:
        """Undo the command."""
        shutil.rmtree(self.work)
        shutil.copytree(self.before, self.work)


class Scenario(NamedTuple):
    """A command, what is there before it, and what must hold after it was killed."""

    make: Callable[[Path], None]
    """Fills an empty folder."""
    work: Callable[[Path], object]
    """Is killed, and called again."""
    check: Callable[[Path], None]
    """What holds after any kill."""
    finish: Callable[[Folders], None]
    """Continues, and checks the result."""
    full: int = 60
    """Number of folders in `make drills`, in each of which the command is killed up to three times."""


def objects(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("objects/**/*.*")}


def torn(folder: Path) -> set[str]:
    """Objects of any root or copy in a folder whose bytes do not have the digest in their names."""
    return {
        path.name
        for path in folder.rglob("objects/**/*.*")
        if hashlib.sha256(path.read_bytes()).hexdigest() != path.name.partition(".")[0]
    }


def nothing_is_torn(folder: Path) -> None:
    assert torn(folder) == set()


def nothing_temporary_is_left(folder: Path) -> None:
    Repository.open(folder / "root")  # sweeps what dead writers left
    assert [path for path in folder.glob("*/tmp/*") if "seat" not in path.name] == []


# ---- a build from files


def make_files(folder: Path) -> None:
    for number in range(60):
        path = folder / "files" / "abc"[number % 3] / f"{number:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hashlib.sha256(str(number).encode()).digest() * (10 + number % 50))


def build(folder: Path) -> None:
    shardkit_tools.build(
        str(folder / "files"), folder / "root", stratify="label", shard_size="64KiB", block_size="8KiB"
    )


def check_build(folder: Path) -> None:
    nothing_is_torn(folder)
    root = folder / "root"
    if (root / "shardkit.json").exists() and Repository.open(root, read_only=True).head().n > 0:
        ds = shardkit.open(root)
        assert sum(len(ds[n]["blob"]) > 0 for n in range(len(ds))) == 60


def finish_build(folders: Folders) -> None:
    build(folders.work)
    check_build(folders.work)
    assert Repository.open(folders.work / "root").refs == Repository.open(folders.whole / "root").refs
    nothing_temporary_is_left(folders.work)


# ---- an adoption


def make_arrays(folder: Path) -> None:
    (folder / "arrays").mkdir()
    for number in range(8):
        np.save(folder / "arrays" / f"{number}.npy", np.full((60, 16), number, np.int16))


def adopt_arrays(folder: Path) -> None:
    adopt([folder / "arrays"], folder / "root", block_size="1KiB", jobs=1)


def finish_adoption(folders: Folders) -> None:
    adopt_arrays(folders.work)
    nothing_is_torn(folders.work)
    assert Repository.open(folders.work / "root").refs == Repository.open(folders.whole / "root").refs
    ds = shardkit.open(folders.work / "root")
    assert [int(ds[row]["value"][0]) for row in range(len(ds))] == [n for n in range(8) for _ in range(60)]
    nothing_temporary_is_left(folders.work)


# ---- versions with copies


ROWS = 40
"""Of a version: each is a shard, and every look at the copies is at all of them."""


def add_version(root: Path, ref: str, first: int) -> None:
    with shardkit.create(root, {"value": "int64"}, ref=ref, shard_size="512B", block_size="128B") as writer:
        for number in range(ROWS):
            writer.add({"value": first + number})


def change_policy(root: Path, **changes: Any) -> None:
    place(Repository.open(root), PlacementChange(policy=lambda old: old.changed(**changes)), grace_s=10**6)


def make_copies(folder: Path) -> None:
    """A root, and copies in a and b as the policy asks for."""
    root = folder / "root"
    add_version(root, "main", 0)
    locations = tuple(LocationRecord.parse(f"{name}={folder / name}") for name in ("a", "b"))
    place(Repository.open(root), PlacementChange(locations=locations))
    change_policy(root, copies=2, mode="sync")
    table = read_table(Repository.open(root).store, Repository.open(root).id)
    assert table is not None
    assert table.policy == Policy(copies=2, mode="sync")
    check_copies(folder)


def make_lag(folder: Path) -> None:
    make_copies(folder)
    change_policy(folder / "root", mode="async")
    add_version(folder / "root", "more", 300)
    change_policy(folder / "root", mode="sync")
    for path in list((folder / "a").glob("objects/**/*.*"))[::2]:
        path.unlink()


def make_garbage(folder: Path) -> None:
    make_copies(folder)
    add_version(folder / "root", "old", 300)
    Repository.open(folder / "root").commit({"old": None}, message="dropped")


def copy(folder: Path) -> None:
    done = replicate(Repository.open(folder / "root"), settings=CheckSettings(jobs=2))
    if done.exit_code:
        raise OSError(done.locations[-1].problem)


def move(folder: Path) -> None:
    change = PlacementChange(locations=(LocationRecord.parse(f"c={folder / 'c'}"),), empty=("a",))
    done = place(Repository.open(folder / "root"), change, grace_s=0)
    if any(one.state != "ok" for one in done.copies.locations) or done.drops.problems:
        raise OSError("a location failed")


def sweep(folder: Path) -> None:
    for _ in range(2):
        collect(Repository.open(folder / "root"), delete=True, grace_s=0, history_s=0)


def values(folder: Path, ref: str) -> list[int]:
    ds = shardkit.open(f"{folder / 'root'}@{ref}")
    return sorted(int(ds[i]["value"]) for i in range(len(ds)))


def check_main(folder: Path) -> None:
    nothing_is_torn(folder)
    assert values(folder, "main") == list(range(ROWS))


def check_copies(folder: Path) -> None:
    """Whichever table holds, and whichever refs: as many copies as the policy promises."""
    check_main(folder)
    repository = Repository.open(folder / "root", read_only=True)
    table = read_table(repository.store, repository.id)
    assert table is not None
    assert look(repository, table, find_needed(repository, table, repository.versions)).missing == []


def finish_copies(folders: Folders, work: Callable[[Path], object]) -> None:
    """The same work done once more leaves what an undisturbed run leaves, and nothing else."""
    folder = folders.work
    work(folder)
    check_copies(folder)
    sweep(folder)
    repository = Repository.open(folder / "root")
    needed = {
        name
        for manifest in repository.refs.values()
        for name, _ in take_inventory(repository.store, manifest).names()
    }
    assert set(repository.store.list_after("objects/")) == needed
    nothing_temporary_is_left(folder)
    repository.log()
    table = read_table(repository.store, repository.id)
    assert table is not None
    assert (work is move) == (table.find("c") is not None)
    if work is move:
        assert not list((folder / "a").glob("objects/**/*.*"))
    if work is create:
        assert values(folder, "new") == list(range(500, 500 + ROWS))


def create(folder: Path) -> None:
    add_version(folder / "root", "new", 500)


# ---- erasures

GONE = [f"key-{number}" for number in (3, 17, 28)]


def secret(key: str) -> str:
    return f"<<{key}|{hashlib.sha256(key.encode()).hexdigest()[:12]}>>"


def make_secrets(folder: Path) -> None:
    with shardkit.create(
        folder / "root", {"secret": "str", "kind": "str"}, stratify="kind", shard_size="12KiB", block_size="2KiB",
        split={"train": 0.7, "val": 0.3}, lookup="key,secret",
    ) as writer:  # fmt: skip
        for number in range(32):
            key = f"key-{number}"
            writer.add({"secret": secret(key), "kind": "ab"[number % 2]}, key=key)
    repository = Repository.open(folder / "root")
    repository.commit(set_tags={"v1": repository.refs["main"]}, message="v1")


def erase_some(folder: Path) -> None:
    try:
        erase(str(folder / "root"), keys=GONE, reason="drill")
    except AbsentError:  # an attempt before this one came to its end
        assert list(folder.glob("root/erasures/*/report.json"))


def samples(folder: Path) -> dict[str, set[str]]:
    """Keys of each ref and tag; each sample is read."""
    repository, found = Repository.open(folder / "root"), {}
    for ref in (*repository.refs, *repository.tags):
        ds = shardkit.open(f"{folder / 'root'}@{ref}")
        found[ref] = {ds.key(sample) for sample in range(len(ds))}
        assert {ds[sample]["secret"] for sample in range(len(ds))} == set(map(secret, found[ref]))
    return found


def check_erased(folders: Folders) -> None:
    root = folders.work / "root"
    before = samples(folders.before)
    assert samples(folders.work) == {ref: keys - set(GONE) for ref, keys in before.items() if ref != "v1"}
    assert objects(folders.work) == objects(folders.whole)
    files = [path.read_bytes() for path in root.rglob("*.*") if path.is_file()]
    assert not any(secret(key).encode() in data for key in GONE for data in files)
    assert verify(root).exit_code == 0
    (report,) = root.glob("erasures/*/*")
    assert report.name == "report.json"
    assert set(json.loads(report.read_text())["report"]["tags"]) == {"v1"}


def finish_erasure(folders: Folders) -> None:
    erase_some(folders.work)
    check_erased(folders)


def resume_erasure(folders: Folders) -> None:
    if resume_erasures(str(folders.work / "root")) or any(folders.work.glob("root/erasures/*/report.json")):
        check_erased(folders)
    else:  # killed before its plan was durable: nothing was begun, so there is nothing to go on with
        assert samples(folders.work) == samples(folders.before)
        assert objects(folders.work) == objects(folders.before)


# ---- parity


def make_rows(folder: Path) -> None:
    with shardkit.create(folder / "root", {"x": "int64[64]"}, shard_size=12_000, block_size=1_200) as writer:
        for number in range(200):
            writer.add({"x": [number] * 64})


def encode(folder: Path) -> None:
    repository = Repository.open(folder / "root")
    done = encode_parity(repository, Parity(4), [repository.resolve()])
    assert not done.failed


def finish_encoding(folders: Folders) -> None:
    folder = folders.work
    nothing_temporary_is_left(folder)
    encode(folder)
    shards = sorted(folder.rglob("objects/**/*.tar"))
    lost = {path: path.read_bytes() for path in shards[:: max(1, len(shards) // 2)][:2]}
    for path in lost:
        path.unlink()
    assert repair(str(folder / "root")).verdict == "repaired"
    assert all(path.read_bytes() == data for path, data in lost.items())


def make_damage(folder: Path) -> None:
    """Two members of every set are bad."""
    make_rows(folder)
    encode(folder)
    chance = random.Random(2)
    for record in find_records([Repository.open(folder / "root").store]):
        for member in chance.sample(record.set.members, min(2, record.set.k)):
            path = folder / "root" / member.name
            if member.extension in ("manifest", "page"):
                continue  # a scrub without them has nothing to go by
            path.chmod(0o644)
            path.unlink() if chance.random() < 0.5 else path.write_bytes(path.read_bytes()[:-1] + b"!")


def check_attestations(folder: Path) -> None:
    read_attestations([Repository.open(folder / "root").store])
    for path in folder.rglob("attest/**/*.json"):
        assert path.read_bytes().endswith(b"}"), "no document is torn"


def scrub_and_heal(folder: Path) -> Any:
    return scrub(str(folder / "root"), heal=True).repair


def repair_all(folder: Path) -> Any:
    return repair(str(folder / "root"))


def finish_healing(folders: Folders, work: Callable[[Path], Any]) -> None:
    """What was healed stays healed, and the rest follows."""
    folder = folders.work
    assert torn(folder) <= torn(folders.before)
    bad = objects(folders.whole) - (objects(folder) - torn(folder))
    done = work(folder)
    assert done is not None
    assert not done.lost
    assert {Path(one.name).name for one in done.healed} == bad
    assert objects(folder) == objects(folders.whole)
    nothing_is_torn(folder)
    nothing_temporary_is_left(folder)
    assert repair_all(folder).exit_code == 0


def then(finish: Callable[..., None], work: Callable[[Path], object]) -> Any:
    return functools.partial(finish, work=work)


SCENARIOS = {
    "build": Scenario(make_files, build, check_build, finish_build, 120),
    "adopt": Scenario(make_arrays, adopt_arrays, nothing_is_torn, finish_adoption),
    "create": Scenario(make_copies, create, check_copies, then(finish_copies, create)),
    "replicate": Scenario(make_lag, copy, check_main, then(finish_copies, copy)),
    "place": Scenario(make_copies, move, check_copies, then(finish_copies, move)),
    "gc": Scenario(make_garbage, sweep, check_copies, then(finish_copies, sweep)),
    "erase": Scenario(make_secrets, erase_some, nothing_is_torn, finish_erasure, 80),
    "erase, resumed": Scenario(make_secrets, erase_some, nothing_is_torn, resume_erasure, 80),
    "encode": Scenario(make_rows, encode, nothing_is_torn, finish_encoding, 70),
    "scrub": Scenario(
        make_damage, scrub_and_heal, check_attestations, then(finish_healing, scrub_and_heal), 70
    ),
    "repair": Scenario(make_damage, repair_all, check_attestations, then(finish_healing, repair_all), 70),
}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """Builds have many tasks, and deletions do not wait."""
    monkeypatch.setattr(source_files, "_TASK_BYTES", 15_000)
    monkeypatch.setattr(engines, "SMALL_BYTES", 0)
    monkeypatch.setattr(collecting, "_PAUSE_S", 0)
    return Folders(tmp_path / "work", tmp_path / "before", tmp_path / "whole")


def run_whole(scenario: Scenario, folders: Folders, operations: FileOperations) -> None:
    folders.work.mkdir()
    scenario.make(folders.work)
    shutil.copytree(folders.work, folders.before)
    with substituted(operations):
        scenario.work(folders.work)
    shutil.copytree(folders.work, folders.whole)


def attempt(work: Callable[[Path], object], folder: Path, at: int) -> int:
    """Exit code of a child that dies at this change."""

    def run() -> None:
        with substituted(KilledOperations(at)):
            work(folder)

    return run_in_child(run)


@pytest.mark.drill
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_killed_command_goes_on(
    name: str, folders: Folders, record_property: Callable[[str, object], None]
) -> None:
    scenario, counting = SCENARIOS[name], KilledOperations(0)
    run_whole(scenario, folders, counting)
    chance = random.Random(f"{name} 20261120")
    killed = 0
    for _ in range(drill_count(scenario.full)):
        folders.restore()
        for _ in range(chance.randrange(1, 4)):  # the one that goes on is killed, too
            code = attempt(scenario.work, folders.work, chance.randrange(1, counting.count + 1))
            assert code in (0, -signal.SIGKILL)  # what is left to do may take fewer changes
            killed += code != 0
            scenario.check(folders.work)
            if name == "create" and code == 0:
                assert values(folders.work, "new") == list(range(500, 500 + ROWS)), "it was acknowledged"
        scenario.finish(folders)
    record_property("killed", killed)
    print(f"{name}: killed {killed} times, {counting.count} changes")
    assert killed


@pytest.mark.drill
@pytest.mark.parametrize(
    ("name", "error", "torn_write"),
    drill_cases(
        [(name, *failure) for name in ("replicate", "place")
         for failure in ((errno.EIO, True), (errno.ENOSPC, False), (errno.ENOSPC, True))],
        [0, 5],
    ),
)  # fmt: skip
def test_disks_that_fail_or_fill_up(name: str, error: int, torn_write: bool, folders: Folders) -> None:
    scenario, counting, failed = SCENARIOS[name], FaultyOperations(error), 0
    run_whole(scenario, folders, counting)
    for at in range(0, counting.num_calls, max(1, counting.num_calls // drill_count(100))):
        folders.restore()
        with substituted(FaultyOperations(error, at, torn=torn_write, forever=error == errno.ENOSPC)):
            try:
                scenario.work(folders.work)
            except (ShardkitError, OSError):
                failed += 1
        scenario.check(folders.work)
        scenario.work(folders.work)  # the disk is well again
        check_copies(folders.work)
    assert failed


def test_a_torn_object_is_found(tmp_path: Path) -> None:
    """The check of these drills can fail."""
    make_rows(tmp_path)
    nothing_is_torn(tmp_path)
    path = next(tmp_path.rglob("objects/**/*.tar"))
    path.chmod(0o644)
    path.write_bytes(b"torn")
    assert torn(tmp_path) == {path.name}
