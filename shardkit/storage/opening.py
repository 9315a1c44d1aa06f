"""What opening a repository asks of its store, and the store that it then reads from."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.errors import NotFoundError, StoreReadOnlyError
from shardkit.storage.identity import IDENTITY_NAME, MAX_IDENTITY_BYTES, Identity
from shardkit.storage.locating import ROOT_NAME, Locations, locate
from shardkit.storage.policy.opening import own_name, read_mark, root_store
from shardkit.storage.policy.table import read_table
from shardkit.storage.reading import LocatedStore, Location, ReadSettings
from shardkit.storage.remote import ObjectStore
from shardkit.storage.store import Store

__all__ = ["for_one_writer", "over_all", "read_identity", "refuse_copy"]


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


def read_identity(store: Store) -> Identity:
    """``shardkit.json``.

    Raises:
        NotFoundError: there is none.
        FormatError, IntegrityError: it is damaged, or of a newer version.
    """
    try:
        data = store.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES)
    except NotFoundError:
        raise NotFoundError(
            f"no dataset at {store.url}: expected {IDENTITY_NAME} in it; check the path, or run: shardkit "
            "build"
        ) from None
    return Identity.from_bytes(data, store.url)


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
