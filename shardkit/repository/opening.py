"""What opening a repository asks of its store: identity, mark of a copy, recorded locations; and what it reads from.

Nothing here decides where copies belong: `shardkit.copies` does.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardkit.errors import (
    IntegrityError,
    MissingDependency,
    NotFoundError,
    ShardkitError,
    StoreReadOnlyError,
    UsageError,
)
from shardkit.formats.canonical_json import dumps, sha256_digest
from shardkit.manifest.json_fields import check_spelling, read_document, sealed, unseal
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.locations import LOCATION_NAME, ROOT_NAME, Location
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.location_table import LocationRecord, LocationTable, read_table
from shardkit.repository.log import LOG, MAX_ENTRY_BYTES, LogEntry
from shardkit.stores.local import LocalStore
from shardkit.stores.objects import OpenedRoot
from shardkit.stores.remote.addresses import parse_address
from shardkit.stores.remote.object_store import ObjectStore
from shardkit.stores.store import Store, find_checked, read_checked, root_store
from shardkit.stores.urls import open_store

Locations = Mapping[str, str] | Sequence[Location]
"""Name → URL, nearest first; or locations with all their properties."""

COPY_NAME: Final = "shardkit-copy.json"
"""Says of a root that it is a copy, and which: nobody commits to it, and an empty mount is not taken for it."""

_FORMAT: Final = "shardkit-copy/1"
_MAX_BYTES: Final = 16 * 2**10


IDENTITY_NAME: Final = "shardkit.json"
"""Object that makes a root a repository."""

MAX_IDENTITY_BYTES: Final = 64 * 1024

_IDENTITY_FORMAT: Final = "shardkit-repository/1"
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SINGLE_WRITER: Final = "single-writer"
"""Feature of a root on a store without put-if-absent: its writers promised to come one at a time."""
FEATURES: Final[tuple[str, ...]] = (SINGLE_WRITER,)
"""All features that this version knows."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which repository a root holds, and what a program must know to use it."""

    id: str
    """Random UUID: tells two repositories apart, whatever their paths."""
    features: tuple[str, ...] = ()

    @classmethod
    def new(cls, features: tuple[str, ...] = ()) -> Identity:
        """An identity that no other repository has."""
        return cls(str(uuid.uuid4()), features)

    def to_bytes(self) -> bytes:
        """Canonical JSON with the digest of the rest of it inside."""
        return sealed({"format": _IDENTITY_FORMAT, "id": self.id, "features": list(self.features)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Identity:
        """Read and check.

        Raises:
            FormatError: Not an identity that this version reads.
            IntegrityError: The digest inside does not match.
        """
        fields = unseal(
            data,
            f"{IDENTITY_NAME} of {where}",
            _IDENTITY_FORMAT,
            ("id", "features", "digest"),
            MAX_IDENTITY_BYTES,
        )
        identity = cls(fields.text("id", pattern=_UUID), fields.features(FEATURES))
        check_spelling(data, identity.to_bytes(), fields)
        return identity


@dataclass(frozen=True, slots=True)
class CopyMark:
    """What ``shardkit-copy.json`` says."""

    location: str
    repository: str

    def to_bytes(self) -> bytes:
        return dumps({"format": _FORMAT, "location": self.location, "repository": self.repository})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> CopyMark:
        fields = read_document(data, where, _FORMAT, ("location", "repository"), _MAX_BYTES)
        return cls(fields.text("location", pattern=LOCATION_NAME), fields.text("repository", maximum=36))


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


def open_locations(repository: OpenedRoot) -> list[Location]:
    """All locations of a repository: the one that it was opened at first, then the others in the table's order.

    Locations that cannot be opened on this machine (a client is not installed) are left out.

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
    )
    return [here, *_others(table, here.name)]


def _others(table: LocationTable | None, own: str, *, heal: bool = False) -> list[Location]:
    found: list[Location] = []
    for record in table.locations if table else ():
        if record.name != own:
            with contextlib.suppress(MissingDependency):
                found.append(location_of(record, heal=heal))
    return found


def read_mark(store: Store) -> CopyMark | None:
    """Which copy a root is; None for a root of its own."""
    return find_checked(store, COPY_NAME, CopyMark.from_bytes, max_bytes=_MAX_BYTES)


def own_name(store: Store) -> str:
    """Which location a store is: ``root``, or the copy that its mark names."""
    with contextlib.suppress(ShardkitError):
        mark = read_mark(store)
        return mark.location if mark else ROOT_NAME
    return ROOT_NAME


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


def for_one_writer(store: Store) -> Store:
    """The store as one writer at a time may use it; a local directory needs no other use."""
    return store.for_one_writer() if isinstance(store, ObjectStore) else store


def refuse_copy(store: Store, identity: Identity) -> None:
    """Commits go to the root: two logs of one repository could never be joined again.

    Raises:
        StoreReadOnlyError: the store is a copy.
    """
    mark = read_mark(root_store(store))
    if mark is not None:
        table = read_table(store, identity.id)
        raise StoreReadOnlyError(
            f"{store.url} is the copy {mark.location!r} of {table.root.url if table else 'another root'}; write there"
        )


def read_identity(store: Store, *, alone: bool = False) -> Identity:
    """``shardkit.json``; where the root's is damaged or gone, that of a location that the root remembers.

    Args:
        store: of the root.
        alone: ask the root only: to find out what it has itself.

    Raises:
        NotFoundError: there is none.
        FormatError, IntegrityError: it is damaged, or of a newer version.
    """
    try:
        return identity_in(store)
    except (NotFoundError, IntegrityError) as error:
        found = None if alone else _identity_elsewhere(store)
        if found is not None:
            return found
        if isinstance(error, IntegrityError):
            raise
        raise NotFoundError(
            f"no dataset at {store.url}: expected {IDENTITY_NAME} in it; check the path, or run: shardkit build"
        ) from None


def identity_in(store: Store) -> Identity:
    """``shardkit.json`` of one place; raises as `read_identity` does."""
    return read_checked(
        store,
        IDENTITY_NAME,
        lambda data, _where: Identity.from_bytes(data, store.url),
        max_bytes=MAX_IDENTITY_BYTES,
    )


def _identity_elsewhere(store: Store) -> Identity | None:
    """The identity as a copy has it: the table of locations says of which repository it must be."""
    with contextlib.suppress(ShardkitError):
        table = read_table(store, None)
        for location in _others(table, ROOT_NAME):
            with contextlib.suppress(ShardkitError):
                found = identity_in(location.store)
                if table is not None and found.id == table.repository:
                    return found
    return None


def first_identity(store: Store, features: tuple[str, ...]) -> Identity:
    """The identity to put where there may be none: a new one, or that of the log that lies there without one.

    Raises:
        IntegrityError: there is a log that does not say whose it is; a new identity would never fit it.
    """
    if store.head(LOG.name(1)) is None:
        return Identity.new(features)
    with contextlib.suppress(ShardkitError):
        first = find_checked(store, LOG.name(1), LogEntry.from_bytes, max_bytes=MAX_ENTRY_BYTES)
        found = identity_named_by(first) if first else None
        if found is not None:
            return found
    if store.head(IDENTITY_NAME) is None:
        raise IntegrityError(
            f"{store.url} has a log and no {IDENTITY_NAME}: it was a dataset and has lost its identity; "
            f"run: shardkit repair {store.url}"
        )
    return Identity.new(features)


def identity_named_by(first: LogEntry) -> Identity | None:
    """The identity that the first entry of a log follows.

    The entry names the repository, and the SHA-256 of the identity's bytes: of the few identities that a repository of
    that id may have, it is the one with this digest.
    """
    for features in ((), *((one,) for one in FEATURES)):
        identity = Identity(first.repository, features)
        if sha256_digest(identity.to_bytes()) == first.previous:
            return identity
    return None


def over_all(
    repository: OpenedRoot,
    given: Locations | None,
    settings: ReadSettings | None,
    *,
    heal: bool,
    alone: bool,
) -> Store:
    """The store to read from: over the locations given and, unless `alone`, those that the root remembers.

    Nothing that is read rests on the table: a damaged one costs a reader the other copies, not the data.
    """
    store, recorded, name = root_store(repository.store), list[Location](), ROOT_NAME
    with contextlib.suppress(ShardkitError):
        table = None if alone else read_table(repository.store, repository.id)
        if table is not None:
            mark = read_mark(repository.store)
            recorded = _others(table, mark.location if mark else ROOT_NAME, heal=heal)
            name = own_name(store) if recorded else ROOT_NAME
    others = _given(given, heal)
    taken = {name, store.url}.union(*((one.name, one.store.url) for one in others))
    others += [one for one in recorded if one.name not in taken and one.store.url not in taken]
    return locate(store, others, settings=settings, heal=heal, name=name)


def locate(
    root: Store,
    others: Locations | None = None,
    *,
    settings: ReadSettings | None = None,
    heal: bool = False,
    name: str = ROOT_NAME,
) -> Store:
    """The store to read from: the root as it is where it is local and alone, else all locations as one.

    Args:
        root: The store of the root; asked first, unless a location has a rank below 0.
        others: Further copies, or caches of neighbours (``http://host:port``).
        settings: Of reads.
        heal: Put good bytes over bad copies that are met, in the root too.
        name: Of the location that `root` is.
    """
    if isinstance(root, LocalStore) and not others:
        return root
    first = Location(name=name, store=root, domain=root.url, heal=heal)
    return LocatedStore([first, *_given(others, heal)], settings=settings)


def _given(locations: Locations | None, heal: bool) -> list[Location]:
    if isinstance(locations, Mapping):
        return [_by_url(name, url, i + 1, heal) for i, (name, url) in enumerate(locations.items())]
    return list(locations or ())


def _by_url(name: str, url: str, rank: int, heal: bool) -> Location:
    if "://" in url and parse_address(url).scheme in ("http", "https"):
        from shardkit.stores.remote.cache_client import CacheClient  # http.client is slow to import

        return Location(name=name, store=CacheClient(url), domain=url, rank=-1, holds="blocks")
    if "@sha256:" in url:
        raise UsageError(
            f"location {name!r}: expected the root alone, without a version; give the version to open"
        )
    return Location(name=name, store=open_store(url, read_only=not heal), domain=url, rank=rank, heal=heal)
