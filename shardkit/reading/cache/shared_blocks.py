"""Blocks that one of several processes has fetched, for the others: memory without a name, the last so many bytes.

DataLoader workers of a rank need the same blocks at about the same time. Whichever asks first fetches, the others wait
and copy. Everything is a hint that is checked by digest: what was overwritten, or torn by a killed process, is fetched
again. Locks belong to descriptions of the file, so a process that dies holds none, and no file remains.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from typing import Any, Final

from shardkit.formats.canonical_json import xxh3
from shardkit.reading.objects import BlockRequest

Buffer = Any

_NUMBER: Final = struct.Struct("<q")
_ENTRY: Final = struct.Struct("<Qq")  # place, and where in the ring; 0: nothing
_LOCK: Final = struct.Struct("hhqqi4x")  # struct flock(2) of 64-bit Linux
_WAYS: Final = 4
_SETS: Final = 1 << 14
_TABLE: Final = 4096
_RING: Final = _TABLE + _SETS * _WAYS * _ENTRY.size
_CLAIMS: Final = 1 << 40  # byte of the file from which on blocks are locked
_WAIT_S: Final = 10.0  # for another process that fetches the same block; then we fetch it too


class SharedBlocks:
    """Made in the process that starts the others, and sent to them by a fork or as an argument.

    Args:
        size: bytes of blocks; memory is taken as they come.
        file: where they lie; a new one by default.

    Attributes:
        size: the same.
    """

    def __init__(self, size: int, file: int | None = None) -> None:
        self.size, self._lock = size, threading.Lock()
        self._file = os.memfd_create("shardkit-blocks") if file is None else file
        weakref.finalize(self, os.close, self._file).atexit = False
        os.ftruncate(self._file, _RING + size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.size, reduction.DupFd(self._file))

    @staticmethod
    def is_possible() -> bool:
        """Whether this system has nameless memory, and locks of descriptions."""
        return hasattr(os, "memfd_create") and hasattr(fcntl, "F_OFD_SETLK")

    def open(self) -> SharedBlocks:
        """The same blocks for the loader of this process: locks are told apart by who has opened the file."""
        return SharedBlocks(self.size, os.open(f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_CLOEXEC))

    # ---- use

    def fetch(self, request: BlockRequest, fetch: Callable[[], Buffer]) -> Buffer:
        """The block's verified bytes: as another process has fetched them, else from `fetch`, which gives such."""
        deadline, pause = time.monotonic() + _WAIT_S, 0.001
        while (found := self._get(request)) is None:
            with self.claimed([request]) as mine:
                if mine[0]:
                    found = self._get(request)
                    return self.keep(request, fetch()) if found is None else found
            if time.monotonic() > deadline:
                return fetch()
            time.sleep(pause)
            pause = min(0.05, pause * 2)
        return found

    @contextlib.contextmanager
    def claimed(self, requests: Sequence[BlockRequest]) -> Iterator[list[bool]]:
        """Which of some blocks this process is to fetch: nobody else does so meanwhile."""
        mine = [self._lock_bytes(fcntl.F_WRLCK, _CLAIMS + (one.place >> 2)) for one in requests]
        try:
            yield mine
        finally:
            for one, is_mine in zip(requests, mine, strict=True):
                if is_mine:
                    self._lock_bytes(fcntl.F_UNLCK, _CLAIMS + (one.place >> 2))

    def holds(self, request: BlockRequest) -> bool:
        """Whether a block was there a moment ago."""
        return self._position(request) is not None

    def keep(self, request: BlockRequest, data: Buffer) -> Buffer:
        """Verified bytes, for the others; returns them."""
        size = memoryview(data).nbytes
        if size > self.size:
            return data
        with self._lock:
            self._lock_bytes(fcntl.F_WRLCK, 0, wait=True)
            try:
                self._write(request.place, data, size)
            finally:
                self._lock_bytes(fcntl.F_UNLCK, 0)
        return data

    # ---- the file

    def _get(self, request: BlockRequest) -> bytes | None:
        position = self._position(request)
        if position is None or request.xxh3 is None:
            return None
        data = os.pread(self._file, request.length, _RING + position % self.size)
        return data if xxh3(data) == request.xxh3 else None  # overwritten while it was read, or never whole

    def _position(self, request: BlockRequest) -> int | None:
        oldest = self._head() - self.size
        for _, place, position in self._entries(request.place):
            if place == request.place and position > oldest + 1:
                return position - 1
        return None

    def _head(self) -> int:
        return int(_NUMBER.unpack(os.pread(self._file, _NUMBER.size, 0))[0])

    def _entries(self, place: int) -> list[tuple[int, int, int]]:
        """(where in the file, place, position) of those that may be of this block."""
        first = _TABLE + place % _SETS * _WAYS * _ENTRY.size
        found = _ENTRY.iter_unpack(os.pread(self._file, _WAYS * _ENTRY.size, first))
        return [(first + number * _ENTRY.size, *entry) for number, entry in enumerate(found)]

    def _write(self, place: int, data: Buffer, size: int) -> None:
        head = self._head()
        if head % self.size + size > self.size:
            head += self.size - head % self.size  # a block lies in one piece
        os.pwrite(self._file, _NUMBER.pack(head + size), 0)  # what lay there counts no more
        os.pwrite(self._file, data, _RING + head % self.size)
        entries = self._entries(place)
        at = min(entries, key=lambda one: (one[1] != place, one[2]))[0]  # its own, or the oldest
        os.pwrite(self._file, _ENTRY.pack(place, head + 1), at)

    def _lock_bytes(self, kind: int, first: int, *, wait: bool = False) -> bool:
        """Lock one byte for this description of the file, or give it back; False where another has it."""
        how = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self._file, how, _LOCK.pack(kind, os.SEEK_SET, first, 1, 0))
        except BlockingIOError:
            return False
        return True


def _receive(size: int, file: Any) -> SharedBlocks:
    return SharedBlocks(size, file.detach())
