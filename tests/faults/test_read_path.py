"""Reads through bad networks and bad servers: right bytes or a clear error, bounded, counted, without a credential."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StoreError
from shardkit.loader import gather, plain_rows
from shardkit.reading import read_path
from shardkit.reading.attestations import Attestation, read_attestations
from shardkit.reading.located_store import LocatedStore, wanted_block
from shardkit.reading.objects import BlockRequest, Location
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore, open_store
from shardkit.stores.remote.addresses import parse_address
from shardkit.stores.remote.object_store import ObjectStore
from shardkit.stores.waiting import EXPIRED, RetryPolicy
from shardkit.testing.memory_store import MemoryStore
from tests.servers.fault_proxy import Fault, FaultProxy, Request

BUCKET = "shards"
BUCKETS = (BUCKET,)
SETTINGS = ReadSettings(deadline_s=20, attempt_s=2, cool_down_s=0.2)


def new_store(**retry: float) -> ObjectStore:
    settings = {"deadline_s": 20.0, "attempt_s": 1.0, "first_pause_s": 0.01} | retry
    return ObjectStore(parse_address(f"s3://{BUCKET}/{uuid.uuid4().hex}"), retry=RetryPolicy(**settings))


def first(
    kind: Any, times: int = 1, method: str = "PUT", **details: Any
) -> Callable[[Request], Fault | None]:
    """A fault for the first requests of a method."""
    left = [times]

    def decide(request: Request) -> Fault | None:
        if request.method != method or left[0] == 0:
            return None
        left[0] -= 1
        return Fault(kind, **details)

    return decide


class TestWrites:
    """A put whose answer was lost is settled by the store itself."""

    @pytest.mark.parametrize("kind", ["lost", "reset", "status"])
    def test_a_put_is_repeated_until_it_is_answered(self, proxy: FaultProxy, kind: str) -> None:
        store = new_store()
        proxy.faults = first(kind, times=3)
        assert store.put_new("log/1", b"mine") is True, (
            "it was this call that created it, whatever the network said"
        )
        assert proxy.counts[kind] == 3
        proxy.faults = first(kind, times=2)
        assert store.put_new("log/1", b"other") is False, "and this one did not"
        assert store.get("log/1", max_bytes=10) == b"mine"

    def test_equal_bytes_of_two_writers_have_one_creator(self, proxy: FaultProxy) -> None:
        """By the bytes alone a writer whose answer was lost could not tell its own object from another's."""
        store = new_store()
        assert store.put_new("x", b"same") is True
        proxy.faults = first("lost")
        assert store.put_new("x", b"same") is False

    def test_it_gives_up_at_the_deadline(self, proxy: FaultProxy) -> None:
        store = new_store(deadline_s=0.3)
        proxy.faults = lambda request: Fault("reset") if request.method == "PUT" else None
        started = time.monotonic()
        with pytest.raises(StoreError, match="cannot write x"):
            store.put_new("x", b"1")
        assert time.monotonic() - started < 60  # and not for ever
        assert store.head("x") is None

    def test_replace_and_delete_are_repeated(self, proxy: FaultProxy) -> None:
        store = new_store()
        proxy.faults = first("lost", 2)
        store.replace("x", b"healed")
        assert store.get("x", max_bytes=10) == b"healed"
        proxy.faults = first("lost", 2, "DELETE")
        store.delete("x")
        assert store.head("x") is None


class TestReads:
    """One location, seen through faults."""

    @pytest.mark.parametrize("kind", ["reset", "truncate", "status", "stall"])
    def test_a_read_is_repeated(self, proxy: FaultProxy, kind: str) -> None:
        store = new_store()
        data = os.urandom(300_000)
        store.put_new("x", data)
        proxy.faults = first(kind, 2, "GET", seconds=30)
        assert store.get("x", max_bytes=len(data)) == data
        proxy.faults = first(kind, 2, "GET", seconds=30)
        assert store.get_range("x", 1_000, 200_000) == data[1_000:201_000]
        assert proxy.counts[kind] == 4

    def test_errors_are_told_in_time(self, proxy: FaultProxy) -> None:
        store = new_store(deadline_s=0.2)
        store.put_new("x", b"1")
        proxy.faults = lambda _request: Fault("status", status=503)
        with pytest.raises(StoreError, match=r"HTTP 503 SlowDown.*fewer requests"):
            store.get("x", max_bytes=1)
        proxy.faults = lambda _request: Fault("status", status=403, code="AccessDenied")
        with pytest.raises(StoreError, match=r"AccessDenied.*get the right"):
            store.get("x", max_bytes=1)
        with pytest.raises(StoreError, match="AccessDenied"):
            store.put_new("y", b"1")


def block(data: bytes, offset: int = 0) -> BlockRequest:
    return BlockRequest(shard_name(data), offset, len(data) - offset, hashlib.sha256(data[offset:]).digest())


def shard_name(data: bytes) -> str:
    text = hashlib.sha256(data).hexdigest()
    return f"objects/sha256/{text[:2]}/{text}.tar"


class Fickle(MemoryStore):
    """A store whose reads go through a function of the test."""

    def __init__(self, name: str, spoil: Callable[[bytes], bytes] | None = None) -> None:
        super().__init__()
        self.name, self.spoil, self.reads = name, spoil or (lambda data: data), 0

    @property
    def url(self) -> str:
        return self.name

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        self.reads += 1
        return self.spoil(super().get_range(name, offset, length))

    def get(self, name: str, *, max_bytes: int) -> bytes:
        self.reads += 1
        return self.spoil(super().get(name, max_bytes=max_bytes))


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def unreachable(data: bytes) -> bytes:
    raise StoreError("no route")


def located(
    *stores: Fickle, data: bytes = b"", settings: ReadSettings = SETTINGS, heal: bool = False
) -> LocatedStore:
    for store in stores:
        if data:
            store.put_new(shard_name(data), data)
    return LocatedStore(
        [Location(name=store.name, store=store, rank=i, heal=heal) for i, store in enumerate(stores)],
        settings=settings,
    )


class TestLocations:
    """Several locations, some bad."""

    data = os.urandom(50_000)

    def test_a_transient_mismatch_is_fetched_once_more(self) -> None:
        spoils = [flipped]
        a = Fickle("a", lambda data: spoils.pop()(data) if spoils else data)
        store = located(a, Fickle("b"), data=self.data)
        assert store.read_block(block(self.data)) == self.data
        stats = store.read_events.stats()
        assert (stats["remote_mismatches"], stats["remote_refetches"], stats["remote_failovers"]) == (1, 1, 0)
        assert stats["bytes_from_a"] == len(self.data)

    def test_a_lasting_mismatch_fails_over_is_attested_and_healed(self) -> None:
        a, b = Fickle("a", flipped), Fickle("b")
        store = located(a, b, data=self.data, heal=True)
        a.objects[shard_name(self.data)] = flipped(self.data)
        a.spoil = lambda data: data
        assert store.read_block(block(self.data)) == self.data
        store.healer.wait()
        stats = store.read_events.stats()
        assert (stats["remote_mismatches"], stats["remote_failovers"], stats["remote_healed"]) == (2, 1, 1)
        assert a.objects[shard_name(self.data)] == self.data
        told = read_attestations([a])["a"][shard_name(self.data)]
        assert (told.result, len(list(a.list_after("attest/a/")))) == ("healed", 2)

    def test_without_the_right_to_write_it_is_left_to_a_repair(self) -> None:
        a, b = Fickle("a", flipped), Fickle("b")
        store = located(a, b, data=self.data)
        told: list[Attestation] = []
        store.listen(attest=told.append)
        for _ in range(3):
            assert store.read_block(block(self.data)) == self.data
        assert [(one.location, one.result) for one in told] == [("a", "wrong")], "once per object"
        assert a.objects[shard_name(self.data)] == self.data

    def test_a_missing_object_is_read_elsewhere(self) -> None:
        a, b = Fickle("a"), Fickle("b")
        store = located(a, b, data=self.data, heal=True)
        a.delete(shard_name(self.data))
        assert store.read_block(block(self.data)) == self.data
        store.healer.wait()
        assert a.objects[shard_name(self.data)] == self.data

    def test_whole_objects_are_verified_by_their_name(self) -> None:
        store = located(Fickle("a", flipped), Fickle("b"), data=self.data)
        assert store.get(shard_name(self.data), max_bytes=10**6) == self.data

    def test_all_bad_is_an_error_at_once(self) -> None:
        store = located(Fickle("a", flipped), Fickle("b", flipped), data=self.data)
        with pytest.raises(IntegrityError, match=r"a: .*b: .*shardkit repair"):
            store.read_block(block(self.data))
        with pytest.raises(NotFoundError):
            located(Fickle("a"), Fickle("b")).read_block(block(self.data))

    def test_unreachable_waits_then_raises(self) -> None:
        settings = ReadSettings(deadline_s=2.0, attempt_s=0.2)
        store = located(Fickle("a", unreachable), Fickle("b", flipped), data=self.data, settings=settings)
        with pytest.raises(StoreError, match=r"a: (no route|silent)"):  # the deadline may cut the last try
            store.read_block(block(self.data))
        assert store.read_events.stats()["remote_retries"] >= 1

    def test_an_attempt_that_the_deadline_cuts_keeps_the_reason_of_the_one_before(self) -> None:
        ended = threading.Event()

        def silent(data: bytes) -> bytes:
            ended.wait(20)
            return data

        path = located(Fickle("a", silent), data=self.data).path
        request = wanted_block(block(self.data))
        order, problems = path._order(request), dict[str, ShardkitError](a=StoreError("no route"))
        assert read_path._Turn(path, request, order, time.monotonic(), problems).run() is None
        assert str(problems["a"]) == "no route"
        assert read_path._Turn(path, request, path._order(request), time.monotonic(), {}).run() is None
        ended.set()

    def test_it_comes_back_while_we_wait(self) -> None:
        back = threading.Event()
        a = Fickle("a", lambda data: data if back.is_set() else unreachable(data))
        store = located(a, data=self.data)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(store.read_block, block(self.data))
            while a.reads < 2:
                time.sleep(0.01)
            back.set()
            assert found.result(30) == self.data

    def test_the_renewal_of_expired_credentials_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Somebody renews them in a file a moment later; if nobody does, the read ends long before its deadline."""
        renewed_after = [4]

        def expired(data: bytes) -> bytes:
            if a.reads > renewed_after[0]:
                return data
            error = StoreError("the credentials expired and could not be renewed")
            error.errno = EXPIRED
            raise error

        a = Fickle("a", expired)
        store = located(a, data=self.data)
        assert store.read_block(block(self.data)) == self.data
        assert a.reads == 5
        renewed_after[0] = 1 << 30
        monkeypatch.setattr(read_path, "_RENEWAL_S", 0.2)
        started = time.monotonic()
        with pytest.raises(StoreError, match="credentials expired"):
            store.read_block(block(self.data))
        assert time.monotonic() - started < SETTINGS.deadline_s / 2

    def test_the_circuit_opens_and_closes(self) -> None:
        healthy = [False]
        a = Fickle("a", lambda data: data if healthy[0] else unreachable(data))
        b = Fickle("b")
        settings = dataclasses.replace(SETTINGS, hedge=False)  # a hedge would ask b, too
        store = located(a, b, data=self.data, settings=settings)
        for _ in range(40):
            assert store.read_block(block(self.data)) == self.data
        asked = a.reads
        assert asked < 12, "after five failures in a row it rests"
        healthy[0] = True
        deadline = time.monotonic() + 20
        while store.read_events.stats()["remote_circuit_closed"] == 0 and time.monotonic() < deadline:
            store.read_block(block(self.data))
            time.sleep(0.01)
        stats = store.read_events.stats()
        assert stats["remote_circuit_opened"] == stats["remote_circuit_closed"] == 1
        before = b.reads
        store.read_block(block(self.data))
        assert b.reads == before, "the nearer one is asked again"

    def test_a_slow_answer_is_hedged(self) -> None:
        stall = threading.Event()
        slow = [False]

        def sometimes(data: bytes) -> bytes:
            if slow[0]:
                stall.wait(30)
            return data

        store = located(Fickle("a", sometimes), Fickle("b"), data=self.data)
        for _ in range(40):
            store.read_block(block(self.data))
        slow[0] = True
        before = store.read_events.stats()  # on a busy machine, some of these were hedged as well
        try:
            assert store.read_block(block(self.data)) == self.data
            stats = store.read_events.stats()
            assert stats["remote_hedges"] == before["remote_hedges"] + 1
            assert stats["remote_hedges_won"] == before["remote_hedges_won"] + 1
            assert stats["bytes_from_b"] == before.get("bytes_from_b", 0) + len(self.data)
        finally:
            stall.set()

    def test_silence_is_a_failure(self) -> None:
        stall = threading.Event()

        def silent(data: bytes) -> bytes:
            stall.wait(30)
            return data

        settings = ReadSettings(deadline_s=20, attempt_s=0.2, hedge=False)
        store = located(Fickle("a", silent), Fickle("b"), data=self.data, settings=settings)
        try:
            assert store.read_block(block(self.data)) == self.data
            assert store.read_events.stats()["remote_timeouts"] >= 1  # b may be late, too
        finally:
            stall.set()

    def test_the_last_resort(self) -> None:
        a = Fickle("a", flipped)
        a.put_new(shard_name(self.data), self.data)
        asked: list[BlockRequest] = []

        class Parity:
            def __call__(_, request: BlockRequest) -> bytes | None:  # noqa: N805
                asked.append(request)
                return self.data if len(asked) > 1 else flipped(self.data)

            def whole(self, name: str, max_bytes: int) -> bytes | None:
                return None

        store = LocatedStore([Location(name="a", store=a)], settings=SETTINGS).with_parity(Parity())
        with pytest.raises(IntegrityError):
            store.read_block(block(self.data))
        assert store.read_block(block(self.data)) == self.data
        assert store.read_events.stats()["remote_rebuilt"] == 1


class TestTraining:
    """An epoch over two locations, of which one goes from bad to worse."""

    def test_the_batches_are_the_same(self, proxy: FaultProxy, server: str, tmp_path: Path) -> None:
        root = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        with shardkit.create(root, {"x": "int64[512]"}, shard_size=150_000, block_size=8_192) as writer:
            for number in range(300):
                writer.add({"x": [number] * 512})
        copy = tmp_path / "mirror"
        _copy(root, copy)
        truth = _epoch(shardkit.open(copy))
        dataset = shardkit.open(root, locations={"mirror": str(copy)}, settings=SETTINGS, heal=True)
        reads = itertools.count()
        worse = [None] * 10 + [Fault("flip")] * 6 + [Fault("stall", seconds=5)] * 3 + [Fault("status")] * 6

        def ill(request: Request) -> Fault | None:
            if request.method != "GET":
                return None
            number = next(reads)
            return worse[number] if number < len(worse) else Fault("reset")

        proxy.faults = ill
        seen = _epoch(dataset)
        assert seen == truth
        store = dataset.repository.store
        assert isinstance(store, LocatedStore)
        stats = store.read_events.stats()
        assert stats["remote_mismatches"] >= 1
        assert stats["remote_failovers"] + stats["remote_hedges"] >= 1
        assert stats["bytes_from_mirror"] > 0
        assert stats["bytes_from_root"] > 0


def _copy(root: str, folder: Path) -> None:
    source, target = open_store(root), LocalStore(folder)
    for name in source.list_after(""):
        target.put_new(name, source.get(name, max_bytes=10**9))


def _epoch(dataset: Any) -> list[tuple[list[int], bytes]]:
    plan = dataset.plan(global_batch=10, seed=3)
    loader = dataset.loader(plan, rank=0, world=1, tensors=False, prefetch=0)
    with contextlib.closing(loader):
        return [(batch["samples"].tolist(), batch["x"].tobytes()) for batch in loader]


def test_a_stranger_repository_is_not_mixed_in(tmp_path: Path) -> None:
    """A location lacks what another root's objects are called: it is asked, and has nothing."""
    for name in ("a", "b"):
        with shardkit.create(tmp_path / name, {"x": "int64"}) as writer:
            writer.add({"x": ord(name)})
    dataset = shardkit.open(tmp_path / "a", locations={"other": str(tmp_path / "b")})
    assert dataset[0] == {"x": ord("a")}
    assert Repository.open(tmp_path / "a").id == dataset.repository.id


def test_a_file_that_goes_while_it_is_being_opened_is_read_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when it was looked for, and is not when it is opened: as if it had been gone before."""
    near, far = tmp_path / "near", tmp_path / "far"
    with shardkit.create(near, {"x": "int64"}, shard_size="1KiB", block_size="512") as writer:
        for number in range(200):
            writer.add({"x": number})
    shutil.copytree(near, far)
    expected = _epoch(shardkit.open(near))
    real = os.open

    def vanishing(path: Any, flags: int, *rest: Any, **how: Any) -> int:
        if str(path).startswith(str(near / "objects")) and not str(path).endswith(".index"):
            Path(path).unlink(missing_ok=True)
        return real(path, flags, *rest, **how)

    dataset = shardkit.open(near, locations={"far": str(far)}, settings=SETTINGS)
    alone = shardkit.open(near)
    monkeypatch.setattr(os, "open", vanishing)
    monkeypatch.setattr(gather, "block_rows", plain_rows)  # the compiled module opens files by itself
    assert _epoch(dataset) == expected
    with pytest.raises(NotFoundError, match="is not in"):  # where there is no other place
        _epoch(alone)


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "link"])
def test_a_shard_that_is_no_regular_file_is_an_error_at_once(tmp_path: Path, kind: str) -> None:
    with shardkit.create(tmp_path / "data", {"x": "int64[64]"}) as writer:
        for number in range(8):
            writer.add({"x": [number] * 64})
    dataset = shardkit.open(tmp_path / "data")
    assert len(list(dataset)) == 8
    (shard,) = (path for path in (tmp_path / "data").rglob("*") if path.suffix in (".arrow", ".tar"))
    kept = shard.rename(tmp_path / "kept")
    if kind == "pipe":
        os.mkfifo(shard)
    elif kind == "socket":
        with (
            contextlib.chdir(shard.parent),
            socket.socket(socket.AF_UNIX) as made,
        ):  # paths of sockets are short
            made.bind(shard.name)
    elif kind == "folder":
        shard.mkdir()
    else:
        shard.symlink_to(kept)
    for opened in (dataset, shardkit.open(tmp_path / "data")):
        with pytest.raises(StoreError, match=r"regular file|symbolic link|No such device"):
            opened[0]
