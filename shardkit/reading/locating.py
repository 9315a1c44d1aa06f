"""From what a user says of locations to a store that reads over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardkit.errors import UsageError
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.locations import ROOT_NAME, Location
from shardkit.reading.read_path import ReadSettings
from shardkit.stores.local import LocalStore
from shardkit.stores.remote import parse_address
from shardkit.stores.store import Store
from shardkit.stores.urls import open_store

__all__ = ["Locations", "locate", "open_location"]

Locations = Mapping[str, str] | Sequence[Location]
"""Name → URL, nearest first; or locations with all their properties."""


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
    if others is None:
        found: list[Location] = []
    elif isinstance(others, Mapping):
        found = [
            open_location(name, url, rank=i + 1, heal=heal) for i, (name, url) in enumerate(others.items())
        ]
    else:
        found = list(others)
    return LocatedStore([first, *found], settings=settings)


def open_location(name: str, url: str, *, rank: int = 1, heal: bool = False) -> Location:
    """A location by name and URL.

    Raises:
        UsageError: The URL names a version of a dataset, or holds a credential.
    """
    if "://" in url and parse_address(url).scheme in ("http", "https"):
        from shardkit.stores.remote.cache_client import CacheClient  # http.client is slow to import

        return Location(name=name, store=CacheClient(url), domain=url, rank=-1, holds="blocks")
    if "@sha256:" in url:
        raise UsageError(
            f"location {name!r}: expected the root alone, without a version; give the version to open"
        )
    return Location(name=name, store=open_store(url, read_only=not heal), domain=url, rank=rank, heal=heal)
