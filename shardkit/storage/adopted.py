"""Where adopted tars lie, and a store that finds them there.

An adopted shard is a tar of somebody else, named by its SHA-256 in the manifest like any shard, that was not copied
into the root. The root remembers its place in one small document, ``locations/<hex of the tar's digest>.json``: like
the place of a part (`storage.locations`) it is configuration, not data, and may be written again when the tar moves.
Nothing is trusted because of it, nor because of a size or a modification time: blocks are verified on every read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import unquote

from shardkit.errors import FormatError, IntegrityError, NotFoundError, UsageError
from shardkit.formats.canonical_json import dumps
from shardkit.manifest import ADOPTED, Manifest
from shardkit.manifest.json_fields import read_document
from shardkit.storage.locations import location_name
from shardkit.storage.objects import parse_object_name
from shardkit.storage.os_errors import explained
from shardkit.storage.repository import Repository
from shardkit.storage.store import ObjectStat, Stage, Store

__all__ = ["AdoptedStore", "adopted_place", "put_adopted", "with_adopted"]

_FORMAT: Final = "shardkit-adopted/1"
_KEYS: Final = ("digest", "urls")
_MAX_BYTES: Final = 64 * 2**10
_SHARDS: Final = ("objects/", ".tar")


def put_adopted(repository: Repository, digest: str, path: str) -> None:
    """Remember, durably, where an adopted tar lies; a place that was remembered before is replaced.

    Args:
        repository: That adopts it.
        digest: ``sha256:<hex>`` of the tar.
        path: Of the local file.

    Raises:
        StoreError: The root cannot be written.
    """
    absolute = os.path.abspath(path)
    urls = [absolute]
    if "://" not in repository.url:
        urls.insert(0, os.path.relpath(absolute, repository.url))  # so that root and tars may move together
    document = dumps({"format": _FORMAT, "digest": digest, "urls": urls})
    name = location_name(digest)
    created = repository.store.put_new(name, document)
    if not created and repository.store.get(name, max_bytes=_MAX_BYTES) != document:
        repository.store.replace(name, document)


def with_adopted(repository: Repository, manifest: Manifest) -> Repository:
    """The repository as a reader of `manifest` needs it: one that finds adopted tars, where the manifest has any."""
    if ADOPTED not in manifest.features or isinstance(repository.store, AdoptedStore):
        return repository
    identity = repository._identity  # noqa: SLF001 - the same repository over another view of its store
    return Repository(AdoptedStore(repository.store), identity, read_only=repository.read_only)


def adopted_place(store: Store, name: str) -> str | None:
    """The path of an adopted tar, as well as it is known; None where `name` is an object of the store itself."""
    return store.place(name) if isinstance(store, AdoptedStore) else None


class AdoptedStore:
    """A store of which some shards are files outside of it; implements `shardkit.storage.store.Store`.

    What is in the store itself is found there first. Adopted tars are never mapped: their owner may truncate or
    rewrite them at any time, and a reader must get the very bytes that were verified. They are never written, listed
    or deleted. May be used from any thread, after a fork, and pickled.

    Args:
        inner: The root's own store.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._places: dict[str, tuple[str, ...]] = {}

    def __repr__(self) -> str:
        return f"AdoptedStore({self._inner!r})"

    @property
    def url(self) -> str:
        """Where the root is."""
        return self._inner.url

    @property
    def inner(self) -> Store:
        """The root's own store."""
        return self._inner

    def place(self, name: str) -> str | None:
        """Where an adopted tar lies, or where it lay; None for anything else."""
        paths = self._paths(name)
        return next((path for path in paths if os.path.exists(path)), paths[-1] if paths else None)

    # Reading

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """The whole object; see `Store.get`."""
        path = self.place(name)
        if path is None:
            return self._inner.get(name, max_bytes=max_bytes)
        size = self._stat(name).size
        if size > max_bytes:
            raise IntegrityError(
                f"{path}: {size} bytes, expected at most {max_bytes}; it changed since it was adopted"
            )
        return self.get_range(name, 0, size)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Part of an object; see `Store.get_range`."""
        return self.get_ranges(name, [(offset, length)])[0]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Parts of an object; see `Store.get_ranges`."""
        path = self.place(name)
        if path is None:
            return self._inner.get_ranges(name, ranges)
        with explained(f"read the adopted tar {path}"):
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                self._gone(name)
            try:
                size = os.fstat(file).st_size
                return [_read(file, path, size, offset, length) for offset, length in ranges]
            finally:
                os.close(file)

    def head(self, name: str) -> ObjectStat | None:
        """Size of an object; see `Store.head`."""
        if not self._paths(name):
            return self._inner.head(name)
        try:
            return self._stat(name)
        except NotFoundError:
            return None

    def local_path(self, name: str) -> Path | None:
        """The file of an object of the root; None for an adopted tar, which must not be mapped."""
        return None if self._paths(name) else self._inner.local_path(name)

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        """Names in the root; see `Store.list_after`."""
        return self._inner.list_after(prefix, after)

    # Writing

    def put_new(self, name: str, data: bytes) -> bool:
        """Create in the root; see `Store.put_new`."""
        return self._inner.put_new(name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Put good bytes over bad ones in the root; see `Store.replace`."""
        self._inner.replace(name, data)

    def delete(self, name: str) -> None:
        """Remove from the root; see `Store.delete`. An adopted tar is not ours to delete."""
        self._inner.delete(name)

    def stage(self, suffix: str = "") -> AbstractContextManager[Stage]:
        """A large object of the root; see `Store.stage`."""
        return self._inner.stage(suffix)

    # Places

    def _paths(self, name: str) -> tuple[str, ...]:
        """Where an adopted tar may lie, most likely first; empty for what is in the root, or unknown."""
        if not (name.startswith(_SHARDS[0]) and name.endswith(_SHARDS[1])):
            return ()
        known = self._places.get(name)
        if known is None:
            known = () if self._inner.head(name) is not None else self._load(name)
            if known:  # what is not there may be adopted, or put, later
                self._places[name] = known
        return known

    def _load(self, name: str) -> tuple[str, ...]:
        digest, _ = parse_object_name(name)
        where = location_name(digest)
        try:
            data = self._inner.get(where, max_bytes=_MAX_BYTES)
        except NotFoundError:
            return ()
        fields = read_document(data, f"{where} in {self.url}", _FORMAT, _KEYS, _MAX_BYTES)
        if fields.digest("digest") != digest:
            raise FormatError(f"{where} in {self.url}: it is of another tar; adopt the tar again")
        return tuple(self._path(url) for url in fields.texts("urls", maximum=16, longest=8_000))

    def _path(self, url: str) -> str:
        if url.lower().startswith("file:///"):
            return unquote(url[len("file://") :])
        if "://" in url:
            raise UsageError(
                f"adopted tar at {url}: only local tars can be read so far; copy it to a local disk"
            )
        return url if os.path.isabs(url) else os.path.normpath(os.path.join(self.url, url))

    def _stat(self, name: str) -> ObjectStat:
        path = self.place(name) or ""
        with explained(f"look at the adopted tar {path}"):
            try:
                found = os.stat(path)
            except FileNotFoundError:
                self._gone(name)
        if not stat.S_ISREG(found.st_mode):
            raise IntegrityError(f"{path}: not a file any more; put the tar back that was adopted")
        return ObjectStat(found.st_size, None)

    def _gone(self, name: str) -> NoReturn:
        looked = ", ".join(dict.fromkeys(self._paths(name)))
        raise NotFoundError(
            f"adopted tar {parse_object_name(name)[0]} is gone from where it was ({looked}); put it back, or tell "
            f"where it is now: shardkit adopt TARS… {self.url}"
        ) from None


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
