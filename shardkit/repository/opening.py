"""Open a root: find its identity and its copies, and refuse a root that has lost its log or all of its objects."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from typing import Final

from shardkit.errors import (
    IntegrityError,
    MissingDependency,
    NotFoundError,
    ShardkitError,
)
from shardkit.reading.located_store import Locations, given_locations, locate
from shardkit.reading.objects import ROOT_NAME, Location
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.location_table import (
    COPY_NAME,
    LocationRecord,
    LocationTable,
    location_of,
    own_name,
    read_mark,
    read_table,
)
from shardkit.repository.log import (
    IDENTITY_NAME,
    LOG,
    Identity,
    identity_in,
)
from shardkit.stores.local import open_store
from shardkit.stores.remote.clients import endpoint_of
from shardkit.stores.store import Store, root_store, scheme_of


def _others(table: LocationTable | None, own: str, *, heal: bool = False) -> list[Location]:
    """Open the locations of a table other than `own`, without those whose client is not installed."""
    found: list[Location] = []
    for record in table.locations if table else ():
        if record.name != own:
            with contextlib.suppress(MissingDependency):
                found.append(location_of(record, heal=heal))
    return found


def identity_of_copies(store: Store, error: NotFoundError | IntegrityError, *, alone: bool) -> Identity:
    """Return the identity of a root whose own cannot be read because of `error`, from one of its copies.

    Raises:
        IntegrityError: The identity is damaged in all locations, or the root is lost.
        NotFoundError: There is no dataset.
    """
    found = None if alone else _identity_elsewhere(store)
    if found is not None:
        return found
    if isinstance(error, IntegrityError):
        raise error
    check_root_is_not_lost(store)
    endpoint = endpoint_of(scheme_of(store.url) or "")
    raise NotFoundError(
        f"no dataset at {store.url}{endpoint}: expected {IDENTITY_NAME} in it; check the path, or run: "
        f"shardkit build; if it was lost and has a copy, run: shardkit repair {store.url} --location NAME=COPY"
    ) from None


_MAX_SIBLINGS: Final = 10_000


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
            f"is lost; run: shardkit repair {root.url}"
        )


def check_log_is_not_lost(root: Store, repository_id: str) -> None:
    """Raise IntegrityError if a root has no log and one of its copies has one."""
    others: list[Location] = []
    with contextlib.suppress(ShardkitError):
        others = _others(read_table(root, repository_id), own_name(root))
    others = others or [location_of(record) for record in find_sibling_copies(root)]
    for location in others:
        names: list[str] = []
        with contextlib.suppress(ShardkitError):
            names = list(location.store.list_after(LOG.prefix))
        if names:
            raise IntegrityError(
                f"the log of {root.url} is lost; {location.name} at {location.store.url} has {len(names)} entries of "
                f"it; run: shardkit repair {root.url}"
            )


def _identity_elsewhere(store: Store) -> Identity | None:
    """Return the identity of a copy if it belongs to the repository that the location table names, otherwise None."""
    with contextlib.suppress(ShardkitError):
        table = read_table(store, None)
        for location in _others(table, ROOT_NAME):
            with contextlib.suppress(ShardkitError):
                found = identity_in(location.store)
                if table is not None and found.id == table.repository:
                    return found
    return None


def over_all(
    root: Store,
    repository_id: str,
    given: Locations | None,
    settings: ReadSettings | None,
    *,
    heal: bool,
    alone: bool,
) -> Store:
    """Return a store that reads from the given locations and, unless `alone`, the locations of the root's table.

    The table is not needed to read the data: if it is damaged, the reader only lacks the other copies.
    """
    store, recorded, name = root_store(root), list[Location](), ROOT_NAME
    with contextlib.suppress(ShardkitError):
        table = None if alone else read_table(root, repository_id)
        if table is not None:
            mark = read_mark(root)
            name = mark.location if mark else ROOT_NAME
            recorded = _others(table, name, heal=heal)
    others = given_locations(given, heal)
    taken = {name, store.url}.union(*((one.name, one.store.url) for one in others))
    others += [one for one in recorded if one.name not in taken and one.store.url not in taken]
    return locate(store, others, settings=settings, heal=heal, name=name)
