"""The window of blocks in memory: loaded in order of first use, verified once per load, within a memory bound.

All decisions are made when a group of steps is planned. If a missing block does not fit, the least recently used blocks
are evicted, and the job of the missing block begins only after the last step that uses them. A block stays as it was
verified until that step is over.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Final

import msgspec
import numpy as np

from shardkit.arrays import Int64s
from shardkit.errors import UsageError
from shardkit.loader.batch import EpochCounts
from shardkit.loader.block_loading import BlockLoading, give_way
from shardkit.loader.block_memory import BlockMemory
from shardkit.loader.gather import RowAddresses, StepGroup, steps_that_fit
from shardkit.loader.load_queue import AFTER, BLOCK, SLOT, LoadQueue, TakenJobs

__all__ = ["BlockWindow", "GroupBlocks"]

_BLOCKS_AT_ONCE: Final = 16  # blocks per wake-up of the threads
_BLOCKS_A_TURN: Final = 64  # blocks that get slots before the interpreter is released for a moment
_TURN_S: Final = 5e-5
_SLOT_BITS: Final = 24
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1


class _Block(msgspec.Struct, eq=False):
    """A block that is in memory, or planned to be."""

    number: int
    slot: int  # of the queue, with its facts and its memory
    last: int  # last planned step that uses it
    used_in: int  # last epoch that uses it
    cost: int  # bytes counted against the budget
    job: int = 1 << 62  # job that loads it, when it has one


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
            found = rows.take(self._window.queue.facts, borders)
            self._window.advance(self._origin + steps.stop)
        return found

    def _check(self) -> None:
        self._window.check(self._loop)


class BlockWindow:
    """Loads blocks on threads and evicts the least recently used ones when memory is needed.

    Steps are counted over all loops, so one comparison tells whether a step is over. The blocks of a single step
    are loaded even if they exceed the limit of `memory`.
    """

    def __init__(self, source: BlockLoading, queue: LoadQueue, memory: BlockMemory) -> None:
        self._source, self.queue, self._memory = source, queue, memory
        self._lock = threading.Lock()  # guards the attributes below
        self._blocks: dict[int, _Block] = {}  # by number
        self._in_slot: list[_Block | None] = []
        self._free: list[int] = []  # slots
        # blocks that the plan has evicted, whose last step is not over
        self._evicted: dict[int, _Block] = {}
        self._bytes = self._planned = 0
        self._failed: dict[int, tuple[_Block, BaseException]] = {}  # job → block and the error of loading
        self.loop = self._epochs = 0  # number of loops that have ended; of epochs that have begun
        self._dropped: dict[int, int] = {}  # block evicted in this epoch → `_epoch_bytes` then
        self._epoch_bytes = 0
        self.counts = queue.counts
        self.epoch = EpochCounts()
        self._now = 0  # steps before it are over
        self._leaving: dict[int, list[_Block]] = {}  # last step → evicted blocks, which leave after it
        self._leaving_lock = threading.Lock()  # guards the two above; a step must not wait for the planning
        self.in_use = threading.Lock()  # held while rows are copied out of slots
        self._threads = [
            threading.Thread(target=self._load, name=f"shardkit-blocks-{number}", daemon=True)
            for number in range(queue.threads)
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
        return self._bytes / max(1, len(self._blocks))

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that are loaded or queued."""
        return self._bytes

    def is_loaded(self, block: int) -> bool:
        """Return True if a block is in memory, False if it is only queued."""
        done = self.queue.num_done
        one, evicted = self._blocks.get(block), self._evicted.get(block)
        if one is not None and one.job < done:
            return True
        return evicted is not None and evicted.job < done and evicted.last >= self._now

    def admit(
        self, loop: int, planned: StepGroup, on_excess: Callable[[int, int], object]
    ) -> tuple[GroupBlocks, StepGroup | None]:
        """Queue the missing blocks of as many steps as fit into memory; return these steps, and the rest or None.

        Blocks are queued in order of first use, and each is loaded as soon as there is room. If the first step alone
        exceeds the budget, `on_excess` is called with its number and its bytes, and may raise the budget.

        Raises:
            UsageError: the loop has ended.
        """
        sizes, own = self._source.sizes(planned.blocks, self._planned + len(planned.numbers), self._now)
        held = np.array([block in self._blocks for block in planned.blocks.tolist()], np.bool_)
        steps, needed = steps_that_fit(planned, sizes, held, self._memory.limit)
        if needed > self._memory.limit:
            on_excess(planned.numbers[0], needed)
            steps, needed = steps_that_fit(planned, sizes, held, self._memory.limit)
        group, rest = planned.split(steps)
        with self._lock:
            self.check(loop)
            numbers, origin = group.blocks.tolist(), self._planned
            first, last = group.first + origin, group.last + origin
            self._planned += len(group.numbers)
            self._evicted = {number: one for number, one in self._evicted.items() if one.last >= self._now}
            found = [self._blocks.get(number) for number in numbers]
            for one, step in zip(found, last.tolist(), strict=True):
                if one is not None:
                    one.last, one.used_in = step, self._epochs
            missing = np.flatnonzero([one is None for one in found])
            self._count(group.blocks[missing].tolist(), int(sizes[missing].sum()))
            self.counts.block_uses += len(numbers)
            after = np.zeros(len(missing), np.int64)
            heap = self._by_last_use()
            for n, place in enumerate(missing.tolist()):
                # otherwise the trainer waits 5 ms for the interpreter after each copy
                if n % _BLOCKS_A_TURN == _BLOCKS_A_TURN - 1:
                    time.sleep(_TURN_S)
                cost = int(sizes[place])
                after[n] = self._make_room(heap, cost, int(first[place]))
                one = found[place] = self._new_block(numbers[place], int(last[place]), cost)
                heappush(heap, one.last + 1 << _SLOT_BITS | one.slot)
            slots = np.array([one.slot for one in found if one is not None], np.int64)
            base = self._add(group.blocks[missing], own[missing], slots[missing], first[missing], after)
            of_steps = np.searchsorted(first[missing], np.arange(origin, self._planned), side="right")
            return GroupBlocks(self, group, slots, (base + of_steps).tolist(), origin), rest

    def _by_last_use(self) -> list[int]:
        """Return a heap of all blocks, encoded as (step after the last use) << 24 | slot.

        The encoding avoids tuples, which the garbage collector would track.
        """
        heap = [one.last + 1 << _SLOT_BITS | one.slot for one in self._blocks.values()]
        heapify(heap)
        return heap

    def _make_room(self, heap: list[int], cost: int, need: int) -> int:
        """Evict blocks whose last use is before step `need` until `cost` more bytes fit within the budget.

        Returns the step from which on there is room. The budget is exceeded if no such block is left.
        """
        after = 0
        while self._bytes + cost > self._memory.limit and heap and heap[0] >> _SLOT_BITS <= need:
            key = heappop(heap)
            one = self._in_slot[key & _SLOT_MASK]
            assert one is not None, "blocks in memory have slots"
            self._evict(one)
            after = key >> _SLOT_BITS
        return after

    def _new_block(self, number: int, last: int, cost: int) -> _Block:
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._in_slot)
            self._in_slot.append(None)
            self.queue.grow(slot + 1)
        one = self._blocks[number] = self._in_slot[slot] = _Block(number, slot, last, self._epochs, cost)
        self._bytes += cost
        # not after the group: a large block may be evicted for later steps of it
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._bytes)
        return one

    def _evict(self, one: _Block) -> None:
        del self._blocks[one.number]
        self._bytes -= one.cost
        self.counts.evictions += 1
        if one.used_in == self._epochs:
            self._dropped[one.number] = self._epoch_bytes
        with self._leaving_lock:
            if one.last >= self._now:
                self._evicted[one.number] = one
                self._leaving.setdefault(one.last, []).append(one)
                return
        self._release(one)

    def _release(self, one: _Block) -> None:
        self.queue.release(one.slot)
        self._in_slot[one.slot] = None
        self._free.append(one.slot)

    def _add(self, blocks: Int64s, own: Int64s, slots: Int64s, first: Int64s, after: Int64s) -> int:
        """Add jobs that load blocks into their slots; return the number of the first job."""
        if not len(blocks):
            return self.queue.num_added
        jobs = self._source.jobs(blocks, own)
        steps = max(1, _BLOCKS_AT_ONCE * int(first[-1] - first[0] + 1) // len(first))
        jobs[:, AFTER] = np.minimum(-(-after // steps) * steps, first)
        jobs[:, SLOT] = slots
        base = self.queue.num_added
        for job, slot in enumerate(slots.tolist(), base):
            one = self._in_slot[slot]
            assert one is not None, "it was made for this job"
            one.job = job
        return self.queue.add(jobs)

    def wait_for(self, jobs: int, timeout_s: float, on_stall: Callable[[float], None]) -> int:
        """Wait until the first `jobs` jobs are done; return how many are done. A closed loop raises UsageError."""
        started = time.perf_counter()
        while (done := self.queue.wait(jobs, timeout_s)) == -1:
            on_stall(time.perf_counter() - started)
        if done < 0:
            raise UsageError(_CLOSED)
        return done

    def advance(self, step: int) -> None:
        """Mark the steps before this one as over, and let the blocks leave that they were the last to use."""
        with self._leaving_lock:
            left = [one for last in range(self._now, step) for one in self._leaving.pop(last, ())]
            self._now = step
        for one in left:
            self._release(one)
        self.queue.advance(step)

    # ---- loading

    def _load(self) -> None:
        """Run a thread: it loads blocks of local files in the C module, and reads all others in Python."""
        give_way()
        while (jobs := self.queue.take()) is not None:
            while len((jobs := self.queue.load(jobs)).rows):
                jobs = self._read(jobs)
            del jobs

    def _read(self, jobs: TakenJobs) -> TakenJobs:
        """Read the block of the first job, and return the jobs after it."""
        slot, block = jobs.rows[0, [SLOT, BLOCK]].tolist()
        started = time.perf_counter()
        try:
            columns, size, taken = self._source.read(block)
        except BaseException as error:  # noqa: BLE001  raised where a step waits for it
            with self._lock:
                one = self._in_slot[slot]
                if not self.queue.is_cancelled(jobs) and one is not None:
                    self._failed[jobs.first] = one, error
                return self.queue.fail(jobs)
        with self._lock:
            one = self._blocks.get(block)
            # unless the plan has evicted it, the expected size becomes the size
            if one is not None and one.slot == slot and not self.queue.is_cancelled(jobs):
                self._bytes += taken - one.cost
                one.cost = taken
                self.counts.peak_bytes = max(self.counts.peak_bytes, self._bytes)
            return self.queue.finish(jobs, columns.facts, columns, size, time.perf_counter() - started)

    # ---- loops

    def _count(self, missing: list[int], num_bytes: int) -> None:
        dropped_at = [self._dropped[block] for block in missing if block in self._dropped]
        self.counts.block_reloads += len(dropped_at)
        self.epoch.reloads += len(dropped_at)
        self.epoch.soon_again += sum(self._epoch_bytes - at < self._memory.limit for at in dropped_at)
        self.epoch.loads += len(missing)
        self._epoch_bytes += num_bytes

    def check(self, loop: int) -> None:
        """Raise UsageError if a loop has ended."""
        if loop != self.loop:
            raise UsageError(_CLOSED)

    def begin_epoch(self) -> None:
        """Start counting for the next epoch; blocks in memory are kept."""
        with self._lock:
            self._epochs += 1
            self._dropped.clear()
            self._epoch_bytes = 0
            self.epoch = EpochCounts()

    def end_loop(self, loop: int) -> None:
        """End the loop with this number unless it has ended: cancel its jobs, and wake threads that wait for them.

        Its other calls raise UsageError from now on.
        """
        with self.in_use, self._lock:
            if loop == self.loop:
                self.loop += 1
                self._drop()
                self.advance(self._planned)

    def _drop(self) -> None:
        """Cancel jobs and forget blocks that are not loaded; waiting threads are woken."""
        lost = [self._in_slot[slot] for slot in self.queue.drop()] + [one for one, _ in self._failed.values()]
        self._failed.clear()
        self._evicted.clear()
        for one in lost:
            if one is not None and self._blocks.get(one.number) is one:  # otherwise the plan has evicted it
                del self._blocks[one.number]
                self._bytes -= one.cost
                self._release(one)

    def close(self) -> None:
        """Cancel queued loads, wait for running ones and free all blocks; may be called twice."""
        self.queue.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        with self.in_use, self._lock:
            self.queue.clear()
            self._bytes = 0
            self._blocks.clear()
            self._leaving.clear()
