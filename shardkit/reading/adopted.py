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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import unquote

from shardkit.errors import FormatError, IntegrityError, NotFoundError
from shardkit.formats.canonical_json import dumps
from shardkit.formats.digest import parse_digest
from shardkit.manifest.json_fields import read_document
from shardkit.reading.located_store import LocatedStore, find_checked, root_store
from shardkit.reading.locations import ROOT_NAME, Location
from shardkit.stores.file_operations import explained
from shardkit.stores.objects import OpenedRoot
from shardkit.stores.remote.addresses import Address
from shardkit.stores.remote.foreign import ForeignStore, open_foreign, split_url
from shardkit.stores.remote.waiting import RetryPolicy
from shardkit.stores.store import (
    ObjectStat,
    Stage,
    Store,
    StoreAround,
    parse_object_name,
    put_over,
    scheme_of,
)

_FORMAT: Final = "shardkit-adopted/1"
_KEYS: Final = ("digest", "urls")
_MAX_BYTES: Final = 64 * 2**10


def location_name(digest: str) -> str:
    """Where the place of a part (by its manifest) or of an adopted tar is kept below the root."""
    return f"locations/{parse_digest(digest)}.json"


def resolved(root: str, place: str) -> str:
    """Where a place lies that a root remembers: a relative one counts from the root."""
    if place.lower().startswith("file:///"):
        return unquote(place[len("file://") :])
    joined = place if scheme_of(place) else os.path.join(root, place)
    return joined if scheme_of(joined) else os.path.normpath(joined)


def put_adopted(repository: OpenedRoot, digest: str, place: str, etag: str = "") -> None:
    """Remember, durably, where an adopted tar lies; a place that was remembered before is replaced.

    Args:
        repository: That adopts it.
        digest: ``sha256:<hex>`` of the tar.
        place: Path of the local file, or URL.
        etag: What the tar's store called these bytes when they were hashed; empty where it has no such thing.

    Raises:
        UsageError: The URL holds a credential.
        StoreError: The root cannot be written.
    """
    if scheme_of(place):
        split_url(place)
        urls = [place]
    else:
        urls = [os.path.abspath(place)]
        if not scheme_of(repository.url):  # so that root and tars may move together
            urls.insert(0, os.path.relpath(urls[0], repository.url))
    fields = {"format": _FORMAT, "digest": digest, "urls": urls}
    put_over(repository.store, location_name(digest), dumps({**fields, "etag": etag} if etag else fields))


@dataclass(frozen=True, slots=True)
class Tar:
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


def read_tar_place(store: Store, digest: str) -> Tar | None:
    """What a root remembers of an adopted tar; None where it remembers nothing.

    Raises:
        FormatError: The document is damaged.
        StoreError: The root does not answer.
    """

    def parse(data: bytes, where: str) -> Tar:
        fields = read_document(data, where, _FORMAT, _KEYS, _MAX_BYTES, ("etag",))
        places = tuple(resolved(store.url, url) for url in fields.texts("urls", maximum=16, longest=8_000))
        if fields.digest("digest") != digest or not places:
            raise FormatError(f"{where}: it is of another tar; adopt the tar again")
        return Tar(digest, places, fields.text("etag", maximum=1_000) if fields.has("etag") else "")

    return find_checked(store, location_name(digest), parse, max_bytes=_MAX_BYTES)


class TarFiles:
    """Reads adopted tars; may be used from any thread, after a fork, and pickled."""

    def __init__(self, retry: RetryPolicy | None = None) -> None:
        self._retry = retry
        self._stores: dict[Address, ForeignStore] = {}

    def stat(self, tar: Tar) -> ObjectStat | None:
        """What its place says of it; None where nothing is there.

        Raises:
            StoreError: The place does not answer.
            IntegrityError: It is not a file any more.
        """
        if tar.is_far:
            store, key = self._store(tar.place)
            return store.head(key)
        with explained(f"look at the adopted tar {tar.place}"):
            try:
                found = os.stat(tar.place)
            except FileNotFoundError:
                return None
        if not stat.S_ISREG(found.st_mode):
            raise IntegrityError(f"{tar.place}: not a file any more; put the tar back that was adopted")
        return ObjectStat(found.st_size, None)

    def read(self, tar: Tar, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of it, for each (offset, length).

        Raises:
            NotFoundError: It is not there.
            IntegrityError: It is shorter than it was.
            StoreError: Its place does not answer.
        """
        if tar.is_far:
            store, key = self._store(tar.place)
            try:
                return store.get_ranges(key, ranges)
            except IntegrityError:
                last = max(offset + length for offset, length in ranges)
                raise IntegrityError(
                    f"{tar.place}: fewer bytes than the {last} that it had when it was adopted; put the tar back"
                ) from None
        with explained(f"read the adopted tar {tar.place}"):
            try:
                file = os.open(tar.place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                raise NotFoundError(f"{tar.place}: no such file") from None
            try:
                size = os.fstat(file).st_size
                return [_read(file, tar.place, size, offset, length) for offset, length in ranges]
            finally:
                os.close(file)

    def _store(self, url: str) -> tuple[ForeignStore, str]:
        address, key = split_url(url)
        found = self._stores.get(address)
        if found is None:
            found = self._stores.setdefault(address, open_foreign(address, retry=self._retry))
        return found, key


def _read(file: int, path: str, size: int, offset: int, length: int) -> bytes:
    """Exactly `length` bytes; the file is somebody else's and may be shorter than it was."""
    if offset + length > size:
        raise IntegrityError(
            f"{path}: {size} bytes, expected at least {offset + length}; it was truncated since it was adopted"
        )
    data = os.pread(file, length, offset)
    if len(data) == length:
        return data
    parts = [data]
    done = len(data)
    while data and done < length:  # the kernel hands out at most 2 GiB at a time
        data = os.pread(file, length - done, offset + done)
        parts.append(data)
        done += len(data)
    if done != length:
        raise IntegrityError(f"{path}: it shrank while it was read; put the tar back that was adopted")
    return b"".join(parts)


_SHARDS: Final = ("objects/", ".tar")
_THREADS: Final = 16


def adopted_place(store: Store, name: str) -> str | None:
    """Path or URL of an adopted tar, as well as it is known; None where `name` is an object of the store itself."""
    return store.place(name) if isinstance(store, AdoptedStore) else None


class AdoptedStore(StoreAround):
    """A store of which some shards lie outside of it; implements `shardkit.stores.store.Store`.

    What is in the store itself is found there first. Adopted tars are never mapped: their owner may truncate or
    rewrite them at any time, and a reader must get the very bytes that were verified. They are never written, listed
    or deleted.

    Args:
        inner: The root's own store, or the root with its locations.
        retry: Of requests for tars behind URLs.
        known: What another view of the same root knows of the places of tars, and goes on learning.
    """

    def __init__(
        self, inner: Store, *, retry: RetryPolicy | None = None, known: dict[str, Tar | None] | None = None
    ) -> None:
        self._inner = inner
        self._files = TarFiles(retry)
        self._tars = {} if known is None else known
        self._located: LocatedStore | None = None

    def __repr__(self) -> str:
        return f"AdoptedStore({self._inner!r})"

    @property
    def inner(self) -> Store:
        return self._inner

    def with_retry(self, retry: RetryPolicy) -> AdoptedStore:
        """The same, more or less patient."""
        inner = self._inner
        patient: Store = inner.with_retry(retry) if hasattr(inner, "with_retry") else inner
        return AdoptedStore(patient, retry=retry, known=self._tars)

    # Adopted tars

    def place(self, name: str) -> str | None:
        """Where an adopted tar lies, or where it lay; None for anything else."""
        tar = self._tar(name)
        return None if tar is None else tar.place

    def is_far(self, name: str) -> bool:
        """Whether a shard is a tar behind a URL."""
        tar = self._tar(name)
        return tar is not None and tar.is_far

    def any_far(self, names: Iterable[str]) -> bool:
        """Whether any of these shards is a tar behind a URL.

        Raises:
            FormatError, StoreError: What the root remembers of one cannot be read.
        """
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardkit-places") as pool:
            return any(pool.map(self.is_far, names))

    def rewritten(self, name: str) -> str | None:
        """Why an adopted tar may be another than the one that was hashed, by its ETag; None where nothing says so."""
        tar = self._tar(name)
        found = self._files.stat(tar) if tar is not None and tar.etag else None
        if tar is None or found is None or not found.etag or found.etag == tar.etag:
            return None
        return f"ETag {found.etag}; it was {tar.etag} when the tar was adopted"

    @property
    def located(self) -> LocatedStore:
        """Adopted tars by the read path: where they lie first, then wherever the root's locations have them."""
        if self._located is None:
            inner = self._inner
            root = AdoptedStore(root_store(inner), known=self._tars)
            here = Location(name=ROOT_NAME, store=root, domain=root.url)
            if isinstance(inner, LocatedStore):
                here = dataclasses.replace(inner.locations[0], store=root)
                self._located = LocatedStore([here, *inner.locations[1:]], settings=inner.settings)
                if inner.parity is not None:
                    self._located = self._located.with_parity(inner.parity)
            else:
                self._located = LocatedStore([here])
        return self._located

    # Reading

    def get(self, name: str, *, max_bytes: int) -> bytes:
        tar = self._tar(name)
        if tar is None:
            return self._inner.get(name, max_bytes=max_bytes)
        stat = self._files.stat(tar)
        if stat is None:
            self._gone(tar)
        if stat.size > max_bytes:
            raise IntegrityError(
                f"{tar.place}: {stat.size} bytes, expected at most {max_bytes}; it changed since it was adopted"
            )
        return self.get_range(name, 0, stat.size)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        return self.get_ranges(name, [(offset, length)])[0]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        tar = self._tar(name)
        if tar is None:
            return self._inner.get_ranges(name, ranges)
        try:
            return self._files.read(tar, ranges)
        except NotFoundError:
            self._gone(tar)

    def head(self, name: str) -> ObjectStat | None:
        """Size of an object; see `Store.head`.

        An ETag that is that of the pass in which a tar was hashed is its store's word for the tar's digest.
        """
        tar = self._tar(name)
        if tar is None:
            return self._inner.head(name)
        found = self._files.stat(tar)
        if found is None:
            return None
        is_same = bool(tar.etag) and found.etag == tar.etag
        return ObjectStat(found.size, found.sha256 or (tar.digest.partition(":")[2] if is_same else None))

    def local_path(self, name: str) -> Path | None:
        """The file of an object of the root; None for an adopted tar, which must not be mapped."""
        return None if self._tar(name) else self._inner.local_path(name)

    # Writing

    def replace(self, name: str, data: bytes) -> None:
        """Put good bytes over bad ones in the root; see `Store.replace`."""
        super().replace(name, data)
        self._tars.pop(name, None)

    def delete(self, name: str) -> None:
        """Remove from the root; see `Store.delete`. An adopted tar is not ours to delete."""
        super().delete(name)
        self._tars.pop(name, None)

    @contextlib.contextmanager
    def stage(self, suffix: str = "") -> Iterator[Stage]:
        """A large object of the root; see `Store.stage`."""
        try:
            with super().stage(suffix) as stage:
                yield stage
        finally:
            self._tars.clear()  # a tar that was healed is in the root from now on

    # Places

    def _tar(self, name: str) -> Tar | None:
        """The adopted tar of a name; None for what is in the root, or unknown."""
        if not (name.startswith(_SHARDS[0]) and name.endswith(_SHARDS[1])):
            return None
        if name in self._tars:
            return self._tars[name]
        is_here = self._inner.head(name) is not None
        tar = None if is_here else read_tar_place(self._inner, parse_object_name(name)[0])
        if is_here or tar is not None:  # what is in neither place may be adopted, or put, later
            self._tars[name] = tar
        return tar

    def _gone(self, tar: Tar) -> NoReturn:
        looked = ", ".join(dict.fromkeys(tar.places))
        raise NotFoundError(
            f"adopted tar {tar.digest} is gone from where it was ({looked}); put it back, or tell "
            f"where it is now: shardkit adopt TARS… {self.url}"
        ) from None
