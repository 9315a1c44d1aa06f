"""Adopted tars: shards of somebody else, found and read where they lie, everything else in the root.

An adopted shard is named by its SHA-256 in the manifest like any shard, and was not copied into the root. The root
remembers its place in one small document, ``locations/<hex of the tar's digest>.json``: like the place of a part it is
configuration, not data, and may be written again when the tar moves. Nothing is trusted because of it, nor because of
a size or a modification time: blocks are verified on every read.
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
    """Where the place of a part (by its manifest) or of an adopted tar is kept below the root."""
    return f"locations/{parse_digest(digest)}.json"


def resolved(root: str, place: str) -> str:
    """Where a place lies that a root remembers: a relative one counts from the root."""
    if place.lower().startswith("file:///"):
        return unquote(place[len("file://") :])
    joined = place if scheme_of(place) else os.path.join(root, place)
    return joined if scheme_of(joined) else os.path.normpath(joined)


def put_adopted(root: Store, digest: str, place: str, etag: str = "") -> None:
    """Remember, durably, where an adopted tar lies; a place that was remembered before is replaced."""
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
        etag: that its store had for these bytes; empty where that is not known.
    """

    digest: str
    places: tuple[str, ...]
    etag: str

    @property
    def place(self) -> str:
        """Where it lies, or lay."""
        return next((one for one in self.places if scheme_of(one) or os.path.exists(one)), self.places[-1])

    @property
    def is_far(self) -> bool:
        """Whether it lies behind a URL."""
        return scheme_of(self.place) is not None

    def gone(self, root: str) -> NotFoundError:
        """The error of a tar that is not where it was."""
        return NotFoundError(
            f"adopted tar {self.digest} is gone from where it was ({', '.join(dict.fromkeys(self.places))}); put it "
            f"back, or tell where it is now: shardkit adopt TARS… {root}"
        )


def read_tar_place(store: Store, digest: str) -> Tar | None:
    """What a root remembers of an adopted tar; None where it remembers nothing."""

    def parse(data: bytes, where: str) -> Tar:
        place = decode(_Place, data, where, max_bytes=_MAX_BYTES)
        if place.digest != digest:
            raise FormatError(f"{where}: it is of another tar; adopt the tar again")
        return Tar(digest, tuple(resolved(store.url, url) for url in place.urls), place.etag)

    return find_checked(store, location_name(digest), parse, max_bytes=_MAX_BYTES)


_SHARDS: Final = ("objects/", ".tar")
_THREADS: Final = 16
_ASKED: Final = (
    64  # shards by which to tell where the tars of a version lie: those of one adoption mostly lie together
)


def with_adopted_tars(store: Store, manifest: Manifest) -> Store:
    """The store as a reader of `manifest` needs it: one that finds adopted tars, where the manifest has any."""
    if not manifest.adopted or _adopting(store) is not None:
        return store
    if not isinstance(store, LocatedStore):
        return AdoptedStore(store)
    root = dataclasses.replace(store.locations[0], store=AdoptedStore(store.inner, documents=store))
    return LocatedStore([root, *store.locations[1:]], settings=store.settings, parity=store.parity)


def store_of_version(store: Store, manifest: Manifest, table: ShardTable) -> Store:
    """As a reader of a version needs it: finds adopted tars, and rebuilds from parity what no location has.

    A local root without parity, copies and tars behind URLs is read as it is.
    """
    store = with_adopted_tars(store, manifest)
    if not isinstance(store, LocatedStore):
        has_parity = store.local_path(version_record_name(manifest.id)) is not None
        if has_parity or (isinstance(store, AdoptedStore) and store.any_far(_some_shards(table))):
            store = LocatedStore([Location(name=ROOT_NAME, store=store, domain=store.url)])
    if isinstance(store, LocatedStore) and MIXED not in (manifest.format, manifest.compression):
        holders = [one.store for one in store.locations if one.holds == "objects"]
        from shardkit.reading.parity.rebuilding import ParityReads  # few readers need it

        parity = ParityReads(holders, manifest, table, attempt_s=store.settings.attempt_s)
        return store.with_parity(parity)
    return store


def _some_shards(table: ShardTable) -> list[str]:
    every = max(1, len(table) // _ASKED)
    return [object_name(table.digest_text(shard), "tar") for shard in range(0, len(table), every)]


def adopted_place(store: Store, name: str) -> str | None:
    """Path or URL of an adopted tar, as well as it is known; None where `name` is an object of the store itself."""
    tar = find_tar(store, name)
    return None if tar is None else tar.place


def find_tar(store: Store, name: str) -> Tar | None:
    """The adopted tar that a shard is, where a store finds those; None for an object of the store itself."""
    adopting = _adopting(store)
    return None if adopting is None else adopting.tar(name)


def _adopting(store: Store) -> AdoptedStore | None:
    while not isinstance(store, AdoptedStore):
        if not isinstance(store, StoreAround):
            return None
        store = store.inner
    return store


class AdoptedStore(StoreAround):
    """The store of a root of which some shards lie outside of it; implements `shardkit.stores.store.Store`.

    What is in the store itself is found there first. Adopted tars are never mapped: their owner may truncate or
    rewrite them at any time, and a reader must get the very bytes that were verified. They are never written, listed
    or deleted.

    Args:
        inner: The root's own store.
        documents: Where the documents are read that say where tars lie: the root with its locations, or `inner`.
        retry: Of requests for tars behind URLs.
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
        """The same, more or less patient; what either learns of tars is known to both."""
        inner = self._inner
        patient: Store = inner.with_retry(retry) if hasattr(inner, "with_retry") else inner
        view = AdoptedStore(patient, documents=self._documents, retry=retry)
        view._tars = self._tars
        return view

    # Adopted tars

    def tar(self, name: str) -> Tar | None:
        """The adopted tar of a name; None for what is in the root, or unknown."""
        if not (name.startswith(_SHARDS[0]) and name.endswith(_SHARDS[1])):
            return None
        if name in self._tars:
            return self._tars[name]
        is_here = self._inner.head(name) is not None
        tar = None if is_here else read_tar_place(self._documents, parse_object_name(name)[0])
        if is_here or tar is not None:  # what is in neither place may be adopted, or put, later
            self._tars[name] = tar
        return tar

    def any_far(self, names: Iterable[str]) -> bool:
        """Whether any of these shards is known to be a tar behind a URL."""

        def is_far(name: str) -> bool:
            with contextlib.suppress(ShardkitError):
                tar = self.tar(name)
                return tar is not None and tar.is_far
            return False

        # at the same time: a dataset is opened meanwhile, and its root may be a bucket
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardkit-places") as pool:
            return any(pool.map(is_far, names))

    def rewritten(self, name: str) -> str | None:
        """Why an adopted tar may be another than the one that was hashed, by its ETag; None where nothing says so."""
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
        """Size of an object; see `Store.head`.

        An ETag that is that of the pass in which a tar was hashed is its store's word for the tar's digest.
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
        """The file of an object of the root; None for an adopted tar, which must not be mapped."""
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
            self._tars.clear()  # a tar that was healed is in the root from now on

    # Where the tars lie

    def _stat(self, tar: Tar) -> ObjectStat | None:
        """What a tar's place says of it; None where nothing is there."""
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
        """Exactly `length` bytes."""
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
    """Exactly `length` bytes; the file is somebody else's and may be shorter than it was."""
    size = os.fstat(file.fd).st_size
    if offset + length > size:  # before anything of that length is allocated
        raise IntegrityError(
            f"{file.path}: {size} bytes, expected at least {offset + length}; it was truncated since it was adopted"
        )
    data = read_exactly(file, offset, length)
    if len(data) != length:
        raise IntegrityError(f"{file.path}: it shrank while it was read; put the tar back that was adopted")
    return data
