"""Which blocks a cache holds, as all its processes see it: a shared file of fixed records, one per change.

The directory is the truth, the catalogue an account of it: whoever opens the cache alone rewrites it from the
directory, and a record without a file, or a file without a record, costs a little room and nothing else.
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

from shardkit.errors import ShardkitError
from shardkit.stores.file_operations import Handle, active, write_all

_RECORD: Final = struct.Struct("<32sQQdB7x")  # digest, size, place, time, what happened
_ADDED: Final = 1
_REMOVED: Final = 2
_MAX_BYTES: Final = 5 * 2**30
_COMPACT_AFTER: Final = 50_000
NAME: Final = "catalogue"


class Entry(NamedTuple):
    """A cached block."""

    size: int
    place: int
    added: float


class Catalogue:
    """The records of one cache; use it inside `locked`.

    Args:
        folder: The cache's directory, open; stays open as long as this is used.
    """

    def __init__(self, folder: Handle) -> None:
        self._folder = folder
        self._offset = 0
        self._inode = -1
        self.entries: dict[bytes, Entry] = {}
        self.total = 0
        """Bytes of all entries."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cache's lock, with the entries brought up to date. Threads lock each other out as processes do."""
        operations = active()
        lock = operations.open_shared(self._folder, "lock")
        try:
            operations.lock(lock)
            self._catch_up()
            yield
        finally:
            operations.close(lock)

    def add(self, digest: bytes, entry: Entry) -> None:
        """Note a block that is about to be there."""
        self._append(_RECORD.pack(digest, entry.size, entry.place, entry.added, _ADDED))

    def remove(self, digest: bytes) -> None:
        self._append(_RECORD.pack(digest, 0, 0, time.time(), _REMOVED))

    def rewrite(self, entries: dict[bytes, Entry]) -> None:
        """Start over with what the directory holds."""
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
            if torn:  # its writer was killed in the middle, and held the lock that we hold now
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
            self.entries[digest] = Entry(size, place, added)
            self.total += size

    @property
    def is_long(self) -> bool:
        """Whether most records are of the past and it should be rewritten."""
        return self._offset // _RECORD.size > _COMPACT_AFTER + 4 * len(self.entries)


def cached_places(path: str | os.PathLike[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """`place_ids` and bytes of the blocks that a cache accounts for; none where there is no cache, or none to be read.

    Reads the catalogue alone: no directory is listed, nothing is swept.
    """
    entries: list[Entry] = []
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
