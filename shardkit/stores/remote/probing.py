"""Probe whether a store keeps put-if-absent, before several writers may use it.

Some servers ignore put-if-absent, others break it only in a race. Both lose commits silently.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from shardkit.errors import StoreError
from shardkit.stores.remote.object_store import ObjectStore
from shardkit.stores.store import Store

WRITERS: Final = 16
ROUNDS: Final = 5


class ProbeResult(NamedTuple):
    """Result of racing writers."""

    winners: tuple[int, ...]
    """Number of writers per round whose put reported that it created the object."""
    kept: tuple[bool, ...]
    """Per round, whether the stored object is the one of a winner."""
    overwritten: bool
    """Whether a later put on an existing name reported that it created the object."""

    @property
    def holds(self) -> bool:
        """True if several writers may share the store."""
        return set(self.winners) == {1} and all(self.kept) and not self.overwritten


def probe(store: Store, *, writers: int = WRITERS, rounds: int = ROUNDS) -> ProbeResult:
    """Test put-if-absent with racing writers; the objects that they write are removed.

    Each writer has its own client, so that no lock inside this process hides the store's behaviour.

    Args:
        store: store to test, which must be writable.
        writers: number of threads.
        rounds: number of races; the first failure ends the test.
    """
    folder = f"probe/{uuid.uuid4().hex}"
    copies = [copy.copy(store) for _ in range(writers)]
    winners: list[int] = []
    kept: list[bool] = []
    overwritten = False
    with ThreadPoolExecutor(writers, thread_name_prefix="shardkit-probe") as pool:
        for turn in range(rounds):
            name, gate = f"{folder}/{turn}", threading.Barrier(writers)

            def put(number: int, name: str = name, gate: threading.Barrier = gate) -> bool:
                gate.wait()
                return copies[number].put_new(name, b"%d" % number)

            try:
                created = list(pool.map(put, range(writers)))
                found = int(store.get(name, max_bytes=8))
                winners.append(sum(created))
                kept.append(created[found])
                overwritten = overwritten or store.put_new(name, b"late")
            finally:
                with contextlib.suppress(StoreError):
                    store.delete(name)
            if winners[-1] != 1:
                break  # one counterexample is enough
    return ProbeResult(tuple(winners), tuple(kept), overwritten)


def check_writers(store: Store) -> None:
    """Raise StoreError if several writers must not share a store."""
    if isinstance(store, ObjectStore) and not store.is_conditional:  # no probe: it might pass by luck
        flaw = "fsspec looks first and writes then"
    else:
        found = probe(store)
        if found.holds:
            return
        most = max(found.winners)
        flaw = "an object that existed was reported as created, or none was"
        if most > 1:
            flaw = f"{most} of {WRITERS} racing writers were told that they created the same object"
    raise StoreError(
        f"{store.url}: put-if-absent does not hold here ({flaw}), so that commits of several writers would get "
        "lost; use a store that keeps If-None-Match, or promise one writer at a time: single_writer=True "
        "(shardkit build --single-writer)"
    )
