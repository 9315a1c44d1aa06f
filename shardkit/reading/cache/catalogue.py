"""Catalogue of a cache: a file with one fixed-size record per change, shared by all processes.

The directory is authoritative. The first process to open the cache rewrites the catalogue from the directory. A record
without a file, or a file without a record, only costs some room.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ShardkitError, StoreError
from shardkit.stores.file_operations import Handle, active, wait_for_lock, write_all

_RECORD: Final = struct.Struct("<32sQQdB7x")  # digest, size, place, time, _ADDED or _REMOVED
_ADDED: Final = 1
_REMOVED: Final = 2
_MAX_BYTES: Final = 5 * 2**30
_COMPACT_AFTER: Final = 50_000
_REST_S: Final = 30.0
NAME: Final = "catalogue"


class CachedBlock(NamedTuple):
    """A cached block."""

    size: int
    place: int
    added: float


class Catalogue:
    """Entries of one cache; use them inside `locked`.

    Args:
        folder: The cache's directory; must stay open.
    """

    def __init__(self, folder: Handle) -> None:
        self._folder = folder
        self._offset = 0
        self._inode = -1
        self._stuck_until = 0.0
        self.entries: dict[bytes, CachedBlock] = {}
        self.total = 0
        """Bytes of all entries."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cache's lock, with current entries. The lock excludes threads as well as processes.

        Raises:
            StoreError: another process did not release it, or did not in the last 30 s.
        """
        if time.monotonic() < self._stuck_until:
            raise StoreError("another process has held the cache's lock for long")
        operations = active()
        lock = operations.open_shared(self._folder, "lock")
        try:
            self._stuck_until = time.monotonic() + _REST_S
            wait_for_lock(operations.try_lock, lock)
            self._stuck_until = 0.0
            self._catch_up()
            yield
        finally:
            operations.close(lock)

    def add(self, digest: bytes, entry: CachedBlock) -> None:
        """Record a stored block."""
        self._append(_RECORD.pack(digest, entry.size, entry.place, entry.added, _ADDED))

    def remove(self, digest: bytes) -> None:
        self._append(_RECORD.pack(digest, 0, 0, time.time(), _REMOVED))

    def rewrite(self, entries: dict[bytes, CachedBlock]) -> None:
        """Replace the records by these entries, in one step."""
        operations = active()
        name = f"{NAME}.new"
        with contextlib.suppress(FileNotFoundError):
            operations.unlink(self._folder, name)
        file = operations.create_file(self._folder, name)
        try:
            records = (
                _RECORD.pack(digest, one.size, one.place, one.added, _ADDED)
                for digest, one in entries.items()
            )
            write_all(file, b"".join(records))
            operations.rename(self._folder, name, self._folder, NAME)
        finally:
            operations.close(file)
        self._inode = -1
        self._catch_up()

    def _append(self, record: bytes) -> None:
        file = active().open_shared(self._folder, NAME)
        try:
            write_all(file, record)
        finally:
            active().close(file)
        self._catch_up()

    def _catch_up(self) -> None:
        operations = active()
        file = operations.open_shared(self._folder, NAME)
        try:
            found = operations.stat_open(file)
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._inode, self._offset, self.total = found.st_ino, 0, 0
                self.entries.clear()
            torn = found.st_size % _RECORD.size
            if torn:  # a process was killed while it wrote; no other one writes now, as we hold the lock
                operations.truncate(file, found.st_size - torn)
            length = found.st_size - torn - self._offset
            data = operations.read(file, length, self._offset) if length > 0 else b""
        finally:
            operations.close(file)
        whole = len(data) - len(data) % _RECORD.size
        for digest, size, place, added, what in _RECORD.iter_unpack(data[:whole]):
            self._apply(digest, size, place, added, what)
        self._offset += whole

    def _apply(self, digest: bytes, size: int, place: int, added: float, what: int) -> None:
        old = self.entries.pop(digest, None)
        if old is not None:
            self.total -= old.size
        if what == _ADDED and size <= _MAX_BYTES:
            self.entries[digest] = CachedBlock(size, place, added)
            self.total += size

    @property
    def is_long(self) -> bool:
        """True if most records are obsolete, so that the catalogue should be rewritten."""
        return self._offset // _RECORD.size > _COMPACT_AFTER + 4 * len(self.entries)


def cached_places(path: str | os.PathLike[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return `place_ids` and sizes in bytes of the blocks in a cache's catalogue.

    Reads only the catalogue and changes nothing else. Both arrays are empty if there is no cache or it is unreadable.
    """
    entries: list[CachedBlock] = []
    if os.path.exists(os.path.join(path, NAME)):
        with contextlib.suppress(OSError, ShardkitError):
            folder = active().open_root(os.path.abspath(os.fspath(path)))
            try:
                catalogue = Catalogue(folder)
                with catalogue.locked():
                    entries = list(catalogue.entries.values())
            finally:
                active().close(folder)
    return (
        np.array([one.place for one in entries], dtype=np.uint64),
        np.array([one.size for one in entries], dtype=np.int64),
    )
