"""Sixteen writers commit to one root while answers get lost: no commit is lost, none lands twice, the chain holds."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from shardkit.errors import CommitUnknown, StoreError
from shardkit.repository.repository import Repository
from tests.drills import drill_count
from tests.servers.fault_proxy import Fault, FaultProxy, Request
from tests.servers.google import google_environment, google_server
from tests.servers.object_stores import Unavailable, localstack, s3_environment

BUCKET = "shards"
WRITERS = 16


class Server(NamedTuple):
    """Somewhere to put objects."""

    scheme: str
    endpoint: str
    environment: Callable[[str], dict[str, str]]


@pytest.fixture(scope="module", params=["localstack", "google"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if request.param == "google":
        with google_server(BUCKET) as served:
            yield Server("gs", served.endpoint, google_environment)
            assert served.refused == [], "all that was asked is known"
        return
    try:
        with localstack(tmp_path_factory.mktemp("localstack"), BUCKET) as endpoint:
            yield Server("s3", endpoint, s3_environment)
    except Unavailable as reason:
        pytest.skip(str(reason))


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
    turns = drill_count(50)
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
