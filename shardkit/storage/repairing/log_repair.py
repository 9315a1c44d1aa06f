"""Log entries that are damaged or missing in a root, from copies of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardkit.errors import ShardkitError
from shardkit.formats.digest import sha256_digest
from shardkit.storage.identity import IDENTITY_NAME, MAX_IDENTITY_BYTES
from shardkit.storage.log import LOG_PREFIX, MAX_ENTRY_BYTES, LogEntry, entry_name, entry_number
from shardkit.storage.reading import Location
from shardkit.storage.repository import Repository
from shardkit.storage.store import Store

__all__ = ["repair_log"]


def repair_log(repository: Repository, copies: Sequence[Location]) -> list[tuple[str, str, str, str]]:
    """Put back entries whose neighbours are good and say what they were.

    An entry is taken from a copy only if its own digest is right, it is of this repository and number, it names its
    predecessor, and its successor, where there is one, names it.

    Returns:
        (location, name, "wrong" or "missing", location that it came from) of each.

    Raises:
        StoreError: the root does not answer, or cannot be written.
    """
    store = repository.store
    numbers = [n for n in map(entry_number, store.list_after(LOG_PREFIX)) if n is not None]
    healed = []
    following: LogEntry | None = None
    for number in range(max(numbers, default=0), 0, -1):
        name = entry_name(number)
        entry = _entry(store, number, repository.id, following)
        if entry is None:
            was = "wrong" if store.head(name) is not None else "missing"
            for source, found in _elsewhere(copies, number, repository, following):
                if was == "wrong":
                    store.replace(name, found.to_bytes())
                elif not store.put_new(name, found.to_bytes()):
                    break  # somebody committed it just now
                healed.append(("root", name, was, source))
                entry = found
                break
        following = entry
    return healed


def _elsewhere(
    copies: Sequence[Location], number: int, repository: Repository, following: LogEntry | None
) -> Iterator[tuple[str, LogEntry]]:
    for location in copies:
        found = _entry(location.store, number, repository.id, following)
        if found is not None and _follows(found, number, repository):
            yield location.name, found


def _entry(store: Store, number: int, repository: str, following: LogEntry | None) -> LogEntry | None:
    """A good entry of a number, None for any other."""
    name = entry_name(number)
    try:
        data = store.get(name, max_bytes=MAX_ENTRY_BYTES)
        entry = LogEntry.from_bytes(data, name)
    except ShardkitError:
        return None
    named = following is None or following.previous == sha256_digest(data)
    return entry if entry.n == number and entry.repository == repository and named else None


def _follows(entry: LogEntry, number: int, repository: Repository) -> bool:
    """Whether it names its predecessor, as far as that is good."""
    store = repository.store
    try:
        if number == 1:
            return entry.previous == sha256_digest(store.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES))
        before = store.get(entry_name(number - 1), max_bytes=MAX_ENTRY_BYTES)
        LogEntry.from_bytes(before, entry_name(number - 1))
        return entry.previous == sha256_digest(before)
    except ShardkitError:
        return True
