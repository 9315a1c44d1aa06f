"""The window of blocks in memory: loaded in order of first use, verified once per load, within a memory bound.

All decisions are made when a group of steps is planned. Each missing block gets the least recently used *slot*. The
last step that uses the slot's present block is recorded in the job, and threads load the new block only after that
step. A block stays as it was verified until its slot is reused.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Any, Final, NamedTuple

import numpy as np

from shardkit.arrays import Int64s
from shardkit.errors import UsageError
from shardkit.loader.batch import EpochCounts, WindowCounts
from shardkit.loader.block_loading import AFTER, SLOT, BlockLoading, give_way
from shardkit.loader.block_memory import BlockMemory, Loan, capacity_of
from shardkit.loader.gather import RowAddresses, StepGroup, steps_that_fit

__all__ = ["BlockWindow", "GroupBlocks"]

_BLOCKS_AT_ONCE: Final = 16  # blocks per wake-up of the threads
_BLOCKS_A_TURN: Final = 64  # blocks that get slots before the interpreter is released for a moment
_TURN_S: Final = 5e-5
_NOBODY: Final = -1
_SLOT_BITS: Final = 24
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1


@dataclass(slots=True)
class _Slot:
    """Memory that holds one block at a time."""

    block: int = _NOBODY  # the block in the slot, or the last one planned for it
    last: int = -1  # last planned step that uses the block
    job: int = -1  # job that loads the block
    used_in: int = 0  # last epoch that uses the block
    cost: int = 0  # bytes counted against the budget
    capacity: int = 0  # bytes of its own memory; 0 if blocks bring their own
    loan: Loan | None = None
    keep: Any = None  # keeps the memory of a block that brought its own


class _MissingBlocks(NamedTuple):
    """Missing blocks of a group, ordered by first use; steps are counted over all loops."""

    block: Int64s
    size: Int64s
    own: Int64s  # bytes of slot memory; 0 if the block brings its own memory
    first: Int64s  # first step that needs each
    last: Int64s


_CLOSED = "the loader was closed while this loop waited for a block; begin another loop"


class GroupBlocks:
    """The blocks of one group of steps, which are loaded or queued."""

    def __init__(
        self, window: BlockWindow, group: StepGroup, slots: Int64s, needs: list[int], origin: int
    ) -> None:
        self.group = group
        # (n,) slot that holds the block of each row
        self.which = slots[group.which] if len(slots) else group.which
        self._window, self._loop = window, window.loop
        self._needs = needs  # per step: number of jobs that must be done before its blocks are loaded
        self._origin = origin  # steps planned before the group

    def wait(self, step: int, most: int, timeout_s: float, on_stall: Callable[[float], None]) -> range:
        """Wait for the blocks of a step; return up to `most` steps from it on whose blocks are loaded.

        An error of loading a block of the step is raised here.
        """
        self._check()
        done = self._window.wait_for(self._needs[step], timeout_s, on_stall)
        self._check()
        end = min(step + most, bisect_right(self._needs, done))
        if failed := self._window.first_failed():
            number, error = failed
            if number < self._needs[step]:
                raise error
            end = min(end, bisect_right(self._needs, number))
        return range(step, end)

    def take(self, steps: range, borders: list[int], rows: RowAddresses) -> list[dict[str, Any]]:
        """Return the rows of these steps, see `RowAddresses.take`, and release their blocks."""
        with self._window.in_use:
            self._check()
            found = rows.take(self._window.facts, borders, self._window.loads)
            self._window.advance(self._origin + steps.stop)
        return found

    def _check(self) -> None:
        if self._window.is_stopped or self._window.loop != self._loop:
            raise UsageError(_CLOSED)


class BlockWindow:
    """Loads blocks on threads and evicts the least recently used ones when memory is needed.

    Steps are counted over all loops, so one comparison tells whether a step is over. The blocks of a single step
    are loaded even if they exceed the limit of `memory`. `width` is the number of int64 facts per block.
    """

    def __init__(
        self, source: BlockLoading, loads: Any, memory: BlockMemory, threads: int, width: int
    ) -> None:
        self._source, self.loads, self._memory = source, loads, memory
        self._lock = threading.Lock()  # guards the attributes below
        self._slots: list[_Slot] = []
        self._slot_of: dict[int, int] = {}  # block → its slot
        # block whose slot is planned for another one → job that loads it and last step that uses it
        self._replaced: dict[int, tuple[int, int]] = {}
        self._spare: list[int] = []  # heap of slots without memory, encoded as in `_free_slots`
        # (step, job, slot, memory): released after the step, unless a dropped job still writes to it
        self._leaving: list[tuple[int, int, int, Any]] = []
        self._withdrawn: dict[int, int] = {}  # slot that a dropped job still writes to → its key in `_spare`
        self._bytes = self._planned = self._now = 0
        self._added = self._nobodys = 0  # jobs added so far, and jobs of earlier loops
        self.loop = self._epochs = 0
        self.is_stopped = False  # the loop is being closed
        self._dropped: dict[int, int] = {}  # block evicted in this epoch → `_epoch_bytes` then
        self._epoch_bytes = 0
        self._counts = WindowCounts()
        self.epoch = EpochCounts()
        self.facts: Int64s = np.zeros((0, width), np.int64)
        self._failed: dict[int, tuple[int, BaseException]] = {}  # job → slot and the error of loading
        self.in_use = threading.Lock()  # held while rows are copied out of slots
        self._threads = [
            threading.Thread(target=self._load, name=f"shardkit-blocks-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def first_failed(self) -> tuple[int, BaseException] | None:
        if not self._failed:
            return None
        with self._lock:
            number = min(self._failed)
            return number, self._failed[number][1]

    def mean_block(self) -> float:
        """Return the mean bytes of a loaded or queued block."""
        return self._bytes / max(1, len(self._slot_of))

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that are loaded or queued."""
        return self._bytes

    @property
    def budget(self) -> int:
        """Bytes that blocks may take: the limit of the memory."""
        return self._memory.limit

    @budget.setter
    def budget(self, value: int) -> None:
        with self._lock:
            self._memory.limit = value
            self._trim()

    @property
    def counts(self) -> WindowCounts:
        """Counters of all loads so far."""
        _, loads, num_bytes, seconds = self.loads.counts()
        own = self._counts
        return WindowCounts(own.block_loads + loads, own.block_reloads, own.block_uses, own.bytes_loaded + num_bytes,
                            own.evictions, own.load_s + seconds, own.peak_bytes)  # fmt: skip

    def is_loaded(self, block: int) -> bool:
        """Return True if a block is in memory, False if it is only queued."""
        slot = self._slot_of.get(block)
        done: int = self.loads.counts()[0]
        job, last = self._replaced.get(block, (done, self._now))
        return (slot is not None and self._slots[slot].job < done) or (job < done and last >= self._now)

    def admit(
        self, planned: StepGroup, on_excess: Callable[[int, int], object]
    ) -> tuple[GroupBlocks, StepGroup | None]:
        """Queue the missing blocks of as many steps as fit into memory; return these steps, and the rest or None.

        Blocks are queued in order of first use, and each is loaded as soon as its slot is free. If the first step alone
        exceeds the budget, `on_excess` is called with its number and its bytes, and may raise the budget.
        """
        sizes, own = self._source.sizes(planned.blocks, self._planned + len(planned.numbers), self._now)
        held = np.array([block in self._slot_of for block in planned.blocks.tolist()], np.bool_)
        steps, needed = steps_that_fit(planned, sizes, held, self._memory.limit)
        if needed > self._memory.limit:
            on_excess(planned.numbers[0], needed)
            steps, needed = steps_that_fit(planned, sizes, held, self._memory.limit)
        group, rest = planned.split(steps)
        with self._lock:
            blocks, origin, slots = group.blocks.tolist(), self._planned, self._slots
            last = group.last + origin
            self._planned += len(group.numbers)
            self._replaced = {block: one for block, one in self._replaced.items() if one[1] >= self._now}
            found = np.array([self._slot_of.get(block, _NOBODY) for block in blocks], np.int64)
            there, missing = np.flatnonzero(found >= 0), np.flatnonzero(found < 0)
            for slot, step in zip(found[there].tolist(), last[there].tolist(), strict=True):
                one = slots[slot]
                one.last, one.used_in = step, self._epochs
            first = group.first[missing] + origin
            wanted = _MissingBlocks(group.blocks[missing], sizes[missing], own[missing], first, last[missing])
            self._count(wanted)
            self._counts.block_uses += len(blocks)
            places = self._assign(wanted)
            found[missing] = places[0]
            base = self._add(wanted, places)
            of_steps = np.searchsorted(wanted.first, np.arange(origin, self._planned), side="right")
            needs = (base + of_steps).tolist()
            return GroupBlocks(self, group, found, needs, origin), rest

    def _assign(self, wanted: _MissingBlocks) -> Int64s:
        """Assign a slot to each block; a block that is planned later may take the same slot again.

        Returns (3, n): slots, addresses of their memory (0 if the block brings its own), and the steps from which on
        they are free.
        """
        slots = self._slots
        self._trim()
        heaps = self._free_slots()
        same: dict[int, list[int]] = {}  # capacity → heap of slots of exactly that capacity
        fitting: dict[int, list[list[int]]] = {}  # size → heaps of slots of one to two times that capacity
        chosen, addresses, afters = [], [], []
        for n, (block, cost, own, need, last) in enumerate(
            zip(*(one.tolist() for one in wanted), strict=True), 1
        ):
            if n % _BLOCKS_A_TURN == 0:
                time.sleep(_TURN_S)  # otherwise the trainer waits 5 ms for the interpreter after each copy
            capacity = capacity_of(own) if own else 0
            if capacity not in same:
                same[capacity] = heaps.setdefault(capacity, [])
                fitting = {size: [heaps[c] for c in heaps if size <= c <= 2 * size] for size in same if size}
                fitting[0] = []
            best = min(filter(None, fitting[capacity]), default=None)
            free_again = last + 1 << _SLOT_BITS
            if self._bytes + cost > self._memory.limit and best is not None and best[0] >> _SLOT_BITS <= need:
                after, slot = best[0] >> _SLOT_BITS, best[0] & _SLOT_MASK
                heapreplace(best, free_again | slot)
                one = slots[slot]
                self._evict(one)
                self._bytes += cost - one.cost
                one.cost = cost
                if self._bytes > self._memory.limit:
                    after = max(after, self._make_room(heaps, 0, need))
            else:
                after = self._make_room(heaps, cost, need)
                slot = self._new_slot(capacity, cost, after)
                heappush(same[capacity], free_again | slot)
                one = slots[slot]
            one.block, one.last, one.used_in = block, last, self._epochs
            self._slot_of[block] = slot
            chosen.append(slot)
            addresses.append(0 if one.loan is None else one.loan.address)
            afters.append(after)
        for block in wanted.block.tolist():
            if block not in self._slot_of:  # replaced before it has a job
                self._replaced.pop(block, None)
        self._counts.peak_bytes = max(self._counts.peak_bytes, self._bytes)
        return np.array([chosen, addresses, afters], np.int64)

    def _free_slots(self) -> dict[int, list[int]]:
        """Return, by capacity, heaps of reusable slots, encoded as (step from which it is free) << 24 | slot.

        The encoding avoids tuples, which the garbage collector would track.
        """
        last = np.array([one.last for one in self._slots], np.int64)
        capacity = np.array([one.capacity for one in self._slots], np.int64)
        used = (capacity > 0) | (np.array([one.cost for one in self._slots], np.int64) > 0)
        used[self.loads.running()] = False
        keys = last + 1 << _SLOT_BITS | np.arange(len(last))
        # a sorted list is a heap
        return {
            size: np.sort(keys[used & (capacity == size)]).tolist()
            for size in sorted(set(capacity[used].tolist()))
        }

    def _make_room(self, heaps: dict[int, list[int]], cost: int, need: int) -> int:
        """Dispose of slots that are free by step `need` until `cost` more bytes fit within the budget.

        Returns the step from which on their memory is free. The budget may still be exceeded if no slot is left.
        """
        after = 0
        while self._bytes + cost > self._memory.limit:
            heap = min(filter(None, heaps.values()), default=None)
            if heap is None or heap[0] >> _SLOT_BITS > need:
                break
            after = max(after, self._dispose(heappop(heap)))
        return after

    def _trim(self) -> None:
        """Dispose of free slots while the budget is exceeded."""
        self._let_go()
        if self._bytes <= self._memory.limit:
            return
        for key in sorted(key for heap in self._free_slots().values() for key in heap):
            if self._bytes <= self._memory.limit or key >> _SLOT_BITS > self._now:
                break
            self._dispose(key)

    def _let_go(self) -> None:
        """Free the memory of disposed slots whose steps are over, except memory that dropped jobs still write to."""
        written = self.loads.running()
        over = [one for one in self._leaving if one[0] <= self._now and one[2] not in written]
        self._leaving = [one for one in self._leaving if one[0] > self._now or one[2] in written]
        for _, job, slot, _ in over:
            self.loads.release(job, slot)
            if slot in self._withdrawn:
                heappush(self._spare, self._withdrawn.pop(slot))

    def _new_slot(self, capacity: int, cost: int, after: int) -> int:
        """Make a slot with `capacity` bytes of memory, or without memory if 0, and return its number."""
        if self._spare and self._spare[0] >> _SLOT_BITS <= max(after, self._now):
            slot = heappop(self._spare) & _SLOT_MASK
        else:
            slot = len(self._slots)
            self._slots.append(_Slot())
            if slot >= len(self.facts):
                facts = np.zeros((max(1024, 2 * len(self.facts)), self.facts.shape[1]), np.int64)
                self.loads.set_table(facts)
                self.facts = facts
        one = self._slots[slot]
        one.capacity, one.cost = capacity, cost
        one.loan = self._memory.lend(capacity, touched=False) if capacity else None
        self._bytes += cost
        return slot

    def _evict(self, slot: _Slot) -> None:
        if slot.block == _NOBODY:
            return
        del self._slot_of[slot.block]
        self._replaced[slot.block] = slot.job, slot.last
        self._counts.evictions += 1
        if slot.used_in == self._epochs:
            self._dropped[slot.block] = self._epoch_bytes
        slot.block = _NOBODY

    def _dispose(self, key: int) -> int:
        """Free the memory of a slot and return the step from which on it is free."""
        free_at, one = key >> _SLOT_BITS, self._slots[key & _SLOT_MASK]
        self._evict(one)
        self._bytes -= one.cost
        if free_at > self._now:
            self._leaving.append((free_at, one.job, key & _SLOT_MASK, (one.loan, one.keep)))
        else:
            self.loads.release(one.job, key & _SLOT_MASK)
        one.loan, one.keep, one.cost, one.capacity = None, None, 0, 0
        heappush(self._spare, key)
        return free_at

    def _add(self, wanted: _MissingBlocks, places: Int64s) -> int:
        """Add jobs that load blocks into their slots; return the number of the first job."""
        if not len(wanted.block):
            return self._added
        (slots, addresses, after), first = places, wanted.first
        jobs = self._source.jobs(wanted.block, addresses, wanted.own)
        steps = max(1, _BLOCKS_AT_ONCE * int(first[-1] - first[0] + 1) // len(first))
        jobs[:, AFTER] = np.minimum(-(-after // steps) * steps, first)
        jobs[:, SLOT] = slots
        number = int(self.loads.add(jobs))
        for n, slot in enumerate(slots.tolist(), number):
            self._slots[slot].job = n
        self._added = number + len(first)
        return number

    def wait_for(self, jobs: int, timeout_s: float, on_stall: Callable[[float], None]) -> int:
        """Wait until the first `jobs` jobs are done; return how many are done. A closed loop raises UsageError."""
        started = time.perf_counter()
        while (done := self.loads.wait(jobs, timeout_s)) == -1:
            on_stall(time.perf_counter() - started)
        if done < 0:
            raise UsageError(_CLOSED)
        return int(done)

    def advance(self, step: int) -> None:
        """Mark the steps before this one as over."""
        self._now = step
        self.loads.advance(step)
        if self._leaving and self._lock.acquire(blocking=False):  # if it is taken, a later step does it
            try:
                self._let_go()
            finally:
                self._lock.release()

    def wake(self, loop: int) -> None:
        """Cancel the jobs of a loop and wake threads that wait for them, which then raise UsageError."""
        with self._lock:
            if loop == self.loop:
                self.is_stopped = True
                self._drop()

    # ---- loading

    def _load(self) -> None:
        """Run a thread: it loads blocks in the C module, which returns only for blocks that are read in Python."""
        give_way()
        while (job := self.loads.work()) is not None:
            self._load_one(*job)
            del job

    def _load_one(self, number: int, slot: int, block: int) -> None:
        started, facts = time.perf_counter(), None
        try:
            columns, size, taken = self._source.read(block)
            facts = columns.facts
        except BaseException as error:  # noqa: BLE001  raised where a step waits for it
            with self._lock:
                self._slots[slot].keep = None
                if number >= self._nobodys:
                    self._failed[number] = slot, error
        else:
            with self._lock:
                one, counts = self._slots[slot], self._counts
                one.keep = columns
                counts.block_loads += 1
                counts.bytes_loaded += size
                counts.load_s += time.perf_counter() - started
                if one.job == number and one.cost and not one.capacity:  # without a cost, it was disposed of
                    self._bytes += taken - one.cost  # the expected size becomes the size
                    one.cost = taken
                    counts.peak_bytes = max(counts.peak_bytes, self._bytes)
        self.loads.finish(number, slot, facts)

    # ---- loops

    def _count(self, wanted: _MissingBlocks) -> None:
        blocks = wanted.block.tolist() if self._dropped else ()
        dropped_at = [self._dropped[block] for block in blocks if block in self._dropped]
        self._counts.block_reloads += len(dropped_at)
        self.epoch.reloads += len(dropped_at)
        self.epoch.soon_again += sum(self._epoch_bytes - at < self._memory.limit for at in dropped_at)
        self.epoch.loads += len(wanted.block)
        self._epoch_bytes += int(wanted.size.sum())

    def begin_loop(self) -> int:
        """End the current loop; return the number of the new one."""
        with self.in_use, self._lock:
            self._end()
            self.loop += 1
            self.is_stopped = False
            return self.loop

    def begin_epoch(self) -> None:
        """Start counting for the next epoch; blocks in memory are kept."""
        with self._lock:
            self._epochs += 1
            self._dropped.clear()
            self._epoch_bytes = 0
            self.epoch = EpochCounts()

    def end_loop(self, loop: int) -> None:
        """End a loop, unless another one has begun since; its queued jobs are cancelled."""
        with self.in_use, self._lock:
            if loop == self.loop:
                self._end()

    def _end(self) -> None:
        self._drop()
        self._now = self._planned
        self.loads.advance(self._planned)
        self._let_go()

    def _drop(self) -> None:
        """Cancel queued jobs and forget blocks that are not loaded; waiting threads are woken."""
        begun, running = self.loads.drop()
        self._replaced.clear()
        lost = {*running, *(slot for slot, _ in self._failed.values())}
        self._nobodys = self._added
        for number, slot in enumerate(self._slots):
            if slot.block != _NOBODY and (slot.job >= begun or number in lost):
                del self._slot_of[slot.block]
                slot.block = _NOBODY
        self._failed.clear()
        written = {key & _SLOT_MASK: key for key in self._spare if key & _SLOT_MASK in running}
        self._withdrawn |= written
        self._spare = sorted(set(self._spare) - set(written.values()))  # a sorted list is a heap

    def close(self) -> None:
        """Cancel queued loads, wait for running ones and free all blocks; may be called twice."""
        self.loads.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        with self.in_use, self._lock:
            self.loads.leave()
            self._bytes = 0
            self._slots.clear()
            self._slot_of.clear()
            self._leaving, self._spare = [], []
            self._withdrawn.clear()
