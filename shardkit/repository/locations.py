"""The table of locations of a root, the marks of copies, and the comparing and copying of logs.

The newest log entry has the table. ``shardkit-locations.json`` has the same table, so that a root whose log is damaged
finds its copies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Annotated, Final

from msgspec import Meta

from shardkit.documents import Document, decode, encode, seal, unseal
from shardkit.errors import (
    FormatError,
    IntegrityError,
    MissingDependency,
    NotFoundError,
    ShardkitError,
    UsageError,
)
from shardkit.extras import shell_word
from shardkit.reading.located_store import Locations, given_locations, locate
from shardkit.reading.objects import LOCATION_NAME, ROOT_NAME, Location
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.log import (
    IDENTITY_NAME,
    LOG_FOLDER,
    MAX_ENTRY_BYTES,
    MAX_IDENTITY_BYTES,
    Identity,
    LogEntry,
    entry_numbers,
    identity_in,
    read_entry,
)
from shardkit.repository.policy import LocationRecord, LocationTable, absolute_url
from shardkit.stores.local import LocalStore, check_vacant, open_store
from shardkit.stores.remote.clients import endpoint_of
from shardkit.stores.store import Store, find_checked, root_store, scheme_of

_MAX_BYTES: Final = 2**20
_MAX_SIBLINGS: Final = 10_000
_MAX_COPY_BYTES: Final = 16 * 2**10

COPY_NAME: Final = "shardkit-copy.json"
"""Mark of a copy, with its name. It prevents commits to the copy, and tells a copy from an empty mount point."""

SPARE_NAME: Final = "shardkit-locations.json"
"""Second copy of the table of the newest log entry, in the root only."""


class _Spare(Document, frozen=True, tag="shardkit-locations/1"):
    repository: Annotated[str, Meta(max_length=36)]
    table: LocationTable


def spare_bytes(repository_id: str, table: LocationTable) -> bytes:
    """Return the content of ``shardkit-locations.json``."""
    return seal(_Spare(repository=repository_id, table=table))


def parse_spare(data: bytes, where: str) -> tuple[str, LocationTable]:
    """Parse ``shardkit-locations.json`` and return (id of the repository, table)."""
    spare = unseal(_Spare, data, where, max_bytes=_MAX_BYTES)
    return spare.repository, spare.table


def read_spare(store: Store, repository_id: str | None) -> LocationTable | None:
    """Return the second copy of the table, None if there is none. `repository_id` None accepts any repository."""
    if store.head(SPARE_NAME) is None:
        return None  # the usual answer, without the message of an error
    found = find_checked(store, SPARE_NAME, parse_spare, max_bytes=_MAX_BYTES)
    if found is not None and repository_id not in (None, found[0]):
        raise IntegrityError(
            f"{SPARE_NAME} in {store.url} is of repository {found[0]}, expected {repository_id}; run: "
            f"shardkit repair {shell_word(store.url)}"
        )
    return found[1] if found is not None else None


def read_table(store: Store, repository_id: str | None, head: LogEntry | None = None) -> LocationTable | None:
    """Return the locations and the policy of a root, None if the root is the only location.

    They are in the newest log entry, `head` if the caller has just read it. If that entry is damaged or lost, the
    second copy is read.
    """
    damage: ShardkitError | None = None
    if head is None:
        try:
            number = max(entry_numbers(store), default=0)
            head = read_entry(store, number, repository_id)[0] if number else None
        except ShardkitError as error:
            damage = error
    if head is not None and head.locations is not None:
        return head.locations
    spare = read_spare(store, repository_id)
    if spare is None and damage is not None:
        raise damage
    return spare


def first_root(store: Store) -> LocationRecord:
    """Return the record of a root that has no table yet."""
    return LocationRecord(name=ROOT_NAME, url=absolute_url(store.url), domain=ROOT_NAME, rank=0)


class CopyMark(Document, frozen=True, tag="shardkit-copy/1"):
    """Content of ``shardkit-copy.json``: name of the location and id of the repository."""

    location: Annotated[str, Meta(pattern=rf"\A({LOCATION_NAME.pattern})\Z")]
    repository: Annotated[str, Meta(max_length=36)]

    def to_bytes(self) -> bytes:
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> CopyMark:
        return decode(cls, data, where, max_bytes=_MAX_COPY_BYTES)


def location_of(record: LocationRecord, *, heal: bool = False, writable: bool = False) -> Location:
    """Open a recorded location without sending a request to it."""
    store = open_store(record.url, read_only=not (heal or writable))
    return Location(name=record.name, store=store, domain=record.domain, rank=record.rank, heal=heal)


def read_mark(store: Store) -> CopyMark | None:
    """Return the mark of a copy, None if the store is not a copy."""
    if store.head(COPY_NAME) is None:
        return None  # the usual answer, without the message of an error
    return find_checked(store, COPY_NAME, CopyMark.from_bytes, max_bytes=_MAX_COPY_BYTES)


def own_name(store: Store) -> str:
    """Return the name of a store's location: the name in its mark, or ``root`` if it has no readable mark."""
    with contextlib.suppress(ShardkitError):
        mark = read_mark(store)
        return mark.location if mark else ROOT_NAME
    return ROOT_NAME


def is_prepared(store: Store, name: str, repository_id: str) -> bool:
    """Return True if a store is the expected copy, False if it has no mark, such as an empty mount point.

    Raises:
        IntegrityError: The store is another copy.
    """
    mark = read_mark(store)
    if mark is None:
        return False
    if mark != CopyMark(name, repository_id):
        raise IntegrityError(
            f"{store.url} is the copy {mark.location!r} of repository {mark.repository}, expected {name!r} of "
            f"{repository_id}; give this location another place"
        )
    return True


def prepare_copy(root: Store, copy: Store, name: str, repository_id: str) -> None:
    """Make a store a copy of a root by writing the mark of the location.

    Raises:
        UsageError: The store has another repository.
    """
    identity = root.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES)
    try:
        found: bytes | None = copy.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES)
    except NotFoundError:
        found = None
    if found is not None and found != identity:
        raise UsageError(f"location {name!r}: {copy.url} holds another dataset; give it an empty place")
    if found is None:
        check_vacant(copy.url, "copy")
    mark = CopyMark(name, repository_id).to_bytes()
    if not copy.put_new(COPY_NAME, mark):
        is_prepared(copy, name, repository_id)
    if root.head(COPY_NAME) is not None:
        copy.delete(COPY_NAME)
        raise UsageError(f"location {name!r}: {copy.url} is the root itself; a copy needs a place of its own")
    if found is None:
        copy.put_new(IDENTITY_NAME, identity)


# ---- Roots that have lost their identity, their log or all of their objects, and reads from all locations


def _others(table: LocationTable | None, own: str, *, heal: bool = False) -> list[Location]:
    """Open the locations of a table other than `own`, without those whose client is not installed."""
    found: list[Location] = []
    for record in table.locations if table else ():
        if record.name != own:
            with contextlib.suppress(MissingDependency):
                found.append(location_of(record, heal=heal))
    return found


def repository_id(root: Store) -> str:
    """Return the repository id of the identity, otherwise of the first good document; "" if there is none."""
    with contextlib.suppress(NotFoundError, IntegrityError, FormatError):
        return identity_in(root).id
    for number in sorted(entry_numbers(root)):
        with contextlib.suppress(NotFoundError, IntegrityError, FormatError):
            return read_entry(root, number, None)[0].repository
    with contextlib.suppress(IntegrityError, FormatError):
        spare = find_checked(root, SPARE_NAME, parse_spare, max_bytes=_MAX_BYTES)
        return spare[0] if spare else ""
    return ""


def identity_of_copies(store: Store, error: NotFoundError | IntegrityError, *, alone: bool) -> Identity:
    """Return the identity of a root whose own cannot be read because of `error`, from one of its copies.

    Raises:
        IntegrityError: The identity is damaged in all locations, or the root is lost.
        NotFoundError: There is no dataset.
    """
    with contextlib.suppress(ShardkitError):
        own = "" if alone else repository_id(store)
        for location in _others(read_table(store, own) if own else None, ROOT_NAME):
            with contextlib.suppress(ShardkitError):
                found = identity_in(location.store)
                if found.id == own:
                    return found
    if isinstance(error, IntegrityError):
        raise error
    check_root_is_not_lost(store)
    scheme = scheme_of(store.url)
    endpoint = endpoint_of(scheme) if scheme else ""
    raise NotFoundError(
        f"no dataset at {store.url}{endpoint}: expected {IDENTITY_NAME} in it; check the path, or run: "
        f"shardkit build; if it was lost and has a copy, run: shardkit repair "
        f"{shell_word(store.url)} --location NAME=COPY"
    ) from None


def find_sibling_copies(root: Store) -> list[LocationRecord]:
    """Return the copies, in folders next to `root`, whose newest location table names it as their root.

    A root that lost everything has no table of its copies, but each copy has a table that names the root.
    """
    found: list[LocationRecord] = []
    if scheme_of(root.url):
        return found
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(root.url)) as siblings:
        for sibling in itertools.islice(siblings, _MAX_SIBLINGS):
            if sibling.path == root.url or not os.path.isfile(os.path.join(sibling.path, COPY_NAME)):
                continue
            with contextlib.suppress(ShardkitError):
                copy = open_store(sibling.path, read_only=True)
                mark = read_mark(copy)
                table = read_table(copy, mark.repository) if mark else None
                record = table.find(mark.location) if mark and table else None
                if table is not None and record is not None and table.root.url == root.url:
                    found.append(dataclasses.replace(record, url=sibling.path))
    return sorted(found, key=lambda one: one.name)


def check_root_is_not_lost(root: Store) -> None:
    """Raise IntegrityError if a root without an identity has copies next to it: it held their dataset."""
    copies = find_sibling_copies(root)
    if copies:
        raise IntegrityError(
            f"{root.url} has no {IDENTITY_NAME}, and {copies[0].url} is a copy of the dataset that was there: the root "
            f"is lost; run: shardkit repair {shell_word(root.url)}"
        )


def check_log_is_not_lost(root: Store, repository_id: str) -> None:
    """Raise IntegrityError if a root has no log and one of its copies has one."""
    others: list[Location] = []
    with contextlib.suppress(ShardkitError):
        others = _others(read_table(root, repository_id), own_name(root))
    others = others or [location_of(record) for record in find_sibling_copies(root)]
    for location in others:
        names: list[int] = []
        with contextlib.suppress(ShardkitError):
            names = list(entry_numbers(location.store))
        if names:
            raise IntegrityError(
                f"the log of {root.url} is lost; {location.name} at {location.store.url} has {len(names)} entries of "
                f"it; run: shardkit repair {shell_word(root.url)}"
            )


def over_all(
    root: Store,
    repository_id: str,
    head: LogEntry | None,
    given: Locations | None,
    settings: ReadSettings | None,
    *,
    heal: bool,
    alone: bool,
) -> Store:
    """Return a store that reads from the given locations and, unless `alone`, the locations of the root's table.

    `head` is the newest log entry, None if it is to be read. The table is not needed to read the data: if it is damaged
    twice, the reader only lacks the other copies.
    """
    store, recorded, name = root_store(root), list[Location](), ROOT_NAME
    with contextlib.suppress(ShardkitError):
        table = None if alone else read_table(root, repository_id, head)
        if table is not None:
            mark = read_mark(root)
            name = mark.location if mark else ROOT_NAME
            recorded = _others(table, name, heal=heal)
    if isinstance(store, LocalStore) and not given and not recorded:
        return store
    others = given_locations(given, heal)
    taken = {name, store.url}.union(*((one.name, one.store.url) for one in others))
    others += [one for one in recorded if one.name not in taken and one.store.url not in taken]
    return locate(store, others, settings=settings, heal=heal, name=name)


# ---- Logs of copies


def log_conflict(root: Store, copy: Store) -> str:
    """Return why a copy's log is not the beginning of the root's, "" if it is."""
    return _compare_logs(root, copy)[0]


def log_conflicts(root: Store, table: LocationTable) -> Iterator[str]:
    """Yield the conflicts of the logs of all copies. Copies that do not answer or have no mark are skipped."""
    for record in table.others:
        with contextlib.suppress(ShardkitError):
            copy = location_of(record).store
            conflict = log_conflict(root, copy) if read_mark(copy) is not None else ""
            if conflict:
                yield conflict


def _compare_logs(root: Store, copy: Store) -> tuple[str, list[str]]:
    """Return the conflict between two logs, "" if there is none, and the names of the entries that the copy lacks.

    The copy is listed first, because a concurrent commit reaches the root before it reaches a copy.
    """
    held, own = set(copy.list_after(LOG_FOLDER)), set(root.list_after(LOG_FOLDER))
    foreign, last = sorted(held - own), max(held, default="")
    conflict = ""
    if foreign:
        conflict = f"{copy.url} has {foreign[0]}, which {root.url} does not have"
    elif last and copy.get(last, max_bytes=MAX_ENTRY_BYTES) != root.get(last, max_bytes=MAX_ENTRY_BYTES):
        conflict = f"{last} in {copy.url} is not the one in {root.url}"
    if conflict:
        conflict += f": the root lost entries of its log; run: shardkit repair {shell_word(root.url)}"
    return conflict, sorted(own - held)


def mirror_log(root: Store, copy: Store) -> int:
    """Copy the log entries that a copy lacks and return their number.

    Raises:
        IntegrityError: The copy's log is not the beginning of the root's, or a new entry is damaged.
    """
    conflict, missing = _compare_logs(root, copy)
    if conflict:
        raise IntegrityError(conflict)
    for name in missing:
        data = root.get(name, max_bytes=MAX_ENTRY_BYTES)
        LogEntry.from_bytes(data, f"{name} in {root.url}")  # do not copy a damaged entry
        if not copy.put_new(name, data) and copy.get(name, max_bytes=MAX_ENTRY_BYTES) != data:
            raise IntegrityError(
                f"{name} in {copy.url} is another one; run: shardkit repair {shell_word(root.url)}"
            )
    return len(missing)
