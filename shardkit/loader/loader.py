"""The loader: a plan's cells, verified, in order, for one rank, resumable at any step."""

from __future__ import annotations

import copy
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from shardkit.errors import StateError, UsageError
from shardkit.ledger import MASKED, SUBSTITUTED, Journal
from shardkit.loader.agreement import agree
from shardkit.loader.assembly import Assembler, StepBatches
from shardkit.loader.batch import Batch
from shardkit.loader.decoders import find_decoders
from shardkit.loader.events import EventLog
from shardkit.loader.gather import Allocate, is_only_copied
from shardkit.loader.loop import Loop, Steps
from shardkit.loader.pipeline import Pipeline, PipelineSettings
from shardkit.loader.prefetcher import Prefetcher, PrefetchSettings
from shardkit.loader.ranks import Topology, find_topology
from shardkit.loader.rebalancing import make_rebalancer
from shardkit.loader.resources import LoaderResources
from shardkit.loader.row_work import RowWork
from shardkit.loader.settings import LoaderConfig, Sources
from shardkit.loader.shares import memory_bound, memory_needed, own_fields, own_lanes
from shardkit.loader.state import STATE_VERSION, check_geometry, check_state
from shardkit.loader.statistics import LoaderCounts
from shardkit.loader.telemetry_sources import LoaderSource
from shardkit.loader.transforms import RowFunction
from shardkit.loader.watchdog import Watchdog
from shardkit.plan import Plan
from shardkit.telemetry import Telemetry

__all__ = ["Loader"]

# A step of at most this size is gathered in the trainer's own `next`: to hand it over would cost as much as it saves.
_INLINE_BYTES = 8 << 20
_DEFAULT_PREFETCH = 4
_AGREEMENT_S = 600.0


class Loader:
    """Iterates the steps of an epoch; iterate again for the next.

    Batches come in the plan's order, whatever the order in which blocks arrive. The state is a step number and two
    digests: it fits any other rank and world.
    """

    def __init__(self, plan: Plan, sources: Sources, config: LoaderConfig) -> None:
        self.plan = plan
        self._sources, self._config = sources, config
        self.topology: Topology = find_topology(config.rank, config.world, mesh=config.mesh)
        self.lanes: list[int] = own_lanes(plan, self.topology, config)
        self._memory = memory_bound(config, plan, len(self.lanes), sources)  # at the start
        self._fields = own_fields(sources.schema, config)
        self._tensors = "torch" in sys.modules if config.tensors is None else config.tensors
        if self._tensors:
            __import__("torch")  # only where a caller asked for tensors before importing it
        self._start = 0  # where the next `iter` begins
        self._handed_out = 0  # the step after the last one handed out
        self._pipeline: Pipeline | None = None
        self._loop: Callable[[], Loop | None] = lambda: None  # the last one, while somebody holds it
        self._ahead: Steps | None = None  # of the next one, where it was looked at
        self._with_trainer: LoaderCounts | None = None  # of the loop whose batch the trainer has
        self._stages = {start: number for number, (start, _) in enumerate(plan.settings.stages) if number}
        self._resources: LoaderResources | None = None
        self._told: set[str] = set()  # of what is said once
        self._handed_at = 0.0  # of the step that the trainer has
        self._computed_s = -1.0  # what it took to compute; below 0: nobody has said
        self._prefetch_now = 0  # where it was changed on the way
        self.allocate: Allocate = np.empty  # the arrays of batches; of the loops that begin after it was set
        self.counts = LoaderCounts()
        self._events = EventLog(config.run, self.topology.rank)
        reports = self._reports = LoaderSource(self)
        self.telemetry = Telemetry(
            rank=self.topology.rank, world=self.topology.world, worker=config.offset, lanes=reports.lanes
        )
        reports.register(self.telemetry)
        self._function = RowFunction(
            seed=plan.settings.seed,
            decoders=find_decoders(config.decode, sources.schema),
            transform=config.transform,
        )
        self._agree()
        self._rebalancer = make_rebalancer(config.rebalance, rank=self.topology.rank, world=self.topology.world,
                                           lanes=plan.lanes, record=self._record_decision)  # fmt: skip

    def _agree(self) -> None:
        distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
        if (
            self.topology.source not in ("the process group", "the device mesh")
            or not distributed.is_initialized()
        ):
            return
        from importlib.metadata import version  # slow to import, and asked where there are several ranks only

        mine = {"software": version("shardkit"), "manifest": self._sources.manifest, "plan": self.plan.digest,
                "world": self.topology.world, "fields": self._fields, "lanes": self.lanes}  # fmt: skip
        agree(distributed.get_rank(), distributed.get_world_size(), mine, lanes=self.plan.lanes,
              shared=self._config.mesh is not None, timeout_s=_AGREEMENT_S)  # fmt: skip

    def __repr__(self) -> str:
        rank, world, _ = self.topology
        return (
            f"<shardkit loader, rank {rank} of {world}: {len(self.lanes)} of {self.plan.lanes} lanes, "
            f"{len(self):,} steps a loop, next is step {self._handed_out:,}; {self.plan}>"
        )

    # ---- iteration

    def __len__(self) -> int:
        """Steps of one loop."""
        return self.plan.loop_steps

    def __iter__(self) -> Loop:
        """Batches (with `by_cell`, lists of batches, one per lane) from the cursor to the end of its epoch.

        It is the loop that counts from now on: one that was under way raises UsageError when it is asked for more.
        """
        start = self._start
        steps = self._read_ahead(start)
        self._ahead = None
        self._end_loop("another loop over this loader has begun")
        self._start, stop = self.plan.epoch_bounds(start)  # a loop left early begins its epoch again
        self._handed_out = start
        if self._rebalancer is not None:
            self._rebalancer.seek(start)
            self.lanes = self._rebalancer.lanes_now()
        self._reports.loop_is_over(self.counts)
        self._leave_pipeline()
        self._pipeline, self.counts = steps.pipeline, steps.counts
        loop = Loop(self._hand_out, self._finish, steps, stop)
        self._loop = weakref.ref(loop)
        return loop

    def peek(self) -> Any:
        """The batch that comes next, in the loop under way, else in the next one; moves nothing.

        State, ledger, statistics and lanes stay as they are, and no rank waits for another, so that one rank may look
        alone. It is a copy: what is done to it does not reach the loop.

        Raises:
            ShardkitError: whatever handing it out would raise, and will.
        """
        loop = self._loop()
        if loop is not None and loop.is_under_way:
            if self._rebalancer is not None:
                self._read_with(loop, self._rebalancer.lanes_ahead(loop.left[0]))
            one = loop.steps.peek()
        else:
            one = self._read_ahead(self._start).peek()
        if one is None:
            raise UsageError(
                f"there is no batch from step {self._start} on in this loader's share of the steps"
            )
        return copy.deepcopy(one.batches if self._config.by_cell else one.batches[0])

    def _read_ahead(self, start: int) -> Steps:
        """The steps of the loop that begins at `start`, read from now on if they were not before."""
        if self._ahead is None or self._is_forked():
            check_geometry(self.plan, start)
            self._close_pipeline(self._pipeline)
            numbers = range(
                start + self._config.offset, self.plan.epoch_bounds(start)[1], self._config.stride
            )
            lanes = self.lanes if self._rebalancer is None else self._rebalancer.lanes_ahead(start)
            self._ahead = self._open_steps(numbers, lanes, LoaderCounts())
        return self._ahead

    def _open_steps(self, numbers: range, lanes: list[int], counts: LoaderCounts) -> Steps:
        return Steps(self._open_pipeline(numbers, lanes, counts), numbers, lanes, counts)

    def _read_with(self, loop: Loop, lanes: list[int]) -> None:
        """A move of lanes begins the reading ahead anew."""
        if lanes != loop.steps.lanes:
            self._drop_pipeline()
            loop.steps = self._open_steps(loop.left, lanes, loop.steps.counts)
            self._pipeline = loop.steps.pipeline

    def _hand_out(self, loop: Loop) -> Any:
        self._came_back(loop)
        if self._rebalancer is not None:
            self.lanes = self._rebalancer.lanes_at(loop.left[0])
            self._read_with(loop, self.lanes)
        one = loop.steps.take()
        if one is None:  # another thread has closed the pipeline
            loop.ended_by = loop.ended_by or "the loader was closed"
            return next(loop)
        if self._rebalancer is not None:
            self._rebalancer.handed_out(sum(map(bool, one.lane_counts)), loop.steps.counts.last_wait_s)
        loop.left = loop.left[1:]
        self._record(one, last=not loop.left)
        if not loop.left:
            self._start = loop.stop
        self._handed_out = one.step + 1
        self._reports.cells += len(self.lanes)
        self._with_trainer = loop.steps.counts
        self._handed_at, self._computed_s = time.perf_counter(), -1.0
        return one.batches if self._config.by_cell else one.batches[0]

    def _record(self, one: StepBatches, *, last: bool) -> None:
        """Journal a step that is about to be handed out."""
        resources = self._open_resources()
        journal, remote = resources.journal, resources.remote
        if journal is not None:
            journal.record_step(one.step, self.lanes, one.lane_counts, one.samples)
        for facts in one.replaced:
            self._record_replaced(facts, journal)
        if remote is not None:
            remote.advance(one.step)
            if journal is not None:
                remote.read_events.flush(one.step, journal, everything=last)
        if journal is not None and one.step in self._stages and self.lanes[:1] == [0]:
            journal.event(one.step, "stage", number=self._stages[one.step])

    def _came_back(self, loop: Loop) -> None:
        """The trainer has done with the last batch of this loop, if it had one."""
        counts = loop.steps.counts
        if self._with_trainer is counts:
            self._with_trainer = None
            counts.computed_s += max(0.0, self._computed_s)
            if self._rebalancer is not None:
                self._rebalancer.came_back()

    def _finish(self, loop: Loop) -> None:
        self._came_back(loop)
        loop.steps.take()  # there is none: the pipeline ends
        if loop.ended_by is None:
            self._start = loop.stop  # where this loader had no step of the epoch

    def _end_loop(self, reason: str) -> None:
        """The loop under way, if there is one, hands out nothing more."""
        loop = self._loop()
        if loop is not None:
            loop.ended_by = loop.ended_by or reason

    def _record_decision(self, step: int, **details: Any) -> None:
        self._events.record("rebalance", step=step, **details)
        journal = None if self._resources is None else self._resources.journal
        if journal is not None:
            journal.event(step, "rebalance", **details)

    def watch(self, module: Any) -> None:
        """A rank's part of a step is computed when the last gradient of `module` is there; see `computed`.

        For plain and DistributedDataParallel models, whose last gradient comes before ranks wait for each other. Where
        they wait inside of the computation (fully_shard, pipelines), measure and tell `computed` instead.
        """
        own = weakref.ref(self)  # a model must not keep its loader alive

        def note(_parameter: Any) -> None:
            if (loader := own()) is not None:
                loader.computed()

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note)

    def computed(self, seconds: float | None = None) -> None:
        """This rank has computed its part of the step, now or in so many seconds.

        To be called in every step before ranks wait for each other; of several calls the last holds. It tells slow
        ranks from those that wait for them: for telemetry, and for `rebalance`.
        """
        self._computed_s = time.perf_counter() - self._handed_at if seconds is None else seconds
        if self._rebalancer is not None:
            self._rebalancer.computed(seconds)

    def _record_replaced(self, facts: dict[str, Any], journal: Journal | None) -> None:
        self.counts.substitutions += 1
        self._events.record(facts["kind"], **{name: value for name, value in facts.items() if name != "kind"})
        if journal is not None:
            kind = SUBSTITUTED if facts["kind"] == "substitution" else MASKED
            journal.event(**(facts | {"kind": kind}))  # the audit accounts for it

    def _open_resources(self) -> LoaderResources:
        """Threads and files, opened by the first loop of this process: a loader that was forked opens its own."""
        if self._resources is None or self._resources.process != os.getpid():
            self._resources = LoaderResources(self.plan, self._sources, self._config, self.topology, self._function,
                                         self._fields, self.lanes, self._events, self._memory)  # fmt: skip
            if self._config.run is not None:  # whoever has no run does not wait for these imports
                from shardkit.loader.run_watch import open_watch

                self._resources.watch = open_watch(self, self._config, self._sources, self._events)
            # not through `self`: what the threads of the resources hold must not keep the loader alive
            weakref.finalize(self, self._resources.close_unwatched)
        return self._resources

    def _open_pipeline(self, numbers: range, lanes: list[int], counts: LoaderCounts) -> Pipeline:
        plan, sources, config = self.plan, self._sources, self._config
        resources = self._open_resources()
        if resources.remote is not None and numbers:
            resources.remote.own(lanes)
            resources.remote.start(numbers.start, resources.window.is_loaded)
        resources.memory = max(resources.memory, self.memory_needed)  # lanes may have come
        work = resources.row_work(plan, sources)
        rows = max(1, plan.cell_size * len(lanes))
        step_bytes = rows * sources.row_bytes(self._fields)
        watchdog = Watchdog(self.topology, plan, lanes, sources.rows, sources.reader, resources.window, work,
                            self._events, config.on_stall, self._told, resources.make_room)  # fmt: skip

        limits = PrefetchSettings(rows_per_step=rows, bytes_per_step=step_bytes, make_room=resources.make_room,
                                  over_memory=watchdog.over_memory, admitted=watchdog.admitted)  # fmt: skip
        find = resources.group_planner(plan, sources, lanes)
        prefetcher = Prefetcher(find, resources.window, numbers, limits, counts)
        settings = PipelineSettings(
            prefetch=self._prefetch(step_bytes, work), stall_s=config.stall_s, report=watchdog
        )
        assembler = Assembler(
            plan,
            sources.schema,
            self._fields,
            lanes=lanes,
            world=self.topology.world,
            by_cell=config.by_cell,
            tensors=self._tensors,
            pin=self._pins(),
            work=work,
            counts=counts,
            allocate=self.allocate,
        )
        return Pipeline(prefetcher, assembler, settings=settings, counts=counts)

    def _pins(self) -> bool:
        """Whether this process has begun to use CUDA: to ask whether it *could* would break a later fork."""
        cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
        return bool(self._tensors and cuda is not None and cuda.is_initialized())

    def _prefetch(self, step_bytes: int, work: RowWork) -> int:
        if self._config.prefetch is not None:
            return (self._config.prefetch and self._prefetch_now) or self._config.prefetch
        small = step_bytes <= _INLINE_BYTES
        only_copied = all(is_only_copied(self._sources.schema[name]) for name in self._fields)
        return (
            0
            if small and only_copied and not work and not self._pins()
            else self._prefetch_now or _DEFAULT_PREFETCH
        )

    def _is_forked(self) -> bool:
        """Whether what is open is a parent process's."""
        return self._resources is None or self._resources.process != os.getpid()

    def _close_pipeline(self, pipeline: Pipeline | None) -> None:
        """End what runs."""
        if pipeline is not None and not self._is_forked():
            pipeline.close()

    def _leave_pipeline(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            self._reports.pipeline_is_over(pipeline)

    def _drop_pipeline(self) -> None:
        """Of the loop under way, and of the one that was read ahead."""
        ahead, self._ahead = self._ahead, None
        for pipeline in (self._pipeline, None if ahead is None else ahead.pipeline):
            self._close_pipeline(pipeline)
        self._leave_pipeline()

    # ---- state

    def state_dict(self, after: Batch | Sequence[Batch] | None = None) -> dict[str, Any]:
        """Where to go on: after `after`, else after the last batch handed out. JSON-able, < 1 KB.

        What was prefetched but not handed out does not count.
        """
        if after is None:
            step = self._handed_out
        else:
            step = (after if isinstance(after, Batch) else after[0]).step + 1
        return {
            "version": STATE_VERSION,
            "step": step,
            "plan": self.plan.digest,
            "manifest": self._sources.manifest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, on any rank of any world.

        Where the plan is an amendment, the state of a plan that it descends from fits too, up to the step at which
        they part.

        Raises:
            StateError: it was taken with another plan or manifest, or by a newer version; says in what they differ.
        """
        self.seek(check_state(state, self.plan, self._sources.manifest))

    def seek(self, step: int) -> None:
        """Begin the next loop at `step`, counted over the whole run."""
        if step < 0:
            raise StateError(f"step {step} does not exist: steps count from 0 over the whole run")
        self._end_loop(f"the loader was moved to step {step}")
        self._drop_pipeline()
        self._start = self._handed_out = step

    # ---- the rest

    @property
    def prefetch(self) -> int | None:
        """How many finished steps may wait; None where each is gathered when it is asked for."""
        return None if self._pipeline is None else self._pipeline.prefetch or None

    @prefetch.setter
    def prefetch(self, steps: int) -> None:
        self._prefetch_now = steps
        if self._pipeline is not None:
            self._pipeline.prefetch = steps

    @property
    def pipeline(self) -> Pipeline | None:
        """Of the current or last loop."""
        return self._pipeline

    @property
    def resources(self) -> LoaderResources | None:
        """What is open in this process."""
        return self._resources

    @property
    def memory_needed(self) -> int:
        """Bytes that the windows of this rank's lanes need."""
        return memory_needed(self.plan, len(self.lanes), self._sources)

    @property
    def handed_out(self) -> int:
        """The step after the last one handed out."""
        return self._handed_out

    def stats(self) -> dict[str, float]:
        """Counters of the current or last loop, and of all block loads of this loader.

        Names are stable; times end in `_s` (seconds), sizes in `_bytes`; see SPEC.md for each.
        """
        counts = self.counts
        result: dict[str, float] = {"step": float(self._handed_out)}
        result |= {name: float(getattr(counts, name)) for name in counts.__slots__}
        result["lanes"] = float(len(self.lanes))
        if self._rebalancer is not None:
            result["moves"] = float(self._rebalancer.moves)
        result["wait_per_step_s"] = counts.consumer_wait_s / max(1, counts.steps)
        if self._resources is not None:
            window = self._resources.window
            result |= {name: float(getattr(window.counts, name)) for name in window.counts.__slots__}
            result["window_bytes"] = float(window.nbytes)
            if self._resources.remote is not None:
                result |= self._resources.remote.stats()
        pipeline = self._pipeline
        if pipeline is not None:
            elapsed = pipeline.elapsed_s
            result |= {
                "elapsed_s": elapsed,
                "samples_per_s": counts.samples / elapsed if elapsed else 0.0,
                "queued_groups": float(pipeline.queued_groups),
                "queued_steps": float(pipeline.queued_steps),
                "plan_blocked_s": pipeline.plan_waits.blocked_s,
                "plan_starved_s": pipeline.plan_waits.starved_s,
                "assembly_blocked_s": pipeline.assembly_waits.blocked_s,
                "assembly_starved_s": pipeline.assembly_waits.starved_s,
            }
        return result

    def __reduce__(self) -> NoReturn:
        """Threads and files do not travel.

        Raises:
            UsageError: always; says what to send instead.
        """
        raise UsageError(
            "a loader stays in its process (a forked child may go on with it); to another one send the dataset, the "
            "plan and loader.state_dict(), make the loader there and load the state"
        )

    def close(self) -> None:
        """Stop threads and processes, sync and close the journal; may be called twice."""
        self._end_loop("the loader was closed")
        self._drop_pipeline()
        if self._resources is not None and self._resources.process == os.getpid():
            self._resources.close()
        self._resources = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
