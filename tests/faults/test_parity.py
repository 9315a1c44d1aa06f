"""Parity: any two objects of a set may be lost, whatever their sizes; nothing wrong leaves it, whatever it is given."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pickle
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.copies.repair import encode_parity, repair
from shardkit.dataset.removing import erase, resume_erasures
from shardkit.documents import encode, sha256_digest
from shardkit.errors import FormatError, IntegrityError, NotFoundError, UsageError
from shardkit.reading.inventory import take_inventory
from shardkit.reading.parity.galois import recover, sums
from shardkit.reading.parity.rebuilding import encode_set, rebuild_range, restore
from shardkit.reading.parity.sets import (
    ParitySet,
    SetRecord,
    find_records,
    form_sets,
    parity_names,
    parse_header,
)
from shardkit.repository.policy import Parity
from shardkit.repository.repository import Repository
from shardkit.repository.versions import load_manifest
from shardkit.stores.local import LocalStore
from shardkit.stores.store import Descriptor, object_name
from shardkit.testing.memory_store import MemoryStore

# An independent GF(2⁸): polynomials as integers, multiplied bit by bit, as the definition says.


def multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(14, 7, -1):
        if product >> bit & 1:
            product ^= 0b1_0001_1101 << (bit - 8)
    return product


def slow_parity(members: Sequence[bytes]) -> tuple[bytes, bytes]:
    length = max(map(len, members))
    p, q = bytearray(length), bytearray(length)
    factor = 1
    for member in members:
        for at, byte in enumerate(member):
            p[at] ^= byte
            q[at] ^= multiply(factor, byte)
        factor = multiply(factor, 2)
    return bytes(p), bytes(q)


def arrays(pieces: Sequence[bytes]) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    return [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]


@given(st.lists(st.binary(max_size=70), min_size=1, max_size=20).filter(any), st.data())
def test_sums_and_recovery_agree_with_the_definition(members: list[bytes], data: st.DataObject) -> None:
    p, q = slow_parity(members)
    length = len(p)
    fast_p, fast_q = np.empty(length, np.uint8), np.empty(length, np.uint8)
    sums(arrays(members), fast_p, fast_q)
    assert (fast_p.tobytes(), fast_q.tobytes()) == (p, q)
    k = len(members)
    lost = data.draw(st.sets(st.integers(0, k + 1), max_size=2))
    pieces = [None if i in lost else piece for i, piece in enumerate(arrays([*members, p, q]))]
    found = recover(pieces[:k], pieces[k], pieces[k + 1], length)
    assert set(found) == lost
    for i in lost:
        assert found[i].tobytes() == [*members, p, q][i].ljust(length, b"\0")


def test_many_members_and_odd_lengths_over_several_rows() -> None:
    rng = np.random.default_rng(7)
    members = [rng.integers(0, 256, size, dtype=np.uint8) for size in (65_536 * 2 + 7, 0, 65_537, 131_071)]
    p, q = np.empty(131_079, np.uint8), np.empty(131_079, np.uint8)
    sums(members, p, q)
    for at in (0, 1, 65_535, 65_536, 131_070, 131_078):  # spot by spot, by the definition
        column = [member[at : at + 1].tobytes() or b"\0" for member in members]
        assert (p[at : at + 1].tobytes(), q[at : at + 1].tobytes()) == slow_parity(column)
    wide = [rng.integers(0, 256, 5, dtype=np.uint8) for _ in range(128)]
    p, q = np.empty(5, np.uint8), np.empty(5, np.uint8)
    sums(wide, p, q)
    for x, y in ((0, 127), (0, 1), (63, 64), (126, 127)):
        found = recover([None if i in (x, y) else piece for i, piece in enumerate(wide)], p, q, 5)
        assert np.array_equal(found[x], wide[x])
        assert np.array_equal(found[y], wide[y])
    with pytest.raises(UsageError):
        recover([None, None, None, *wide[3:]], p, q, 5)


# Sets in stores.


def put(store: MemoryStore | LocalStore, data: bytes, extension: str = "tar") -> Descriptor:
    found = Descriptor(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data), extension)
    store.put_new(found.name, data)
    return found


SIZES = {
    "uneven": [3_000_017, 2_999_999, 1, 1_048_576, 1_048_577, 700_000, 65_536, 2_097_152],
    "empty tail": [2_200_000, 1_500_000, 900_000, 0],
    "one": [1_300_000],
    "one, empty": [0],
    "equal": [40_000] * 8,
}


@pytest.mark.parametrize("kind", SIZES)
def test_any_two_of_a_set_are_made_again(kind: str) -> None:
    """All patterns of one and two lost objects; 55 of them for 8+2."""
    sizes = SIZES[kind]
    store = MemoryStore()
    rng = np.random.default_rng(len(sizes))
    one = ParitySet(tuple(put(store, rng.bytes(size)) for size in sizes))
    record = encode_set(store, one, [store])
    whole = dict(store.objects)
    objects = [record.object_at(i) for i in range(one.k + 2)]
    patterns = [lost for n in (1, 2) for lost in itertools.combinations(range(one.k + 2), n)]
    if one.k == 8:
        assert len(patterns) == 10 + 45
    for lost in patterns:
        for i in lost:
            store.delete(objects[i].name)
        made = restore(one, objects, dict.fromkeys(lost, store), [store])
        assert made == {i: objects[i] for i in lost}
        assert store.objects == whole
    for i in (0, 1, 2)[: one.k + 2]:
        store.delete(objects[i].name)
    if one.k + 2 > 2:
        with pytest.raises(IntegrityError, match="are needed"):
            restore(one, objects, dict.fromkeys((0, 1, 2), store), [store])


def test_parity_is_what_the_specification_says() -> None:
    """An object's bytes, from the slow arithmetic and the table of the header."""
    store = MemoryStore()
    contents = [b"first member", b"second", b""]
    one = ParitySet(tuple(put(store, data) for data in contents))
    record = encode_set(store, one, [store])
    for row, expected in enumerate(slow_parity(contents)):
        members = [[f"sha256:{hashlib.sha256(data).hexdigest()}", "tar", len(data)] for data in contents]
        document = encode(
            {"format": "shardkit-parity/1", "code": "pq-11d", "members": members, "row": row, "size": 12}
        )
        header = b"SKPARITY" + struct.pack("<II", 1, len(document)) + document
        data = store.objects[object_name(record.parity[row], "parity")]
        assert data == header + bytes(-len(header) % 64) + expected
        assert parse_header(data, len(data), "x") == (one, row)


def test_a_bad_source_is_done_without() -> None:
    """A survivor that rotted counts as lost, whether it says so by its size or not; of three, nothing is made."""
    store = MemoryStore()
    rng = np.random.default_rng(3)
    one = ParitySet(tuple(put(store, rng.bytes(50_000 + i)) for i in range(5)))
    record = encode_set(store, one, [store])
    objects = [record.object_at(i) for i in range(7)]
    truth = dict(store.objects)
    rotten = bytearray(store.objects[objects[2].name])
    rotten[777] ^= 4
    store.objects[objects[2].name] = bytes(rotten)
    store.delete(objects[0].name)
    restore(one, objects, {0: store}, [store])
    assert store.objects[objects[0].name] == truth[objects[0].name]
    store.objects[objects[5].name] += b"longer"
    store.delete(objects[0].name)
    before = dict(store.objects)
    with pytest.raises(IntegrityError):
        restore(one, objects, {0: store}, [store])
    assert store.objects == before, "nothing was published"


def test_a_rotten_member_is_not_encoded() -> None:
    """Parity of wrong bytes would protect them; it is read from where it is right, or the set is left out."""
    good, bad = MemoryStore(), MemoryStore()
    rng = np.random.default_rng(4)
    contents = [rng.bytes(30_000) for _ in range(3)]
    one = ParitySet(tuple(put(good, data) for data in contents))
    for data in contents:
        put(bad, data)
    bad.objects[one.members[1].name] = contents[0]
    with pytest.raises(IntegrityError):
        encode_set(bad, one, [bad])
    assert not [name for name in bad.objects if "parity" in name]


class Counting:
    """Ranges of objects in a dict, each request noted; what is in `lost` is not there."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.requests: list[tuple[str, int, int]] = []
        self.lost: set[str] = set()

    def __call__(self, name: str, offset: int, length: int) -> bytes:
        self.requests.append((name, offset, length))
        if name in self.lost:
            raise NotFoundError(name)
        return self.store.get_range(name, offset, length)


class TestRanges:
    """A degraded read of one block."""

    @pytest.fixture(autouse=True)
    def _sets(self) -> None:
        self.store = MemoryStore()
        rng = np.random.default_rng(5)
        self.one = ParitySet(tuple(put(self.store, rng.bytes(100_000 - 9_000 * i)) for i in range(8)))
        self.record = encode_set(self.store, self.one, [self.store])
        self.read = Counting(self.store)

    def rebuild(self, position: int, offset: int, length: int) -> bytes | None:
        truth = self.store.objects[self.one.members[position].name][offset : offset + length]
        self.read.requests.clear()
        digest = hashlib.sha256(truth).digest()
        found = rebuild_range(self.record, position, offset, length, digest, self.read)
        assert found in (None, truth)
        return found

    def test_one_lost_costs_k_ranges_of_the_block(self) -> None:
        assert self.rebuild(2, 5_000, 4_096) is not None
        assert len(self.read.requests) == 8
        assert {length for _, _, length in self.read.requests} == {4_096}
        assert self.one.members[2].name not in {name for name, _, _ in self.read.requests}

    def test_ranges_behind_the_end_of_others_cost_nothing(self) -> None:
        assert self.rebuild(0, 99_000, 500) is not None
        assert len(self.read.requests) == 1, "P alone: all others have ended"
        assert self.rebuild(0, 90_900, 200) is not None
        assert sorted(length for _, _, length in self.read.requests) == [100, 200]

    @pytest.mark.parametrize("second", [*range(1, 8), 8, 9])
    def test_two_lost(self, second: int) -> None:
        self.read.lost = {self.record.object_at(second).name}
        assert self.rebuild(0, 1_000, 3_000) is not None
        assert len(self.read.requests) - (second < 9) == 8, "one more that found nothing"

    def test_three_lost(self) -> None:
        self.read.lost = {self.record.object_at(i).name for i in (1, 2)}
        assert self.rebuild(0, 1_000, 3_000) is None

    @pytest.mark.parametrize("rotten", [1, 7, 8])
    def test_a_survivor_that_is_silently_wrong(self, rotten: int) -> None:
        name = self.record.object_at(rotten).name
        self.store.objects[name] = bytes(255 - byte for byte in self.store.objects[name])
        assert self.rebuild(0, 1_000, 3_000) is not None
        assert len(self.read.requests) == 9


# Versions.


def make(root: Path, rows: int = 300) -> Repository:
    with shardkit.create(
        str(root), {"x": "int64[64]"}, format="tar", shard_size=9_000, block_size=1_200
    ) as writer:
        for number in range(rows):
            writer.add({"x": [number] * 64})
    return Repository.open(root)


def values(root: Path) -> list[int]:
    dataset = shardkit.open(str(root))
    return [int(dataset[i]["x"][0]) for i in range(len(dataset))]


def test_a_version_is_encoded_once_and_an_append_adds_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = make(tmp_path)
    manifest = repository.resolve()
    done = encode_parity(repository, Parity(4), [manifest])
    assert len(done.encoded) == done.sets > 8
    assert not done.failed
    again = encode_parity(repository, Parity(4), [manifest])
    assert (again.encoded, again.sets) == ([], done.sets)
    with shardkit.create(str(tmp_path), {"x": "int64[64]"}, append=True) as writer:
        for number in range(100):
            writer.add({"x": [number] * 64})
    opened: list[str] = []
    of = Repository.open

    def counted(url: str, **more: Any) -> Repository:
        opened.append(url)
        return of(url, **more)

    monkeypatch.setattr(Repository, "open", counted)
    more = encode_parity(repository, Parity(4), [manifest, repository.resolve()])
    assert len(opened) == 1  # not once for each version
    assert more.sets - len(more.encoded) >= 2 * (len(load_manifest(repository, manifest).table) // 4), (
        "full sets stay as they are"
    )
    names = parity_names(repository.store, take_inventory(repository.store, manifest))
    there = {name for name in repository.store.list_after("objects/") if name.endswith(".parity")}
    assert {name for name in names if name.endswith(".parity")} < there
    assert there == {
        name
        for name in names
        | parity_names(repository.store, take_inventory(repository.store, repository.resolve()))
        if name.endswith(".parity")
    }
    assert len(list(find_records([repository.store]))) == done.sets + len(more.encoded)


def test_documents_are_made_again_from_headers(tmp_path: Path) -> None:
    repository = make(tmp_path)
    encode_parity(repository, Parity(4), [repository.resolve()])
    before = {record.set.id: record for record in find_records([repository.store])}
    for name in list(repository.store.list_after("parity/")):
        repository.store.delete(name)
    assert {record.set.id: record for record in find_records([repository.store])} == before


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("kind", ["tar", "index"])
def test_a_dataset_with_parity_is_read_through_damage(tmp_path: Path, damage: str, kind: str) -> None:
    """A local root of its own: two objects of a set are bad, and every sample is right; it is counted."""
    repository = make(tmp_path)
    encode_parity(repository, Parity(4), [repository.resolve()])
    shards = [name for name in repository.store.list_after("objects/") if name.endswith(kind)]
    table = load_manifest(repository, repository.resolve()).table
    wanted = [table.digest_text(i) if kind == "tar" else table.index_digest_text(i) for i in (0, 3)]
    for name in (name for name in shards if "sha256:" + name[-64 - 1 - len(kind) :].split(".")[0] in wanted):
        path = tmp_path / name
        data = bytearray(path.read_bytes())
        path.chmod(0o644)
        if damage == "flip":
            data[len(data) // 2] ^= 16
            path.write_bytes(data)
        elif damage == "truncate":
            path.write_bytes(data[: len(data) // 2])
        else:
            path.unlink()
    dataset = shardkit.open(str(tmp_path))
    with contextlib.closing(
        dataset.loader(dataset.plan(global_batch=16), tensors=False, rank=0, world=1)
    ) as loader:
        seen = np.concatenate([batch["x"][:, 0] for batch in loader])
        stats = loader.stats()
    assert set(seen.tolist()) <= set(range(300))
    assert len(seen) == len(set(seen.tolist())) == 288
    assert stats["remote_rebuilt"] > 0
    assert sorted(values(tmp_path)) == list(range(300))


def test_an_erasure_leaves_the_parity_that_another_shard_lives_by(tmp_path: Path) -> None:
    repository = make(tmp_path)
    encode_parity(repository, Parity(4), [repository.resolve()])
    table = load_manifest(repository, repository.resolve()).table
    shards = [table.digest_text(shard) for shard in range(len(table))]
    record = next(one for one in find_records([repository.store]) if one.set.members[0].digest in shards)
    erased, beside = record.set.members[:2]
    before = values(tmp_path)
    row = int(table.rows[: shards.index(erased.digest)].sum())
    (tmp_path / beside.name).unlink()
    with pytest.raises(IntegrityError, match="run: shardkit repair"):
        erase(str(tmp_path), rows=[row], reason="asked for")
    assert repair(str(tmp_path), level="read").lost == []
    resume_erasures(str(tmp_path))
    assert sorted(values(tmp_path)) == sorted(set(before) - {before[row]})
    assert not (tmp_path / erased.name).exists()


def test_opening_a_version_changes_nothing(tmp_path: Path) -> None:
    """A repository is what it was however often a version is loaded; each reader rebuilds what no location has."""
    repository = make(tmp_path / "root")
    encode_parity(repository, Parity(4), [repository.resolve()])
    (tmp_path / "copy").mkdir()
    opened = Repository.open(tmp_path / "root", read_only=True, locations={"copy": str(tmp_path / "copy")})
    version = opened.resolve()
    before = pickle.dumps(opened)
    parts = [load_manifest(opened, version).parts[0] for _ in range(3)]
    assert pickle.dumps(opened) == before
    table = load_manifest(opened, version).table
    index = object_name(table.index_digest_text(0), "index")
    good = (tmp_path / "root" / index).read_bytes()
    (tmp_path / "root" / index).unlink()
    for part in parts:
        assert part.repository.store.get(index, max_bytes=2**20) == good
    with pytest.raises(NotFoundError):
        opened.store.get(index, max_bytes=2**20)


def test_it_survives_pickling_and_forks(tmp_path: Path) -> None:
    import pickle

    repository = make(tmp_path)
    encode_parity(repository, Parity(4), [repository.resolve()])
    dataset = shardkit.open(str(tmp_path))
    for path in list((tmp_path / "objects").rglob("*.tar"))[:1]:
        path.unlink()
    copy = pickle.loads(pickle.dumps(dataset))
    assert sorted(int(copy[i]["x"][0]) for i in range(300)) == list(range(300))


# Hostile bytes.


def member(i: int, size: int = 10, extension: str = "tar") -> list[Any]:
    return [f"sha256:{i:064x}", extension, size]


def header(
    document: dict[str, Any], *, magic: bytes = b"SKPARITY", version: int = 1, length: int | None = None
) -> bytes:
    text = encode(document)
    data = magic + struct.pack("<II", version, len(text) if length is None else length) + text
    return data + bytes(-len(data) % 64)


GOOD: dict[str, Any] = {
    "format": "shardkit-parity/1", "code": "pq-11d", "members": [member(1), member(2, 7)], "row": 0, "size": 10,
}  # fmt: skip

HOSTILE = {
    "no member": GOOD | {"members": [], "size": 0},
    "too many": GOOD | {"members": [member(i) for i in range(129)]},
    "twice the same": GOOD | {"members": [member(1), member(1)]},
    "larger than any object": GOOD | {"members": [member(1, 2**50)], "size": 2**50},
    "negative": GOOD | {"members": [member(1, -1)]},
    "a truth value": GOOD | {"members": [member(1, True)]},
    "a path": GOOD | {"members": [["sha256:../../../../etc/passwd", "tar", 10]]},
    "an unknown extension": GOOD | {"members": [member(1, 10, "so")]},
    "another size": GOOD | {"size": 11},
    "another row": GOOD | {"row": 2},
    "another code": GOOD | {"code": "xor"},
    "more": GOOD | {"url": "http://169.254.169.254/"},
    "nested": GOOD | {"members": [[["sha256:"]]]},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_headers(kind: str) -> None:
    data = header(HOSTILE[kind])
    size = HOSTILE[kind]["size"]
    with pytest.raises(FormatError):
        parse_header(data, len(data) + size, "x")


def test_hostile_frames() -> None:
    data = header(GOOD)
    assert parse_header(data, len(data) + 10, "x")[0].length == 10
    for bad, size in [
        (data, len(data) + 9),
        (data[:10], 10),
        (b"", 0),
        (header(GOOD, magic=b"SKPARITZ"), len(data) + 10),
        (header(GOOD, version=2), len(data) + 10),
        (header(GOOD, length=2**32 - 1), len(data) + 10),
        (header(GOOD, length=3), len(data) + 10),
        (data[:-1] + b"x", len(data) + 10),
    ]:
        with pytest.raises(FormatError):
            parse_header(bad, size, "x")
    document = {
        "format": "shardkit-parity-set/1",
        "code": "pq-11d",
        "members": [member(1)],
        "parity": ["sha256:" + "0" * 64],
    }
    with pytest.raises(FormatError, match="parity"):
        SetRecord.from_bytes(encode({**document, "digest": sha256_digest(encode(document))}), "x")


LIMITED = """
import sys
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore
from shardkit.reading.parity.sets import find_records
import shardkit
def peak_kib():  # not ru_maxrss, which counts the process that started this one
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

store = LocalStore(sys.argv[1])
before = peak_kib()
print(len(list(find_records([store]))))
dataset = shardkit.open(sys.argv[1])
try:
    [dataset[i] for i in range(len(dataset))]
except shardkit.errors.ShardkitError as error:
    print(type(error).__name__)
print(peak_kib() - before)
"""


def test_hostile_objects_with_right_digests_cost_little_memory(tmp_path: Path) -> None:
    """Huge parity objects, and documents that claim huge members: refused by their sizes; wrong parity by the block."""
    repository = make(tmp_path / "root", rows=60)
    store = repository.store
    manifest = repository.resolve()
    encode_parity(repository, Parity(4), [manifest])
    endless = b"SKPARITY" + struct.pack("<II", 1, 60_000) + b'{"members":' + b"[" * 200_000_000
    put(LocalStore(tmp_path / "root"), endless, "parity")
    del endless
    records = list(find_records([store]))
    for record in records:  # P and Q of another set, rightly named
        zeros = bytes(record.set.parity_bytes)
        wrong = put(LocalStore(tmp_path / "root"), zeros, "parity").digest
        store.replace(record.set.record_name, SetRecord(record.set, (wrong, wrong)).to_bytes())
    shard = next((tmp_path / "root" / "objects").rglob("*.tar"))
    shard.unlink()
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path / "root")], capture_output=True, text=True,
                          check=True)  # fmt: skip
    found, error, grown = done.stdout.split()
    assert int(found) == len(records)
    assert error in ("NotFoundError", "IntegrityError", "StoreError")
    assert int(grown) < 64 * 1024, f"{grown} KiB"


BOUNDED = """
import sys
from concurrent.futures import ThreadPoolExecutor
from shardkit.stores.local import LocalStore
from shardkit.reading.parity.sets import find_records
from shardkit.reading.parity.rebuilding import restore
from shardkit.reading.parity.rebuilding import encode_set
from shardkit.reading.parity.sets import ParitySet
from shardkit.stores.store import Descriptor

def peak_kib():  # not ru_maxrss, which counts the process that started this one
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

store = LocalStore(sys.argv[1])
members = []
for number in range(4):
    with store.stage("tar") as stage:
        for piece in range(64):
            stage.write(bytes([number]) * 2**20)
        found = Descriptor(f"sha256:{stage.digest}", stage.size, "tar")
        stage.publish(found.name)
        members.append(found)
before = peak_kib()
record = encode_set(store, ParitySet(tuple(members)), [store])
objects = [record.object_at(i) for i in range(6)]
store.delete(objects[0].name)
store.delete(objects[3].name)
restore(record.set, objects, {0: store, 3: store}, [store])
print(peak_kib() - before)
"""


def test_objects_are_streamed(tmp_path: Path) -> None:
    """384 MiB of objects in less than 48 MiB of memory."""
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 48 * 1024, f"{done.stdout} KiB"


def test_sets_are_formed_in_order_each_digest_once() -> None:
    def one(i: int, size: int = 1) -> Descriptor:
        return Descriptor(f"sha256:{i:064x}", size, "tar")

    row = [one(1), one(2), one(1), one(3, 5 * 2**30), one(4), one(5)]
    assert [tuple(int(m.digest[-4:], 16) for m in found.members) for found in form_sets(row, 2)] == [
        (1, 2),
        (4, 5),
    ]
    assert list(form_sets([], 2)) == []
