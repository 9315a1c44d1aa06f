"""What opening a repository asks of its store, and the store that it then reads from."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from shardkit.copies.policy.opening import others_of, own_name, read_mark, root_store
from shardkit.copies.policy.table import read_table
from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StoreReadOnlyError
from shardkit.reading.documents import read_checked
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.locating import ROOT_NAME, Locations, locate
from shardkit.reading.locations import Location
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.identity import IDENTITY_NAME, MAX_IDENTITY_BYTES, Identity
from shardkit.repository.log import MAX_ENTRY_BYTES, LogEntry, entry_name, identity_named_by
from shardkit.stores.remote import ObjectStore
from shardkit.stores.store import Store

__all__ = [
    "first_identity",
    "for_one_writer",
    "over_all",
    "read_identity",
    "recover_identity",
    "refuse_copy",
]


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
        return _identity_in(store)
    except (NotFoundError, IntegrityError) as error:
        found = None if alone else _identity_elsewhere(store)
        if found is not None:
            return found
        if isinstance(error, IntegrityError):
            raise
        raise NotFoundError(
            f"no dataset at {store.url}: expected {IDENTITY_NAME} in it; check the path, or run: shardkit "
            "build"
        ) from None


def _identity_in(store: Store) -> Identity:
    def parse(data: bytes, _where: str) -> Identity:
        return Identity.from_bytes(data, store.url)

    return read_checked(store, IDENTITY_NAME, parse, max_bytes=MAX_IDENTITY_BYTES)


def _identity_elsewhere(store: Store) -> Identity | None:
    """The identity as a copy has it: the table of locations says of which repository it must be."""
    with contextlib.suppress(ShardkitError):
        table = read_table(store, None)
        for location in others_of(table, ROOT_NAME, heal=False):
            with contextlib.suppress(ShardkitError):
                found = _identity_in(location.store)
                if table is not None and found.id == table.repository:
                    return found
    return None


def first_identity(store: Store, features: tuple[str, ...]) -> Identity:
    """The identity to put where there may be none: a new one, or that of the log that lies there without one.

    Raises:
        IntegrityError: there is a log that does not say whose it is; a new identity would never fit it.
    """
    if store.head(entry_name(1)) is None:
        return Identity.new(features)
    found = recover_identity(store)
    if found is None and store.head(IDENTITY_NAME) is None:
        raise IntegrityError(
            f"{store.url} has a log and no {IDENTITY_NAME}: it was a dataset and has lost its identity; "
            f"run: shardkit repair {store.url}"
        )
    return found or Identity.new(features)


def recover_identity(store: Store) -> Identity | None:
    """What ``shardkit.json`` said, by the first entry of the log; None where that is gone as well."""
    try:
        first = read_checked(
            store, entry_name(1), LogEntry.from_bytes, max_bytes=MAX_ENTRY_BYTES, is_optional=True
        )
    except ShardkitError:
        return None
    return identity_named_by(first)


def over_all(
    opened: Store,
    given: Locations | None,
    recorded: Sequence[Location],
    settings: ReadSettings | None,
    *,
    heal: bool,
) -> Store:
    """The store to read from: over the locations that the caller gave, and those that the root remembers.

    Args:
        opened: as the repository was opened.
        given: see `locate`.
        recorded: of the root's table.
        settings: of reads.
        heal: see `locate`.
    """
    store = root_store(opened)
    name = own_name(store) if recorded else ROOT_NAME
    located = locate(store, given, settings=settings, heal=heal, name=name)
    known = located.locations if isinstance(located, LocatedStore) else ()
    taken = {one.name for one in known} | {one.store.url for one in known} | {store.url}
    more = [one for one in recorded if one.name not in taken and one.store.url not in taken]
    if more:
        located = locate(store, [*known[1:], *more], settings=settings, heal=heal, name=name)
    return located
