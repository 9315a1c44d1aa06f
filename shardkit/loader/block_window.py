"""The blocks that are in memory: loaded in the order of first need, verified once per load, within a byte budget.

A block lies in memory of its own: it is what was verified until it is dropped.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import UsageError
from shardkit.loader.gather import GatherColumns
from shardkit.loader.schedule import StepGroup

__all__ = ["BlockSource", "BlockWindow", "GroupBlocks", "WindowCounts"]

_BLOCKS_PER_TASK = 16  # a hand-over between threads costs as much as a tenth of a block
_BYTES_PER_TASK = 8 << 20
_CLOSED = "the loader was closed while this loop waited for a block; begin another loop"
_ROOM_AT_ONCE = 16  # a part of the budget: room is waited for not task by task but for some of them


@dataclass(frozen=True, kw_only=True)
class BlockSource:
    """Where a window's blocks come from.

    Attributes:
        load: reads and verifies some blocks; called on the window's threads.
        size_of: upper bound of the bytes that a block takes, known before it is loaded; of a near one, those bytes.
        loaded_size_of: the bytes that it does take, once it is loaded.
        near: whether all of some blocks are read without waiting for a network: some are then loaded together.
    """

    load: Callable[[Sequence[int]], list[GatherColumns]]
    size_of: Callable[[int], int]
    loaded_size_of: Callable[[int], int]
    near: Callable[[Sequence[int]], bool]


@dataclass(slots=True)
class WindowCounts:
    """Counters of one window; plain numbers, read without a lock."""

    block_loads: int = 0
    block_reloads: int = 0  # of blocks that this loop had already and dropped for want of room
    block_uses: int = 0
    bytes_loaded: int = 0
    evictions: int = 0
    load_s: float = 0.0  # of all threads together
    peak_bytes: int = 0


class _Task:
    """Some blocks that are loaded together; over once it has what it found, or an error."""

    __slots__ = ("blocks", "error", "found", "has_begun", "is_near", "sizes", "slots", "steps")

    def __init__(
        self, blocks: list[int], sizes: list[int], steps: list[int], slots: list[int], is_near: bool
    ) -> None:
        self.blocks, self.sizes, self.slots, self.is_near = blocks, sizes, slots, is_near
        self.steps = steps  # the first that needs each
        self.found: list[GatherColumns | None] | None = None
        self.error: BaseException | None = None
        self.has_begun = False

    def is_over(self) -> bool:
        """Whether it was loaded or has failed."""
        return self.found is not None or self.error is not None

    def give_up(self) -> bool:
        """Do not load it, if that has not begun; whether it will have no blocks."""
        if not self.has_begun and self.error is None:
            self.error = UsageError(_CLOSED)
        return self.error is not None


class _Entry:
    """One block that is loaded, being loaded, or waits for room to be loaded."""

    __slots__ = ("position", "slot", "task")

    def __init__(self, task: _Task, position: int, slot: int) -> None:
        self.task, self.position, self.slot = task, position, slot


_FREE = np.iinfo(np.int64).max  # the last step of a slot without a block: none is ever past it


class _Slots:
    """Of each entry the numbers that are asked of all of them at once; an entry has a slot as long as it is there."""

    def __init__(self) -> None:
        self.size = np.zeros(0, np.int64)  # bytes, from when there is room
        self.last = np.zeros(0, np.int64)  # the last step that needs it
        self.used_in = np.zeros(0, np.int64)  # the last loop that does
        self.block = np.zeros(0, np.int64)
        self._free: list[int] = []

    def take(self, blocks: Sequence[int]) -> list[int]:
        """A slot for each block."""
        if len(self._free) < len(blocks):
            used = len(self.last)
            more = max(len(blocks), used)
            self.size, self.last, self.used_in, self.block = (
                np.concatenate([one, np.full(more, value, np.int64)])
                for one, value in ((self.size, 0), (self.last, _FREE), (self.used_in, 0), (self.block, -1))
            )
            self._free += range(used + more - 1, used - 1, -1)
        taken = self._free[len(self._free) - len(blocks) :]
        del self._free[len(self._free) - len(blocks) :]
        self.block[taken] = blocks
        return taken

    def give_back(self, slots: list[int]) -> None:
        """Their entries are gone."""
        self.size[slots], self.last[slots] = 0, _FREE
        self._free += slots

    def over(self, now: int) -> NDArray[np.int64]:
        """Slots of blocks that no step from `now` on needs, the longest unused first."""
        found = np.flatnonzero(self.last < now)
        return found[np.argsort(self.last[found], kind="stable")]

    def room_at(self, wanted: int) -> int | None:
        """The step from which on so many bytes are not needed any more; None where there never are so many."""
        used = np.flatnonzero(self.last != _FREE)
        by_last = used[np.argsort(self.last[used], kind="stable")]
        at = int(np.searchsorted(np.cumsum(self.size[by_last]), wanted))
        return int(self.last[by_last[at]]) + 1 if at < len(by_last) else None


class GroupBlocks:
    """The blocks of one group of steps; each stays from the first step that needs it to the last."""

    def __init__(
        self,
        window: BlockWindow,
        group: StepGroup,
        entries: list[_Entry],
        tasks: list[_Task],
        origin: int,
        stopped: Callable[[], bool],
    ) -> None:
        self.group, self.tasks, self.stopped = group, tasks, stopped
        self._window, self._entries, self._origin = window, entries, origin
        steps = np.arange(len(group.numbers) + 1)
        self._needed: list[int] = np.searchsorted(
            group.first, steps, side="left"
        ).tolist()  # before each step
        by_last = np.argsort(group.last, kind="stable")
        self._by_last: list[int] = by_last.tolist()
        self._done: list[int] = np.searchsorted(group.last[by_last], steps, side="left").tolist()

    def __len__(self) -> int:
        return len(self._entries)

    def wait(
        self, step: int, most: int, timeout_s: float, on_stall: Callable[[float], None]
    ) -> tuple[range, int, list[GatherColumns]]:
        """Once what a step needs is there: it and those after it that need nothing else, at most so many.

        Raises what loading a block of the step raised.

        Returns:
            The steps, and what they need and none before them: place of the first in `blocks`, blocks.
        """
        first, own = self._needed[step], self._needed[step + 1]
        end = min(step + most, len(self.group.numbers))
        loaded: list[GatherColumns] = []
        for place, entry in enumerate(self._entries[first : self._needed[end]], first):
            if entry.task.found is None:
                if place >= own:
                    end = bisect_right(self._needed, place) - 1
                    del loaded[self._needed[end] - first :]
                    break
                self._window.wait_for(entry, self._origin + step, timeout_s, on_stall, self.stopped)
            found = entry.task.found and entry.task.found[entry.position]
            assert found  # only a block that no step needs any more is taken out
            loaded.append(found)
        return range(step, end), first, loaded

    def done(self, steps: range) -> list[int]:
        """Rows of these steps have been copied: places in `blocks` of those that no later step of the group needs."""
        self._window.advance(self._origin + steps.stop)
        return self._by_last[self._done[steps.start] : self._done[steps.stop]]


class BlockWindow:
    """Loads blocks on threads and keeps them until room is needed.

    Not a cache with a guess for a policy: what the next steps need is known and stays; only blocks that no planned
    step needs are dropped, least recently used first. Steps are counted over all loops, so that it is one comparison
    whether a step is over.

    Args:
        source: of the blocks.
        budget: bytes. What one step needs is loaded even if it alone exceeds them.
        threads: how many tasks are loaded at once.
        page: of so many bytes each block takes a whole number.
    """

    def __init__(self, source: BlockSource, budget: int, threads: int, *, page: int = 1) -> None:
        self._source, self._budget, self._threads, self._page = source, budget, threads, page
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shardkit-blocks")
        self._entries: dict[int, _Entry] = {}
        self._slots = _Slots()
        self._changed = threading.Condition()
        self._waiting = 0  # how many threads wait for a task
        self._planned = self._now = 0  # steps that are planned, and over
        self._wake_at: int | None = None  # a thread waits for room, which there will be at this step
        self._wanted = -1  # the step that waits for a block
        self._coming = False  # whether something is being loaded that no step needs any more
        self._loop = 0
        self._dropped: dict[int, int] = {}  # after this loop has used them: bytes it had loaded by then
        self._loop_bytes = 0
        self.count_anew()
        self._bytes = 0
        self._closed = False
        self._loading: dict[_Task, float] = {}  # when each began
        self._ready: deque[_Task] = deque()  # for which there is room
        self._working = 0  # threads that load them
        self.counts = WindowCounts()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that are loaded or being loaded."""
        return self._bytes

    @property
    def budget(self) -> int:
        """Bytes that blocks may take; a smaller one takes effect as steps end."""
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

    def sizes(self, blocks: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Bytes of these blocks, at most, and whether they are there or on their way."""
        entries = map(self._entries.get, blocks)
        slots = np.array([-1 if entry is None else entry.slot for entry in entries], np.int64)
        there = slots >= 0
        sizes = np.zeros(len(slots), np.int64)
        sizes[there] = self._slots.size[slots[there]]
        for n in np.flatnonzero(sizes == 0).tolist():  # they are not there, or wait for room
            sizes[n] = self._whole_pages(self._source.size_of(blocks[n]))
        return sizes, there

    # ---- what steps need

    def admit(
        self, group: StepGroup, sizes: NDArray[np.int64], stopped: Callable[[], bool] = lambda: False
    ) -> GroupBlocks:
        """Keep the blocks of a group that are there, and know which are to be loaded; `load` loads them.

        Once `stopped` says so, nothing more is loaded, and whoever waits for a block gets a UsageError; `wake` them.
        """
        with self._changed:
            entries, loop, origin = self._entries, self._loop, self._planned
            found = list(map(entries.get, group.blocks))
            missing = [n for n, entry in enumerate(found) if entry is None]
            new = [group.blocks[n] for n in missing]
            tasks = self._tasks(new, sizes[missing].tolist(), (group.first[missing] + origin).tolist())
            for task in tasks:
                for position, block in enumerate(task.blocks):
                    entries[block] = _Entry(task, position, task.slots[position])
            self._planned += len(group.numbers)
            needed = [entry or entries[block] for block, entry in zip(group.blocks, found, strict=True)]
            places = [entry.slot for entry in needed]
            self._slots.last[places] = group.last + origin
            self._slots.used_in[places] = loop
            self._count(new, int(sizes[missing].sum()))
            self.counts.block_uses += len(group.blocks)
            return GroupBlocks(self, group, needed, tasks, origin, stopped)

    def _tasks(self, blocks: list[int], sizes: list[int], steps: list[int]) -> list[_Task]:
        near = self._source.near(blocks)
        by_size = _BYTES_PER_TASK * len(blocks) // max(1, sum(sizes))
        each = max(1, min(_BLOCKS_PER_TASK, by_size, -(-len(blocks) // self._threads))) if near else 1
        parts = (slice(first, first + each) for first in range(0, len(blocks), each))
        slots = self._slots.take(blocks)
        return [_Task(blocks[part], sizes[part], steps[part], slots[part], near) for part in parts]

    def _split(self, task: _Task) -> list[_Task]:
        """One task for each of its blocks."""
        single = [
            _Task([block], [size], [step], [slot], task.is_near)
            for block, size, step, slot in zip(task.blocks, task.sizes, task.steps, task.slots, strict=True)
        ]
        for one in single:
            entry = self._entries[one.blocks[0]]
            entry.task, entry.position = one, 0
        return single

    def load(self, wanted: GroupBlocks) -> None:
        """Begin to load what is missing of a group, in its order; returns when there was room for all of it.

        While there is none, steps that need what is there end, and make some.
        """
        left, stopped = wanted.tasks, wanted.stopped
        while left and not stopped():
            some, need = self._some_of(left)
            with self._changed:
                while not self._make_room(need):
                    if stopped() or self._closed:
                        return
                    if self._wanted < left[0].steps[0] or self._coming:
                        self._wake_at = self._room_at(need)
                        self._changed.wait()
                        self._wake_at = None
                        continue
                    # no step ends before this is there
                    if len(left[0].blocks) == len(some) == 1:
                        break  # one step needs more than there is
                    left = self._split(left[0]) + left[1:]
                    some, need = left[:1], left[0].sizes[0]
                if self._closed or left[0].error is not None:  # given up
                    return
                self._begin(some, need)
            left = left[len(some) :]

    def _some_of(self, left: list[_Task]) -> tuple[list[_Task], int]:
        """The first of some tasks, and as many more as room is made for at once; their bytes."""
        need, count = sum(left[0].sizes), 1
        for task in left[1:]:
            if (need + (size := sum(task.sizes))) * _ROOM_AT_ONCE > self._budget:
                break
            need, count = need + size, count + 1
        return left[:count], need

    def _begin(self, tasks: list[_Task], need: int) -> None:
        self._bytes += need
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._bytes)
        for task in tasks:
            self._slots.size[task.slots] = task.sizes
        self._ready.extend(tasks)
        for _ in range(min(len(tasks), self._threads - self._working)):
            self._working += 1
            self._pool.submit(self._load_tasks)

    def wait_for(
        self,
        entry: _Entry,
        step: int,
        timeout_s: float,
        on_stall: Callable[[float], None],
        stopped: Callable[[], bool],
    ) -> None:
        """Until a block is there that `step` needs; raises what loading raised, or that nobody loads it any more."""
        started = time.perf_counter()

        def is_over() -> bool:
            return entry.task.is_over() or self._closed or stopped()

        while not is_over():
            with self._changed:
                self._wanted = max(self._wanted, step)
                self._waiting += 1
                if self._wake_at is not None:
                    self._changed.notify_all()
                in_time = self._changed.wait_for(is_over, timeout_s)
                self._waiting -= 1
            if not in_time:
                on_stall(time.perf_counter() - started)
        if entry.task.error is not None:
            raise entry.task.error
        if entry.task.found is None:
            raise UsageError(_CLOSED)

    def advance(self, step: int) -> None:
        """Steps before this one are over."""
        self._now = step
        wake_at = self._wake_at
        if wake_at is not None and step >= wake_at:
            with self._changed:
                self._changed.notify_all()

    def wake(self) -> None:
        """Let whoever waits look whether it was stopped."""
        with self._changed:
            self._changed.notify_all()

    # ---- loading

    def longest_load(self) -> tuple[int, float] | None:
        """The first block of what is being loaded for the longest time, and when that began."""
        loading = dict(self._loading)
        task = min(loading, key=loading.__getitem__, default=None)
        return None if task is None else (task.blocks[0], loading[task])

    def _load_tasks(self) -> None:
        """One task after the other, as long as there are any."""
        while True:
            with self._changed:
                while self._ready and self._ready[0].error is not None:  # given up
                    self._ready.popleft()
                if self._closed or not self._ready:
                    self._working -= 1
                    return
                task = self._ready.popleft()
                task.has_begun = True
            self._load(task)
            del task  # whoever waits for another one keeps no blocks

    def _load(self, task: _Task) -> None:
        started = self._loading[task] = time.perf_counter()
        found: list[GatherColumns | None] | None = None
        size_of, loaded_size_of = self._source.size_of, self._source.loaded_size_of
        try:
            found = [*self._source.load(task.blocks)]
            sizes = list(map(size_of if task.is_near else loaded_size_of, task.blocks))
        except BaseException as error:  # noqa: BLE001  raised where a step waits for it
            task.error = error
        finally:
            del self._loading[task]
        elapsed = time.perf_counter() - started
        with self._changed:
            self.counts.load_s += elapsed
            if found is not None:
                self.counts.block_loads += len(task.blocks)
                self.counts.bytes_loaded += sum(sizes)
                if not task.is_near:
                    self._correct(task, sizes)
                task.found = found
            if self._waiting or self._coming:
                self._changed.notify_all()

    def _whole_pages(self, size: int) -> int:
        return -(-size // self._page) * self._page

    def _correct(self, task: _Task, sizes: Sequence[int]) -> None:
        """From what the blocks of a task could at most have been to what they are: there may be room for another."""
        before = self._bytes
        for block, loaded in zip(task.blocks, sizes, strict=True):
            entry, size = self._entries.get(block), self._whole_pages(loaded)
            if (
                entry is not None
                and entry.task is task
                and size < (noted := int(self._slots.size[entry.slot]))
            ):
                self._bytes -= noted - size
                self._slots.size[entry.slot] = size
        if self._bytes < before and self._wake_at is not None:
            self._changed.notify_all()

    # ---- room

    def _make_room(self, need: int) -> bool:
        wanted, self._coming = self._bytes + need - self._budget, False
        if wanted <= 0:
            return True
        over = self._slots.over(self._now)
        columns = (one[over].tolist() for one in (self._slots.block, self._slots.size, self._slots.used_in))
        gone = []
        for block, size, loop in zip(*columns, strict=True):
            if wanted <= 0:
                break
            if not self._entries[block].task.is_over():
                self._coming = True
                continue
            wanted -= size
            if loop == self._loop:
                self._dropped[block] = self._loop_bytes
            gone.append(block)
        self._remove(gone)
        self.counts.evictions += len(gone)
        return wanted <= 0

    def _room_at(self, need: int) -> int:
        """The step from which on there is room for so many bytes."""
        found = self._slots.room_at(self._bytes + need - self._budget)
        return self._planned if found is None else found

    def _remove(self, blocks: Sequence[int]) -> None:
        entries = [self._entries.pop(block) for block in blocks]
        slots = [entry.slot for entry in entries]
        self._bytes -= int(self._slots.size[slots].sum())
        self._slots.give_back(slots)
        for entry in entries:
            if entry.task.found is not None:
                entry.task.found[entry.position] = None  # what its task loaded beside it may stay

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

    # ---- loops

    def begin_loop(self) -> int:
        """What is admitted from now on is for another loop, of this number; the one before it has ended."""
        with self._changed:
            self._end()
            self._loop += 1
            self._dropped.clear()
            self._loop_bytes = 0
            self.count_anew()
            return self._loop

    def mean_block(self) -> float:
        """Bytes of a block, of those that are there."""
        with self._changed:
            return self._bytes / max(1, len(self._entries))

    def end_loop(self, loop: int) -> None:
        """No step of this loop needs anything any more; says nothing of one that was begun since.

        What was not begun is forgotten, what failed is tried again.
        """
        with self._changed:
            if loop == self._loop:
                self._end()

    def _end(self) -> None:
        self._now = self._planned
        self._remove([block for block, entry in self._entries.items() if entry.task.give_up()])
        self._changed.notify_all()

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, drop everything; may be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            self._entries.clear()
            self._slots = _Slots()
            self._bytes = 0
