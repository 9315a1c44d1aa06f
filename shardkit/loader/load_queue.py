"""The queue of blocks to load: jobs in the order of first use, which the block threads take a few at a time.

All scheduling is here. `block_rows.load_blocks` only reads, hashes and opens the blocks of the jobs that it is given.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from shardkit.arrays import Int64s
from shardkit.loader import gather
from shardkit.loader.batch import WindowCounts
from shardkit.loader.block_memory import BlockMemory, Loan

__all__ = ["JOB", "LoadQueue", "TakenJobs"]

FILE, OFFSET, SIZE, ADDRESS, HASH, AFTER, SLOT, BLOCK, LAYOUT, RAW_SIZE, DIGEST, ROOM, TOOK = range(13)
JOB: Final = 13
"""Number of int64 in a job before its facts; see `load_blocks` in block_rows.pyi."""

# A thread takes jobs for about a millisecond, because it has to wait for the interpreter after each call.
_MOST_JOBS: Final = 16
_LEAST_JOBS: Final = (
    4  # if as many may begin; a call for each block would cost more than sharing them out evenly gains
)
_MOST_BYTES: Final = 4 << 20
_MOST_OPEN: Final = 32  # files that stay open after they were read
_MOST_READ: Final = 16  # files that the threads read at a time; each thread may read one
_ASK_AHEAD: Final = 16  # blocks; a disk is faster if it is asked for many at a time


class TakenJobs(NamedTuple):
    """Consecutive jobs that one thread has taken."""

    first: int  # number of the first job
    rows: Int64s  # (n, JOB + width)

    def after(self, done: int) -> TakenJobs:
        """Return the jobs after the first `done` ones."""
        return TakenJobs(self.first + done, self.rows[done:])


class _OpenFile:
    """A descriptor of a regular file of the expected size, closed when nothing refers to it."""

    __slots__ = ("descriptor",)

    def __init__(self, path: str, size: int) -> None:
        self.descriptor = -1
        # a pipe must not block the thread
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        found = os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise OSError(f"{path} is not a file of {size} bytes")

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class LoadQueue:
    """Jobs in the order of first use. They are numbered in the order in which they are added.

    A job may begin when the steps before its AFTER number are over, because its slot is free then. Jobs of local files
    are loaded by `load`; all others are read by the caller, who then calls `finish`. Thread-safe.

    Args:
        width: number of int64 facts per block.
        threads: number of threads that take jobs.
        memory: lends the memory that blocks are loaded into.

    Attributes:
        note: called with the block and the seconds of each load, if set.
        facts: (slots, width) facts of the block in each slot.
        threads: number of threads that take jobs.
        counts: counters of loads; the window counts the rest of them.
    """

    def __init__(self, width: int, threads: int, memory: BlockMemory) -> None:
        self._width, self.threads, self._memory = width, threads, memory
        self.note: Callable[[int, float], None] | None = None
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # a job may begin
        self._done = threading.Condition(self._lock)  # jobs are done, added or cancelled
        self.facts: Int64s = np.zeros((0, width), np.int64)
        self._jobs: Int64s = np.zeros((0, JOB + width), np.int64)  # from job `_base` on
        self._after: list[int] = []  # of the same jobs
        self._makes_objects: list[bool] = []  # rows of a field are read into bytes objects
        self._base = 0
        self._next = self._ready = 0  # jobs before them are taken; may be taken
        self._taken: dict[int, tuple[float, TakenJobs]] = {}  # first job → when it was begun, jobs not done
        self._inside = 0  # threads in `load_blocks`, which read what the addresses in jobs refer to
        self._need = 0  # number of jobs that are waited for; 0 if the end of `load_blocks` is
        self._loop = 0  # number of calls of `drop`
        self._now = self._asked = 0  # steps before it are over; jobs before it were asked from the disk
        self._is_closed = False
        self._files: list[tuple[str, int]] = []
        self._open: dict[int, _OpenFile] = {}  # the most recently used file last
        self._objects: dict[int, Any] = {}  # job → tuple of bytes objects, until it is done
        self._held: dict[int, Any] = {}  # slot → memory of the block in it
        self.counts = WindowCounts()

    # ---- the caller's side

    def add_file(self, path: str, size: int) -> int:
        """Return the number of a file, which must have `size` bytes when it is read."""
        with self._lock:
            self._files.append((path, size))
            return len(self._files) - 1

    def grow(self, slots: int) -> None:
        """Make room for the facts of at least `slots` slots."""
        with self._lock:
            if slots > len(self.facts):
                facts = np.zeros((max(1024, slots, 2 * len(self.facts)), self._width), np.int64)
                facts[: len(self.facts)] = self.facts
                self.facts = facts

    def add(self, jobs: Int64s) -> int:
        """Add (n, JOB + width) jobs and return the number of the first."""
        with self._lock:
            first, base = self._end, self._num_done()
            self._jobs = np.concatenate([self._jobs[base - self._base :], jobs])
            self._after, self._base = self._jobs[:, AFTER].tolist(), base
            pitches = self._jobs[:, JOB + gather.FACTS :: gather.FACTS]
            self._makes_objects = (pitches == gather.OBJECTS).any(axis=1).tolist()
            self._release_ready(works_steps=False)
            self._done.notify_all()  # the thread that works the steps makes the objects
            return first

    def wait(self, jobs: int, timeout_s: float) -> int:
        """Wait until the first `jobs` jobs are done and return how many are; −1 after the time, −2 if cancelled."""
        with self._lock:
            loop = self._loop

            def is_over() -> bool:
                self._release_ready(works_steps=True)
                return self._is_closed or self._loop != loop or self._num_done() >= jobs

            self._need = jobs
            in_time = self._done.wait_for(is_over, timeout_s)
            if self._is_closed or self._loop != loop:
                return -2
            return self._num_done() if in_time else -1

    def advance(self, step: int) -> None:
        """Note that the steps before `step` are over, so that the memory which they used may be written to."""
        with self._lock:
            self._now = step
            self._release_ready(works_steps=True)

    def drop(self) -> set[int]:
        """Cancel all jobs and return the slots of jobs that are not done.

        Waits until no thread uses an address of a job.
        """
        with self._lock:
            waiting = self._jobs[self._next - self._base :, SLOT].tolist()
            self._next = self._ready = self._end
            self._loop, self._need = self._loop + 1, 0
            self._done.notify_all()
            while self._inside:
                self._done.wait()
            unfinished = [jobs.rows[:, SLOT].tolist() for _, jobs in self._taken.values()]
            self._taken.clear()
            self._objects.clear()
            return set(waiting).union(*unfinished)

    def release(self, slot: int) -> None:
        """Drop the memory of the block in a slot."""
        self._held.pop(slot, None)

    @property
    def num_added(self) -> int:
        """Number of jobs added so far."""
        return self._end

    @property
    def num_done(self) -> int:
        """Number of jobs before the first one that is not done."""
        with self._lock:
            return self._num_done()

    def longest(self) -> tuple[int, float] | None:
        """Return the block that has been loading for the longest time, and the seconds."""
        with self._lock:
            if not self._taken:
                return None
            started, jobs = min(self._taken.values(), key=lambda one: one[0])
            return int(jobs.rows[0, BLOCK]), time.perf_counter() - started

    def clear(self) -> None:
        """Drop the memory of all blocks; no thread may be loading."""
        self._held.clear()

    def close(self) -> None:
        """Make `take` and `wait` return; threads may still be in `load`."""
        with self._lock:
            self._is_closed = True
            self._open.clear()
            self._work.notify_all()
            self._done.notify_all()

    # ---- the threads' side

    def take(self) -> TakenJobs | None:
        """Wait for jobs that may begin and take some of them; None once the queue is closed.

        Either all of them are in local files, or it is one that the caller reads.
        """
        with self._lock:
            while not self._is_closed and self._next >= self._ready:
                self._work.wait()
            if self._is_closed:
                return None
            ready = self._ready - self._next
            most = min(_MOST_JOBS, ready, max(_LEAST_JOBS, -(-ready // self.threads)))
            rows = self._jobs[self._next - self._base :][:most]
            count = num_bytes = 0
            files: set[int] = set()
            for file, size in rows[:, [FILE, SIZE]].tolist():
                num_bytes += size
                files.add(file)
                if count and (file < 0 or num_bytes > _MOST_BYTES or len(files) * self.threads > _MOST_READ):
                    break
                count += 1
                if file < 0:
                    break
            taken = TakenJobs(self._next, rows[:count])
            self._next += count
            self._taken[taken.first] = time.perf_counter(), taken
            return taken

    def load(self, jobs: TakenJobs) -> TakenJobs:
        """Load jobs up to one that the caller has to read, and return it with the rest.

        That is a job without a file, or a block that is not what was written.
        """
        while len(jobs.rows) and jobs.rows[0, FILE] >= 0:
            with self._lock:
                if jobs.first not in self._taken:
                    return jobs.after(len(jobs.rows))  # cancelled
                files = self._open_files(jobs.rows[:, FILE].tolist())
                objects = tuple(map(self._objects.get, range(jobs.first, jobs.first + len(files))))
                self._inside += 1
            rows = jobs.rows[: len(files)].copy()
            memory: list[Loan] = []
            loaded, is_cold = 0, False
            try:
                memory = self._memory.lend_all(rows[:, ROOM].tolist())
                rows[:, FILE] = [one.descriptor for one in files]
                rows[:, ADDRESS] = [one.address for one in memory]
                loaded, is_cold = gather.block_rows.load_blocks(rows, objects)
            except MemoryError:  # the caller reads the block, and a step that waits for it raises the error
                pass
            finally:
                with self._lock:
                    self._inside -= 1
                    self._count(rows[:loaded])
                    rest = self._finish(jobs, rows[:loaded], memory[:loaded])
            self._note(rows[:loaded])
            del memory, files
            if is_cold:
                self._ask_disk(rest.first)
            elif len(rest.rows):  # it may be repaired, and is another file then
                self._open.pop(int(rest.rows[0, FILE]), None)
                return rest
            jobs = rest
        return jobs

    def is_cancelled(self, jobs: TakenJobs) -> bool:
        return jobs.first not in self._taken

    def finish(self, jobs: TakenJobs, facts: bytes, memory: Any, num_bytes: int, seconds: float) -> TakenJobs:
        """Note that the caller has read the first job, and return the jobs after it."""
        rows = jobs.rows[:1]
        rows[0, JOB:] = np.frombuffer(facts, np.int64)
        rows[0, RAW_SIZE], rows[0, TOOK] = num_bytes, seconds * 1e9
        with self._lock:
            self._count(rows)
            rest = self._finish(jobs, rows, [memory])
        self._note(rows)
        return rest

    def fail(self, jobs: TakenJobs) -> TakenJobs:
        """Note that the caller could not read the first job, and return the jobs after it."""
        with self._lock:
            return self._finish(jobs, jobs.rows[:1], [None])

    # ---- with the lock held

    @property
    def _end(self) -> int:
        return self._base + len(self._jobs)

    def _num_done(self) -> int:
        return min(self._taken, default=self._next)

    def _release_ready(self, *, works_steps: bool) -> None:
        """Let jobs begin whose slots are free.

        Bytes objects are made by the thread that works the steps: memory of earlier batches that was freed is taken
        again only by the thread that had allocated it.
        """
        base, before, ready, end = self._base, self._ready, self._ready, self._end
        while ready < end and self._after[ready - base] <= self._now:
            if self._makes_objects[ready - base]:
                if not works_steps:
                    break
                self._objects[ready] = gather.block_rows.make_objects(self._jobs[ready - base])
            ready += 1
        self._ready = ready
        if ready > before:
            self._work.notify_all()

    def _finish(self, jobs: TakenJobs, rows: Int64s, memory: Sequence[Any]) -> TakenJobs:
        """Take over facts and memory of the first jobs unless they were cancelled; return the jobs after them.

        `rows` are these jobs with the facts.
        """
        rest = jobs.after(len(rows))
        if self._taken.pop(jobs.first, None) is not None:
            slots = rows[:, SLOT]
            self.facts[slots] = rows[:, JOB:]
            objects = [self._objects.pop(job, None) for job in range(jobs.first, rest.first)]
            self._held.update(zip(slots.tolist(), zip(memory, objects, strict=True), strict=True))
            if len(rest.rows):
                self._taken[rest.first] = time.perf_counter(), rest
        if self._num_done() >= self._need:
            self._done.notify_all()
        return rest

    def _count(self, rows: Int64s) -> None:
        self.counts.block_loads += len(rows)
        self.counts.bytes_loaded += int((rows[:, RAW_SIZE] + rows[:, SIZE] * (rows[:, RAW_SIZE] == 0)).sum())
        self.counts.load_s += int(rows[:, TOOK].sum()) / 1e9

    def _open_files(self, numbers: list[int]) -> list[_OpenFile]:
        """Return these files, up to one that does not open: the caller reads its block and finds out why."""
        files: list[_OpenFile] = []
        with contextlib.suppress(OSError):
            for number in numbers:
                found = self._open.pop(number, None) or _OpenFile(*self._files[number])
                files.append(found)
                if not self._is_closed:
                    self._open[number] = found
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
        return files

    # ---- without the lock

    def _note(self, rows: Int64s) -> None:
        if self.note is not None:
            for block, took in rows[:, [BLOCK, TOOK]].tolist():
                self.note(block, took / 1e9)

    def _ask_disk(self, first: int) -> None:
        """Ask the system to read the next blocks from `first` on, while a thread waits for one."""
        with self._lock:
            first, end = max(self._asked, first, self._base), min(first + _ASK_AHEAD, self._end)
            rows = self._jobs[first - self._base : max(0, end - self._base)]
            wanted = rows[rows[:, FILE] >= 0][:, [FILE, OFFSET, SIZE]].tolist()
            self._asked = max(self._asked, end)
            files = self._open_files([file for file, _, _ in wanted])
        for one, (_, offset, size) in zip(files, wanted, strict=False):
            if hasattr(os, "posix_fadvise"):
                with contextlib.suppress(OSError):
                    os.posix_fadvise(one.descriptor, offset, size, os.POSIX_FADV_WILLNEED)
