"""What a loader opens in one process: the window and its threads, the workers, the journal."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import lru_cache
from typing import Protocol

import numpy as np

from shardkit.errors import ShardkitError
from shardkit.ledger import Journal
from shardkit.loader.block_loading import BlockLoading
from shardkit.loader.block_memory import BlockMemory
from shardkit.loader.block_window import BlockSource, BlockWindow
from shardkit.loader.events import EventLog
from shardkit.loader.ranks import Topology
from shardkit.loader.remote_blocks import open_remote_blocks
from shardkit.loader.row_work import RowWork, open_workers
from shardkit.loader.schedule import StepGroup, first_lanes, plan_group
from shardkit.loader.settings import LoaderConfig, Sources
from shardkit.loader.transforms import RowFunction, SubstituteDraw
from shardkit.plan import Plan
from shardkit.stores.open_files import raise_file_limit
from shardkit.telemetry.slow_blocks import BlockTimes

__all__ = ["LoaderResources", "default_threads"]

_OWN_THREADS = "shardkit-"  # how the names of all threads that this library starts begin
_ROOMY_BYTES = 512 << 20  # below this bound 64 MiB of freed memory are not negligible


class Watch(Protocol):
    """What runs beside a loader."""

    @property
    def port(self) -> int | None:
        """Where /metrics and /healthz are served."""

    def close(self) -> None:
        """Write the last record, stop; may be called twice."""


class LoaderResources:
    """What a loader opens in one process: the window and its threads, the workers, the journal."""

    def __init__(
        self,
        plan: Plan,
        sources: Sources,
        config: LoaderConfig,
        topology: Topology,
        function: RowFunction,
        fields: Sequence[str],
        lanes: list[int],
        events: EventLog,
        memory: int,
    ) -> None:
        self.process = os.getpid()
        self._config, self._function = config, function
        self.is_bounded = config.memory is not None  # by who made the loader, or later by control.toml
        self.remote = open_remote_blocks(plan, sources, config, lanes, events, memory)
        reader, rows = (self.remote or sources).reader, sources.rows

        has_file = lru_cache(maxsize=1 << 16)(reader.has_file)

        def size_of(block: int) -> int:
            shard, inside = rows.shard_of_block(block)
            with contextlib.suppress(ShardkitError):  # loading the block says what is wrong
                if has_file(shard):
                    return reader.raw_size(shard, inside)
            return sources.block_bytes(block)

        self.watch: Watch | None = None
        self.times: BlockTimes | None = None
        if config.run is not None and config.telemetry is not None:
            self.times = BlockTimes(lambda shard: reader.shard_name(shard)[18:30], has_file)
        self._memory = BlockMemory(memory)
        load = self._load = BlockLoading(sources, reader, fields, self._memory, self.times)

        raise_file_limit()
        if memory >= _ROOMY_BYTES:
            _keep_freed_memory()
        threads = config.threads or default_threads()
        self.window = BlockWindow(
            BlockSource(
                load=load,
                size_of=lru_cache(maxsize=1 << 16)(size_of),
                loaded_size_of=lambda block: reader.raw_size(*rows.shard_of_block(block)),
                near=lru_cache(maxsize=1 << 16)(lambda block: has_file(rows.shard_of_block(block)[0])),
            ),
            memory,
            threads,
            page=mmap.PAGESIZE,
        )
        self._threads = threads
        self.workers: Executor | None = None
        if function.transform is not None or function.decoders:
            self.workers = open_workers(config.workers, threads, function)
        self.journal = None if config.run is None else Journal(
            config.run / "journal", manifest=sources.manifest, plan=plan.digest, rank=topology.rank,
            world=topology.world, lanes=plan.lanes, worker=config.offset, workers=config.stride,
            meta={"history": plan.history(), "dataset": reader.urls},
        )  # fmt: skip

    @property
    def memory(self) -> int:
        """Bytes that blocks may take."""
        return self.window.budget

    @memory.setter
    def memory(self, num_bytes: int) -> None:
        self.window.budget = self._memory.limit = num_bytes

    def make_room(self, num_bytes: int) -> bool:
        """Have room for so many bytes, and half as many beside them; False where somebody set a bound."""
        if not self.is_bounded:
            self.memory = max(self.memory, num_bytes * 3 // 2)
        return not self.is_bounded

    @property
    def verification_failures(self) -> int:
        """How many blocks were not what was written."""
        return self._load.verification_failures

    def group_planner(self, plan: Plan, sources: Sources, lanes: list[int]) -> Callable[[range], StepGroup]:
        """What works out some steps of these lanes."""
        times = self.times

        def find(numbers: range) -> StepGroup:
            found = plan_group(plan, sources.rows.locate, lanes, numbers)
            if times is not None:
                times.expect(found.blocks, first_lanes(found, plan.cell_size))
            return found

        return find

    def row_work(self, plan: Plan, sources: Sources) -> RowWork:
        """Decoding and transforms for one loop."""
        return RowWork(
            self._function,
            self._config.batch_transform,
            workers=self.workers,
            parts=self._threads * 2,
            on_error=self._config.on_error,
            substitutes=SubstituteDraw(plan.population, plan.settings.seed, sources.fetch),
            cell_size=plan.cell_size,
        )

    def close(self) -> None:
        """End all of it; may be called twice, and in a forked child does nothing."""
        if self.process != os.getpid():
            return
        if self.watch is not None:
            self.watch.close()
        if self.remote is not None:
            self.remote.close()
        self.window.close()
        self._memory.close()
        if self.workers is not None:
            self.workers.shutdown(wait=True, cancel_futures=True)
        if self.journal is not None:
            self.journal.close()

    def close_unwatched(self) -> None:
        """`close` for a loader that nobody holds any more, on whichever thread that comes to light.

        The collector may run on a thread of the loader's own, and no thread can wait for itself.
        """
        if threading.current_thread().name.startswith(_OWN_THREADS):
            threading.Thread(target=self.close, name="shardkit-close", daemon=True).start()
        else:
            self.close()


def _keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory instead of giving it back after every batch.

    It adapts by itself once a program has freed a mapping of nearly 32 MiB (M_MMAP_THRESHOLD in mallopt(3)); this one
    is never touched and costs two system calls. Without it each batch of large samples pays a page fault per 4 KiB,
    a quarter of its time. Other allocators take no notice.
    """
    np.empty((32 << 20) - (1 << 16), dtype=np.uint8)


def default_threads() -> int:
    """Block readers where none are asked for: as many as processors that this process may use, at most 8.

    Not one less: nothing is handed out before the first blocks are there, and a trainer that computes keeps what it
    needs of the processors, for readers wait as soon as the window is full.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, usable))
