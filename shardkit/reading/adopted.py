"""Adopted files: existing files that serve as shards without being copied into the root.

The manifest names an adopted shard by its SHA-256, like any shard. The root records the file's path or URL in one
small document, ``locations/<hex of the file's digest>.json``. The document is configuration, not data, and may be
rewritten when the file moves. A group of files is one shard: the document names their folder, and their `FileGroup`
is stored next to it. Neither these documents nor a size or modification time is trusted: blocks are verified on every
read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from shardkit.documents import xxh3
from shardkit.errors import IntegrityError, NotFoundError, ShardkitError
from shardkit.extras import shell_word
from shardkit.manifest import Manifest
from shardkit.reading.adopted_places import (
    MAX_GROUP_BYTES,
    AdoptedFile,
    FileGroup,
    Piece,
    group_name,
    read_adopted_place,
)
from shardkit.reading.located_store import LocatedStore
from shardkit.stores.file_operations import Handle, explained, read_exactly
from shardkit.stores.store import (
    ObjectStat,
    Stage,
    Store,
    StoreAround,
    find_checked,
    parse_object_name,
)
from shardkit.stores.waiting import RetryPolicy

if TYPE_CHECKING:
    from shardkit.stores.remote.addresses import Address
    from shardkit.stores.remote.object_store import ForeignStore

_SHARDS: Final = (".tar", ".rows")
"""Extensions of shards that may be adopted."""

_THREADS: Final = 16
_GROUPS: Final = 256  # groups of files whose names are kept in memory
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def with_adopted_files(store: Store, manifest: Manifest) -> Store:
    """Return a store that finds adopted files if the manifest has any; otherwise return `store`."""
    if not manifest.adopted or _adopting(store) is not None:
        return store
    if not isinstance(store, LocatedStore):
        return AdoptedStore(store)
    root = dataclasses.replace(store.locations[0], store=AdoptedStore(store.inner, documents=store))
    return LocatedStore([root, *store.locations[1:]], settings=store.settings, parity=store.parity)


def adopted_place(store: Store, name: str) -> str | None:
    """Return the path or URL of an adopted file, or None if `name` is not known to be one."""
    file = find_adopted(store, name)
    return None if file is None else file.place


def find_adopted(store: Store, name: str) -> AdoptedFile | None:
    """Return the adopted file of a shard's object name, or None if the shard is not known to be one."""
    adopting = _adopting(store)
    return None if adopting is None else adopting.adopted(name)


def changed_files(store: Store, name: str, *, read: bool) -> list[tuple[str, str, str]]:
    """Return the changed files of a shard that is a group of adopted files; see `AdoptedStore.changed_files`."""
    adopting = _adopting(store)
    return [] if adopting is None else adopting.changed_files(name, read=read)


def _adopting(store: Store) -> AdoptedStore | None:
    while not isinstance(store, AdoptedStore):
        if not isinstance(store, StoreAround):
            return None
        store = store.inner
    return store


class AdoptedStore(StoreAround):
    """Store of a root that has adopted files; implements `shardkit.stores.store.Store`.

    Objects in the root itself take precedence. Adopted files are never memory-mapped: their owner may truncate or
    rewrite them at any time, and a reader must use exactly the bytes that were verified. They are never written,
    listed or deleted.

    Args:
        inner: Store of the root.
        documents: Store from which the places of files are read: the root with its locations; default `inner`.
        retry: Retry policy for files at URLs.
    """

    def __init__(
        self, inner: Store, *, documents: Store | None = None, retry: RetryPolicy | None = None
    ) -> None:
        self._inner, self._documents, self._retry = inner, documents or inner, retry
        self._files: dict[str, AdoptedFile | None] = {}
        self._groups: dict[str, FileGroup] = {}
        self._stores: dict[Address, ForeignStore] = {}

    def __repr__(self) -> str:
        return f"AdoptedStore({self._inner!r})"

    @property
    def inner(self) -> Store:
        return self._inner

    def with_retry(self, retry: RetryPolicy) -> AdoptedStore:
        """Return a view with another retry policy; both share the places of files found so far."""
        inner = self._inner
        patient: Store = inner.with_retry(retry) if hasattr(inner, "with_retry") else inner
        view = AdoptedStore(patient, documents=self._documents, retry=retry)
        view._files, view._groups = self._files, self._groups
        return view

    # Adopted files

    def adopted(self, name: str) -> AdoptedFile | None:
        """Return the adopted file of an object name; None if the object is in the root, or unknown."""
        if not (name.startswith("objects/") and name.endswith(_SHARDS)):
            return None
        if name in self._files:
            return self._files[name]
        is_here = self._inner.head(name) is not None
        file = None if is_here else read_adopted_place(self._documents, parse_object_name(name)[0])
        if is_here or file is not None:  # an unknown object may be written or adopted later
            self._files[name] = file
        return file

    def any_far(self, names: Iterable[str]) -> bool:
        """Return True if any of these shards is known to be a file at a URL."""

        def is_far(name: str) -> bool:
            with contextlib.suppress(ShardkitError):
                file = self.adopted(name)
                return file is not None and file.is_far
            return False

        # in parallel: opening a dataset waits for this, and its root may be a bucket
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardkit-places") as pool:
            return any(pool.map(is_far, names))

    def rewritten(self, name: str) -> str | None:
        """Return how a file's ETag differs from the adopted one; None if it is equal or unknown."""
        file = self.adopted(name)
        found = self._stat(file) if file is not None and file.etag else None
        if file is None or found is None or not found.etag or found.etag == file.etag:
            return None
        return f"ETag {found.etag}; it was {file.etag} when the file was adopted"

    # Reading

    def get(self, name: str, *, max_bytes: int) -> bytes:
        file = self.adopted(name)
        if file is None:
            return self._inner.get(name, max_bytes=max_bytes)
        found = self._state(file)
        if found is None:
            raise file.gone(self.url)
        if found.size > max_bytes:
            raise IntegrityError(
                f"{file.place}: {found.size} bytes, expected at most {max_bytes}; it changed since it was adopted"
            )
        return self.get_range(name, 0, found.size)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        file = self.adopted(name)
        if file is None:
            return self._inner.get_range(name, offset, length)
        if file.files:
            return self._read_group(file, offset, length)
        try:
            return self._read(file, offset, length)
        except NotFoundError:
            raise file.gone(self.url) from None

    def head(self, name: str) -> ObjectStat | None:
        """Return size and checksum of an object; see `Store.head`.

        If a file's ETag is unchanged since it was hashed, its digest counts as the checksum that the store keeps.
        """
        file = self.adopted(name)
        if file is None:
            return self._inner.head(name)
        found = self._state(file)
        if found is None:
            return None
        is_same = bool(file.etag) and found.etag == file.etag
        return ObjectStat(found.size, found.sha256 or (file.digest.partition(":")[2] if is_same else None))

    def local_path(self, name: str) -> Path | None:
        """Return the file of an object in the root; None for an adopted file, which must not be mapped."""
        return None if self.adopted(name) else self._inner.local_path(name)

    # Writing

    def replace(self, name: str, data: bytes) -> None:
        super().replace(name, data)
        self._files.pop(name, None)

    def delete(self, name: str) -> None:
        super().delete(name)
        self._files.pop(name, None)

    @contextlib.contextmanager
    def stage(self, suffix: str = "") -> Iterator[Stage]:
        try:
            with super().stage(suffix) as stage:
                yield stage
        finally:
            self._files.clear()  # a healed file is an object of the root

    # Groups of files

    def changed_files(self, name: str, *, read: bool) -> list[tuple[str, str, str]]:
        """Return (place, expected, found) of each file of a group that is not as it was adopted; [] without a group.

        Args:
            name: object name of the shard.
            read: compare XXH3 of all bytes; otherwise only sizes.
        """
        file = self.adopted(name)
        if file is None or not file.files:
            return []
        group = self._group(file)

        def change(number: int) -> tuple[str, str, str] | None:
            size = int(group.sizes[number])
            one = self._member(file, group, number)
            found = self._stat(one)
            if found is None or found.size != size:
                return one.place, f"{size} bytes", "no file" if found is None else f"{found.size} bytes"
            try:
                if read:
                    self._read_piece(file, group, Piece(number, 0, size))
            except (IntegrityError, NotFoundError) as error:
                return one.place, f"XXH3 {int(group.xxh3[number]):016x}", str(error)
            return None

        return [one for one in self._of_all(file, change, range(len(group))) if one is not None]

    def _state(self, file: AdoptedFile) -> ObjectStat | None:
        """Return the size of a file, or the sum over the files of a group.

        None if the file, or every file of the group, is missing.
        """
        if not file.files:
            return self._stat(file)
        group = self._group(file)
        found = self._of_all(
            file, lambda number: self._stat(self._member(file, group, number)), range(len(group))
        )
        there = [one.size for one in found if one is not None]
        return ObjectStat(sum(there) + len(group.values), None) if there else None

    def _of_all(
        self, file: AdoptedFile, work: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> list[_Result]:
        """Return the results of all items, computed in parallel if the files are at a URL."""
        if not file.is_far:
            return [work(item) for item in items]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardkit-files") as pool:
            return list(pool.map(work, items))

    def _group(self, file: AdoptedFile) -> FileGroup:
        found = self._groups.get(file.digest)
        if found is None:
            name = group_name(file.digest)
            found = find_checked(self._documents, name, FileGroup.from_bytes, max_bytes=MAX_GROUP_BYTES)
            if found is None or found.digest != file.digest or len(found) != file.files:
                raise IntegrityError(
                    f"{name} in {self.url}: the names of {file.files} adopted files in {file.place} are missing or of "
                    f"another group; adopt them again: shardkit adopt {shell_word(file.place)} {shell_word(self.url)}"
                )
            while len(self._groups) >= _GROUPS:
                self._groups.pop(next(iter(self._groups)), None)
            self._groups[file.digest] = found
        return found

    @staticmethod
    def _member(file: AdoptedFile, group: FileGroup, number: int) -> AdoptedFile:
        return AdoptedFile(file.digest, (f"{file.place}/{group.name(number)}",), "")

    def _read_group(self, file: AdoptedFile, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of a group; files that are read as a whole are verified."""
        group = self._group(file)
        if offset + length > group.size:
            raise IntegrityError(f"{file.place}: {group.size} bytes in its files, expected {offset + length}")
        pieces = group.pieces(offset, length)
        return b"".join(self._of_all(file, lambda piece: self._read_piece(file, group, piece), pieces))

    def _read_piece(self, file: AdoptedFile, group: FileGroup, piece: Piece) -> bytes:
        if piece.file < 0:
            return group.values[piece.start : piece.stop].tobytes()
        one, size = self._member(file, group, piece.file), int(group.sizes[piece.file])
        try:
            data = self._read(one, piece.start, piece.stop - piece.start, size=size)
        except NotFoundError:
            raise one.gone(self.url) from None
        expected = int(group.xxh3[piece.file])
        if len(data) == size and xxh3(data) != expected:
            raise IntegrityError(
                f"{one.place}: XXH3 mismatch (expected {expected:016x}, got {xxh3(data):016x}); it changed since it "
                "was adopted"
            )
        return data

    # Access to files

    def _stat(self, file: AdoptedFile) -> ObjectStat | None:
        """Return size and checksum of a file at its place, or None if it is missing."""
        if file.is_far:
            store, key = self._foreign(file.place)
            return store.head(key)
        with explained(f"look at the adopted file {file.place}"):
            try:
                found = os.stat(file.place)
            except FileNotFoundError:
                return None
        if not stat.S_ISREG(found.st_mode):
            raise IntegrityError(f"{file.place}: not a file any more; put the file back that was adopted")
        return ObjectStat(found.st_size, None)

    def _read(self, file: AdoptedFile, offset: int, length: int, *, size: int | None = None) -> bytes:
        """Read exactly `length` bytes of a file, which must have `size` bytes if it is on this machine."""
        if file.is_far:
            store, key = self._foreign(file.place)
            try:
                return store.get_range(key, offset, length)
            except IntegrityError:
                raise IntegrityError(
                    f"{file.place}: fewer bytes than the {offset + length} that it had when it was adopted"
                ) from None
        with explained(f"read the adopted file {file.place}"):
            try:
                number = os.open(file.place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                raise NotFoundError(f"{file.place}: no such file") from None
            try:
                return _read_file(Handle(number, file.place), offset, length, size)
            finally:
                os.close(number)

    def _foreign(self, url: str) -> tuple[ForeignStore, str]:
        from shardkit.stores.remote.addresses import split_url
        from shardkit.stores.remote.object_store import ForeignStore

        address, key = split_url(url)
        found = self._stores.get(address)
        if found is None:
            found = self._stores.setdefault(address, ForeignStore(address, read_only=True, retry=self._retry))
        return found, key


def _read_file(file: Handle, offset: int, length: int, expected: int | None) -> bytes:
    """Return exactly `length` bytes; another owner may have truncated the file."""
    size = os.fstat(file.fd).st_size
    if expected not in (None, size):
        raise IntegrityError(
            f"{file.path}: {size} bytes, expected {expected}; it changed since it was adopted"
        )
    if offset + length > size:  # checked before memory of that length is allocated
        raise IntegrityError(
            f"{file.path}: {size} bytes, expected at least {offset + length}; it was truncated since it was adopted"
        )
    data = read_exactly(file, offset, length)
    if len(data) != length:
        raise IntegrityError(f"{file.path}: it shrank while it was read")
    return data
