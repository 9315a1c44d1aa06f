"""Many processes commit to one root at once: no commit is lost, none lands twice, the chain holds."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

import pytest

import shardkit
from shardkit.errors import CommitConflict, CommitUnknown, StoreError
from shardkit.repository.log import LogEntry
from shardkit.repository.repository import Repository
from tests.drills import drill_cases, drill_count
from tests.servers.fault_proxy import Fault, FaultProxy, Request
from tests.servers.google import google_environment, google_server
from tests.servers.object_stores import localstack, moto, s3_environment

# ---- Many processes commit to one root at once: no commit is lost, none lands twice, the chain holds


WRITERS = 16
Answers = SimpleQueue[tuple[list[tuple[int, str]], int]]


def write(root: Path, name: str, turns: int, begin: Barrier, answers: Answers) -> None:
    """Count up a ref of its own, blindly, and a shared one by compare-and-set until it wins."""
    repository = Repository.open(root)
    acknowledged, conflicts = [], 0
    begin.wait(300)
    for turn in range(turns):
        manifest = repository.put_object(f"{name} {turn}".encode(), "manifest").digest
        if turn % 2:
            entry = repository.commit({name: manifest}, message=str(turn), author=name)
        else:
            while True:
                before = repository.refs.get("shared")
                try:
                    entry = repository.commit(
                        {"shared": manifest}, {f"{name}-{turn}": manifest},
                        message=str(turn), author=name, expected={"shared": before},
                    )  # fmt: skip
                    break
                except CommitConflict:
                    conflicts += 1
        acknowledged.append((entry.n, entry.txn))
    answers.put((acknowledged, conflicts))


def race(root: Path, turns: int) -> tuple[list[tuple[int, str]], int, float]:
    """(number and transaction of each acknowledged commit, conflicts seen, seconds)."""
    Repository.create(root)
    context = multiprocessing.get_context("fork")
    begin, answers = context.Barrier(WRITERS + 1), context.SimpleQueue()
    writers = [
        context.Process(target=write, args=(root, f"writer{number}", turns, begin, answers))
        for number in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    begin.wait(300)
    start = time.perf_counter()
    acknowledged: list[tuple[int, str]] = []
    conflicts = 0
    for _ in writers:
        own, seen = answers.get()
        acknowledged += own
        conflicts += seen
    seconds = time.perf_counter() - start
    for writer in writers:
        writer.join(300)
        assert writer.exitcode == 0
    return acknowledged, conflicts, seconds


@pytest.mark.drill
def test_racing_writers_lose_nothing(tmp_path: Path) -> None:
    turns = drill_count(50)
    acknowledged, conflicts, seconds = race(tmp_path / "root", turns)
    log = Repository.open(tmp_path / "root", read_only=True).log()  # verifies the whole chain
    total = WRITERS * turns
    assert len(acknowledged) == total
    assert sorted(acknowledged) == sorted((entry.n, entry.txn) for entry in log)
    assert [entry.n for entry in log] == list(range(total, 0, -1))
    assert max(Counter((entry.author, entry.message) for entry in log).values()) == 1
    # Compare-and-set: every value of the shared ref was put on top of another one, so none was overwritten unseen.
    shared = [entry.refs.get("shared") for entry in reversed(log)]
    values = [new for old, new in zip([None, *shared], shared, strict=False) if new != old]
    assert len(values) == len(set(values)) == WRITERS * ((turns + 1) // 2)
    for number in range(WRITERS):
        mine = [entry for entry in reversed(log) if entry.author == f"writer{number}"]
        assert [entry.message for entry in mine] == [str(turn) for turn in range(turns)]
    print(json.dumps({"commits": total, "lost": 0, "conflicts": conflicts, "seconds": round(seconds, 2)}))


class Interrupted(Repository):
    """Another commit lands between this one's look at the head and its put."""

    interruption: Callable[[], object] | None = None

    def head(self) -> LogEntry:
        found, interruption = super().head(), self.interruption
        if interruption is not None:
            self.interruption = None
            interruption()
        return found


def test_a_commit_to_another_ref_is_rebased_over(tmp_path: Path) -> None:
    first = Repository.create(tmp_path / "root")
    second = Repository.open(tmp_path / "root")
    one, two = (first.put_object(data, "manifest").digest for data in (b"1", b"2"))
    first.commit({"main": one}, message="first")

    racing = Interrupted(first.store, first._identity, read_only=False)
    racing.interruption = lambda: second.commit({"val": two}, message="in between")
    entry = racing.commit({"main": two}, message="rebased")
    assert (entry.n, dict(entry.refs)) == (3, {"main": two, "val": two})

    racing.interruption = lambda: second.commit({"main": one}, message="same ref")
    with pytest.raises(CommitConflict, match=r"'main' was moved"):
        racing.commit({"main": None}, message="refused")

    racing.interruption = lambda: second.commit({"main": two}, message="what I wanted too")
    assert racing.commit({"main": two}, message="agreed").n == 6

    racing.interruption = lambda: second.commit({}, {"v1": one}, message="tag")
    with pytest.raises(CommitConflict, match="never moved"):
        racing.commit({}, {"v1": two}, message="refused")
    assert [entry.message for entry in first.log()][:2] == ["tag", "agreed"]


def test_threads_share_one_repository(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "root")
    manifest = repository.put_object(b"1", "manifest").digest

    def commit(number: int) -> str:
        return repository.commit({f"ref-{number % 8}": manifest}, message=str(number)).txn

    with ThreadPoolExecutor(8) as pool:
        acknowledged = list(pool.map(commit, range(64)))
    assert sorted(acknowledged) == sorted(entry.txn for entry in repository.log())


def append_rows(root: Path, name: str) -> None:
    """Append four rows, one by one; exit code 0 once each is in."""
    for turn in range(4):
        while True:
            try:
                with shardkit.create(root, {"n": "int64"}, append=True) as writer:
                    writer.add({"n": turn}, key=f"{name}-{turn}")
                break
            except CommitConflict:
                pass


def test_racing_appends_are_all_in_or_told(tmp_path: Path) -> None:
    root = tmp_path / "d"
    with shardkit.create(root, {"n": "int64"}) as writer:
        writer.add({"n": -1}, key="first")
    context = multiprocessing.get_context("fork")
    racers = [context.Process(target=append_rows, args=(root, name)) for name in "xy"]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(120)
        assert racer.exitcode == 0
    ds = shardkit.open(root)
    appended = (f"{name}-{turn}" for name in "xy" for turn in range(4))
    assert sorted(ds.key(sample) for sample in range(len(ds))) == sorted(["first", *appended])
    assert len(Repository.open(root).log()) == 9


# ---- Sixteen writers commit to one root while answers get lost: no commit is lost, none lands twice, the chain holds


BUCKET = "shards"


class Server(NamedTuple):
    """Somewhere to put objects."""

    scheme: str
    endpoint: str
    environment: Callable[[str], dict[str, str]]


@pytest.fixture(scope="module", params=drill_cases(["moto", "google", "localstack"], [0, 1]))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if request.param == "google":
        with google_server(BUCKET) as served:
            yield Server("gs", served.endpoint, google_environment)
            assert served.refused == [], "all that was asked is known"
        return
    with (
        localstack(tmp_path_factory.mktemp("localstack"), BUCKET)
        if request.param == "localstack"
        else moto(BUCKET)
    ) as endpoint:
        yield Server("s3", endpoint, s3_environment)


def bad_network(request: Request) -> Fault | None:
    """Every seventh answer is lost after the server did its work; some requests are reset or refused before."""
    if request.number % 7 == 3:
        return Fault("lost")
    if request.number % 23 == 11:
        return Fault("reset")
    return Fault("status", status=503) if request.number % 31 == 5 else None


@pytest.mark.drill
def test_sixteen_writers_through_lost_answers(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = drill_count(20)
    root = f"{server.scheme}://{BUCKET}/{uuid.uuid4().hex}"
    with FaultProxy(server.endpoint) as proxy:
        for name, value in server.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        Repository.create(root)
        proxy.faults = bad_network
        gate = threading.Barrier(WRITERS)

        def write(number: int) -> list[str]:
            repository = Repository.open(root)
            gate.wait()
            landed = []
            for turn in range(turns):
                manifest = repository.put_object(f"{number} {turn}".encode(), "manifest").digest
                try:
                    landed.append(repository.commit({f"w{number}": manifest}, message=f"{number} {turn}").txn)
                except CommitUnknown as unknown:  # the caller's part of the bargain: ask later
                    proxied = unknown.args[0].partition("commit ")[2][:32]
                    found = repository.find_commit(proxied)
                    if found is not None:
                        landed.append(found.txn)
            return landed

        started = time.perf_counter()
        with ThreadPoolExecutor(WRITERS) as pool:
            acknowledged = [txn for txns in pool.map(write, range(WRITERS)) for txn in txns]
        seconds = time.perf_counter() - started
        proxy.faults = lambda _request: None
        log = Repository.open(root).log()  # the chain is verified
        lost = proxy.counts["lost"]
    assert sorted(acknowledged) == sorted(entry.txn for entry in log), (
        "all that were told, and no other, are there"
    )
    assert len(log) == WRITERS * turns
    assert max(Counter(entry.message for entry in log).values()) == 1, "none twice"
    for number in range(WRITERS):
        assert f"w{number}" in log[0].refs
    assert lost > WRITERS
    with capsys.disabled():
        told = {"commits": len(log), "lost_answers": lost, "seconds": round(seconds, 1)}
        print(json.dumps({"server": server.scheme, **told}))


@pytest.mark.parametrize(("scheme", "environment"), [("s3", s3_environment), ("gs", google_environment)])
def test_an_unreachable_store_is_told_as_such(
    scheme: str, environment: Callable[[str], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shardkit.stores.remote.object_store.RetryPolicy", _impatient)
    with pytest.raises(StoreError, match="no connection"):
        Repository.open(f"{scheme}://{BUCKET}/x")


def _impatient() -> object:
    from shardkit.stores.waiting import RetryPolicy

    return RetryPolicy(deadline_s=0.2, attempt_s=1)
