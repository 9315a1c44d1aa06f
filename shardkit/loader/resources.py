"""Resources that a loader opens in one process, and the watchdog that reports stalls."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import UsageError
from shardkit.loader import gather
from shardkit.loader.batch import Batch
from shardkit.loader.block_loading import BlockLoading
from shardkit.loader.block_memory import BlockMemory
from shardkit.loader.block_window import BlockWindow
from shardkit.loader.gather import FACTS, Allocate
from shardkit.loader.row_work import RowWork, open_workers
from shardkit.loader.schedule import StepGroup
from shardkit.loader.settings import LoaderSetup, Sources
from shardkit.ranges import shown
from shardkit.reading.located_store import LocatedStore

if TYPE_CHECKING:
    from shardkit.ledger import Journal
    from shardkit.ledger.losses import LossWriter
    from shardkit.loader.batch import LoaderCounts, StepBatches
    from shardkit.loader.remote_blocks import RemoteBlocks
    from shardkit.telemetry.recorder import BlockTimes, RunWatch

__all__ = ["LoaderResources", "Watchdog"]

_ENOUGH_FILES: Final = 4096  # for a training program with its workers, sockets and pipes
_LOADS_BEFORE_ROOM: Final = 16
_LOADS_BEFORE_TELLING: Final = 256  # too few loads would say nothing about the epoch
_ROOM_OF_WINDOWS: Final = (
    1.5  # factor over the blocks that lanes mix at once, because consecutive windows overlap
)
_OWN_THREADS = "shardkit-"  # prefix of the names of all threads that this library starts
_ROOMY_BYTES = 128 << 20  # below this bound 64 MiB of freed memory are not negligible


class LoaderResources:
    """Resources of a loader in one process: the window and its threads, the workers and the journal.

    Args:
        setup: setup of the loader.
        memory: bytes that blocks may take, from `LoaderSetup.memory_bound`.
        needed: bytes that the windows of the lanes need.
    """

    def __init__(self, setup: LoaderSetup, memory: int, needed: int) -> None:
        plan, sources, config = setup.plan, setup.sources, setup.config
        self.process = os.getpid()
        self._setup = setup
        self._bound = None if config.memory is None else memory  # set by the user or control.toml
        self._stages = {start: number for number, (start, _) in enumerate(plan.settings.stages) if number}
        self.told: set[str] = set()  # names of messages that are given once
        self.remote: RemoteBlocks | None = None
        if _needs_network(sources):
            from shardkit.loader.remote_blocks import RemoteBlocks

            if self._bound is None:  # reading ahead expects blocks that are used again in memory
                memory = memory * 3 // 2
            self.remote = RemoteBlocks(setup, memory)
        # Blocks after use are kept up to the bound if they came over a network, or if any step may need them again.
        self._fills = self.remote is not None or plan.settings.shuffle == "full"
        start = memory if self._fills or self._bound is None else needed
        reader = (self.remote or sources).reader

        self.close_pipeline: Callable[[], None] = lambda: None  # closes the current pipeline
        self.watch: RunWatch | None = None
        self.times: BlockTimes | None = None
        self._memory = BlockMemory(start)
        self._batch_memory = BlockMemory(0, inherited=True)
        width = 1 + FACTS * len(setup.fields)
        timed = config.run is not None and config.telemetry is not None
        self._loads = gather.block_rows.Loads(width, timed)
        load = self._load = BlockLoading(sources, reader, setup.fields, self._memory.take, self._loads)
        if timed:
            from shardkit.telemetry.recorder import BlockTimes

            self.times = load.times = BlockTimes(lambda shard: reader.shard_name(shard)[18:30], load.has_file)

        _raise_file_limit()
        if start >= _ROOMY_BYTES:
            _keep_freed_memory()
        self._threads = config.num_threads
        self.window = BlockWindow(load, self._loads, self._memory, start, self._threads, width)
        self.workers: Executor | None = None
        if setup.function is not None:
            self.workers = open_workers(config.workers, self._threads, setup.function)
        self._losses: LossWriter | None = None  # opened when the first losses are noted
        self.journal: Journal | None = None
        if config.run is not None:
            from shardkit.ledger import Journal

            self.journal = Journal(
                config.run / "journal", manifest=sources.manifest, plan=plan.digest, rank=setup.topology.rank,
                world=setup.topology.world, lanes=plan.lanes, worker=config.offset, workers=config.stride,
                meta={"history": plan.history(), "dataset": reader.urls, "beside": _seen_from(config.run, reader.urls)},
            )  # fmt: skip

    @property
    def memory(self) -> int:
        """Bytes that blocks may take now."""
        return self.window.budget

    @memory.setter
    def memory(self, num_bytes: int) -> None:
        self.window.budget = self._memory.limit = num_bytes

    @property
    def bound(self) -> int:
        """Bytes that blocks may ever take, if the user has set it; otherwise `memory`."""
        return self.memory if self._bound is None else self._bound

    @bound.setter
    def bound(self, num_bytes: int) -> None:
        self._bound = num_bytes
        self.memory = num_bytes if self._fills else min(self.memory, num_bytes)

    def note_times(self) -> None:
        """Pass the durations of loads in the C module to `times`."""
        if self.times is not None:
            self._load.note_times()

    def read_ahead(self, numbers: range, lanes: list[int]) -> None:
        """Read ahead over the network from the first of these steps on."""
        if self.remote is not None and numbers:
            self.remote.start(numbers.start, lanes, self.window.is_loaded)

    def make_room(self, num_bytes: int) -> bool:
        """Raise `memory` to 1.5 times `num_bytes`, within the bound.

        Returns False if it cannot grow or `num_bytes` would exceed the bound.
        """
        room = max(self.memory, num_bytes * 3 // 2)
        if self._bound is not None:
            room = min(room, self._bound)
        if room < num_bytes or room <= self.memory:
            return False
        self.memory = room
        return True

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
            if (made_by := self._setup.made_by) and "decoders" not in self.told:
                self.told.add("decoders")
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
        setup = self._setup
        plan, run, step = setup.plan, setup.config.run, batches[0].step
        if self._losses is None:
            from shardkit.ledger.losses import LossWriter

            assert run is not None, "checked by `Loader.note`"
            assert self.journal is not None, "there is one with a run directory"
            self._losses = LossWriter(
                run, rank=setup.topology.rank, plan=plan.digest, since=self.journal.started,
                batch=plan.global_batch, lanes=plan.lanes, cell_size=plan.cell_size,
            )  # fmt: skip
        slots = batches[0].slots if len(batches) == 1 else np.concatenate([one.slots for one in batches])
        self._losses.write(step, slots, losses)
        if setup.mixing is not None:
            samples = np.concatenate([one.samples for one in batches])
            setup.mixing.note(step, samples, slots, losses)

    def _record_replacements(self, facts: dict[str, Any]) -> None:
        details = {name: value for name, value in facts.items() if name != "kind"}
        self._setup.events.record(facts["kind"], **details)
        if self.journal is not None:
            from shardkit.ledger import MASKED, SUBSTITUTED

            kind = SUBSTITUTED if facts["kind"] == "substitution" else MASKED
            self.journal.event(kind=kind, **details)  # the audit needs it

    def row_work(self, allocate: Allocate) -> RowWork | None:
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
        self._memory.close()
        self._batch_memory.close()
        if self.workers is not None:
            self.workers.shutdown(wait=True, cancel_futures=True)
        if self.journal is not None:
            self.journal.close()
        if self._losses is not None:
            self._losses.close()

    def close_unwatched(self) -> None:
        """Close the resources of a loader that was garbage-collected, from any thread.

        The collector may run on one of the loader's own threads, which cannot join itself.
        """
        if threading.current_thread().name.startswith(_OWN_THREADS):
            threading.Thread(target=self.close, name="shardkit-close", daemon=True).start()
        else:
            self.close()


class Watchdog:
    """Reports stalls; called by a thread that has waited too long, so it costs nothing otherwise.

    Args:
        setup: setup of the loader.
        resources: open resources of the loader.
        lanes: number of lanes that are read.
        work: decoding and transforms, to report the sample being transformed; None without them.
    """

    def __init__(
        self, setup: LoaderSetup, resources: LoaderResources, lanes: int, work: RowWork | None
    ) -> None:
        self._setup, self._resources, self._lanes, self._work = setup, resources, lanes, work

    def report_stall(self, waited: float, stage: str, group: StepGroup | None) -> None:
        """Report a wait of `waited` seconds in `stage` of `group`."""
        (rank, world, _), sources = self._setup.topology, self._setup.sources
        facts: dict[str, Any] = {"rank": rank, "world": world, "waited_s": round(waited, 1), "stage": stage}
        at = None if self._work is None else self._work.at
        loading = self._resources.window.longest_load()
        if at is not None:
            facts |= {"stage": "transform", "step": at[0], "sample": at[1]}
        elif loading is not None:
            block, seconds = loading
            shard, inside = sources.rows.shard_of_block(block)
            facts |= {"stage": "load", "shard": sources.reader.shard_name(shard), "block": inside,
                      "loading_s": round(seconds, 1)}  # fmt: skip
            facts |= self._needed_by(block, group)
        elif group is not None:
            facts["step"] = group.numbers[0]
        self._tell(facts)

    def over_memory(self, step: int, needed: int) -> None:
        """Warn that the blocks of a single step exceed the memory bound; only once, because other steps will too."""
        told, budget = self._resources.told, self._resources.memory
        if "over_memory" in told:
            return
        told.add("over_memory")
        self._setup.events.record("over_memory", step=step, needed_bytes=needed, memory_bytes=budget)
        warnings.warn(
            f"shardkit: the blocks of step {step} take {needed / 2**20:.1f} MiB, memory={budget / 2**20:.1f} MiB; they "
            "are loaded all the same. Give the loader more memory, the plan fewer lanes, or the dataset smaller blocks "
            "(shardkit rebuild --block-size)",
            RuntimeWarning,
            stacklevel=2,
        )

    def note_admission(self) -> None:
        """Check whether most loads of the epoch are of blocks that were evicted before.

        If so, memory grows unless the user has bounded it; otherwise a warning is given once.
        """
        resources, settings = self._resources, self._setup.plan.settings
        window, told = resources.window, resources.told
        full, loads = settings.shuffle == "full", window.epoch_loads
        again = window.epoch_reloads if full else window.epoch_soon_again
        if "rereading" in told or loads < _LOADS_BEFORE_ROOM or 2 * again < loads:
            return
        budget = window.budget
        if not full and resources.make_room(budget):
            window.count_anew()
            return
        if loads < _LOADS_BEFORE_TELLING:
            return
        told.add("rereading")
        self._setup.events.record("rereading", loads=loads, reloads=again, memory_bytes=budget)
        if full:
            advice = (
                'rows of all blocks are mixed with shuffle="full", so that only the whole dataset would do'
            )
        else:
            # many strata need more than the windows
            mixed = self._lanes * settings.window_blocks * window.mean_block()
            needed = max(2 * budget, _ROOM_OF_WINDOWS * mixed)
            advice = (
                f"{self._lanes} lanes mix rows of {settings.window_blocks} blocks each: give the loader "
                f"memory={_in_mib(needed)!r}, or the plan fewer lanes or a smaller window_blocks"
            )
        warnings.warn(
            f"shardkit: memory={_in_mib(budget)!r} is too little: of {loads} blocks that were read, {again} had been "
            f"read and dropped before in the same epoch; {advice}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _needed_by(self, block: int, group: StepGroup | None) -> dict[str, Any]:
        rows = np.zeros(0, np.int64) if group is None else np.flatnonzero(group.block_of == block)
        if group is None or not len(rows):
            return {}
        first = int(rows[0])
        step = int(np.searchsorted(group.borders, first, side="right")) - 1
        return {"step": group.numbers[step], "lane": int(group.slots[first]) // self._setup.plan.cell_size}

    def _tell(self, facts: dict[str, Any]) -> None:
        self._setup.events.record("stall", **{name: value for name, value in facts.items() if name != "rank"})
        if self._setup.config.on_stall is not None:
            self._setup.config.on_stall(facts)
            return
        details = ", ".join(f"{name} {facts[name]}" for name in ("step", "lane", "sample", "shard", "block")
                            if name in facts)  # fmt: skip
        warnings.warn(
            f"shardkit: rank {facts['rank']} of {facts['world']} has waited {facts['waited_s']} s for a batch; stage "
            f"{facts['stage']}" + (f" ({details})" if details else ""),
            RuntimeWarning,
            stacklevel=2,
        )


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


def _in_mib(size: float) -> str:
    return f"{math.ceil(size / 2**20)}MiB"
