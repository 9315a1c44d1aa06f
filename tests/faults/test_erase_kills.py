"""Erasures killed at any of their file operations, and appends that race: nothing else is lost, and nothing stays."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.copies.verify import verify
from shardkit.dataset.removing import erase
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore
from tests.drills import drill_count

GONE = (3, 17, 28)

# One process forks a child per kill, so that the interpreter starts once. A child dies at its n-th change, from 1.
DRIVER = """
import json, shutil, sys
from shardkit.dataset.removing import erase, resume_erasures
from shardkit.stores.file_operations import substituted
from tests.faults.killed_operations import KilledOperations, run_in_child as child

original, folder, keys = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

def attempt(root, at, resume=False):
    killer = KilledOperations(at)
    with substituted(killer):
        if resume:
            resume_erasures(root)
        else:
            erase(root, keys=keys, reason="drill")
    with open(folder + "/count", "w") as file:
        file.write(str(killer.count))

shutil.copytree(original, folder + "/whole")
assert child(lambda: attempt(folder + "/whole", 0)) == 0
total = int(open(folder + "/count").read())
print(json.dumps(total), flush=True)
for line in sys.stdin:
    at = json.loads(line)
    root = f"{folder}/kill-{at}"
    shutil.copytree(original, root)
    codes = [child(lambda: attempt(root, at))]
    codes.append(child(lambda: attempt(root, at // 2 + 1, at % 2 == 1)))  # the one that goes on is killed, too
    codes.append(child(lambda: attempt(root, 0, at % 2 == 1)))
    print(json.dumps(codes), flush=True)
"""


def secret(number: int) -> str:
    return f"<<{number:05d}|{number * 7919 % 104729:06d}>>"


def make(root: Path) -> None:
    with shardkit.create(
        root, {"secret": "str", "kind": "str"}, stratify="kind", shard_size="12KiB", block_size="2KiB",
        split={"train": 0.7, "val": 0.3}, lookup="key,secret",
    ) as writer:  # fmt: skip
        for number in range(32):
            writer.add({"secret": secret(number), "kind": "ab"[number % 2]}, key=f"key-{number}")
    repository = Repository.open(root)
    repository.commit(set_tags={"v1": repository.refs["main"]}, message="v1")


def state(root: Path) -> dict[str, Any]:
    """What readers see of a root: its samples by ref, tags, and the names of its objects."""
    repository = Repository.open(root)
    refs = {}
    for ref in repository.refs:
        ds = shardkit.open(f"{root}@{ref}")
        refs[ref] = (ds.manifest.id, {ds.key(sample): ds[sample]["secret"] for sample in range(len(ds))})
    objects = sorted(str(path.relative_to(root)) for path in (root / "objects").rglob("*.*"))
    return {"refs": refs, "tags": repository.tags, "objects": objects}


def test_a_tag_that_races_is_withdrawn_before_anything_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    old = Repository.open(tmp_path).refs["main"]
    commit, delete, tags, named = Repository.commit, LocalStore.delete, [{"late": old}], list[bool]()

    def tagged_first(self: Repository, *given: Any, **options: Any) -> Any:
        if tags:
            commit(Repository.open(tmp_path), set_tags=tags.pop(), message="late")
        return commit(self, *given, **options)

    def watched(self: LocalStore, name: str) -> None:
        if name.startswith("objects/"):
            named.append(old in Repository.open(tmp_path, read_only=True).tags.values())
        delete(self, name)

    monkeypatch.setattr(Repository, "commit", tagged_first)
    monkeypatch.setattr(LocalStore, "delete", watched)
    erase(str(tmp_path), keys=["key-3"], reason="asked for")
    assert named
    assert not any(named)
    assert "late" not in Repository.open(tmp_path).tags


@pytest.mark.drill
def test_a_killed_erasure_goes_on(tmp_path: Path) -> None:
    make(tmp_path / "d")
    keys = json.dumps([f"key-{number}" for number in GONE])
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "d"), str(tmp_path), keys],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as driver:  # fmt: skip
        assert driver.stdin is not None
        assert driver.stdout is not None
        total = json.loads(driver.stdout.readline())
        whole = state(tmp_path / "whole")
        assert len(whole["refs"]["main"][1]) == 32 - len(GONE)
        assert whole["tags"] == {}
        kills = sorted(random.Random(20261120).sample(range(1, total + 1), min(total, drill_count(160))))
        kills = sorted({*kills, 1, total})
        for at in kills:
            driver.stdin.write(f"{at}\n")
            driver.stdin.flush()
            codes = json.loads(driver.stdout.readline())
            assert codes[0] == -9, f"the kill at change {at} of {total} did not happen"
            root = tmp_path / f"kill-{at}"
            if at % 2 and not list(root.glob("erasures/*/report.json")):
                # Killed before its plan was durable: nothing was begun, so there is nothing to go on with.
                assert state(root) == state(tmp_path / "d")
            else:
                assert state(root) == whole, f"killed at change {at} of {total}"
                assert not any(
                    secret(number).encode() in path.read_bytes()
                    for number in GONE
                    for path in root.rglob("*.*")
                    if path.is_file()
                )
                assert verify(root).exit_code == 0
                assert [path.name for path in root.glob("erasures/*/*")] == ["report.json"]
                (report,) = root.glob("erasures/*/report.json")
                assert set(json.loads(report.read_text())["report"]["tags"]) == {"v1"}
            shutil.rmtree(root)
        driver.stdin.close()
    print(f"{len(kills)} kills at {total} changes")


APPENDER = """
import sys, shardkit
from shardkit.errors import CommitConflict
root, name = sys.argv[1:]
done = refused = 0
for turn in range(4):
    while True:
        try:
            with shardkit.create(root, {"n": "int64"}, append=True) as writer:
                writer.add({"n": turn}, key=f"{name}-{turn}")
            done += 1
            break
        except CommitConflict:
            refused += 1
print(done, refused)
"""


def test_racing_appends_are_all_in_or_told(tmp_path: Path) -> None:
    root = tmp_path / "d"
    with shardkit.create(root, {"n": "int64"}) as writer:
        writer.add({"n": -1}, key="first")
    racers = [
        subprocess.Popen([sys.executable, "-c", APPENDER, str(root), name], stdout=subprocess.PIPE, text=True)
        for name in ("x", "y")
    ]
    for racer in racers:
        out, _ = racer.communicate(timeout=120)
        assert racer.returncode == 0
        assert out.split()[0] == "4"
    ds = shardkit.open(root)
    assert sorted(ds.key(sample) for sample in range(len(ds))) == sorted(
        ["first", *(f"{name}-{turn}" for name in "xy" for turn in range(4))]
    )
    assert len(Repository.open(root).log()) == 9
