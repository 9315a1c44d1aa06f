"""A running loader in one process: its resources, the loop over one epoch, and the numbers that telemetry reads."""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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

_ENOUGH_FILES: Final = 4096  # for a training program with its workers, sockets and pipes
_OWN_THREADS = "shardkit-"  # prefix of the names of all threads that this library starts
_ROOMY_BYTES = 128 << 20  # below this bound 64 MiB of freed memory are not negligible


class LoaderResources:
    """Resources of a loader in one process: the pipeline, the window and its threads, the workers and the journal.

    `lanes` is the number of lanes that the rank works.
    """

    def __init__(self, setup: LoaderSetup, lanes: int) -> None:
        plan, sources, config = setup.plan, setup.sources, setup.config
        self.process = os.getpid()
        self._setup = setup
        self._stages = {start: number for number, (start, _) in enumerate(plan.settings.stages) if number}
        self._has_named_decoders = False
        over_network = _needs_network(sources)
        self.memory = MemoryBound(setup, lanes, over_network=over_network)
        self.remote: RemoteBlocks | None = None
        if over_network:
            from shardkit.loader.remote_blocks import RemoteBlocks

            self.remote = RemoteBlocks(setup, self.memory.pool.limit)
        reader = (self.remote or sources).reader

        self.pipeline: Pipeline | None = None  # reads for the current loop or for the next one
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

    def open_pipeline(
        self, numbers: range, lanes: list[int], allocate: Allocate, *, goes_on: bool, prefetch: int
    ) -> Pipeline:
        """Replace the pipeline by one that reads these steps of these lanes; see `Pipeline`."""
        self.close_pipeline()
        self.read_ahead(numbers, lanes)
        self.memory.serve(len(lanes))
        self.pipeline = Pipeline(
            self._setup, self.window, self.memory, self._row_work(allocate), self.times, numbers, lanes, allocate,
            goes_on=goes_on, prefetch=prefetch,
        )  # fmt: skip
        return self.pipeline

    def close_pipeline(self) -> None:
        """Stop reading for the loop under way, or for the next one."""
        if self.pipeline is not None:
            self.pipeline.close()
        self.pipeline = None

    @property
    def verification_failures(self) -> int:
        """Number of blocks that failed verification in all locations."""
        return self._load.verification_failures

    def record_step(
        self, one: StepBatches, lanes: Sequence[int], counts: LoaderCounts, *, last: bool
    ) -> None:
        """Journal a step that is about to be handed out; `last` says that it is the last one of its epoch."""
        journal, remote = self.journal, self.remote
        if journal is not None:
            journal.record_step(one.step, lanes, one.lane_counts.tolist(), one.samples)
        for facts in one.replaced:
            self._record_replacements(facts)
            counts.substitutions += 1
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

    `hand_out` takes the next step from the pipeline and returns it as the trainer gets it; `finish` is called when
    another batch is requested after the last step. The pipeline is replaced when lanes move. `stop` is the first step
    of the next epoch.
    """

    def __init__(
        self,
        hand_out: Callable[[Loop], Batch],
        finish: Callable[[Loop], None],
        pipeline: Pipeline,
        numbers: range,
        stop: int,
        counts: LoaderCounts,
    ) -> None:
        self._hand_out, self._finish = hand_out, finish
        self.pipeline, self.stop, self.counts = pipeline, stop, counts
        self.left = numbers  # not handed out yet
        self.ended_by: str | None = None  # reason why it ended before its last step
        self._turn = threading.Lock()

    def __next__(self) -> Batch:
        """Return the next batch."""
        self._take_turn()
        try:
            if not self.left:
                self._finish(self)
                raise StopIteration
            if self.ended_by is not None:
                raise self.ended()
            return self._hand_out(self)
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

    def _take_turn(self) -> None:
        """Raise UsageError if another thread is taking a batch; the loop does not change."""
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

    def close(self) -> None:
        """End the loop and stop reading for it; may be called twice."""
        self.ended_by = self.ended_by or "it was closed"
        if self.left:
            self.pipeline.close()

    def __del__(self) -> None:
        if self.left:
            self.pipeline.close()

    @property
    def is_under_way(self) -> bool:
        """True if the loop has another batch to deliver."""
        return bool(self.left) and self.ended_by is None


class LiveLoader:
    """State of a running loader; telemetry and control hold this object, so that they do not keep the loader alive."""

    def __init__(self, lanes: list[int]) -> None:
        self.lanes = lanes  # that the rank works now
        self.counts = LoaderCounts()  # of the current or last loop
        self.resources: LoaderResources | None = None  # open in this process; None before the first loop
        self.handed_out = 0  # the step after the last one handed out
        self.cells = 0  # handed out in all loops
        self.chosen_prefetch = 0  # finished steps that may wait, if that was changed while the loader ran
        # `time.perf_counter` of the loop's start, and of the last batch
        self.started_at = self.handed_at = 0.0
        self.computed_s = -1.0  # time of the rank's part of the last step; negative if not reported
        self._with_trainer: LoaderCounts | None = None  # counters of the loop whose batch the trainer has
        self._lock = threading.Lock()
        self._past: Counter[str] = Counter()  # sums of the counters of earlier loops

    def begin_loop(self, counts: LoaderCounts) -> None:
        """Add the counters of the last loop to the sums, and count in `counts` from now on."""
        with self._lock:
            self._past.update(_numbers(self.counts, but="last_wait_s"))
            self.counts = counts
        self.started_at = self.handed_at = time.perf_counter()

    def begin_batch(self, counts: LoaderCounts) -> None:
        """Note that the trainer gets a batch of the loop with these counters."""
        self._with_trainer = counts
        self.handed_at, self.computed_s = time.perf_counter(), -1.0

    def end_batch(self, counts: LoaderCounts) -> bool:
        """Note that the trainer comes back to the loop with these counters; return True if it had a batch of it."""
        if self._with_trainer is not counts:
            return False
        self._with_trainer = None
        counts.computed_s += max(0.0, self.computed_s)
        return True

    @property
    def pipeline(self) -> Pipeline | None:
        """Reads for the current loop or for the next one; None if nothing is read."""
        return None if self.resources is None else self.resources.pipeline

    @property
    def prefetch(self) -> int | None:
        """Number of finished steps that may wait; None if each step is gathered on request."""
        return None if self.pipeline is None else self.pipeline.prefetch or None

    @prefetch.setter
    def prefetch(self, steps: int) -> None:
        self.chosen_prefetch = steps
        if self.pipeline is not None:
            self.pipeline.prefetch = steps

    def of_loop(self) -> dict[str, float]:
        """Return counters of the loop and of all block loads, for `Loader.stats`."""
        counts = self.counts
        found = _numbers(counts) | self._now() | {"lanes": float(len(self.lanes))}
        found["wait_per_step_s"] = counts.consumer_wait_s / max(1, counts.steps)
        elapsed = found["elapsed_s"] = self.handed_at - self.started_at
        found["samples_per_s"] = counts.samples / elapsed if elapsed else 0.0
        return found | self.reads()

    def of_all_loops(self) -> dict[str, float]:
        """Return counters summed over all loops, for telemetry, whose counters only grow."""
        with self._lock:
            found: Counter[str] = self._past.copy()
            counts = self.counts
            found.update(_numbers(counts, but="last_wait_s"))
        more = {"cells": float(self.cells), "last_wait_s": counts.last_wait_s}
        if self.resources is not None:
            more["memory_bytes"] = float(self.resources.memory.pool.limit)
            more["verification_failures"] = float(self.resources.verification_failures)
        return dict(found) | self._now() | more

    def _now(self) -> dict[str, float]:
        found = {"step": float(self.handed_out)}
        if self.pipeline is not None:
            found["queued_groups"], found["queued_steps"] = map(float, self.pipeline.queued)
        if self.resources is not None:
            window = self.resources.window
            found |= _numbers(window.counts)
            found["window_bytes"] = float(window.nbytes)
        return found

    def reads(self) -> dict[str, float]:
        """Return counters of network reads and of the cache; empty if all blocks are local."""
        return (
            {} if self.resources is None or self.resources.remote is None else self.resources.remote.stats()
        )


def _numbers(counts: LoaderCounts | WindowCounts, but: str = "") -> dict[str, float]:
    return {name: float(value) for name, value in msgspec.structs.asdict(counts).items() if name != but}


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
