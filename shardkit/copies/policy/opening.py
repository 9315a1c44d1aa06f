"""Recorded locations as stores, and the mark by which a copy knows itself."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Final

from shardkit.copies.policy.record import ROOT_NAME, LocationRecord, LocationTable
from shardkit.copies.policy.table import read_table
from shardkit.errors import IntegrityError, MissingDependency, NotFoundError, ShardkitError, UsageError
from shardkit.formats.canonical_json import dumps
from shardkit.manifest.json_fields import read_document
from shardkit.reading.documents import read_checked
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.locations import Location
from shardkit.repository.identity import IDENTITY_NAME, MAX_IDENTITY_BYTES
from shardkit.repository.object_access import OpenedRoot
from shardkit.stores.store import Store
from shardkit.stores.urls import open_store

__all__ = [
    "COPY_NAME",
    "CopyMark",
    "is_prepared",
    "location_of",
    "open_locations",
    "others_of",
    "own_name",
    "prepare_copy",
    "read_mark",
    "recorded_locations",
    "root_store",
]

COPY_NAME: Final = "shardkit-copy.json"
"""Says of a root that it is a copy, and which: nobody commits to it, and an empty mount is not taken for it."""

_FORMAT: Final = "shardkit-copy/1"
_MAX_BYTES: Final = 16 * 2**10
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")


@dataclass(frozen=True, slots=True)
class CopyMark:
    """What ``shardkit-copy.json`` says."""

    location: str
    repository: str

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return dumps({"format": _FORMAT, "location": self.location, "repository": self.repository})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> CopyMark:
        """Read it.

        Raises:
            FormatError: it is none.
        """
        fields = read_document(data, where, _FORMAT, ("location", "repository"), _MAX_BYTES)
        return cls(fields.text("location", pattern=_NAME), fields.text("repository", maximum=36))


def root_store(store: Store) -> Store:
    """The store of the root itself, below what reads over several locations or finds adopted tars."""
    while True:
        if isinstance(store, LocatedStore):
            store = store.root
        elif hasattr(store, "inner"):
            store = store.inner
        else:
            return store


def location_of(record: LocationRecord, *, heal: bool = False, writable: bool = False) -> Location:
    """A recorded location as one that can be read; nothing is asked of it yet.

    Args:
        record: see there.
        heal: whether readers may put good bytes over bad ones there.
        writable: whether anything may be put there.

    Raises:
        MissingDependency: a package is not installed that its kind of URL needs.
    """
    store = open_store(record.url, read_only=not (heal or writable))
    return Location(name=record.name, store=store, domain=record.domain, rank=record.rank, heal=heal)


def open_locations(repository: OpenedRoot, *, heal: bool = False, writable: bool = False) -> list[Location]:
    """All locations of a repository: the one that it was opened at first, then the others in the table's order.

    Locations that cannot be opened on this machine (a client is not installed) are left out.

    Args:
        repository: opened in any way.
        heal: see `location_of`.
        writable: see `location_of`.

    Raises:
        IntegrityError: the table is damaged.
        StoreError: the root does not answer.
    """
    store = root_store(repository.store)
    table = read_table(store, repository.id)
    own = read_mark(store) if table is not None else None
    record = (table.find(own.location) if own else table.root) if table else None
    here = Location(
        name=own.location if own else ROOT_NAME,
        store=store,
        domain=record.domain if record else ROOT_NAME,
        rank=record.rank if record and own is None else 0,
        heal=heal,
    )
    return [here, *others_of(table, here.name, heal=heal, writable=writable)]


def recorded_locations(store: Store, repository_id: str, *, heal: bool = False) -> list[Location]:
    """Locations beside `store` that its table names; none where there is no table, or none that can be trusted.

    For readers: nothing that is read rests on the table, so a damaged one costs them the other copies, not the data.
    """
    with contextlib.suppress(ShardkitError):
        table = read_table(store, repository_id)
        if table is not None:
            own = read_mark(store)
            return others_of(table, own.location if own else ROOT_NAME, heal=heal)
    return []


def others_of(table: LocationTable | None, own: str, *, heal: bool, writable: bool = False) -> list[Location]:
    """The locations of a table but the one of a name, as far as they can be opened on this machine."""
    found: list[Location] = []
    for record in table.locations if table else ():
        if record.name != own:
            with contextlib.suppress(MissingDependency):
                found.append(location_of(record, heal=heal, writable=writable))
    return found


def read_mark(store: Store) -> CopyMark | None:
    """Which copy a root is; None for a root of its own."""
    try:
        return read_checked(store, COPY_NAME, CopyMark.from_bytes, max_bytes=_MAX_BYTES, is_optional=True)
    except NotFoundError:
        return None


def own_name(store: Store) -> str:
    """Which location a store is: ``root``, or the copy that its mark names."""
    try:
        mark = read_mark(store)
    except ShardkitError:
        mark = None
    return mark.location if mark else ROOT_NAME


def is_prepared(store: Store, name: str, repository_id: str) -> bool:
    """Whether a store is the copy that it should be: not another one, not a folder over which a disk was not mounted.

    Raises:
        IntegrityError: it is a copy of something else.
        StoreError: it does not answer.
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
    """Make a store a copy of a root: the same identity, and the mark that says which copy it is.

    Raises:
        UsageError: it is the root itself, a root of its own, or another copy.
        StoreError: it cannot be written.
    """
    identity = root.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES)
    try:
        found: bytes | None = copy.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES)
    except NotFoundError:
        found = None
    if found is not None and found != identity:
        raise UsageError(f"location {name!r}: {copy.url} holds another dataset; give it an empty place")
    mark = CopyMark(name, repository_id).to_bytes()
    if not copy.put_new(COPY_NAME, mark):
        is_prepared(copy, name, repository_id)
    if root.head(COPY_NAME) is not None:
        copy.delete(COPY_NAME)
        raise UsageError(f"location {name!r}: {copy.url} is the root itself; a copy needs a place of its own")
    if found is None:
        copy.put_new(IDENTITY_NAME, identity)
