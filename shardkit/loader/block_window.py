"""The blocks that are in memory: each loaded in the order of first need, verified once per load, within a bound.

What the next steps need is known, so that nothing is decided while they run: with a group of steps each block that is
missing is given a *slot*, the one that is longest out of use, and the step up to which that one is in use. Threads load
it once that step is over. A block lies in its slot as it was verified until the next one is loaded there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import UsageError
from shardkit.loader.block_loading import AFTER, SLOT, BlockLoading
from shardkit.loader.block_memory import BlockMemory, Loan, capacity_of
from shardkit.loader.schedule import StepGroup

__all__ = ["BlockWindow", "WindowCounts"]

Int64s = NDArray[np.int64]

_BLOCKS_AT_ONCE: Final = 16  # threads are woken for some blocks and not for each
_BLOCKS_A_TURN: Final = 64  # get their slots before the interpreter is let go of for a moment
_TURN_S: Final = 5e-5
_NICER: Final = 3  # of a processor that both want, a thread that loads gets half as much as another
_NOBODY: Final = -1
_SLOT_BITS: Final = 24
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1


@dataclass(slots=True)
class WindowCounts:
    """Counters of one window; plain numbers, read without a lock."""

    block_loads: int = 0
    block_reloads: int = 0  # of blocks that this epoch had already and dropped for want of room
    block_uses: int = 0
    bytes_loaded: int = 0
    evictions: int = 0
    load_s: float = 0.0  # of all threads together
    peak_bytes: int = 0


@dataclass(slots=True)
class _Slot:
    """A place for one block after the other."""

    block: int = _NOBODY  # that is there, or is planned last
    last: int = -1  # the last planned step that needs it
    job: int = -1  # that loads it
    used_in: int = 0  # the last epoch that needs it
    cost: int = 0  # bytes that count
    capacity: int = 0  # of its own memory; 0 where blocks bring theirs
    loan: Loan | None = None
    keep: Any = None  # what the addresses of a block that brought its memory refer to


class _Wanted(NamedTuple):
    """Blocks of a group that are not there, in the order of first need."""

    block: Int64s
    size: Int64s
    own: Int64s  # bytes of memory that its slot has for it; 0: it brings its own
    first: Int64s  # steps that need them, counted over all loops
    last: Int64s


class Admitted(NamedTuple):
    """A group whose blocks are loaded, or will be."""

    loop: int  # that it belongs to
    slots: Int64s  # of its blocks
    needs: list[int]  # per step: how many jobs are done once its blocks are loaded
    origin: int  # steps planned before it


CLOSED = "the loader was closed while this loop waited for a block; begin another loop"


class BlockWindow:
    """Loads blocks on threads and keeps them until their room is needed, least recently used ones going first.

    Steps are counted over all loops, so that it is one comparison whether a step is over.

    Args:
        source: finds and reads the blocks.
        loads: a `block_rows.Loads`, which only the source has used before.
        memory: of slots.
        budget: bytes. What one step needs is loaded even if it alone exceeds them.
        threads: how many blocks are loaded at once.
        width: facts of a block.
    """

    def __init__(
        self, source: BlockLoading, loads: Any, memory: BlockMemory, budget: int, threads: int, width: int
    ) -> None:
        self._source, self.loads, self._memory = source, loads, memory
        self._budget = budget
        self._lock = threading.Lock()  # of what follows
        self._slots: list[_Slot] = []
        self._slot_of: dict[int, int] = {}  # block → its slot
        self._spare: list[int] = []  # keys of slots without memory and block, as of `_free_slots`
        self._leaving: list[
            tuple[int, int, int, Any]
        ] = []  # step, once which is over job, slot and memory go
        self._bytes = self._planned = self._now = 0
        self._added = self._nobodys = 0  # jobs so far, and those of loops that are over
        self.loop = self._epoch = 0
        self._dropped: dict[int, int] = {}  # after this epoch has used them: bytes it had loaded by then
        self._epoch_bytes = 0
        self._counts = WindowCounts()
        self.count_anew()
        self.facts: Int64s = np.zeros((0, width), np.int64)
        self._failed: dict[int, tuple[int, BaseException]] = {}  # job → slot, what loading raised
        self.in_use = threading.Lock()  # held while rows are copied out of slots
        self._threads = [
            threading.Thread(target=self._load, name=f"shardkit-blocks-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def first_failed(self) -> tuple[int, BaseException] | None:
        """The first job of this loop that failed, and what it raised."""
        if not self._failed:
            return None
        with self._lock:
            number = min(self._failed)
            return number, self._failed[number][1]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that are loaded or planned to be."""
        return self._bytes

    @property
    def budget(self) -> int:
        """Bytes that blocks may take; a smaller one takes effect as steps end."""
        return self._budget

    @budget.setter
    def budget(self, value: int) -> None:
        with self._lock:
            self._budget = value
            self._trim()

    @property
    def counts(self) -> WindowCounts:
        """What was loaded so far."""
        _, loads, num_bytes, seconds = self.loads.counts()
        own = self._counts
        return WindowCounts(own.block_loads + loads, own.block_reloads, own.block_uses, own.bytes_loaded + num_bytes,
                            own.evictions, own.load_s + seconds, own.peak_bytes)  # fmt: skip

    def is_loaded(self, block: int) -> bool:
        """Whether a block is in memory; one that still waits for its turn to be loaded is not."""
        slot = self._slot_of.get(block)
        return slot is not None and self._slots[slot].job < self.loads.counts()[0]

    # ---- what steps need

    def sizes(self, group: StepGroup) -> tuple[Int64s, Int64s, NDArray[np.bool_]]:
        """Of the blocks of a group that is planned next: bytes, at most; those of their slots; which are there."""
        sizes, own = self._source.sizes(group.blocks, self._planned + len(group.numbers), self._now)
        there = [block in self._slot_of for block in group.blocks.tolist()]
        return sizes, own, np.array(there, np.bool_)

    def admit(
        self,
        group: StepGroup,
        sizes: Int64s,
        own: Int64s,
    ) -> Admitted:
        """Have the blocks of a group loaded that are not there, as early as there is room, in the order of first need.

        `sizes` and `own` belong to its blocks, as `sizes` returns them for it or a longer one.
        """
        with self._lock:
            blocks, origin, slots = group.blocks.tolist(), self._planned, self._slots
            last = group.last + origin
            self._planned += len(group.numbers)
            found = np.array([self._slot_of.get(block, _NOBODY) for block in blocks], np.int64)
            there, missing = np.flatnonzero(found >= 0), np.flatnonzero(found < 0)
            for slot, step in zip(found[there].tolist(), last[there].tolist(), strict=True):
                one = slots[slot]
                one.last, one.used_in = step, self._epoch
            wanted = _Wanted(
                group.blocks[missing],
                sizes[missing],
                own[missing],
                group.first[missing] + origin,
                last[missing],
            )
            self._count(wanted)
            self._counts.block_uses += len(blocks)
            places = self._assign(wanted)
            found[missing] = places[0]
            base = self._add(wanted, places)
            steps = np.arange(origin, self._planned)
            needs = (base + np.searchsorted(wanted.first, steps, side="right")).tolist()
            return Admitted(self.loop, found, needs, origin)

    def _assign(self, wanted: _Wanted) -> Int64s:
        """Give each block a slot.

        Returns:
            (3, n) the slots, where their memory is (0: the block brings its own), and the steps up to which they are in
            use: others may take slot and memory later in the same plan.
        """
        slots = self._slots
        self._trim()
        heaps = self._free_slots()
        same: dict[int, list[int]] = {}  # by capacity, those of just that
        fitting: dict[int, list[list[int]]] = {}  # by capacity, those that hold it
        chosen, addresses, afters = [], [], []
        for n, (block, cost, own, need, last) in enumerate(
            zip(*(one.tolist() for one in wanted), strict=True), 1
        ):
            if n % _BLOCKS_A_TURN == 0:
                time.sleep(_TURN_S)  # else the trainer waits 5 ms for the interpreter after each copy
            capacity = capacity_of(own) if own else 0
            if capacity not in same:
                same[capacity] = heaps.setdefault(capacity, [])
                fitting = {size: [heaps[c] for c in heaps if size <= c <= 2 * size] for size in same if size}
                fitting[0] = []
            best = min(filter(None, fitting[capacity]), default=None)
            free_again = last + 1 << _SLOT_BITS
            if self._bytes + cost > self._budget and best is not None and best[0] >> _SLOT_BITS <= need:
                after, slot = best[0] >> _SLOT_BITS, best[0] & _SLOT_MASK
                heapreplace(best, free_again | slot)
                one = slots[slot]
                self._evict(one)
                self._bytes += cost - one.cost
                one.cost = cost
                if self._bytes > self._budget:
                    after = max(after, self._make_room(heaps, 0, need))
            else:
                after = self._make_room(heaps, cost, need)
                slot = self._new_slot(capacity, cost, after)
                heappush(same[capacity], free_again | slot)
                one = slots[slot]
            one.block, one.last, one.used_in = block, last, self._epoch
            self._slot_of[block] = slot
            chosen.append(slot)
            addresses.append(0 if one.loan is None else one.loan.address)
            afters.append(after)
        self._counts.peak_bytes = max(self._counts.peak_bytes, self._bytes)
        return np.array([chosen, addresses, afters], np.int64)

    def _free_slots(self) -> dict[int, list[int]]:
        """By capacity the slots that may be used again: from which step on, and slot, in one number; the first first.

        One number, and no pair, for a pair is an object that the collector looks at.
        """
        last = np.array([one.last for one in self._slots], np.int64)
        capacity = np.array([one.capacity for one in self._slots], np.int64)
        used = (capacity > 0) | (np.array([one.cost for one in self._slots], np.int64) > 0)
        used[self.loads.running()] = False
        keys = last + 1 << _SLOT_BITS | np.arange(len(last))
        # what is sorted is a heap
        return {
            size: np.sort(keys[used & (capacity == size)]).tolist()
            for size in sorted(set(capacity[used].tolist()))
        }

    def _make_room(self, heaps: dict[int, list[int]], cost: int, need: int) -> int:
        """Have slots of other sizes go until so many bytes more are within the budget, before step `need`.

        Returns the step from which on they are gone; what one step needs may exceed the budget all the same.
        """
        after = 0
        while self._bytes + cost > self._budget:
            heap = min(filter(None, heaps.values()), default=None)
            if heap is None or heap[0] >> _SLOT_BITS > need:
                break
            after = max(after, self._dispose(heappop(heap)))
        return after

    def _trim(self) -> None:
        """Have free slots go while more is in memory than may be."""
        self._let_go()
        if self._bytes <= self._budget:
            return
        for key in sorted(key for heap in self._free_slots().values() for key in heap):
            if self._bytes <= self._budget or key >> _SLOT_BITS > self._now:
                break
            self._dispose(key)

    def _let_go(self) -> None:
        for step, job, slot, _ in self._leaving:
            if step <= self._now:
                self.loads.release(job, slot)
        self._leaving = [one for one in self._leaving if one[0] > self._now]

    def _new_slot(self, capacity: int, cost: int, after: int) -> int:
        """A slot of its own memory, or of none."""
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
        """What is in a slot goes."""
        if slot.block == _NOBODY:
            return
        del self._slot_of[slot.block]
        self._counts.evictions += 1
        if slot.used_in == self._epoch:
            self._dropped[slot.block] = self._epoch_bytes
        slot.block = _NOBODY

    def _dispose(self, key: int) -> int:
        """A free slot has no memory any more from the step on that is returned."""
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

    def _add(self, wanted: _Wanted, places: Int64s) -> int:
        """Have blocks loaded to their slots; the number of the first of these jobs."""
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
        """Until the first so many jobs are done; how many are."""
        started = time.perf_counter()
        while (done := self.loads.wait(jobs, timeout_s)) == -1:
            on_stall(time.perf_counter() - started)
        if done < 0:
            raise UsageError(CLOSED)
        return int(done)

    def advance(self, step: int) -> None:
        """Steps before this one are over."""
        self._now = step
        self.loads.advance(step)
        if self._leaving and self._lock.acquire(blocking=False):  # else a later step does it
            try:
                self._let_go()
            finally:
                self._lock.release()

    def wake(self, loop: int) -> None:
        """This loop is stopped: nothing more is loaded for it, and whoever waits is told."""
        with self._lock:
            if loop == self.loop:
                self._drop()

    # ---- loading

    def longest_load(self) -> tuple[int, float] | None:
        """What has been loading for the longest time: a block, and for how many seconds."""
        found: tuple[int, float] | None = self.loads.longest()
        return found

    def _load(self) -> None:
        """A thread's life: it comes here only for blocks that need Python."""
        _give_way()
        while (job := self.loads.work()) is not None:
            self._load_one(*job)
            del job

    def _load_one(self, number: int, slot: int, block: int) -> None:
        started, facts, columns, error = time.perf_counter(), None, None, None
        try:
            columns, size, taken = self._source.read(block)
            facts = columns.facts
        except BaseException as raised:  # noqa: BLE001  raised where a step waits for it
            error = raised
        with self._lock:
            self._slots[slot].keep = columns
            if error is not None and number >= self._nobodys:
                self._failed[number] = slot, error
            if columns is not None:
                self._note_read(self._slots[slot], number, (size, taken), time.perf_counter() - started)
        self.loads.finish(number, slot, facts)

    def _note_read(self, slot: _Slot, number: int, sizes: tuple[int, int], seconds: float) -> None:
        """From what a block could at most have been to what it is."""
        counts = self._counts
        counts.block_loads += 1
        counts.bytes_loaded += sizes[0]
        counts.load_s += seconds
        taken = sizes[1]
        if slot.job == number and not slot.capacity and taken < slot.cost:
            self._bytes -= slot.cost - taken
            slot.cost = taken

    # ---- loops

    def count_anew(self) -> None:
        """From here on, what this epoch asks for."""
        self.epoch_loads = self.epoch_reloads = 0
        self.epoch_soon_again = 0  # of these what twice the budget would have kept

    def _count(self, wanted: _Wanted) -> None:
        blocks = wanted.block.tolist() if self._dropped else ()
        dropped_at = [self._dropped[block] for block in blocks if block in self._dropped]
        self._counts.block_reloads += len(dropped_at)
        self.epoch_reloads += len(dropped_at)
        self.epoch_soon_again += sum(self._epoch_bytes - at < self._budget for at in dropped_at)
        self.epoch_loads += len(wanted.block)
        self._epoch_bytes += int(wanted.size.sum())

    def begin_loop(self) -> int:
        """What is admitted from now on is for another loop, of this number; the one before it has ended."""
        with self.in_use, self._lock:
            self._end()
            self.loop += 1
            return self.loop

    def begin_epoch(self) -> None:
        """What is admitted from now on is for another epoch: a block that is loaded for both is not loaded again."""
        with self._lock:
            self._epoch += 1
            self._dropped.clear()
            self._epoch_bytes = 0
            self.count_anew()

    def mean_block(self) -> float:
        """Bytes of a block, of those that are there."""
        return self._bytes / max(1, len(self._slot_of))

    def end_loop(self, loop: int) -> None:
        """No step of this loop needs anything any more; says nothing of one that was begun since.

        What was not begun is forgotten, what failed is tried again.
        """
        with self.in_use, self._lock:
            if loop == self.loop:
                self._end()

    def _end(self) -> None:
        self._drop()
        self._now = self._planned
        self.loads.advance(self._planned)
        self._let_go()

    def _drop(self) -> None:
        """What was not loaded is not there, and nobody waits for it any more."""
        begun, running = self.loads.drop()
        lost = {*running, *(slot for slot, _ in self._failed.values())}
        self._nobodys = self._added
        for number, slot in enumerate(self._slots):
            if slot.block != _NOBODY and (slot.job >= begun or number in lost):
                del self._slot_of[slot.block]
                slot.block = _NOBODY
        self._failed.clear()

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, drop everything; may be called twice."""
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


def _give_way() -> None:
    """Have this thread wait where the program's others want its processor.

    Blocks are loaded ahead, and what the others do is wanted now. Where the trainer waits for a block, it wants none.
    """
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        own = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICER)
