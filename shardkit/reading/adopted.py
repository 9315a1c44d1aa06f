"""A store that finds adopted tars where they lie, and everything else in the root (`adopted_tars` for the places)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NoReturn

from shardkit.errors import IntegrityError, NotFoundError
from shardkit.manifest import ADOPTED, Manifest
from shardkit.reading.adopted_tars import Tar, TarFiles, read_tar_place
from shardkit.reading.located_store import LocatedStore, root_store
from shardkit.reading.locations import ROOT_NAME, Location
from shardkit.repository.repository import Repository
from shardkit.stores.remote.backoff import RetryPolicy
from shardkit.stores.store import ObjectStat, Stage, Store, StoreAround, parse_object_name

_SHARDS: Final = ("objects/", ".tar")
_THREADS: Final = 16


def with_adopted(repository: Repository, manifest: Manifest) -> Repository:
    """The repository as a reader of `manifest` needs it: one that finds adopted tars, where the manifest has any."""
    if ADOPTED not in manifest.features or isinstance(repository.store, AdoptedStore):
        return repository
    return repository.with_store(AdoptedStore(repository.store))


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
