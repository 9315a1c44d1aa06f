"""Check and repair the documents that no manifest names: identity, marks, log and the second copy of the table.

Each document has its own digest, and log entries name their predecessors, so a good document can be recognized in any
location. The root's documents are repaired before anything is read through them. The documents of copies are
repaired last, after the objects, so that a copy never names an object that it lacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from shardkit.documents import sha256_digest
from shardkit.errors import FormatError, IntegrityError, MissingDependency, NotFoundError, ShardkitError
from shardkit.extras import shell_word
from shardkit.reading.objects import ROOT_NAME, Location
from shardkit.repository.locations import (
    COPY_NAME,
    SPARE_NAME,
    CopyMark,
    location_of,
    read_mark,
    read_spare,
    repository_id,
    spare_bytes,
)
from shardkit.repository.log import (
    IDENTITY_NAME,
    LOG_FOLDER,
    MAX_ENTRY_BYTES,
    NO_COMMIT,
    Identity,
    LogEntry,
    entry_name,
    entry_numbers,
    identity_in,
    identity_named_by,
    read_entry,
)
from shardkit.repository.policy import LocationRecord, LocationTable
from shardkit.stores.store import Store

_DAMAGED: Final = (NotFoundError, IntegrityError, FormatError)
_AT_ONCE: Final = 16

_RESTORE: Final = "put it back from a backup of the root"
_RESTORE_OLDER: Final = (
    f"{_RESTORE}; without one, leave it: every version can be opened, and copied to a new root with: shardkit "
    "rebuild "
)
_RESTORE_NEWEST: Final = (
    f"{_RESTORE}; without one, delete this file and build the same source again with the same options: the build "
    "names its version again"
)


class HealedCopy(NamedTuple):
    """A repaired copy. `source` is the name of the location that had a good copy, or "parity"."""

    location: str
    name: str
    was: str
    source: str
    num_bytes: int


class LostObject(NamedTuple):
    """An object without a good copy. `rows` is the number of lost samples: 0 for objects other than shards."""

    name: str
    rows: int
    why: str
    action: str = "put it back from a backup, or build the same source again with the same options"


class UncheckedCopy(NamedTuple):
    """A copy that could not be checked or written."""

    location: str
    name: str
    why: str


class _Entry(NamedTuple):
    data: bytes
    entry: LogEntry
    source: str


@dataclass(frozen=True)
class _PlaceLog:
    """The log of one location.

    Attributes:
        numbers: numbers of all entries.
        good: number → valid entry of this repository.
    """

    location: str
    store: Store
    numbers: set[int]
    good: dict[int, _Entry]

    @property
    def table(self) -> LocationTable | None:
        """Locations and policy in the newest valid entry."""
        return self.good[max(self.good)].entry.locations if self.good else None


class _Put(NamedTuple):
    """A document to put or to delete in one location."""

    location: str
    store: Store
    name: str
    data: bytes | None
    """Bytes to put; None to delete the document."""
    was: str
    source: str


class Fork(NamedTuple):
    """A copy's log that does not continue the root's: the root lost entries, then got others."""

    location: str  # name of the copy
    common: LogEntry  # newest entry that both logs have, `NO_COMMIT` if they have none in common
    newest: LogEntry  # newest entry of the copy's log


@dataclass
class Documents:
    """The result of a check of documents."""

    newest: LogEntry | None = None  # newest good log entry
    # name → location, for the locations other than the root that have this repository
    locations: dict[str, Location] = field(default_factory=dict)
    # name → store, of the locations whose documents are compared with the root's
    copies: dict[str, Store] = field(default_factory=dict)
    # name → reason, for the locations that do not have it or do not answer
    absent: dict[str, str] = field(default_factory=dict)
    lost: list[LostObject] = field(default_factory=list)  # documents without a good copy
    # documents that could not be read or written
    unchecked: list[UncheckedCopy] = field(default_factory=list)
    puts: list[_Put] = field(default_factory=list)  # documents to put or delete
    forks: list[Fork] = field(default_factory=list)  # logs of copies that do not continue the root's

    def heal_root(self) -> list[HealedCopy]:
        """Repair the root's documents."""
        return [healed for one in self._take_puts(is_root=True) for healed in _put(one)]

    def heal_copies(self) -> list[HealedCopy]:
        """Repair the documents of copies. A failed write is noted in `unchecked`."""
        done: list[HealedCopy] = []
        for one in self._take_puts(is_root=False):
            try:
                done += _put(one)
            except ShardkitError as error:
                self.unchecked.append(
                    UncheckedCopy(one.location, one.name, f"it could not be healed: {error}")
                )
        return done

    def add_commit(self, entry: LogEntry) -> None:
        """Add an entry that was committed after the comparison of the logs, which replaces the copies' own."""
        self.newest = entry
        name, data = entry_name(entry.n), entry.to_bytes()
        stores = {one.location: one.store for one in self.puts if one.location != ROOT_NAME}
        stores |= {location: one.store for location, one in self.locations.items()}
        self.puts = [one for one in self.puts if one.name != name]
        for location, store in stores.items():
            if store.head(name) is not None:
                self.puts.append(_Put(location, store, name, data, "wrong", ROOT_NAME))

    def _take_puts(self, *, is_root: bool) -> list[_Put]:
        taken = [one for one in self.puts if (one.location == ROOT_NAME) == is_root]
        self.puts = [one for one in self.puts if (one.location == ROOT_NAME) != is_root]
        return taken


def _put(one: _Put) -> Iterator[HealedCopy]:
    if one.data is None:
        one.store.delete(one.name)
        yield HealedCopy(one.location, one.name, one.was, one.source, 0)
        return
    if one.was != "missing" or not one.store.put_new(one.name, one.data):
        with contextlib.suppress(ShardkitError):
            if one.store.get(one.name, max_bytes=MAX_ENTRY_BYTES) == one.data:
                return  # another process put it meanwhile
        one.store.replace(one.name, one.data)
    yield HealedCopy(one.location, one.name, one.was, one.source, len(one.data))


def check_documents(root: Store, more: Sequence[LocationRecord]) -> Documents:
    """Check the documents of a root and its copies without writing.

    `more` are copies that the root's table does not name.
    """
    found = Documents()
    repository = repository_id(root)
    if not repository or root.head(COPY_NAME) is not None:
        return found  # opening the root reports the error
    logs = [_read_log(ROOT_NAME, root, repository)]
    table, spare, was = logs[0].table, None, "missing"
    try:
        spare = read_spare(root, repository)
    except ShardkitError:  # damaged or not a regular file; `_put` handles both
        was = "wrong"
    if spare is not None and (table is None or spare.n > table.n):
        table = spare
    copies = found.copies
    _open_copies(root, repository, table.others if table is not None else (), more, found)
    for name, store in list(copies.items()):
        try:
            log = _read_log(name, store, repository)
        except ShardkitError as error:
            found.unchecked.append(UncheckedCopy(name, LOG_FOLDER, str(error)))
            continue
        if _is_promoted(log.table, table):
            del copies[name]
            found.puts = [one for one in found.puts if one.location != name]
        else:
            logs.append(log)
    chosen = _choose(logs)
    _compare(logs, chosen, found)
    found.newest = chosen[max(chosen)].entry if chosen else None
    first = chosen[1].entry if 1 in chosen else None
    _identities(root, copies, first, repository, found)
    current = found.newest.locations if found.newest is not None else None
    if current is not None and current != spare and (spare is None or spare.n <= current.n):
        was = was if spare is None else "wrong"
        found.puts.append(_Put(ROOT_NAME, root, SPARE_NAME, spare_bytes(repository, current), was, ROOT_NAME))
    return found


def _open_copies(
    root: Store,
    repository: str,
    recorded: Sequence[LocationRecord],
    more: Sequence[LocationRecord],
    found: Documents,
) -> None:
    """Open the copies that the root's table records, and further locations that the caller names."""
    copies = found.copies
    for record in (*recorded, *more):
        copies.pop(record.name, None)
        try:
            location = location_of(record, writable=True)
            if record in recorded:
                is_copy, why = _is_copy(location.store, root, record, repository, found)
            else:
                is_copy, why = _is_ours(location.store, repository, root)
        except MissingDependency:
            continue  # it cannot be opened on this machine
        except ShardkitError as error:
            is_copy, why = False, str(error)
        if is_copy:
            copies[record.name] = location.store
        if why:
            found.absent[record.name] = why
            found.locations.pop(record.name, None)
        else:
            found.locations[record.name] = location
            found.absent.pop(record.name, None)


def _is_promoted(own: LocationTable | None, table: LocationTable | None) -> bool:
    """Return True if a copy was promoted to a root: it has a newer table, in which another place is the root.

    Its objects are used, its documents are not.
    """
    return own is not None and table is not None and own.n > table.n and own.root.url != table.root.url


def _read_log(location: str, store: Store, repository: str) -> _PlaceLog:
    numbers = entry_numbers(store)
    good: dict[int, _Entry] = {}

    def read(number: int) -> None:
        with contextlib.suppress(ShardkitError):  # damaged or not a regular file; `_put` handles both
            entry, data = read_entry(store, number, repository)
            good[number] = _Entry(data, entry, location)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="shardkit-documents") as pool:
        list(pool.map(read, sorted(numbers)))
    return _PlaceLog(location, store, numbers, good)


def _choose(places: Sequence[_PlaceLog]) -> dict[int, _Entry]:
    """Return the good entry of each number: it names its predecessor, and the root's successor names it.

    Entries of copies may follow the root's last one: the root lost them, because commits go to the root only.
    """
    root, copies = places[0], sorted(places[1:], key=lambda place: -len(place.good))
    own = max(root.numbers, default=0)
    last = max((n for place in places for n in place.numbers), default=0)
    found: dict[int, _Entry] = {}
    for number in range(1, last + 1):
        before, after = found.get(number - 1), root.good.get(number + 1)
        for one in (place.good[number] for place in (root, *copies) if number in place.good):
            follows = before is None or one.entry.previous == sha256_digest(before.data)
            is_followed = after is None or after.entry.previous == sha256_digest(one.data)
            if follows and (is_followed or one.source == root.location):
                found[number] = one
                break
        if number > own and (number not in found or (number > 1 and number - 1 not in found)):
            found.pop(number, None)
            break
    return found


def _compare(places: Sequence[_PlaceLog], chosen: dict[int, _Entry], found: Documents) -> None:
    """Add puts for the entries that differ from the chosen ones, or are missing before the last one of a log."""
    root = places[0]
    for number in range(1, max((n for place in places for n in place.numbers), default=0) + 1):
        if number not in chosen and not any(number in place.good for place in places):
            is_newest = number == max(root.numbers, default=0)
            older = f"{_RESTORE_OLDER}{root.store.url}@REF --to NEW_ROOT"
            action = _RESTORE_NEWEST if is_newest else older
            found.lost.append(LostObject(entry_name(number), 0, "no location has a good one", action))
    for place in places:
        last = max(place.numbers, default=0)
        is_fork = place.location != root.location and _note_fork(place, chosen, found)
        for number, good in chosen.items():
            if number in place.good and place.good[number].data == good.data:
                continue
            if number > last and place.location != root.location:
                continue  # not damaged: `mirror_log` copies new entries
            was = "wrong" if number in place.numbers else "missing"
            name = entry_name(number)
            found.puts.append(_Put(place.location, place.store, name, good.data, was, good.source))
        for number in sorted(place.numbers - chosen.keys()) if is_fork else ():
            name = entry_name(number)
            found.puts.append(_Put(place.location, place.store, name, None, "wrong", ROOT_NAME))


def _note_fork(place: _PlaceLog, chosen: dict[int, _Entry], found: Documents) -> bool:
    """Return True if a copy has good entries other than the chosen ones. The fork is noted for merging."""
    other = [n for n, one in place.good.items() if n not in chosen or chosen[n].data != one.data]
    if not other or not chosen:
        return False
    common = max((n for n in place.good.keys() - other), default=0)
    shared = place.good[common].entry if common else NO_COMMIT
    found.forks.append(Fork(place.location, shared, place.good[max(other)].entry))
    return True


def merged_names(head: LogEntry, fork: Fork, is_there: Callable[[str], bool]) -> Mapping[str, object] | None:
    """Return the refs and tags of `head` with the names that only the fork has; None if it has no such names.

    A name that both changed keeps the root's version, and the fork's version gets the name ``<name>-<location>``.
    Versions without a manifest, and versions of withdrawn tags, are not restored. A table of locations that only the
    fork changed is restored.
    """
    before = fork.common
    tables: dict[str, dict[str, str]] = {"refs": dict(head.refs), "tags": dict(head.tags)}
    withdrawn = {**fork.newest.withdrawn, **head.withdrawn}
    for kind, theirs, common in (
        ("refs", fork.newest.refs, before.refs),
        ("tags", fork.newest.tags, before.tags),
    ):
        for name, version in theirs.items():
            if common.get(name) == version or not is_there(version) or version in withdrawn.values():
                continue  # the root has it, or dropped it on purpose
            own = tables["refs"].get(name, tables["tags"].get(name))
            is_free = own is None or (kind == "refs" and own == common.get(name))
            if own == version:
                continue
            if not is_free or name in withdrawn:
                name = f"{name[:60]}-{fork.location}"
            tables[kind].setdefault(name, version)
    tables["tags"] = {name: version for name, version in tables["tags"].items() if name not in withdrawn}
    tables["withdrawn"] = withdrawn
    was = {"refs": head.refs, "tags": head.tags, "withdrawn": head.withdrawn}
    locations = fork.newest.locations if head.locations == before.locations else head.locations
    if locations == head.locations and all(dict(was[kind]) == table for kind, table in tables.items()):
        return None
    if locations is not None and locations != head.locations:
        locations = msgspec.structs.replace(locations, n=head.n + 1)
    return {**tables, "locations": locations}


def _is_ours(store: Store, repository: str, root: Store, *, is_marked: bool = False) -> tuple[bool, str]:
    """Return whether a store has this repository, and the reason if not. An unmounted disk is an empty folder."""
    try:
        if identity_in(store).id == repository:
            return True, ""
    except _DAMAGED as error:
        if is_marked:
            return True, ""
        if isinstance(error, NotFoundError):
            refill = f"shardkit place {shell_word(root.url)} --refill NAME"
            return False, f"{store.url} is empty, or its disk is not mounted; to fill it anew: {refill}"
    except ShardkitError as error:
        return False, str(error)
    return False, f"{store.url} holds another repository; give this location another place"


def _is_copy(
    store: Store, root: Store, record: LocationRecord, repository: str, found: Documents
) -> tuple[bool, str]:
    """Return whether a location is the copy that the table names, and why it does not have this repository.

    A damaged or missing mark is restored if the identity is there: an unmounted disk has neither.
    """
    wanted, was = CopyMark(record.name, repository), "wrong"
    try:
        mark = read_mark(store)
        was = "missing" if mark is None else "wrong"
    except (IntegrityError, FormatError):
        mark = None
    except ShardkitError as error:
        return False, str(error)
    is_ours, why = _is_ours(store, repository, root, is_marked=mark == wanted)
    if not is_ours or mark == wanted:
        return is_ours, why
    is_another = mark is not None and mark.repository == repository and mark.location != record.name
    if is_another or store.url == root.url:
        return False, ""
    found.puts.append(_Put(record.name, store, COPY_NAME, wanted.to_bytes(), was, ROOT_NAME))
    return True, ""


def _identities(
    root: Store, copies: dict[str, Store], first: LogEntry | None, repository: str, found: Documents
) -> None:
    """Add puts for missing or damaged identities, from any good one or from the digest in the first log entry."""
    places = {ROOT_NAME: root, **copies}
    known: dict[str, Identity] = {}
    for name, store in places.items():
        with contextlib.suppress(ShardkitError):
            known[name] = identity_in(store)
    source = next((name for name, one in known.items() if one.id == repository), None)
    proven = identity_named_by(first) if first is not None else None
    good = proven or (known[source] if source is not None else None)
    if good is None:
        found.lost.append(
            LostObject(
                IDENTITY_NAME, 0, "no location has a good one, nor the first entry of the log", _RESTORE
            )
        )
        return
    for name, store in places.items():
        if name not in known:  # the identity of another repository is left as it is
            with contextlib.suppress(ShardkitError):
                was = "missing" if store.head(IDENTITY_NAME) is None else "wrong"
                data = good.to_bytes()
                found.puts.append(_Put(name, store, IDENTITY_NAME, data, was, source or ROOT_NAME))
