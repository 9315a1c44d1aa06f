"""What other processes will need of a shared cache: each publishes its future in a file that it keeps locked.

The kernel drops the lock when the process dies, and whoever finds an unlocked file removes it. No reference counts, no
process numbers, no shared memory.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import threading
import time
from typing import Final

import numpy as np

from shardkit.errors import ShardkitError
from shardkit.formats import pack_columns, unpack_columns
from shardkit.reading.cache.eviction import NEVER, Float64s, Future, Int64s, UInt64s
from shardkit.stores.file_operations import Directories, Handle, active, write_all

FOLDER: Final = "futures"
"""Folder of what each process needs when."""

_KIND: Final = "cache-future"
_HEADER: Final = struct.Struct("<qdQQ")  # step now, seconds per step, clock, bytes of the table that follows
_MAX_TABLE_BYTES: Final = 2**31
_PUBLISH_S: Final = 0.02
_ENOUGH_STEPS: Final = 8
_PACE_S: Final = 1.0  # until a process has measured its own


class Lease:
    """This process's future, for itself and for the others."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories
        self._lock = threading.Lock()
        self._future: Future | None = None
        self._step, self.pace_s = 0, _PACE_S
        self.clock = 0
        self._started: tuple[int, float] | None = None  # a step that the trainer was handed, and when
        self._file: Handle | None = None
        self.name = secrets.token_hex(16)
        self._published = 0.0

    def restart(self, step: int) -> None:
        """The process begins, or begins again, at `step`."""
        self._step = step

    def publish(self, future: Future, clock: int) -> None:
        """From now on this is what is needed.

        Args:
            future: Uses by step.
            clock: Processes with the same number count the same steps, as ranks of one run do.
        """
        with self._lock:
            self._future, self.clock = future, clock
            self._write(table=True)

    def advance(self, step: int) -> None:
        """The process has asked for the blocks of all steps before `step`: those uses are over."""
        self._step = step
        now = time.monotonic()
        if now - self._published < _PUBLISH_S or self._future is None:
            return
        with self._lock:
            self._write(table=False)

    def tick(self, step: int) -> None:
        """The trainer was handed `step`: how long steps take makes those of different runs comparable."""
        now = time.monotonic()
        if self._started is None or step < self._started[0]:
            self._started = (step, now)
        elif step - self._started[0] >= _ENOUGH_STEPS:
            self.pace_s = (now - self._started[1]) / (step - self._started[0])

    def seconds_until(self, places: UInt64s, *, after: int = 0) -> Float64s:
        """Estimated seconds until this process needs each block, inf where it does not.

        Args:
            places: (k,) blocks.
            after: Uses within so many steps from now do not count.
        """
        future = self._future
        if future is None:
            return np.full(len(places), np.inf)
        return _seconds(future.distance(places, self._step + after), self.pace_s)

    def close(self) -> None:
        """Take the future back; may be called twice."""
        with self._lock:
            if self._file is not None:
                with contextlib.suppress(OSError), self._directories.opened((FOLDER,)) as folder:
                    active().unlink(folder, self.name)
                active().close(self._file)
                self._file = None

    def _write(self, *, table: bool) -> None:
        """In place: a reader that sees half a table refuses it by its own checks and goes without. Best effort."""
        assert self._future is not None
        self._published = time.monotonic()
        operations = active()
        with contextlib.suppress(OSError, ShardkitError):
            if self._file is None or table:
                body = pack_columns(_KIND, {}, self._future._asdict(), compress=False)
                with self._directories.made((FOLDER,)) as folder:
                    if self._file is not None:
                        operations.unlink(folder, self.name)
                        operations.close(self._file)
                        self._file, self.name = None, secrets.token_hex(16)
                    self._file = operations.create_file(folder, self.name)
                    operations.try_lock(self._file)
                    header = _HEADER.pack(self._step, self.pace_s, self.clock, len(body))
                    write_all(self._file, header + body)
            else:
                operations.write_at(self._file, _HEADER.pack(self._step, self.pace_s, 0, 0)[:16], 0)


class Neighbours:
    """The futures of the other live processes."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories
        self._tables: dict[str, Future] = {}

    def seconds_until(self, places: UInt64s, *, own: Lease) -> Float64s:
        """Estimated seconds until any other process needs each block, inf where none does."""
        soonest = np.full(len(places), np.inf)
        seen = {own.name}
        with contextlib.suppress(OSError), self._directories.opened((FOLDER,)) as folder:
            for name, _ in active().names(folder):
                if name != own.name and len(name) == 32:
                    with contextlib.suppress(OSError, ShardkitError, struct.error):
                        read = self._read(folder, name)
                        if read is not None:
                            seen.add(name)
                            table, step, pace_s, clock = read
                            pace_s = own.pace_s if clock == own.clock else pace_s
                            np.minimum(soonest, _seconds(table.distance(places, step), pace_s), out=soonest)
        self._tables = {name: table for name, table in self._tables.items() if name in seen}
        return soonest

    def _read(self, folder: Handle, name: str) -> tuple[Future, int, float, int] | None:
        operations = active()
        file = operations.open_file(folder, name)
        try:
            if operations.try_lock(file):  # its process is gone
                operations.unlink(folder, name)
                return None
            step, pace_s, clock, size = _HEADER.unpack(operations.read(file, _HEADER.size, 0))
            table = self._tables.get(name)
            if table is None:
                if not 0 < size <= _MAX_TABLE_BYTES:
                    return None
                columns = unpack_columns(operations.read(file, size, _HEADER.size), _KIND).arrays
                table = self._tables[name] = Future(columns["places"], columns["starts"], columns["steps"])
            return table, step, pace_s, clock
        finally:
            operations.close(file)


def _seconds(distance: Int64s, pace_s: float) -> Float64s:
    return np.where(distance == NEVER, np.inf, distance * pace_s)
