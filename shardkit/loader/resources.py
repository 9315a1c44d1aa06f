"""A running loader in one process: its resources, the loop over one epoch, and the numbers that telemetry reads."""

from __future__ import annotations

import _thread
import contextlib
import copy
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardkit.errors import UsageError
from shardkit.loader.batch import Batch, LoaderCounts, StepBatches, WindowCounts
from shardkit.loader.block_loading import BlockLoading
from shardkit.loader.block_memory import BlockMemory, MemoryBound
from shardkit.loader.block_window import BlockWindow
from shardkit.loader.gather import FACTS, Allocate
from shardkit.loader.load_queue import LoadQueue
from shardkit.loader.pipeline import Pipeline
from shardkit.loader.row_work import RowWork, open_workers
from shardkit.loader.settings import LoaderSetup, Sources
from shardkit.ranges import shown
from shardkit.reading.located_store import LocatedStore

if TYPE_CHECKING:
    from shardkit.ledger import Journal
    from shardkit.loader.remote_blocks import RemoteBlocks
    from shardkit.telemetry.recorder import BlockTimes, RunWatch

__all__ = ["LiveLoader", "LoaderResources", "Loop"]

T = TypeVar("T")

_ENOUGH_FILES: Final = 4096  # for a training program with its workers, sockets and pipes
_OWN_THREADS = "shardkit-"  # prefix of the names of all threads that this library starts
_ROOMY_BYTES = 128 << 20  # below this bound 64 MiB of freed memory are not negligible


class LoaderResources:
    """Resources of a loader in one process: the pipeline, the window and its threads, the workers and the journal.

    `lanes` is the number of lanes that the rank works; `counts` are the loader's counters.
    """

    def __init__(self, setup: LoaderSetup, lanes: int, counts: LoaderCounts) -> None:
        plan, sources, config = setup.plan, setup.sources, setup.config
        self.process = os.getpid()
        self._setup, self._counts = setup, counts
        self._stages = {start: number for number, (start, _) in enumerate(plan.settings.stages) if number}
        self._has_named_decoders = False
        over_network = _needs_network(sources)
        self.memory = MemoryBound(setup, lanes, over_network=over_network)
        self.remote: RemoteBlocks | None = None
        if over_network:
            from shardkit.loader.remote_blocks import RemoteBlocks

            self.remote = RemoteBlocks(setup, self.memory.pool.limit)
        reader = (self.remote or sources).reader

        self._pipeline: Pipeline | None = None  # reads for the current loop or for the next one
        self._prefetch = 0  # finished steps that may wait, if that was changed
        self.watch: RunWatch | None = None
        self.times: BlockTimes | None = None
        self._batch_memory = BlockMemory(0, inherited=True)
        width = 1 + FACTS * len(setup.fields)
        self._threads = config.num_threads
        queue = LoadQueue(width, self._threads, self.memory.pool)
        load = self._load = BlockLoading(sources, reader, setup.fields, self.memory.pool.take, queue)
        if config.run is not None and config.telemetry is not None:
            self.times = load.watch()

        _raise_file_limit()
        if self.memory.pool.limit >= _ROOMY_BYTES:
            _keep_freed_memory()
        self.window = BlockWindow(load, queue, self.memory.pool)
        self.workers: Executor | None = None
        if setup.function is not None:
            self.workers = open_workers(config.workers, self._threads, setup.function)
        self.journal: Journal | None = None
        if config.run is not None:
            from shardkit.ledger import Journal

            self.journal = Journal(
                config.run / "journal", manifest=sources.manifest, plan=plan.digest, rank=setup.topology.rank,
                world=setup.topology.world, lanes=plan.lanes, worker=config.offset, workers=config.stride,
                meta={"history": plan.history(), "dataset": reader.urls, "beside": _seen_from(config.run, reader.urls)},
            )  # fmt: skip

    def read_ahead(self, numbers: range, lanes: list[int]) -> None:
        """Read ahead over the network from the first of these steps on."""
        if self.remote is not None and numbers:
            self.remote.start(numbers.start, lanes, self.window.is_loaded)

    def read(self, numbers: range, lanes: list[int], allocate: Allocate, *, goes_on: bool) -> Pipeline:
        """Return the pipeline that reads these steps of these lanes next; open one unless it does already."""
        pipeline = self._pipeline
        if pipeline is None or pipeline.is_closed or pipeline.left != numbers or pipeline.lanes != lanes:
            self.close_pipeline()
            self.read_ahead(numbers, lanes)
            self.memory.serve(len(lanes))
            pipeline = self._pipeline = Pipeline(
                self._setup, self.window, self.memory, self._row_work(allocate), self.times, self._counts, numbers,
                lanes, allocate, goes_on=goes_on, prefetch=self._prefetch,
            )  # fmt: skip
        return pipeline

    def close_pipeline(self) -> None:
        """Stop reading; does nothing in a forked child, which has no threads, and whose locks may be held for ever."""
        if self._pipeline is not None and self.process == os.getpid():
            self._pipeline.close()
            self._pipeline = None

    @property
    def prefetch(self) -> int | None:
        """Number of finished steps that may wait; None if each step is gathered on request."""
        return None if self._pipeline is None else self._pipeline.prefetch or None

    @prefetch.setter
    def prefetch(self, steps: int) -> None:
        self._prefetch = steps
        if self._pipeline is not None:
            self._pipeline.prefetch = steps

    def numbers(self) -> dict[str, float]:
        """Return counters of block loads, and what is in memory and in queues, for `Loader.stats`."""
        groups, steps = (0, 0) if self._pipeline is None else self._pipeline.queued
        return _numbers(self.window.counts) | {
            "window_bytes": float(self.window.nbytes),
            "queued_groups": float(groups),
            "queued_steps": float(steps),
        }

    @property
    def verification_failures(self) -> int:
        """Number of blocks that failed verification in all locations."""
        return self._load.verification_failures

    def record_step(self, one: StepBatches, lanes: Sequence[int], *, last: bool) -> None:
        """Journal a step that is about to be handed out; `last` says that it is the last one of its epoch."""
        journal, remote = self.journal, self.remote
        if journal is not None:
            journal.record_step(one.step, lanes, one.lane_counts.tolist(), one.samples)
        for facts in one.replaced:
            self._record_replacements(facts)
            self._counts.substitutions += 1
        if remote is not None:
            remote.supply.advance(one.step)
            if journal is not None:
                remote.journaled.flush(one.step, journal, everything=last)
        if journal is not None and lanes[:1] == [0]:
            if one.step in self._stages:
                journal.event(one.step, "stage", number=self._stages[one.step])
            if (made_by := self._setup.made_by) and not self._has_named_decoders:
                self._has_named_decoders = True
                journal.event(one.step, "decoders", made_by=made_by)

    def note_losses(self, batches: Sequence[Batch], losses: Any) -> None:
        """Record the losses of a step in the run directory, one per row or one per cell, and pass them to the mixer.

        Raises:
            UsageError: an argument is of another kind, or there are other numbers of losses.
        """
        if not isinstance(batches, list | tuple) or not all(
            isinstance(one, Batch) for one in batches or [None]
        ):
            raise UsageError(
                f"loader.note(batch, losses): {shown(batches)} is no batch; pass what the loader handed out"
            )
        try:
            losses = losses.detach().float().cpu().numpy() if hasattr(losses, "detach") else losses
            losses = np.asarray(losses, dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(
                f"loader.note(batch, losses): {shown(losses)}: expected one number per row, or one per cell"
            ) from None
        setup, step = self._setup, batches[0].step
        slots = np.concatenate([one.slots for one in batches])
        borders = np.flatnonzero(np.diff(slots // setup.plan.cell_size, prepend=-1))  # first rows of cells
        if losses.shape not in ((len(slots),), (len(borders),)):
            raise UsageError(
                f"step {step}: losses of shape {losses.shape}, expected ({len(slots)},), one per row of the batch, or "
                f"({len(borders)},), one per cell"
            )
        if len(losses) != len(slots):
            losses = np.repeat(losses, np.diff(borders, append=len(slots)))
        assert self.journal is not None, "checked by `Loader.note`"
        self.journal.record_losses(step, slots, losses)
        if setup.mixing is not None:
            samples = np.concatenate([one.samples for one in batches])
            setup.mixing.note(step, samples, losses)

    def _record_replacements(self, facts: dict[str, Any]) -> None:
        details = {name: value for name, value in facts.items() if name != "kind"}
        self._setup.events.record(facts["kind"], **details)
        if self.journal is not None:
            from shardkit.ledger import MASKED, SUBSTITUTED

            kind = SUBSTITUTED if facts["kind"] == "substitution" else MASKED
            self.journal.event(kind=kind, **details)  # the audit needs it

    def _row_work(self, allocate: Allocate) -> RowWork | None:
        """Return the decoding and transforms of one loop; None if rows are handed out as stored.

        `allocate` makes the arrays of batches that decoders write to.
        """
        if self._setup.function is None and self._setup.config.batch_transform is None:
            return None
        parts = self._threads * 2
        if allocate is np.empty:  # fresh pages for each batch would cost a fifth of decoding it
            allocate = self._batch_array
        return RowWork(self._setup, workers=self.workers, parts=parts, allocate=allocate)

    def _batch_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Allocate an array, preferably in the memory of an earlier batch that is not referenced."""
        taken = self._batch_memory.take(math.prod(shape) * dtype.itemsize)
        array: NDArray[Any] = taken.view(dtype).reshape(shape)
        return array

    def close(self) -> None:
        """Close all resources; may be called twice, and does nothing in a forked child."""
        if self.process != os.getpid():
            return
        self.close_pipeline()  # first: its threads must end by themselves, not at exit while they hold locks
        if self.watch is not None:
            self.watch.close()
        if self.remote is not None:
            self.remote.close()
        self.window.close()
        self.memory.pool.close()
        self._batch_memory.close()
        if self.workers is not None:
            self.workers.shutdown(wait=True, cancel_futures=True)
        if self.journal is not None:
            self.journal.close()

    def close_unwatched(self) -> None:
        """Close the resources of a loader that was garbage-collected, from any thread.

        The collector may run on one of the loader's own threads, which cannot join itself. It may run inside a library
        that holds a lock which the new thread needs, so the start of that thread is not waited for.
        """
        if threading.current_thread().name.startswith(_OWN_THREADS):
            _thread.start_new_thread(self.close, ())
        else:
            self.close()


class Loop(Iterator[Batch]):
    """Iterator over the steps of one epoch; ``iter(loader)`` returns one.

    `hand_out` returns the next batch; `finish` is called when another one is requested after the last step, and `leave`
    when the loop is ended before it. After an error every later call raises it again, so a loop that failed cannot look
    complete. Only the loop refers to its error: a traceback refers to the loader, which would never be collected if
    anything did that lives until the loader is closed.
    """

    # reason why it ended before its last step, or what came after it; a copy that `copy` gave up has none
    ended_by: str | None = None
    left = range(0)  # not handed out yet

    def __init__(
        self,
        hand_out: Callable[[Loop], Batch],
        finish: Callable[[Loop], None],
        leave: Callable[[Loop], None],
        numbers: range,
        stop: int,
    ) -> None:
        self._hand_out, self._finish, self._leave = hand_out, finish, leave
        self.left = numbers
        self.stop = stop  # the first step of the next epoch
        self._error: Exception | None = None
        self._turn, self._process = threading.Lock(), os.getpid()

    def __next__(self) -> Batch:
        """Return the next batch."""
        self._take_turn()
        try:
            if not self.left:
                self._finish(self)
                raise StopIteration
            return self.run(self._hand_out)
        finally:
            self._turn.release()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Return a context during which other threads may not take a batch."""
        self._take_turn()
        try:
            yield
        finally:
            self._turn.release()

    def run(self, work: Callable[[Loop], T]) -> T:
        """Return the result of `work` on this loop, or raise the error with which the loop has ended or failed."""
        if self.ended_by is not None:
            raise self.ended()
        if self._error is not None:
            raise self._error
        try:
            return work(self)
        except Exception as error:
            self._error = error
            raise
        except BaseException as error:
            text = f"this loop was interrupted by {type(error).__name__}"
            self._error = UsageError(f"{text}; iterate again, or load a state")
            raise

    def _take_turn(self) -> None:
        """Raise UsageError if another thread is taking a batch, or in a forked child; the loop does not change."""
        if self.left and self._process != os.getpid():
            raise UsageError(
                "this loop was begun in the parent process, and its threads and blocks are there; iterate "
                "over the loader again to begin one here"
            )
        if not self._turn.acquire(blocking=False):
            raise UsageError(
                f"another thread is taking step {self.left[0] if self.left else self.stop} from this loop, and batches "
                "come in order, one at a time: take them in one thread, or hold a lock around next(); the loop "
                "continues in the other thread"
            )

    def ended(self) -> UsageError:
        """Return the error that a loop raises if it ended before its last step."""
        return UsageError(
            f"this loop ended before step {self.left[0]}: {self.ended_by}. A loader has one loop at a time; to look at "
            "the next batch without leaving the loop call loader.peek()"
        )

    def close(self, reason: str = "it was closed") -> None:
        """End the loop and stop reading for it; may be called twice."""
        if self.ended_by is None:
            self.ended_by = reason
            if self.left:
                self._leave(self)

    def __del__(self) -> None:
        self.close()

    @property
    def is_under_way(self) -> bool:
        """True if the loop has another batch to deliver."""
        return bool(self.left) and self.ended_by is None


class LiveLoader:
    """State of a running loader; telemetry and control hold this object, so that they do not keep the loader alive."""

    def __init__(self, lanes: list[int]) -> None:
        self.lanes = lanes  # that the rank works now
        self.counts = LoaderCounts()  # of all loops
        self._before = LoaderCounts()  # the same when the current or last loop began
        self.resources: LoaderResources | None = None  # open in this process; None before the first loop
        self.handed_out = 0  # the step after the last one handed out
        self.cells = 0  # handed out in all loops
        self.step_cells = 0  # that have rows in the last step
        # `time.perf_counter` of the loop's start, and of the last batch
        self.started_at = self.handed_at = 0.0
        self.computed_s = -1.0  # time of the rank's part of the last step; negative if not reported
        self._is_with_trainer = False  # the trainer has a batch

    def begin_loop(self) -> None:
        """Count a loop from now on."""
        self.counts.last_wait_s = 0.0
        self._before = copy.copy(self.counts)
        self.started_at = self.handed_at = time.perf_counter()

    def hand_out(self, cursor: int, cells: int) -> None:
        """Note that the trainer gets a batch of `cells` cells; `cursor` is the step after it."""
        self.handed_out, self.step_cells, self._is_with_trainer = cursor, cells, True
        self.cells += len(self.lanes)
        self.handed_at, self.computed_s = time.perf_counter(), -1.0

    def come_back(self) -> bool:
        """Note that the trainer has finished its batch; return False if it had none."""
        had_batch, self._is_with_trainer = self._is_with_trainer, False
        if had_batch:
            self.counts.computed_s += max(0.0, self.computed_s)
        return had_batch

    def of_loop(self) -> dict[str, float]:
        """Return counters of the current or last loop and of all block loads, for `Loader.stats`."""
        before = _numbers(self._before)
        found = {name: value - before[name] for name, value in _numbers(self.counts).items()}
        elapsed = self.handed_at - self.started_at
        return found | self._now() | self.reads() | {
            "lanes": float(len(self.lanes)),
            "elapsed_s": elapsed,
            "wait_per_step_s": found["consumer_wait_s"] / max(1.0, found["steps"]),
            "samples_per_s": found["samples"] / elapsed if elapsed else 0.0,
        }  # fmt: skip

    def of_all_loops(self) -> dict[str, float]:
        """Return counters summed over all loops, for telemetry, whose counters only grow."""
        found = _numbers(self.counts) | self._now() | {"cells": float(self.cells)}
        if self.resources is not None:
            found["memory_bytes"] = float(self.resources.memory.pool.limit)
            found["verification_failures"] = float(self.resources.verification_failures)
        return found

    def _now(self) -> dict[str, float]:
        found = {"step": float(self.handed_out)}
        return found if self.resources is None else found | self.resources.numbers()

    def reads(self) -> dict[str, float]:
        """Return counters of network reads and of the cache; empty if all blocks are local."""
        return (
            {} if self.resources is None or self.resources.remote is None else self.resources.remote.stats()
        )


def _numbers(counts: LoaderCounts | WindowCounts) -> dict[str, float]:
    return {name: float(value) for name, value in msgspec.structs.asdict(counts).items()}


def _needs_network(sources: Sources) -> bool:
    """Return True if blocks may come over a network: a store is not a folder, or has several locations."""
    return any(
        isinstance(store, LocatedStore) or store.local_path("shardkit.json") is None
        for store in sources.reader.stores
    )


def _seen_from(run: Path, urls: Sequence[str]) -> list[str]:
    """Return local roots as paths relative to the run directory, as both may be moved together; "" for other URLs."""
    return ["" if "://" in url else os.path.relpath(url, run) for url in urls]


def _keep_freed_memory() -> None:
    """Make glibc keep up to 64 MiB of freed memory instead of returning it after every batch.

    glibc raises its thresholds after a program has freed a mapping of nearly 32 MiB (M_MMAP_THRESHOLD in mallopt(3)).
    The mapping freed here is never touched and costs two system calls. Otherwise a batch of large samples spends a
    quarter of its time on page faults. Other allocators are not affected.
    """
    np.empty((32 << 20) - (1 << 16), dtype=np.uint8)


def _raise_file_limit() -> None:
    """Raise this process's limit of open files to 4,096, or as far as the hard limit allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
