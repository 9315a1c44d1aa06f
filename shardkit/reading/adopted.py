"""Adopted tars: existing tar files that serve as shards without being copied into the root.

The manifest names an adopted shard by its SHA-256, like any shard. The root records the tar's path or URL in one small
document, ``locations/<hex of the tar's digest>.json``. The document is configuration, not data, and may be rewritten
when the tar moves. Neither the document nor a size or modification time is trusted: blocks are verified on every read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from urllib.parse import unquote

from msgspec import Meta

from shardkit.documents import Digest, Document, decode, encode
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.formats.canonical_json import parse_digest
from shardkit.manifest import MIXED, Manifest, ShardTable
from shardkit.reading.inventory import version_record_name
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import ROOT_NAME, Location
from shardkit.stores.file_operations import Handle, explained, read_exactly
from shardkit.stores.store import (
    ObjectStat,
    Stage,
    Store,
    StoreAround,
    find_checked,
    object_name,
    parse_object_name,
    put_over,
    scheme_of,
)
from shardkit.stores.waiting import RetryPolicy

if TYPE_CHECKING:
    from shardkit.stores.remote.addresses import Address
    from shardkit.stores.remote.object_store import ForeignStore

_MAX_BYTES: Final = 64 * 2**10


class _Place(Document, frozen=True, kw_only=True, tag="shardkit-adopted/1"):
    digest: Digest
    urls: Annotated[tuple[Annotated[str, Meta(max_length=8_000)], ...], Meta(min_length=1, max_length=16)]
    etag: Annotated[str, Meta(max_length=1_000)] = ""


def location_name(digest: str) -> str:
    """Return the name of the document with the place of a part (given its manifest id) or of an adopted tar."""
    return f"locations/{parse_digest(digest)}.json"


def resolved(root: str, place: str) -> str:
    """Return the path or URL of a recorded place; relative paths are relative to the root."""
    if place.lower().startswith("file:///"):
        return unquote(place[len("file://") :])
    joined = place if scheme_of(place) else os.path.join(root, place)
    return joined if scheme_of(joined) else os.path.normpath(joined)


def put_adopted(root: Store, digest: str, place: str, etag: str = "") -> None:
    """Record the place of an adopted tar durably, replacing any earlier record."""
    if scheme_of(place):
        from shardkit.stores.remote.addresses import split_url

        split_url(place)
        urls = [place]
    else:
        urls = [os.path.abspath(place)]
        if not scheme_of(root.url):  # so that root and tars may move together
            urls.insert(0, os.path.relpath(urls[0], root.url))
    put_over(root, location_name(digest), encode(_Place(digest=digest, urls=tuple(urls), etag=etag or "")))


class Tar(NamedTuple):
    """An adopted tar.

    Attributes:
        digest: ``sha256:<hex>``.
        places: absolute paths and URLs, tried in order.
        etag: ETag of the tar in its store when it was adopted; empty if unknown.
    """

    digest: str
    places: tuple[str, ...]
    etag: str

    @property
    def place(self) -> str:
        """The first place that is a URL or an existing file; otherwise the last one."""
        return next((one for one in self.places if scheme_of(one) or os.path.exists(one)), self.places[-1])

    @property
    def is_far(self) -> bool:
        """Whether the tar is read from a URL."""
        return scheme_of(self.place) is not None

    def gone(self, root: str) -> NotFoundError:
        """Return the error for a tar that is missing from all its places."""
        return NotFoundError(
            f"adopted tar {self.digest} is gone from where it was ({', '.join(dict.fromkeys(self.places))}); put it "
            f"back, or tell where it is now: shardkit adopt TARS… {root}"
        )


def read_tar_place(store: Store, digest: str) -> Tar | None:
    """Return the recorded place of an adopted tar, or None if the root has no record of it."""

    def parse(data: bytes, where: str) -> Tar:
        place = decode(_Place, data, where, max_bytes=_MAX_BYTES)
        if place.digest != digest:
            raise FormatError(f"{where}: it is of another tar; adopt the tar again")
        return Tar(digest, tuple(resolved(store.url, url) for url in place.urls), place.etag)

    return find_checked(store, location_name(digest), parse, max_bytes=_MAX_BYTES)


_SHARDS: Final = ("objects/", ".tar")
_THREADS: Final = 16
_ASKED: Final = (
    64  # shards sampled to learn whether tars are remote: tars adopted together are mostly in one place
)


def with_adopted_tars(store: Store, manifest: Manifest) -> Store:
    """Return a store that finds adopted tars if the manifest has any; otherwise return `store`."""
    if not manifest.adopted or _adopting(store) is not None:
        return store
    if not isinstance(store, LocatedStore):
        return AdoptedStore(store)
    root = dataclasses.replace(store.locations[0], store=AdoptedStore(store.inner, documents=store))
    return LocatedStore([root, *store.locations[1:]], settings=store.settings, parity=store.parity)


def store_of_version(store: Store, manifest: Manifest, table: ShardTable) -> Store:
    """Return a store for reading a version: it finds adopted tars and rebuilds lost objects from parity.

    A local root without parity, copies and remote tars is returned as it is, or with its adopted tars.
    """
    store = with_adopted_tars(store, manifest)
    if not isinstance(store, LocatedStore):
        has_parity = store.local_path(version_record_name(manifest.id)) is not None
        if has_parity or (isinstance(store, AdoptedStore) and store.any_far(_some_shards(table))):
            store = LocatedStore([Location(name=ROOT_NAME, store=store, domain=store.url)])
    if isinstance(store, LocatedStore) and MIXED not in (manifest.format, manifest.compression):
        holders = [one.store for one in store.locations if one.holds == "objects"]
        from shardkit.reading.parity.rebuilding import ParityReads  # imported late: few readers need it

        parity = ParityReads(holders, manifest, table, attempt_s=store.settings.attempt_s)
        return store.with_parity(parity)
    return store


def _some_shards(table: ShardTable) -> list[str]:
    every = max(1, len(table) // _ASKED)
    return [object_name(table.digest_text(shard), "tar") for shard in range(0, len(table), every)]


def adopted_place(store: Store, name: str) -> str | None:
    """Return the path or URL of an adopted tar, or None if `name` is not known to be one."""
    tar = find_tar(store, name)
    return None if tar is None else tar.place


def find_tar(store: Store, name: str) -> Tar | None:
    """Return the adopted tar of a shard's object name, or None if the shard is not known to be one."""
    adopting = _adopting(store)
    return None if adopting is None else adopting.tar(name)


def _adopting(store: Store) -> AdoptedStore | None:
    while not isinstance(store, AdoptedStore):
        if not isinstance(store, StoreAround):
            return None
        store = store.inner
    return store


class AdoptedStore(StoreAround):
    """Store of a root that has adopted tars; implements `shardkit.stores.store.Store`.

    Objects in the root itself take precedence. Adopted tars are never memory-mapped: their owner may truncate or
    rewrite them at any time, and a reader must use exactly the bytes that were verified. They are never written,
    listed or deleted.

    Args:
        inner: Store of the root.
        documents: Store from which the places of tars are read: the root with its locations; default `inner`.
        retry: Retry policy for tars at URLs.
    """

    def __init__(
        self, inner: Store, *, documents: Store | None = None, retry: RetryPolicy | None = None
    ) -> None:
        self._inner, self._documents, self._retry = inner, documents or inner, retry
        self._tars: dict[str, Tar | None] = {}
        self._stores: dict[Address, ForeignStore] = {}

    def __repr__(self) -> str:
        return f"AdoptedStore({self._inner!r})"

    @property
    def inner(self) -> Store:
        return self._inner

    def with_retry(self, retry: RetryPolicy) -> AdoptedStore:
        """Return a view with another retry policy; both share the places of tars found so far."""
        inner = self._inner
        patient: Store = inner.with_retry(retry) if hasattr(inner, "with_retry") else inner
        view = AdoptedStore(patient, documents=self._documents, retry=retry)
        view._tars = self._tars
        return view

    # Adopted tars

    def tar(self, name: str) -> Tar | None:
        """Return the adopted tar of an object name; None if the object is in the root, or unknown."""
        if not (name.startswith(_SHARDS[0]) and name.endswith(_SHARDS[1])):
            return None
        if name in self._tars:
            return self._tars[name]
        is_here = self._inner.head(name) is not None
        tar = None if is_here else read_tar_place(self._documents, parse_object_name(name)[0])
        if is_here or tar is not None:  # an unknown object may be written or adopted later
            self._tars[name] = tar
        return tar

    def any_far(self, names: Iterable[str]) -> bool:
        """Whether any of these shards is known to be a tar at a URL."""

        def is_far(name: str) -> bool:
            with contextlib.suppress(ShardkitError):
                tar = self.tar(name)
                return tar is not None and tar.is_far
            return False

        # in parallel: opening a dataset waits for this, and its root may be a bucket
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardkit-places") as pool:
            return any(pool.map(is_far, names))

    def rewritten(self, name: str) -> str | None:
        """Return how a tar's ETag differs from the adopted one; None if it is equal or unknown."""
        tar = self.tar(name)
        found = self._stat(tar) if tar is not None and tar.etag else None
        if tar is None or found is None or not found.etag or found.etag == tar.etag:
            return None
        return f"ETag {found.etag}; it was {tar.etag} when the tar was adopted"

    # Reading

    def get(self, name: str, *, max_bytes: int) -> bytes:
        tar = self.tar(name)
        if tar is None:
            return self._inner.get(name, max_bytes=max_bytes)
        found = self._stat(tar)
        if found is None:
            raise tar.gone(self.url)
        if found.size > max_bytes:
            raise IntegrityError(
                f"{tar.place}: {found.size} bytes, expected at most {max_bytes}; it changed since it was adopted"
            )
        return self.get_range(name, 0, found.size)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        tar = self.tar(name)
        if tar is None:
            return self._inner.get_range(name, offset, length)
        try:
            return self._read(tar, offset, length)
        except NotFoundError:
            raise tar.gone(self.url) from None

    def head(self, name: str) -> ObjectStat | None:
        """Return size and checksum of an object; see `Store.head`.

        If a tar's ETag is unchanged since it was hashed, its digest counts as the checksum that the store keeps.
        """
        tar = self.tar(name)
        if tar is None:
            return self._inner.head(name)
        found = self._stat(tar)
        if found is None:
            return None
        is_same = bool(tar.etag) and found.etag == tar.etag
        return ObjectStat(found.size, found.sha256 or (tar.digest.partition(":")[2] if is_same else None))

    def local_path(self, name: str) -> Path | None:
        """Return the file of an object in the root; None for an adopted tar, which must not be mapped."""
        return None if self.tar(name) else self._inner.local_path(name)

    # Writing

    def replace(self, name: str, data: bytes) -> None:
        super().replace(name, data)
        self._tars.pop(name, None)

    def delete(self, name: str) -> None:
        super().delete(name)
        self._tars.pop(name, None)

    @contextlib.contextmanager
    def stage(self, suffix: str = "") -> Iterator[Stage]:
        try:
            with super().stage(suffix) as stage:
                yield stage
        finally:
            self._tars.clear()  # a healed tar is an object of the root

    # Access to tars

    def _stat(self, tar: Tar) -> ObjectStat | None:
        """Return size and checksum of a tar at its place, or None if it is missing."""
        if tar.is_far:
            store, key = self._foreign(tar.place)
            return store.head(key)
        with explained(f"look at the adopted tar {tar.place}"):
            try:
                found = os.stat(tar.place)
            except FileNotFoundError:
                return None
        if not stat.S_ISREG(found.st_mode):
            raise IntegrityError(f"{tar.place}: not a file any more; put the tar back that was adopted")
        return ObjectStat(found.st_size, None)

    def _read(self, tar: Tar, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes of a tar."""
        if tar.is_far:
            store, key = self._foreign(tar.place)
            try:
                return store.get_range(key, offset, length)
            except IntegrityError:
                raise IntegrityError(
                    f"{tar.place}: fewer bytes than the {offset + length} that it had when it was adopted; put the tar "
                    "back"
                ) from None
        with explained(f"read the adopted tar {tar.place}"):
            try:
                file = os.open(tar.place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                raise NotFoundError(f"{tar.place}: no such file") from None
            try:
                return _read_file(Handle(file, tar.place), offset, length)
            finally:
                os.close(file)

    def _foreign(self, url: str) -> tuple[ForeignStore, str]:
        from shardkit.stores.remote.addresses import split_url
        from shardkit.stores.remote.object_store import ForeignStore

        address, key = split_url(url)
        found = self._stores.get(address)
        if found is None:
            found = self._stores.setdefault(address, ForeignStore(address, read_only=True, retry=self._retry))
        return found, key


def _read_file(file: Handle, offset: int, length: int) -> bytes:
    """Return exactly `length` bytes; another owner may have truncated the file."""
    size = os.fstat(file.fd).st_size
    if offset + length > size:  # checked before memory of that length is allocated
        raise IntegrityError(
            f"{file.path}: {size} bytes, expected at least {offset + length}; it was truncated since it was adopted"
        )
    data = read_exactly(file, offset, length)
    if len(data) != length:
        raise IntegrityError(f"{file.path}: it shrank while it was read; put the tar back that was adopted")
    return data
