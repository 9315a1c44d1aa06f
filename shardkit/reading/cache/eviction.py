"""Eviction by next use: which blocks a full cache drops, and which it does not store.

`choose_victims` implements the rule on arrays. `shardkit simulate` has the same rule with a heap.

Each process publishes its future uses of a shared cache in a file that it keeps locked (`Lease`). The kernel releases
the lock when the process dies, and other processes remove unlocked files. No reference counts, process numbers or
shared memory are needed.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import threading
import time
from typing import Final, NamedTuple

import numpy as np

from shardkit.arrays import Float64s, Int64s, UInt64s
from shardkit.errors import ShardkitError
from shardkit.formats import pack_columns, unpack_columns
from shardkit.stores.file_operations import Directories, Handle, active, write_all

NEVER: Final = np.iinfo(np.int64).max
"""Distance of a block that no known plan uses again."""


SLACK: Final = 0.02
"""Minimum share of the limit that one eviction frees."""


class Future(NamedTuple):
    """Future uses of blocks by one process, over a part of its plan.

    Block `places[i]` is used at `steps[starts[i] : starts[i + 1]]`, ascending.
    """

    places: UInt64s  # (n,) ascending; see `place_ids`
    starts: Int64s  # (n + 1,)
    steps: Int64s  # (m,)

    @classmethod
    def of(cls, places: UInt64s, steps: Int64s) -> Future:
        """Build from uses in any order: block `places[i]` is used at `steps[i]`."""
        order = np.lexsort((steps, places))
        places, steps = places[order], steps[order]
        first = np.ones(len(places), dtype=bool)
        first[1:] = places[1:] != places[:-1]
        starts = np.append(np.flatnonzero(first), len(places)).astype(np.int64)
        return cls(places[first], starts, steps)

    def distance(self, places: UInt64s, now: int) -> Int64s:
        """Return the steps from `now` until each of `places` ((k,) any order) is used; NEVER for unused ones.

        A use at `now` itself counts as 0. Costs O(m + k log m).
        """
        result = np.full(len(places), NEVER, dtype=np.int64)
        if not len(self.places):
            return result
        which = np.minimum(np.searchsorted(self.places, places), len(self.places) - 1)
        known = np.flatnonzero(self.places[which] == places)
        if not len(known):
            return result
        which = which[known]
        # One sorted array of keys for all blocks: block rank times span, plus step.
        base = int(self.steps.min(initial=now))
        span = int(self.steps.max(initial=now)) - base + 2
        ranks = np.repeat(np.arange(len(self.places)), np.diff(self.starts))
        keys = ranks * span + (self.steps - base)
        wanted = which * span + min(max(now - base, 0), span - 1)
        found = np.searchsorted(keys, wanted)
        there = found < self.starts[which + 1]
        result[known[there]] = self.steps[found[there]] - now
        return result


def choose_victims(
    sizes: Int64s,
    distances: Float64s,
    added: Float64s,
    *,
    held: int,
    limit: int,
    new_size: int,
    new_distance: float,
) -> Int64s | None:
    """Choose the entries to evict for a new block.

    The block whose next use is furthest away is evicted first, the new block included (Belady 1966, with bypass); at
    equal distance, the oldest one. At least `SLACK` of the limit is freed at a time.

    Args:
        sizes: (n,) sizes of the entries in bytes.
        distances: (n,) distances to their next uses, inf for none, in any one unit.
        added: (n,) times at which they were added.
        held: bytes in the cache.
        limit: bytes that the cache may hold.
        new_size: size of the new block.
        new_distance: distance to its next use.

    Returns:
        Indices of the victims; all entries if they do not free enough. None if the new block would be evicted first,
        so that it should not be stored.
    """
    wanted = held + new_size - limit
    if wanted <= 0:
        return np.empty(0, dtype=np.int64)
    new = len(sizes)
    distances = np.append(distances, new_distance)
    order: Int64s = np.lexsort((np.append(added, np.inf), -distances))
    freed = np.cumsum(np.append(sizes, new_size)[order])
    needed = order[: int(np.searchsorted(freed, wanted)) + 1]
    if new in needed and np.isfinite(distances).any():
        return None
    room = max(wanted, int(limit * SLACK))
    victims = order[: int(np.searchsorted(freed, room)) + 1]
    return np.delete(victims, np.flatnonzero(victims == new))


FOLDER: Final = "futures"
"""Folder with the published futures of processes."""

_KIND: Final = "cache-future"
_HEADER: Final = struct.Struct("<qdQ")  # step now, seconds per step, bytes of the table that follows
_MAX_TABLE_BYTES: Final = 2**31
_PUBLISH_S: Final = 0.02
_ENOUGH_STEPS: Final = 8
_PACE_S: Final = 1.0  # assumed until a process has measured its own


class Lease:
    """Future of this process, published for other processes."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories
        self._lock = threading.Lock()
        self._future: Future | None = None
        self._step, self.pace_s = 0, _PACE_S
        self._started: tuple[int, float] | None = None  # a step that the trainer received, and the time
        self._file: Handle | None = None
        self.name = secrets.token_hex(16)
        self._published = 0.0

    def restart(self, step: int) -> None:
        """Set the current step, at the start or after a jump."""
        self._step = step

    def publish(self, future: Future) -> None:
        """Replace the published future."""
        with self._lock:
            self._future = future
            self._write(table=True)

    def advance(self, step: int) -> None:
        """Record that the blocks of all steps before `step` have been requested, so those uses are over."""
        self._step = step
        now = time.monotonic()
        if now - self._published < _PUBLISH_S or self._future is None:
            return
        with self._lock:
            self._write(table=False)

    def tick(self, step: int) -> None:
        """Record that the trainer received `step`; step durations make the futures of different runs comparable."""
        now = time.monotonic()
        if self._started is None or step < self._started[0]:
            self._started = (step, now)
        elif step - self._started[0] >= _ENOUGH_STEPS:
            self.pace_s = (now - self._started[1]) / (step - self._started[0])

    def seconds_until(self, places: UInt64s, *, after: int = 0) -> Float64s:
        """Return the estimated seconds until this process uses each block, inf for unused ones."""
        future = self._future
        if future is None:
            return np.full(len(places), np.inf)
        return _seconds(future.distance(places, self._step + after), self.pace_s)

    def close(self) -> None:
        """Withdraw the future; may be called twice."""
        with self._lock:
            if self._file is not None:
                with contextlib.suppress(OSError), self._directories.opened((FOLDER,)) as folder:
                    active().unlink(folder, self.name)
                active().close(self._file)
                self._file = None

    def _write(self, *, table: bool) -> None:
        """Write in place, best effort; a reader rejects a half-written table and does without it."""
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
                    header = _HEADER.pack(self._step, self.pace_s, len(body))
                    write_all(self._file, header + body)
            else:
                operations.write_at(self._file, _HEADER.pack(self._step, self.pace_s, 0)[:16], 0)


class Neighbours:
    """Futures of other live processes."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories
        self._tables: dict[str, Future] = {}

    def seconds_until(self, places: UInt64s, *, own: Lease) -> Float64s:
        """Return the estimated seconds until any other process uses each block, inf for unused ones."""
        soonest = np.full(len(places), np.inf)
        seen = {own.name}
        with contextlib.suppress(OSError), self._directories.opened((FOLDER,)) as folder:
            for name, _ in active().names(folder):
                if name != own.name and len(name) == 32:
                    with contextlib.suppress(OSError, ShardkitError, struct.error):
                        read = self._read(folder, name)
                        if read is not None:
                            seen.add(name)
                            table, step, pace_s = read
                            np.minimum(soonest, _seconds(table.distance(places, step), pace_s), out=soonest)
        self._tables = {name: table for name, table in self._tables.items() if name in seen}
        return soonest

    def _read(self, folder: Handle, name: str) -> tuple[Future, int, float] | None:
        operations = active()
        file = operations.open_file(folder, name)
        try:
            if operations.try_lock(file):  # its process is gone
                operations.unlink(folder, name)
                return None
            step, pace_s, size = _HEADER.unpack(operations.read(file, _HEADER.size, 0))
            table = self._tables.get(name)
            if table is None:
                if not 0 < size <= _MAX_TABLE_BYTES:
                    return None
                columns = unpack_columns(operations.read(file, size, _HEADER.size), _KIND).arrays
                table = self._tables[name] = Future(columns["places"], columns["starts"], columns["steps"])
            return table, step, pace_s
        finally:
            operations.close(file)


def _seconds(distance: Int64s, pace_s: float) -> Float64s:
    return np.where(distance == NEVER, np.inf, distance * pace_s)
