"""Ranks that begin together: whoever is late is named, and mistakes say what was meant."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import RunError, StateError
from shardkit.loader import agreement
from shardkit.loader.agreement import Exchange, agree

distributed = pytest.importorskip("torch.distributed")


def _tcp(tmp_path: Path) -> Any:
    return distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _file(tmp_path: Path) -> Any:
    return distributed.FileStore(str(tmp_path / "store"), 2)


def _hash(tmp_path: Path) -> Any:
    return distributed.HashStore()


@pytest.mark.parametrize("make", [_tcp, _file, _hash])
def test_a_rank_that_is_late_is_named_and_waited_for(
    make: Callable[[Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(agreement, "_QUIET_S", 0.05)
    store = make(tmp_path)
    store.set_timeout(timedelta(seconds=60))
    other = store.clone() if hasattr(store, "clone") else store

    def come_late() -> None:
        ends = time.monotonic() + 30
        while not caplog.records and time.monotonic() < ends:
            time.sleep(0.01)
        agree(Exchange(other, 1, 2), {"lanes": [1]}, lanes=2, shared=False)

    thread = threading.Thread(target=come_late)
    thread.start()
    found = agree(Exchange(store, 0, 2), {"lanes": [0]}, lanes=2, shared=False)
    thread.join(30)
    assert [one["lanes"] for one in found] == [[0], [1]]
    first = caplog.records[0].getMessage()
    assert "rank 0 has waited 0 s for a loader on rank 1 of 2" in first
    assert "rank=0, world=1" in first


def test_a_rank_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(agreement, "_QUIET_S", 0.02)
    exchange = Exchange(_hash(tmp_path), 0, 2, patience_s=0.05)
    with pytest.raises(RunError, match="rank 1 of 2 has made no loader"):
        agree(exchange, {"lanes": [0]}, lanes=2, shared=False)


def test_other_loaders_are_asked_for_where_ranks_differ(tmp_path: Path) -> None:
    store = _hash(tmp_path)
    Exchange(store, 1, 2).put("1", b'{"lanes":[1],"plan":"b"}')
    with pytest.raises(StateError, match="Was a loader made on some ranks only"):
        agree(Exchange(store, 0, 2), {"lanes": [0], "plan": "a"}, lanes=2, shared=False)


def _hold_store(pipe: Any) -> None:
    store = _tcp(Path())
    pipe.send(store.port)
    pipe.recv()


def _use(exchange: Exchange, *, is_reading: bool) -> None:
    """Read a message, or write until the connection is known to be lost."""
    if is_reading:
        exchange.get("0", 0)
    for _ in range(100):
        exchange.put("1", b"{}")


@pytest.mark.parametrize("is_reading", [True, False])
def test_a_store_whose_process_has_ended_is_named(is_reading: bool) -> None:
    context = multiprocessing.get_context("fork")
    pipe, end = context.Pipe()
    holder = context.Process(target=_hold_store, args=(end,))
    holder.start()
    store = distributed.TCPStore("127.0.0.1", pipe.recv(), is_master=False)
    exchange = Exchange(store, 1, 2, patience_s=600)
    exchange.put("1", b"{}")
    holder.kill()
    holder.join()
    with pytest.raises(RunError, match="lost the connection to the store of the process group"):
        _use(exchange, is_reading=is_reading)
