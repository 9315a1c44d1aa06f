"""Repair and scrub: what is bad is found and made good from where it is good; what is lost or unknown is said."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.copies.repair import encode_parity, repair
from shardkit.copies.scrub import scrub
from shardkit.copies.verify import verify
from shardkit.copies.walk import CheckSettings
from shardkit.dataset.removing import erase
from shardkit.documents import encode, utc_text
from shardkit.errors import NotFoundError, StoreError
from shardkit.reading.attestations import Attestation, Records, put_attestations, read_attestations
from shardkit.reading.objects import check_object
from shardkit.reading.parity.sets import find_records
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.policy import Parity
from shardkit.repository.repository import Repository
from shardkit.repository.versions import load_manifest
from shardkit.stores.file_operations import substituted
from shardkit.stores.local import LocalStore
from shardkit.testing.memory_store import MemoryStore
from tests.command_line import call as called
from tests.faults.faulty_operations import FaultyOperations
from tests.flips import flip
from tests.servers.object_stores import s3_environment

ROWS = 160


def make(root: Path, *policy: str, parity: int = 0) -> Repository:
    schema = {"x": "int64[64]", "label": "int64"}
    with shardkit.create(str(root), schema, shard_size=12_000, block_size=1_200, stratify="label") as writer:
        for number in range(ROWS):
            writer.add({"x": [number] * 64, "label": number % 3}, key=f"key-{number:05d}")
    if policy:
        assert call("place", root, *policy)[0] == 0
    repository = Repository.open(root)
    if parity:
        encode_parity(repository, Parity(parity), [repository.resolve()])
    return repository


def call(*arguments: object) -> tuple[int, str]:
    """A command with canaries in the environment, of which nothing is told."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment("http://127.0.0.1:1").items():
            patch.setenv(name, value)
        return called(*arguments)


def shards(root: Path, kind: str = "tar") -> list[Path]:
    return sorted(root.glob(f"objects/sha256/*/*.{kind}"))


def whole(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.glob("objects/sha256/*/*")}


class TestSources:
    """Replica first, then parity; what neither has is lost."""

    def test_from_parity_and_no_further(self, tmp_path: Path) -> None:
        repository = make(tmp_path, parity=4)
        truth = whole(tmp_path)
        record = next(
            one
            for one in find_records([repository.store])
            if one.set.k == 4 and one.set.members[0].extension == "tar"
        )
        flip(tmp_path / record.set.members[0].name)
        (tmp_path / record.object_at(4).name).unlink()
        done = repair(str(tmp_path))
        assert (done.exit_code, len(done.healed), {one.source for one in done.healed}) == (0, 2, {"parity"})
        assert whole(tmp_path) == truth
        for i in (0, 1, 3):
            flip(tmp_path / record.set.members[i].name)
        code, told = call("repair", tmp_path, "--json")
        lost = json.loads(told)
        assert code == lost["exit_code"] == 4
        assert {one["name"] for one in lost["lost"]} == {record.set.members[i].name for i in (0, 1, 3)}
        table = load_manifest(repository, repository.resolve()).table
        rows = {table.digest_text(i): int(table.rows[i]) for i in range(len(table))}
        assert sum(one["rows"] for one in lost["lost"]) == sum(
            rows[record.set.members[i].digest] for i in (0, 1, 3)
        )
        code, told = call("repair", tmp_path)
        assert code == 4
        assert "Lost: 3 objects" in told
        assert "put it back from a backup" in told

    def test_members_are_read_where_they_are_good(self, tmp_path: Path) -> None:
        """A shard rots in the root before it has parity: it is encoded from the mirror, and healed from there."""
        root, mirror = tmp_path / "root", tmp_path / "mirror"
        make(root, "--location", f"mirror={mirror}", "--copies", "2")
        truth = whole(root)
        flip(shards(root)[0])
        repository = Repository.open(root)
        done = encode_parity(repository, Parity(4), [repository.resolve()])
        assert (len(done.encoded), done.failed) == (done.sets, {})
        shutil.rmtree(mirror)
        assert repair(str(root)).exit_code == 3, "healed by parity, and the mirror is gone"
        assert {name: data for name, data in whole(root).items() if name in truth} == truth


class TestAttested:
    """Readers without the right to write leave attestations in their run; who has it heals."""

    @pytest.fixture
    def read(self, tmp_path: Path) -> Path:
        """A run whose reader met two bad shards of the root, and good ones in the mirror."""
        root, mirror = tmp_path / "root", tmp_path / "mirror"
        make(root, "--location", f"mirror={mirror}", "--copies", "2")
        self.truth = whole(root)
        flip(shards(root)[0])
        shards(root)[1].unlink()
        # without hedging: a second request that overtakes the first would leave a bad copy unseen
        dataset = shardkit.open(root, settings=ReadSettings(hedge=False))
        plan = dataset.plan(global_batch=8)
        loader = dataset.loader(plan, tensors=False, rank=0, world=1, run=tmp_path / "run")
        seen = [int(x) for batch in loader for x in batch["x"][:, 0]]
        assert loader.stats()["remote_healed"] == 0
        loader.close()
        assert sorted(seen) == list(range(ROWS))
        return tmp_path

    def test_repair_from_run(self, read: Path) -> None:
        flip(shards(read / "mirror")[4])  # met by nobody: not looked for
        code, told = call("repair", read / "root", "--from-run", read / "run", "--json")
        done = json.loads(told)
        assert code == 0
        assert {(one["location"], one["source"]) for one in done["healed"]} == {("root", "mirror")}
        assert len(done["healed"]) == done["copies"] == 2
        assert whole(read / "root") == self.truth
        code, told = call("repair", read / "root", "--from-run", read / "run")
        assert (code, "clean" in told) == (0, True), "attested long ago, and good now"

    def test_a_location_that_is_not_known_here(self, read: Path) -> None:
        one = next((read / "run" / "attest" / "root").rglob("*.json"))
        text = one.read_text().replace('"root"', '"elsewhere"')
        LocalStore(read / "run").put_new(f"attest/elsewhere/{one.parent.name}/{one.name}", text.encode())
        code, told = call("repair", read / "root", "--from-run", read / "run")
        assert code == 3
        assert "--location elsewhere=URL" in told

    def test_hostile_attestations_are_passed_over(self, read: Path) -> None:
        """Nothing is believed because of one: at worst a good copy is looked at once more."""
        store = LocalStore(read / "run")
        good = shards(read / "root")[3]
        digest = f"sha256:{good.name.split('.')[0]}"
        when = utc_text()

        def attested(*results: list[str], location: str = "root") -> bytes:
            document = {
                "format": "shardkit-attestations/1",
                "location": location,
                "level": "read",
                "by": "scrub",
            }
            return encode({**document, "results": list(results)})

        documents = [
            b"{" * 1_000_000,
            b"x" * 2_000_000,
            attested(["sha256:../../x", "tar", "wrong", when]),
            attested([digest, "so", "wrong", when]),
            attested([digest, "tar", "healed", "9999"]),
            attested([digest, "tar", "wrong", when], location="../root"),
            attested([digest, "tar", "wrong", when, "more"]),
            attested(*[[digest, "tar", "wrong", when]] * 4_097),
            attested([f"sha256:{9:064x}", "tar", "wrong", when]),
            attested([digest, "tar", "wrong", when]),
        ]
        for number, document in enumerate(documents):
            store.put_new(f"attest/root/2026-11-20/{number}.json", document)
        done = repair(str(read / "root"), level="attested", from_runs=[str(read / "run")])
        assert (done.exit_code, len(done.healed), done.copies) == (0, 2, 3)
        assert whole(read / "root") == self.truth

    def test_a_run_that_is_not_there(self, tmp_path: Path) -> None:
        make(tmp_path / "root")
        code, told = call("repair", tmp_path / "root", "--from-run", tmp_path / "none")
        assert (code, "is not there" in told) == (3, True)
        with pytest.raises(NotFoundError):
            repair(str(tmp_path / "root"), from_runs=[str(tmp_path / "none")])


class TestUnknown:
    """What does not answer is neither lost nor clean."""

    def test_a_location_that_is_not_mounted_is_not_filled(self, tmp_path: Path) -> None:
        root, mirror = tmp_path / "root", tmp_path / "mirror"
        make(root, "--location", f"mirror={mirror}", "--copies", "2")
        mirror.rename(tmp_path / "unmounted")
        mirror.mkdir()
        for command in (["repair", root], ["scrub", root]):
            code, told = call(*command)
            assert code == 3, told
            assert "not mounted" in told
        shards(root)[0].unlink()
        code, told = call("repair", root)
        assert code == 3, "what is missing here may be there: it is not lost"
        assert list(mirror.iterdir()) == []
        mirror.rmdir()
        (tmp_path / "unmounted").rename(mirror)
        assert call("repair", root)[0] == 0

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
    def test_a_disk_that_cannot_be_written(self, tmp_path: Path, number: int) -> None:
        """Every change fails: a clean error or code 3; nothing torn; with room again the same call heals."""
        make(tmp_path, parity=4)
        truth = whole(tmp_path)
        shards(tmp_path)[0].unlink()
        left = whole(tmp_path)
        with (
            substituted(FaultyOperations(number, 0, forever=True, torn=True)),
            contextlib.suppress(StoreError),
        ):
            assert repair(str(tmp_path)).exit_code == 3
        assert whole(tmp_path) == left
        assert repair(str(tmp_path)).verdict == "repaired"
        assert whole(tmp_path) == truth


class TestScrub:
    """Longest unlooked-at first, within its time; goes on where it was."""

    def test_every_copy_is_reached_in_turns(self, tmp_path: Path) -> None:
        """A clock that ticks with each copy makes the box small: about ten calls see everything once."""
        make(tmp_path)
        total = len(whole(tmp_path))
        ticks = iter(range(10**6))
        seen, calls = 0, 0
        while True:
            calls += 1
            done = scrub(
                str(tmp_path),
                older_than_s=3_600,
                time_box_s=12.5,
                settings=CheckSettings(jobs=2),
                clock=lambda: float(next(ticks)),
            )
            seen += done.locations["root"].checked
            if not done.remaining:
                break
            assert done.locations["root"].oldest == "", "what was never looked at waits longest"
            assert seen == sum(len(names) for names in read_attestations([LocalStore(tmp_path)]).values())
        assert calls > 3
        assert seen == total, "each once"
        assert scrub(str(tmp_path), older_than_s=3_600).locations["root"].checked == 0
        assert scrub(str(tmp_path)).locations["root"].checked == total

    def test_the_longest_unlooked_at_first(self, tmp_path: Path) -> None:
        repository = make(tmp_path)
        names = sorted(whole(tmp_path))
        digests = [(f"sha256:{name.split('/')[-1].split('.')[0]}", name.split(".", 1)[1]) for name in names]
        results = [
            Attestation("root", *one, "good", "read", "scrub", f"2026-01-{1 + (i * 7) % 28:02d}T00:00:00Z")
            for i, one in enumerate(digests)
        ]
        put_attestations(repository.store, results)
        order: list[str] = []
        original = LocalStore.head

        def noted(self: LocalStore, name: str) -> Any:
            order.append(name)
            return original(self, name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalStore, "head", noted)
            scrub(str(tmp_path), settings=CheckSettings(jobs=1))
        when = {name: row.time for name, row in zip(names, results, strict=True)}
        looked = list(dict.fromkeys(reversed([name for name in order if name in when])))[::-1]
        assert [when[name] for name in looked] == sorted(when.values())

    def test_what_is_bad_is_marked_and_healed_later_or_at_once(self, tmp_path: Path) -> None:
        make(tmp_path, parity=4)
        truth = whole(tmp_path)
        flip(shards(tmp_path)[0])
        code, told = call("scrub", tmp_path)
        assert code == 4
        assert f"shardkit repair {tmp_path} --level attested" in told
        done = repair(str(tmp_path), level="attested")
        assert (done.exit_code, done.copies) == (0, 1)
        assert whole(tmp_path) == truth
        flip(shards(tmp_path)[1])
        code, told = call("scrub", tmp_path, "--repair", "--older-than", "0")
        assert code == 0, told
        assert whole(tmp_path) == truth

    def test_stored_checksums_spare_the_bytes(self) -> None:
        store = MemoryStore()
        digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
        name = f"objects/sha256/9f/{digest}.tar"

        class NoBytes(MemoryStore):
            def get_range(self, name: str, offset: int, length: int) -> bytes:
                raise AssertionError("no byte is read")

        store = NoBytes()
        store.put_new(name, b"test")
        assert check_object(store, name, 4, "stored")[:3] == ("good", "stored", 0)
        store.objects[name] = b"tess"
        assert check_object(store, name, 4, "stored").result == "wrong"
        assert check_object(store, name, 5, "list").result == "wrong"
        assert check_object(store, name.replace("9f86", "9f87"), 4, "list").result == "missing"

    def test_verify_believes_what_is_recorded_for_as_long_as_the_policy_says(self, tmp_path: Path) -> None:
        make(tmp_path, parity=4)
        assert verify(tmp_path, level="attested").exit_code == 3
        scrub(str(tmp_path))
        assert verify(tmp_path, level="attested").exit_code == 0
        records = Records(LocalStore(tmp_path), "read")
        records.add("root", str(shards(tmp_path)[0].relative_to(tmp_path)), "wrong", "read")
        records.flush()
        found = verify(tmp_path, level="attested")
        assert (found.exit_code, len(found.damaged)) == (4, 1)
        assert repair(str(tmp_path), level="attested").exit_code == 0, "it is good"
        assert verify(tmp_path, level="attested").exit_code == 0
        old = {path: path.read_bytes().replace(utc_text()[:4].encode() + b"-", b"2020-") for path in
               tmp_path.glob("attest/root/*/*.json")}  # fmt: skip
        for path, data in old.items():
            path.chmod(0o644)
            path.write_bytes(data)
        assert verify(tmp_path, level="attested").exit_code == 3


AT_WORK = """
import os, sys
from shardkit.stores.waiting import RateLimiter
from shardkit_tools.main import run

take = RateLimiter.take
def noted(self, num_bytes):
    os.write(1, b"at work\\n")
    take(self, num_bytes)
RateLimiter.take = noted
run(sys.argv[1:])
"""


class TestCommands:
    """What somebody sees."""

    @pytest.mark.parametrize(
        ("arguments", "code", "said"),
        [
            (["repair", "ROOT", "--level", "deep"], 2, "deep"),
            (["scrub", "ROOT", "--time-box", "soon"], 2, "soon"),
            (["scrub", "ROOT", "--only", "mirror"], 2, "no location 'mirror'"),
            (["scrub", "ROOT", "--bandwidth", "fast"], 2, "fast"),
            (["repair", "ROOT", "--location", "x=s3://user:secret@bucket"], 2, "x"),
            (["repair", "NONE"], 3, "no dataset"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
        make(tmp_path / "root")
        places = {"ROOT": str(tmp_path / "root"), "NONE": str(tmp_path / "none")}
        got, told = call(*(places.get(word, word) for word in arguments))
        assert (got, said in told) == (code, True), told
        assert "secret" not in told

    @pytest.mark.parametrize("command", ["repair", "scrub"])
    def test_control_c_ends_it_and_the_next_goes_on(self, tmp_path: Path, command: str) -> None:
        make(tmp_path)
        arguments = [sys.executable, "-c", AT_WORK, command, str(tmp_path), "--bandwidth", "20kB/s"]
        with subprocess.Popen(
            arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "at work\n"
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            told = process.communicate(timeout=60)[1]
        assert process.returncode == 130, told
        assert "goes on where it stood" in told
        assert "Traceback" not in told
        looks = read_attestations([LocalStore(tmp_path)])
        done = scrub(str(tmp_path), older_than_s=3_600)
        assert done.locations["root"].not_due == len(looks.get("root", {}))
        assert done.exit_code == 0


def test_erasing_takes_the_parity_along(tmp_path: Path) -> None:
    """P + Q + k − 1 others give an erased shard back: they go with it."""
    repository = make(tmp_path, parity=4)
    before = {record.set.id for record in find_records([repository.store])}
    gone = next(
        record
        for record in find_records([repository.store])
        if record.set.k == 4 and record.set.members[0].extension == "tar"
    )
    erase(str(tmp_path), keys=["key-00007"], reason="asked to")
    left = list(find_records([repository.store]))
    held = {name for name in repository.store.list_after("objects/") if name.endswith(".parity")}
    assert {record.set.id for record in left} < before
    assert held == {record.object_at(record.set.k + row).name for record in left for row in (0, 1)}
    there = set(repository.store.list_after("objects/"))
    for record in left:
        assert all(member.name in there for member in record.set.members), "none that holds what was erased"
    assert gone.set.k == 4
    assert repair(str(tmp_path)).exit_code == 0
