"""The blocks that are in memory: loaded ahead by deadline, verified once per load, held within a byte budget.

A block lies in memory of its own: it is what was verified until it is dropped.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

from shardkit.loader.gather import GatherColumns

__all__ = ["BlockSource", "BlockWindow", "Lease", "WindowCounts"]

_BLOCKS_PER_TASK = 8  # a hand-over between threads costs as much as a tenth of a block


@dataclass(frozen=True, kw_only=True)
class BlockSource:
    """Where a window's blocks come from.

    Attributes:
        load: reads and verifies some blocks; called on the window's threads.
        size_of: upper bound of the bytes that a block takes, known before it is loaded; of a near one, those bytes.
        loaded_size_of: the bytes that it does take, once it is loaded.
        near: whether the block is read without waiting for a network: some are then loaded together.
    """

    load: Callable[[Sequence[int]], list[GatherColumns]]
    size_of: Callable[[int], int]
    loaded_size_of: Callable[[int], int]
    near: Callable[[int], bool]


class WindowCounts:
    """Counters of one window; plain numbers, read without a lock."""

    __slots__ = (
        "block_loads",
        "block_reloads",
        "block_uses",
        "bytes_loaded",
        "evictions",
        "load_s",
        "peak_bytes",
    )

    def __init__(self) -> None:
        self.block_loads = 0
        self.block_reloads = 0  # of blocks that this loop had already and dropped for want of room
        self.block_uses = 0
        self.bytes_loaded = 0
        self.evictions = 0
        self.load_s = 0.0  # of all threads together
        self.peak_bytes = 0


class _Task:
    """Some blocks that are loaded together."""

    __slots__ = ("blocks", "found", "future")

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.future: Future[None]
        self.found: list[GatherColumns | None] | None = None  # once loaded: a future is slow to ask

    def is_over(self) -> bool:
        """Whether it was loaded, has failed, or was cancelled."""
        return self.found is not None or self.future.done()

    def failed(self) -> bool:
        """Whether it is over without its blocks."""
        return self.future.done() and self.found is None  # in this order: it is found before that is done


class _Entry:
    """One block that is loaded or being loaded."""

    __slots__ = ("pins", "position", "size", "task", "used_in")

    def __init__(self, task: _Task, position: int, size: int, loop: int) -> None:
        self.task, self.position, self.size = task, position, size
        self.used_in = loop  # the last loop that has
        self.pins = 0


class Lease:
    """The blocks of one group of steps: they stay until `release`."""

    def __init__(self, window: BlockWindow, blocks: Sequence[int], entries: list[_Entry]) -> None:
        self._window, self.blocks, self._entries = window, blocks, entries

    def wait(self, timeout_s: float, on_stall: Callable[[float], None]) -> list[GatherColumns]:
        """The loaded blocks in the order in which they were asked for; raises what loading one of them raised."""
        loaded = []
        for entry in self._entries:
            task = entry.task
            if task.found is None:
                _wait(task.future, timeout_s, on_stall)
                task.future.result()
            found = task.found and task.found[entry.position]
            assert found  # only a block that no lease holds is taken out
            loaded.append(found)
        return loaded

    def is_loaded(self) -> bool:
        """Whether `wait` would not wait, and raise nothing."""
        return all(entry.task.found is not None for entry in self._entries)

    def failed(self) -> bool:
        """Whether loading one of the blocks has failed by now."""
        return any(entry.task.failed() for entry in self._entries)

    def release(self) -> None:
        """The group is done; may be called twice."""
        entries, self._entries = self._entries, []
        if entries:
            self._window.unpin(entries)


def _wait(future: Future[Any], timeout_s: float, on_stall: Callable[[float], None]) -> None:
    started = time.perf_counter()
    while not future.done():
        try:
            future.result(timeout_s)
        except FutureTimeout:
            if not future.done():  # else it is what loading raised
                on_stall(time.perf_counter() - started)


class BlockWindow:
    """Loads blocks on threads and keeps them until room is needed.

    Not a cache with a guess for a policy: what the next steps need is known and pinned; only blocks that no planned
    step needs are dropped, least recently used first.

    Args:
        source: of the blocks.
        budget: bytes. A group's own blocks are loaded even if they alone exceed it.
        threads: how many blocks are read at once.
        page: of so many bytes each block takes a whole number.
    """

    def __init__(self, source: BlockSource, budget: int, threads: int, *, page: int = 1) -> None:
        self._source, self._budget, self._threads, self._page = source, budget, threads, page
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shardkit-blocks")
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently used first
        self._changed = threading.Condition()
        self._leases = 0
        self._loop = 0
        self._dropped: dict[int, int] = {}  # after this loop has used them: bytes it had loaded by then
        self._loop_bytes = 0
        self.count_anew()
        self._bytes = 0
        self._closed = False
        self.loading: dict[int, float] = {}  # block → when its load began
        self.counts = WindowCounts()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that are loaded or being loaded."""
        return self._bytes

    @property
    def budget(self) -> int:
        """Bytes that blocks may take; a smaller one takes effect as leases end."""
        return self._budget

    @budget.setter
    def budget(self, value: int) -> None:
        with self._changed:
            self._budget = value
            self._make_room(0)
            self._changed.notify_all()

    def is_loaded(self, block: int) -> bool:
        """Whether a block is in memory; one that still waits for its turn to be loaded is not."""
        entry = self._entries.get(block)
        return entry is not None and entry.task.is_over()

    def measure(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Bytes of these blocks, and of those among them that are still to be loaded."""
        held = missing = 0
        find, size_of = self._entries.get, self._source.size_of
        for block in blocks:
            entry = find(block)
            if entry is None:
                missing += self._whole_pages(size_of(block))
            else:
                held += entry.size
        return held + missing, missing

    def lease(self, blocks: Sequence[int], stopped: Callable[[], bool]) -> Lease:
        """Pin blocks and start loading those that are missing, in their order.

        Waits while the budget is exhausted and other leases are out, whose release will make room.
        """
        with self._changed:
            missing = self._pin(blocks)
            sizes = [self._whole_pages(self._source.size_of(block)) for block in missing]
            need = sum(sizes)
            self._make_room(need)
            while self._bytes + need > self._budget and self._leases and not stopped():
                self._changed.wait()
                self._make_room(need)
            self._leases += 1
            self._count(missing, need)
            for block, entry in zip(missing, self._submit(missing, sizes), strict=True):
                entry.pins = 1
                self._entries[block] = entry
            self._bytes += need
            self.counts.peak_bytes = max(self.counts.peak_bytes, self._bytes)
            self.counts.block_uses += len(blocks)
            entries = self._entries
            return Lease(self, blocks, [entries[block] for block in blocks])

    def _pin(self, blocks: Sequence[int]) -> list[int]:
        """Hold those that are there, so that making room does not drop them; the others."""
        missing = []
        find, used = self._entries.get, self._entries.move_to_end
        for block in blocks:
            entry = find(block)
            if entry is None:
                missing.append(block)
            else:
                entry.pins += 1
                entry.used_in = self._loop
                used(block)
        return missing

    def _whole_pages(self, size: int) -> int:
        return -(-size // self._page) * self._page

    def count_anew(self) -> None:
        """From here on, what this loop asks for."""
        self.loop_loads = self.loop_reloads = 0
        self.loop_soon_again = 0  # of these what twice the budget would have kept

    def _count(self, missing: Sequence[int], need: int) -> None:
        dropped_at = [self._dropped[block] for block in missing if block in self._dropped]
        self.counts.block_reloads += len(dropped_at)
        self.loop_reloads += len(dropped_at)
        self.loop_soon_again += sum(self._loop_bytes - at < self._budget for at in dropped_at)
        self.loop_loads += len(missing)
        self._loop_bytes += need

    def wake(self) -> None:
        """Let a waiting `lease` look whether it was stopped."""
        with self._changed:
            self._changed.notify_all()

    def unpin(self, entries: Iterable[_Entry]) -> None:
        """A lease is over."""
        with self._changed:
            for entry in entries:
                entry.pins -= 1
            self._leases -= 1
            self._changed.notify_all()

    def _submit(self, blocks: list[int], sizes: list[int]) -> list[_Entry]:
        entries: list[_Entry] = []
        share = -(-len(blocks) // self._threads)
        each = max(1, min(_BLOCKS_PER_TASK, share)) if all(map(self._source.near, blocks)) else 1
        for first in range(0, len(blocks), each):
            task = _Task(blocks[first : first + each])
            task.future = self._pool.submit(self._load, task)
            entries += [_Entry(task, i, sizes[first + i], self._loop) for i in range(len(task.blocks))]
        return entries

    def _load(self, task: _Task) -> None:
        started, blocks = time.perf_counter(), task.blocks
        self.loading.update(dict.fromkeys(blocks, started))
        try:
            found: list[GatherColumns | None] = [*self._source.load(blocks)]
        finally:
            for block in blocks:
                self.loading.pop(block, None)
        elapsed, nbytes = time.perf_counter() - started, sum(map(self._source.size_of, blocks))
        sizes = [self._whole_pages(self._source.loaded_size_of(block)) for block in blocks]
        with self._changed:
            self.counts.load_s += elapsed
            self.counts.block_loads += len(blocks)
            self.counts.bytes_loaded += nbytes
            self._correct(task, sizes)
        task.found = found

    def _correct(self, task: _Task, sizes: Sequence[int]) -> None:
        """From what the blocks of a task could at most have been to what they are: there may be room for another."""
        before = self._bytes
        for block, size in zip(task.blocks, sizes, strict=True):
            entry = self._entries.get(block)
            if entry is not None and entry.task is task and size < entry.size:
                self._bytes -= entry.size - size
                entry.size = size
        if self._bytes < before:
            self._changed.notify_all()

    def _make_room(self, need: int) -> None:
        wanted = self._bytes + need - self._budget
        if wanted <= 0:
            return
        dropped = []
        for block, entry in self._entries.items():
            if wanted <= 0:
                break
            if not entry.pins and entry.task.is_over():
                wanted -= entry.size
                dropped.append((block, entry))
        for block, entry in dropped:
            if entry.used_in == self._loop:
                self._dropped[block] = self._loop_bytes
            self._remove(block, entry)
            self.counts.evictions += 1

    def _remove(self, block: int, entry: _Entry) -> None:
        del self._entries[block]
        self._bytes -= entry.size
        if not entry.pins and entry.task.found is not None:
            entry.task.found[entry.position] = None  # what its task loaded beside it may stay

    def begin_loop(self) -> None:
        """What is leased from now on is for another loop; leases of the loop before go on."""
        with self._changed:
            self._loop += 1
            self._dropped.clear()
            self._loop_bytes = 0
            self.count_anew()

    def mean_block(self) -> float:
        """Bytes of a block, of those that are there."""
        with self._changed:
            return self._bytes / max(1, len(self._entries))

    def end_loop(self) -> None:
        """What no lease holds is not loaded any more if that has not begun, and tried again if it failed."""
        with self._changed:
            for block, entry in list(self._entries.items()):
                task = entry.task
                if not entry.pins and task.found is None and (task.future.cancel() or task.failed()):
                    self._remove(block, entry)

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, drop everything; may be called twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            self._entries.clear()
            self._bytes = 0
            self._changed.notify_all()
