"""Does this store's put-if-absent hold when sixteen writers race? Asked before a root is given to several writers.

Some servers ignore the condition, some keep it one request after the other and break it in a race. Either loses
commits without a word, so a new root is tried out first (SPEC.md, "Stores beyond the local disk").
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
    """What a race showed."""

    winners: tuple[int, ...]
    """Per round, how many writers were told that they created the object."""
    kept: tuple[bool, ...]
    """Per round, whether what lies there afterwards is a winner's."""
    overwritten: bool
    """A later put on an existing name was told that it created it."""

    @property
    def holds(self) -> bool:
        """Whether several writers may share the store."""
        return set(self.winners) == {1} and all(self.kept) and not self.overwritten


def probe(store: Store, *, writers: int = WRITERS, rounds: int = ROUNDS) -> ProbeResult:
    """Let writers race for the same names; what they put is removed again.

    Each writer has a client of its own, so that no lock inside one process hides what the store does.
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
    """Refuse a store that several writers must not share.

    Raises:
        StoreError: Its put-if-absent admitted more than one winner.
    """
    if isinstance(store, ObjectStore) and not store.is_conditional:  # a race might be won by luck
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
