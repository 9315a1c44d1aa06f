"""The loader: a plan's cells, verified, in order, for one rank, resumable at any step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError, StateError
from shardkit.formats import Schema
from shardkit.ledger import Journal
from shardkit.loader.assembly import Assembler
from shardkit.loader.batch import Batch
from shardkit.loader.block_window import BlockWindow
from shardkit.loader.gather import GatherColumns
from shardkit.loader.pipeline import Pipeline
from shardkit.loader.ranks import Topology, find_topology
from shardkit.loader.schedule import StepGroup, plan_group
from shardkit.loader.transforms import BatchTransform, SampleTransform
from shardkit.plan import Plan
from shardkit.storage import BlockReader, RowMap

__all__ = ["Loader", "LoaderConfig", "Sources"]

Int64s = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the rows come from: made by `Dataset.loader`."""

    manifest: str  # "sha256:…"
    schema: Schema
    rows: RowMap
    reader: BlockReader
    block_bytes: Callable[[int], int]  # upper bound of a block's raw bytes by dataset-wide number


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Settings of a loader; see `Dataset.loader` for their meaning."""

    rank: int | None = None
    world: int | None = None
    lanes: Sequence[int] | None = None
    fields: Sequence[str] | None = None
    by_cell: bool = False
    uneven: bool = False
    memory: int = 2 << 30
    threads: int = 4
    prefetch: int = 4
    tensors: bool | None = None
    transform: SampleTransform | None = None
    batch_transform: BatchTransform | None = None
    run: Path | None = None
    stride: int = (
        1  # hand out only every stride-th step, those ≡ offset: how DataLoader workers share the steps
    )
    offset: int = 0

    def __post_init__(self) -> None:
        for name, least in (("memory", 1 << 20), ("threads", 1), ("prefetch", 1)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name}={getattr(self, name)}: at least {least} is expected")


class Loader:
    """Iterates the steps of an epoch; iterate again for the next.

    Batches come in the plan's order, whatever the order in which blocks arrive. The state is a step number and two
    digests: it fits any other rank and world.
    """

    def __init__(self, plan: Plan, sources: Sources, config: LoaderConfig) -> None:
        self.plan = plan
        self._sources = sources
        self._config = config
        self.topology: Topology = find_topology(config.rank, config.world)
        self.lanes: list[int] = _own_lanes(plan, self.topology, config)
        self._fields = list(sources.schema) if config.fields is None else list(config.fields)
        for name in self._fields:
            if name not in sources.schema:
                raise ConfigurationError(
                    f"fields: {name!r} is not in the schema; it has {', '.join(sources.schema)}"
                )
        self._tensors = "torch" in sys.modules if config.tensors is None else config.tensors
        if self._tensors:
            __import__("torch")  # only where a caller asked for tensors before importing it
        self._start = 0  # where the next `iter` begins
        self._handed_out = 0  # the step after the last one handed out
        self._pipeline: Pipeline | None = None
        self._window: BlockWindow | None = None
        self._journal = _open_journal(plan, sources, config, self.topology)
        self._pool = ThreadPoolExecutor(config.threads, "shardkit-transform") if config.transform else None
        self._assembler = Assembler(
            plan,
            sources.schema,
            self._fields,
            lanes=self.lanes,
            world=self.topology.world,
            by_cell=config.by_cell,
            tensors=self._tensors,
            transform=config.transform,
            batch_transform=config.batch_transform,
            pool=self._pool,
        )
        self._finalizer = weakref.finalize(self, _release, self._pool, self._journal)

    # ---- iteration

    def __len__(self) -> int:
        """Steps of one loop."""
        return self.plan.loop_steps

    def __iter__(self) -> Iterator[Any]:
        """Batches (with `by_cell`, lists of batches, one per lane) from the cursor to the end of its epoch."""
        self._stop_pipeline()
        config = self._config
        length = self.plan.loop_steps
        start, stop = self._start, (self._start // length + 1) * length
        self._start = start - start % length  # a loop left early begins its epoch again
        self._handed_out = start
        numbers = range(start + (config.offset - start) % config.stride, stop, config.stride)
        pipeline = self._pipeline = self._open_pipeline(numbers)
        return self._hand_out(pipeline, stop)

    def _hand_out(self, pipeline: Pipeline, stop: int) -> Iterator[Any]:
        for one in pipeline:
            if self._journal is not None:
                self._journal.record(one.step, one.cells(self.lanes))
            self._handed_out = one.step + 1
            if one.step + self._config.stride >= stop:
                self._start = stop
            yield one.batches if self._config.by_cell else one.batches[0]
        self._start = stop

    def _open_pipeline(self, numbers: range) -> Pipeline:
        sources, config = self._sources, self._config

        def load(block: int) -> GatherColumns:
            shard, inside = sources.rows.shard_of_block(block)
            return GatherColumns(sources.reader.read(shard, inside), self._fields)

        def group(numbers: range) -> StepGroup:
            return plan_group(self.plan, sources.rows.locate, self.lanes, numbers)

        window = BlockWindow(load, sources.block_bytes, config.memory, config.threads)
        self._window = window
        rows = self.plan.cell_size * max(1, len(self.lanes))
        return Pipeline(
            group,
            self._assembler,
            window,
            numbers=numbers,
            bytes_per_step=rows * self._row_bytes(),
            prefetch=config.prefetch,
        )

    def _row_bytes(self) -> int:
        """A rough size of a row; variable fields count as a tenth of a typical block."""
        sizes = (self._sources.schema[name].item_bytes for name in self._fields)
        return sum(100_000 if size is None else size for size in sizes) or 1

    def _stop_pipeline(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    # ---- state

    def state_dict(self, after: Batch | Sequence[Batch] | None = None) -> dict[str, Any]:
        """Where to go on: after `after`, else after the last batch handed out. JSON-able, < 1 KB.

        What was prefetched but not handed out does not count.
        """
        if after is None:
            step = self._handed_out
        else:
            step = (after if isinstance(after, Batch) else after[0]).step + 1
        return {"version": 1, "step": step, "plan": self.plan.digest, "manifest": self._sources.manifest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, on any rank of any world.

        Raises:
            StateError: it was taken with another plan or manifest, or by a newer version; says in what they differ.
        """
        if state.get("version") != 1:
            raise StateError(
                f"loader state of version {state.get('version')!r}: this shardkit reads version 1"
            )
        expected = {"manifest": self._sources.manifest, "plan": self.plan.digest}
        differing = [name for name, value in expected.items() if state.get(name) != value]
        if differing:
            details = "; ".join(
                f"{n} is {state.get(n)!r} in the state, {expected[n]!r} here" for n in differing
            )
            raise StateError(
                f"this state belongs to other data: {details}. Open the dataset at that manifest and make the plan "
                "with the settings of the run, or start at step 0"
            )
        step = state.get("step")
        if not isinstance(step, int) or step < 0:
            raise StateError(f"loader state: step is {step!r}, a whole number from 0 on is expected")
        self.seek(step)

    def seek(self, step: int) -> None:
        """Begin the next loop at `step`, counted over the whole run."""
        if step < 0:
            raise StateError(f"step {step} does not exist: steps count from 0 over the whole run")
        self._stop_pipeline()
        self._start = self._handed_out = step

    # ---- the rest

    def stats(self) -> dict[str, float]:
        """Counters of the current or last loop: names are stable, times in seconds, sizes in bytes."""
        result: dict[str, float] = {"step": float(self._handed_out)}
        for owner in (self._pipeline, self._window):
            if owner is not None:
                result |= {name: float(getattr(owner.counts, name)) for name in owner.counts.__slots__}
        return result

    def close(self) -> None:
        """Stop threads, sync and close the journal; may be called twice."""
        self._stop_pipeline()
        self._finalizer()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _release(pool: ThreadPoolExecutor | None, journal: Journal | None) -> None:
    if pool is not None:
        pool.shutdown(wait=False, cancel_futures=True)
    if journal is not None:
        journal.close()


def _open_journal(plan: Plan, sources: Sources, config: LoaderConfig, topology: Topology) -> Journal | None:
    if config.run is None:
        return None
    return Journal(
        config.run / "journal",
        manifest=sources.manifest,
        plan=plan.digest,
        rank=topology.rank,
        world=topology.world,
    )


def _own_lanes(plan: Plan, topology: Topology, config: LoaderConfig) -> list[int]:
    """The lanes of this rank: contiguous runs, so that neighbouring shards stay on one node."""
    lanes, world = plan.lanes, topology.world
    if config.lanes is not None:
        own = sorted(config.lanes)
        if len(set(own)) != len(own) or (own and not 0 <= own[0] <= own[-1] < lanes):
            raise ConfigurationError(
                f"lanes={list(config.lanes)}: distinct numbers from 0 to {lanes - 1} are expected"
            )
        return own
    if world > lanes:
        raise ConfigurationError(
            f"{world} ranks cannot share {lanes} lanes; make the plan with lanes={world} or more, or use fewer ranks"
        )
    if lanes % world and not config.uneven:
        fitting = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise ConfigurationError(
            f"{lanes} lanes do not divide evenly over {world} ranks, and a trainer that averages over ranks would get "
            f"wrong gradients. World sizes that fit: {fitting}. Or pass uneven=True and multiply the loss by "
            "batch.weight"
        )
    if not config.uneven and world > 1 and _has_short_step(plan):
        raise ConfigurationError(
            "the last step of each epoch is short and would give ranks unequal batches; make the plan with "
            'remainder="drop", or pass uneven=True and multiply the loss by batch.weight'
        )
    rank = topology.rank
    return list(range(rank * lanes // world, (rank + 1) * lanes // world))


def _has_short_step(plan: Plan) -> bool:
    length = plan.steps_per_epoch
    if not length:
        return False
    return bool((plan.step(length - 1) < 0).any())
