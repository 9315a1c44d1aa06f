"""What is live: everything that must not be collected."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from shardkit.errors import IntegrityError, NotFoundError
from shardkit.manifest.json_fields import seconds_of
from shardkit.reading.located_store import root_store
from shardkit.reading.parity.catalogue import parity_names
from shardkit.repository.inventory import walk_versions
from shardkit.repository.log import LogEntry
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import FOLDER
from shardkit.stores.local import LocalStore
from shardkit.stores.store import EXTENSIONS, Store, object_name

__all__ = ["COLLECTED", "mark_live", "objects_of_builds", "versions_of"]

COLLECTED: Final = frozenset(EXTENSIONS) - {"tensor", "checkpoint"}
"""Extensions that a collection may take: checkpoints belong to runs, which remove their own."""

_HEX: Final = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_MAX_RECORD_BYTES: Final = 64 * 2**20


def versions_of(log: Iterable[LogEntry], since: float) -> tuple[set[str], set[str]]:
    """Versions that refs and tags name now, and those that they named at some time since `since`.

    Args:
        log: newest first.
        since: seconds since 1970; an entry before counts if it still was the newest then.
    """
    now: set[str] | None = None
    recent: set[str] = set()
    for entry in log:
        named = {*entry.refs.values(), *entry.tags.values()}
        now = named if now is None else now
        recent |= named
        if seconds_of(entry.time) < since:
            break
    return now or set(), recent - (now or set())


def mark_live(repository: Repository, log: Iterable[LogEntry], since: float) -> set[str]:
    """Names of all objects that refs, tags and the history since `since` need, and builds under way have put.

    Args:
        repository: reads over all locations.
        log: newest first.
        since: seconds since 1970.

    Raises:
        NotFoundError, IntegrityError, FormatError: a version cannot be read: nothing may be collected.
    """
    now, past = versions_of(log, since)
    # Versions of the past may be gone; what is left of them is no reason to stop.
    return _mark(repository, now) | _mark(repository, past, optional=True) | objects_of_builds(repository)


def _mark(repository: Repository, versions: Iterable[str], *, optional: bool = False) -> set[str]:
    found: set[str] = set()
    for inventory in walk_versions(repository, versions, optional=optional):
        found |= {name for name, _ in inventory.names()} | parity_names(repository, inventory)
    return found


def objects_of_builds(repository: Repository) -> set[str]:
    """What unfinished builds below ``tmp/`` of a local root, or ``scratch/`` of another, say that they have put.

    Every digest in their records counts, whatever kind of object it may be of: a build that goes on finds its work.
    """
    store = root_store(repository.store)
    records = _local_records(store) if isinstance(store, LocalStore) else _stored_records(store)
    found = {match.decode() for record in records for match in _HEX.findall(record)}
    return {object_name(f"sha256:{digest}", kind) for digest in found for kind in COLLECTED}


def _stored_records(store: Store) -> Iterator[bytes]:
    """Records of builds over several machines (SPEC.md of shardkit.dataset §6)."""
    for name in store.list_after("scratch/"):
        if name.endswith(".done"):
            try:
                yield store.get(name, max_bytes=_MAX_RECORD_BYTES)
            except (IntegrityError, NotFoundError):
                continue  # finished meanwhile, or no record


def _local_records(store: LocalStore) -> Iterator[bytes]:
    for folder, _, files in os.walk(os.path.join(store.url, FOLDER)):
        if "build-" not in folder and "parts" not in folder and "adopt" not in folder:
            continue
        for file in files:
            path = Path(folder, file)
            try:
                if file.endswith(".done") and path.stat().st_size <= _MAX_RECORD_BYTES:
                    yield path.read_bytes()
            except OSError:
                continue  # finished meanwhile
