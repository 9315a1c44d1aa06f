"""How far copies are below the policy, checked now and then while a run goes on (DESIGN §4.5)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Final

from shardkit.copies.replicate import replicate
from shardkit.errors import ShardkitError
from shardkit.repository.location_table import read_table
from shardkit.repository.repository import Repository
from shardkit.stores.store import root_store
from shardkit.telemetry import Record

_BETWEEN_S: Final = 600.0
_SHARE_OF_TIME: Final = 1 / 200


class ReplicationLag:
    """A hook of rank 0's recorder: lists the locations every ten minutes at most, on a thread of its own.

    Nothing is done where a dataset has no policy. What a location does not answer counts as missing there.

    Args:
        roots: URLs of the repositories of the dataset's parts; opened for each look.
        versions: manifest that counts, for a dataset of one part; else all that refs name.
    """

    def __init__(self, roots: Sequence[str], versions: Sequence[str]) -> None:
        self._roots, self._versions = list(roots), list(versions)
        self._next_look, self._policies, self._lag_bytes = 0.0, 0, 0.0
        self._thread: threading.Thread | None = None

    def __call__(self, record: Record) -> None:
        """Begin a look if it is time to."""
        if time.monotonic() >= self._next_look and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self.look, name="shardkit-replication-lag", daemon=True)
            self._thread.start()

    def look(self) -> None:
        started = time.monotonic()
        policies, lag = 0, 0.0
        for root in self._roots:
            with contextlib.suppress(ShardkitError):  # a root that does not answer tells nothing new
                repository = Repository.open(root, read_only=True)
                if read_table(root_store(repository.store), repository.id) is None:
                    continue
                versions = self._versions if len(self._roots) == 1 else None
                lag += replicate(repository, dry_run=True, versions=versions).lag_before
                policies += 1
        self._policies, self._lag_bytes = policies, lag
        took = time.monotonic() - started
        self._next_look = time.monotonic() + max(_BETWEEN_S, took / _SHARE_OF_TIME)

    def numbers(self) -> dict[str, float]:
        """For `Telemetry.add_source`; empty until a policy was found."""
        return {"policies": float(self._policies), "lag_bytes": self._lag_bytes} if self._policies else {}
