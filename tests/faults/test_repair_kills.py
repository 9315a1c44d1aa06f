"""Encoding, scrubbing and repairing are killed at random moments: nothing torn or lost, and the next call finishes."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardkit
from shardkit.copies.repair import encode_parity, repair
from shardkit.copies.scrub import scrub
from shardkit.errors import FormatError
from shardkit.reading.attestations import read_attestations
from shardkit.reading.parity.sets import find_records
from shardkit.repository.policy import Parity
from shardkit.repository.repository import Repository
from shardkit.stores.store import parse_object_name
from tests.drills import drill_count

WORKER = """
import sys
from shardkit.repository.policy import Parity
from shardkit.repository.repository import Repository
from shardkit.copies.repair import encode_parity
from shardkit.copies.repair import repair
from shardkit.copies.scrub import scrub

work, root = sys.argv[1:]
print("begun", flush=True)
if work == "encode":
    repository = Repository.open(root)
    encode_parity(repository, Parity(4), [repository.resolve()])
elif work == "scrub":
    scrub(root, heal=True)
else:
    repair(root)
print("done", flush=True)
"""

LONGEST_S = {"encode": 0.35, "scrub": 0.25, "repair": 0.3}
"""Until the kill at the latest, adapted as the drill goes, so that about half of the kills come in time."""


def make(root: Path) -> dict[str, bytes]:
    with shardkit.create(str(root), {"x": "int64[64]"}, shard_size=12_000, block_size=1_200) as writer:
        for number in range(200):
            writer.add({"x": [number] * 64})
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("objects/**/*")
        if path.is_file()
    }


def check_whole(root: Path) -> set[str]:
    """No object that any process published is torn; names of those that are not what they should be."""
    wrong = set()
    for path in root.rglob("objects/**/*"):
        if path.is_file():
            digest, _ = parse_object_name(str(path.relative_to(root)))
            if f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" != digest:
                wrong.add(str(path.relative_to(root)))
    return wrong


def killed(work: str, root: Path, share: float) -> bool:
    """Whether the worker was killed before it was done, after a share of the longest time."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, work, str(root)], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "begun\n"
        time.sleep(share * LONGEST_S[work])
        worker.send_signal(signal.SIGKILL)
        in_time = "done" not in worker.stdout.read()
    LONGEST_S[work] = min(3.0, LONGEST_S[work] * (1.2 if in_time else 0.8))
    return in_time


@pytest.mark.drill
def test_kills_while_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, kills, turns = random.Random(1), 0, drill_count(70)
    for turn in range(turns):
        root = tmp_path / str(turn)
        truth = make(root)
        for _ in range(3):
            kills += killed("encode", root, source.random())
            assert check_whole(root) == set()
        repository = Repository.open(root)
        assert not list((root / "tmp").iterdir()), "opening sweeps what dead writers left"
        done = encode_parity(repository, Parity(4), [repository.resolve()])
        assert not done.failed
        for name in sorted(truth)[:: max(1, len(truth) // 2)][:2]:
            (root / name).unlink()
        assert repair(str(root)).verdict == "repaired"
        assert all((root / name).read_bytes() == data for name, data in truth.items())
    assert kills or turns < 20, "none came in time"
    with capsys.disabled():
        print(f"encode: {kills} of {3 * turns} killed in time")


@pytest.mark.drill
@pytest.mark.parametrize("work", ["scrub", "repair"])
def test_kills_while_healing(work: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two members of every set are bad; killed three times, what was healed stays healed and the rest follows."""
    source, kills, turns = random.Random(2), 0, drill_count(70)
    for turn in range(turns):
        root = tmp_path / str(turn)
        truth = make(root)
        repository = Repository.open(root)
        encode_parity(repository, Parity(4), [repository.resolve()])
        bad = set()
        for record in find_records([repository.store]):
            for member in source.sample(record.set.members, min(2, record.set.k)):
                if member.extension in ("manifest", "page"):
                    continue  # a scrub without them has nothing to go by
                path = root / member.name
                bad.add(member.name)
                path.chmod(0o644)
                if source.random() < 0.5:
                    path.unlink()
                else:
                    path.write_bytes(path.read_bytes()[:-1] + b"!")
        for _ in range(3):
            kills += killed(work, root, source.random())
            assert check_whole(root) <= bad
            read_attestations([repository.store])
            for path in root.rglob("attest/**/*.json"):
                assert path.read_bytes().endswith(b"}"), "no document is torn"
        left = {name for name in bad if not (root / name).is_file()} | check_whole(root)
        done = scrub(str(root), heal=True).repair if work == "scrub" else repair(str(root))
        assert done is not None
        assert {one.name for one in done.healed} == left
        assert not done.lost
        assert all((root / name).read_bytes() == data for name, data in truth.items())
        assert not list((root / "tmp").iterdir())
        assert repair(str(root)).exit_code == 0
    assert kills or turns < 20, "none came in time"
    with capsys.disabled():
        print(f"{work}: {kills} of {3 * turns} killed in time")


def test_names_of_objects_are_checked(tmp_path: Path) -> None:
    """The check of these drills can fail."""
    make(tmp_path)
    path = next(tmp_path.rglob("objects/**/*.tar"))
    path.chmod(0o644)
    path.write_bytes(b"torn")
    assert check_whole(tmp_path) == {str(path.relative_to(tmp_path))}
    with pytest.raises(FormatError):
        parse_object_name("objects/x")
