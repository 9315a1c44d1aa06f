"""Garbage is collected while processes commit versions that share objects with it: nothing that is named goes."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import shardkit
from shardkit.copies import collecting
from shardkit.copies.collecting import announce_deletion, collect, end_deletion
from shardkit.copies.place import PlacementChange, place
from shardkit.copies.placement import find_needed
from shardkit.errors import CommitConflict, UsageError
from shardkit.reading.inventory import take_inventory
from shardkit.repository.locations import read_table
from shardkit.repository.policy import LocationRecord
from shardkit.repository.repository import Repository
from shardkit.repository.versions import put_manifest
from tests.drills import DRILLS

COMMITTERS = 8 if DRILLS else 4
VERSIONS = 6


# Versions are few, so that what one process drops another one builds again, out of objects that are being collected.
def commit(root: Path, name: str, seed: int, rounds: Connection) -> None:
    """As many builds or drops as each message asks for; answers with the counts of what happened."""
    chance = random.Random(seed)
    while turns := rounds.recv():
        told = {"commits": 0, "dropped": 0, "conflicts": 0}
        for _ in range(turns):
            version = chance.randrange(VERSIONS)
            for _ in range(200):
                try:
                    if chance.random() < 0.3:
                        Repository.open(root).commit({name: None}, message="drop")
                        told["dropped"] += 1
                    else:
                        with shardkit.create(
                            root, {"value": "int64"}, ref=name, shard_size="256B", block_size="64B"
                        ) as writer:
                            for number in range(40):
                                writer.add({"value": version * 20 + number})
                        told["commits"] += 1
                    break
                except CommitConflict:
                    told["conflicts"] += 1
        rounds.send(told)


def dangling(root: Path) -> list[str]:
    """Objects that a ref needs and that are not there, or not whole."""
    repository = Repository.open(root)
    missing = []
    for ref, manifest in repository.refs.items():
        for name, size in take_inventory(repository.store, manifest).names():
            stat = repository.store.head(name)
            if stat is None or (size is not None and stat.size != size):
                missing.append(f"{ref}: {name}")
    return missing


def race(root: Path, rounds: int, copies: list[str]) -> dict[str, int]:
    """Counts of what happened; asserts after each round that nothing dangles."""
    repository = Repository.create(root)
    if copies:
        records = tuple(LocationRecord.parse(f"c{i}={copy}") for i, copy in enumerate(copies))
        place(
            repository,
            PlacementChange(locations=records, policy=lambda old: old.changed(copies=2, mode="sync")),
        )
    total = {"commits": 0, "dropped": 0, "conflicts": 0, "deleted": 0}
    skew = random.Random(1)
    context = multiprocessing.get_context("fork")
    committers, processes = [], []
    for number in range(COMMITTERS):
        own, other = context.Pipe()
        committers.append(own)
        processes.append(context.Process(target=commit, args=(root, f"w{number}", number, other)))
        processes[-1].start()
    for _ in range(rounds):
        for one in committers:
            one.send(2)
        for _ in range(4):  # by machines whose clocks are days apart
            now = 1_800_000_000 + skew.choice((-30, 0, 30)) * 86_400
            with mock.patch("time.time", return_value=now):
                done = collect(Repository.open(root), delete=True, grace_s=0, history_s=0)
            total["deleted"] += done.deleted.get("root", 0)
        for one, process in zip(committers, processes, strict=True):
            while not one.poll(1):
                assert process.is_alive(), process.exitcode
            for key, value in one.recv().items():
                total[key] += value
        assert dangling(root) == []
    for one, process in zip(committers, processes, strict=True):
        one.send(0)
        process.join(60)
        one.close()
        assert process.exitcode == 0
    return total


@pytest.mark.drill
@pytest.mark.parametrize("mirrored", [False, True])
def test_nothing_that_a_ref_needs_is_collected(
    tmp_path: Path, mirrored: bool, record_property: Callable[[str, object], None]
) -> None:
    root = tmp_path / "root"
    copies = [str(tmp_path / "a"), str(tmp_path / "b")] if mirrored else []
    total = race(root, (200 if DRILLS else 4) // (2 if mirrored else 1), copies)
    for key, value in total.items():
        record_property(key, value)
    print(total)
    assert total["commits"] > 0
    assert total["deleted"] > 0

    with mock.patch("time.time", return_value=1_900_000_000):
        for _ in range(2):  # garbage is gone after two rounds
            collect(Repository.open(root), delete=True, grace_s=0, history_s=0)
    repository = Repository.open(root)
    needed = {
        name
        for manifest in repository.refs.values()
        for name, _ in take_inventory(repository.store, manifest).names()
    }
    assert set(repository.store.list_after("objects/")) == needed
    for ref in repository.refs:
        ds = shardkit.open(f"{root}@{ref}")
        values = sorted(int(ds[i]["value"]) for i in range(len(ds)))
        assert values == list(range(values[0], values[0] + 40))
    table = read_table(repository.store, repository.id)
    if table is not None:
        where = find_needed(repository, table, repository.refs.values())
        for record in table.others:
            held = {str(path.relative_to(record.url)) for path in Path(record.url).glob("objects/**/*.*")}
            assert held <= needed
            assert held >= {name for name, one in where.items() if record.name in one.where}


def _version(root: Path) -> str:
    with shardkit.create(
        root, {"value": "int64"}, ref="main", shard_size="1KiB", block_size="256B"
    ) as writer:
        for number in range(50):
            writer.add({"value": number})
    return writer.manifest.id


def test_a_commit_that_relies_on_what_goes_is_refused_and_done_again(tmp_path: Path) -> None:
    """Each moment of a collection at which a writer may come by, one by one."""
    root = tmp_path / "root"
    version = _version(root)
    manifest = take_inventory(Repository.open(root).store, version).manifest
    Repository.open(root).commit({"main": None}, message="drop")
    assert collect(Repository.open(root), delete=True, grace_s=0, history_s=0).deleted == {}

    before = Repository.open(root)  # found everything there, and has not committed
    put_manifest(before, manifest, [])
    collector = Repository.open(root)
    names = sorted(name for name, _ in take_inventory(collector.store, version).names())
    deletion = announce_deletion(collector, lambda _head: names)
    assert deletion is not None
    with pytest.raises(CommitConflict, match="being deleted as garbage"):
        before.commit({"main": version}, message="relies on it")
    during = Repository.open(root)  # comes while it is being deleted: the objects are still there
    with pytest.raises(CommitConflict, match="being deleted as garbage"):
        during.commit({"main": version}, message="relies on it")
    data = {name: collector.store.get(name, max_bytes=2**20) for name in names}
    for name in names[1:]:
        collector.store.delete(name)
    with pytest.raises(CommitConflict):
        during.commit({"main": version}, message="relies on it")
    collector.store.delete(names[0])
    end_deletion(collector, deletion)
    for name in names:
        if name.endswith(".manifest"):
            collector.store.put_new(name, data[name])
    with pytest.raises(CommitConflict):
        during.commit({"main": version}, message="only the manifest is there again")
    for name in names:
        collector.store.put_new(name, data[name])
    during.commit({"main": version}, message="all is there again")  # whoever put it again may name it
    assert dangling(root) == []


def test_a_killed_deletion_is_finished_and_its_objects_are_refused_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    version = _version(root)
    Repository.open(root).commit({"main": None}, message="drop")
    collector = Repository.open(root)
    names = sorted(name for name, _ in take_inventory(collector.store, version).names())
    announce_deletion(collector, lambda _head: names)
    with pytest.raises(UsageError, match="--grace 0s"):
        collect(Repository.open(root), delete=True)
    monkeypatch.setattr(collecting, "_PAUSE_S", 0)
    done = collect(Repository.open(root), delete=True, grace_s=0)
    assert done.finished == 1
    assert list(collector.store.list_after("objects/")) == []
    assert _version(root) == version  # the same work done again
    assert dangling(root) == []


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_killed_deletion_whose_list_is_lost_stops_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    root = tmp_path / "root"
    names = _garbage(root)
    collector = Repository.open(root)
    announce_deletion(collector, lambda _head: names)
    (listed,) = (root / "gc" / "lists").iterdir()
    listed.chmod(0o644)
    listed.write_bytes(b"{}") if is_damaged else listed.unlink()
    with pytest.raises(CommitConflict):
        _version(root)
    monkeypatch.setattr(collecting, "_PAUSE_S", 0)
    collect(Repository.open(root), delete=True, grace_s=0)
    _version(root)
    assert dangling(root) == []


def _garbage(root: Path) -> list[str]:
    """Objects of a version that no ref names any more: marked, and due."""
    _version(root)
    Repository.open(root).commit({"main": None}, message="drop")
    collect(Repository.open(root), delete=True, grace_s=0, history_s=0)
    return sorted(Repository.open(root).store.list_after("objects/"))


def test_of_two_collections_at_once_the_log_lets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have seen that none is under way, and marked the same objects, when the first one begins."""
    root = tmp_path / "root"
    names = _garbage(root)
    inner: list[Any] = []
    late = Repository.open(root)

    def announce(repository: Repository, *given: Any) -> Any:
        if repository is late:
            inner.append(collect(Repository.open(root), delete=True, grace_s=0, history_s=0, report=pause))
        return announce_deletion(repository, *given)

    def pause(gone: int, _total: int) -> None:
        if gone == 2:  # in the middle of the first one's deletions comes a third
            with pytest.raises(UsageError, match="has been deleted since"):
                collect(Repository.open(root), delete=True, history_s=0)

    monkeypatch.setattr(collecting, "announce_deletion", announce)
    done = collect(late, delete=True, grace_s=0, history_s=0)
    assert inner[0].deleted == {"root": len(names)}
    assert done.deleted == {}, "what was due is gone when the second one may begin"
    assert list(late.store.list_after("objects/")) == []
    head = late.head()
    assert head.deletion is not None
    assert head.deletion.is_ended


def test_one_that_begins_while_another_deletes_is_refused_by_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    names = _garbage(root)
    first = Repository.open(root)
    begun: list[Any] = []

    def announce(repository: Repository, *given: Any) -> Any:
        begun.append(announce_deletion(first, lambda _head: names))
        return announce_deletion(repository, *given)

    monkeypatch.setattr(collecting, "announce_deletion", announce)
    with pytest.raises(UsageError, match="has been deleted since"):
        collect(Repository.open(root), delete=True, grace_s=0, history_s=0)
    assert sorted(first.store.list_after("objects/")) == names, "the one that came second deleted nothing"
    assert end_deletion(first, begun[0])


def test_a_collector_that_lives_stops_when_it_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its objects are put again and named after the other one has ended: it must not go on deleting them."""
    root = tmp_path / "root"
    names = _garbage(root)
    naps: list[float] = []
    monkeypatch.setattr(collecting, "_CHECK_EVERY_S", 0.0)
    monkeypatch.setattr(collecting, "_PAUSE_S", 3600.0)  # no machine takes so long before it
    monkeypatch.setattr("time.sleep", naps.append)

    def taken_over(gone: int, _total: int) -> None:
        if gone == 2:
            other = collect(Repository.open(root), delete=True, grace_s=0, history_s=0)
            assert other.finished == 1
            _version(root)

    done = collect(Repository.open(root), delete=True, grace_s=0, history_s=0, report=taken_over)
    assert done.deleted == {"root": 2}
    assert any(nap > 1800 for nap in naps), "the other one gave it time to find out"
    assert dangling(root) == []
    assert sorted(Repository.open(root).store.list_after("objects/")) == names
