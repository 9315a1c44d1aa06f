"""The loader: a plan's cells, verified, in order, for one rank, resumable at any step."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardkit.errors import ConfigurationError, UsageError
from shardkit.loader.batch import Batch, MissingValues
from shardkit.loader.gather import Allocate
from shardkit.loader.live import STATE_VERSION, LiveLoader, Loop, check_geometry, check_state, check_step
from shardkit.loader.pipeline import Pipeline
from shardkit.loader.ranks import Dealt, check_chosen, check_shares, find_topology, fixed_shares
from shardkit.loader.rebalancing import Rebalancer, make_rebalancer
from shardkit.loader.resources import LoaderResources
from shardkit.loader.settings import (
    LoaderConfig,
    LoaderSetup,
    Sources,
    first_lanes,
    gathered_fields,
    makes_tensors,
)
from shardkit.loader.step_batches import LoaderCounts, StepBatches
from shardkit.loader.transforms import RowFunction, find_decoders, split_decoders
from shardkit.plan import Plan

if TYPE_CHECKING:
    from shardkit.loader.sharing import ServedCache
    from shardkit.telemetry import Telemetry

__all__ = ["Loader"]

_log = logging.getLogger("shardkit.loader")


class Loader:
    """Iterates the steps of an epoch; iterate again for the next.

    Batches come in the plan's order, whatever the order in which blocks arrive. The state is a step number and two
    digests: it fits any other rank and world.

    A loader is in one of three states, and at most one pipeline reads for it (SPEC.md §3)::

        idle ── iter() ──▶ under way ── last step handed out ──▶ ahead ── iter() ──▶ under way
        idle ── peek() ──▶ ahead
        any  ── seek(), load_state_dict(), close(), a loop that is left early ──▶ idle
    """

    def __init__(self, plan: Plan, sources: Sources, config: LoaderConfig) -> None:
        self.plan = plan
        self.topology = topology = find_topology(config.rank, config.world, mesh=config.mesh)
        fields, tensors = gathered_fields(sources.schema, config), makes_tensors(config)
        self._setup = LoaderSetup(
            plan=plan, sources=sources, config=config, topology=topology, fields=fields, tensors=tensors,
            missing=MissingValues(sources.schema, fields, config.fill),
        )  # fmt: skip
        decoders = find_decoders(config.decode, sources.schema) if config.decode else {}
        self._device: Any = None
        self._finish_on: dict[str, Any] = {}  # field → what is done to it on the device
        if config.device is not None:
            from shardkit.loader.device import find_device

            self._device = find_device(config.device)
            if config.transform is None and config.batch_transform is None:  # nobody looks at it on the host
                decoders, self._finish_on = split_decoders(decoders, self._device)
        self._function: RowFunction | None = None
        if config.decode or config.transform is not None:
            self._function = RowFunction(
                seed=plan.settings.seed, decoders=decoders, transform=config.transform,
                is_seeded=config.rows_are_seeded,
            )  # fmt: skip
        row_decoders = {} if self._function is None else self._function.row_decoders
        self._made_by = {name: one.made_by for name, one in row_decoders.items()}
        self._served: ServedCache | None = None  # this node's cache, for the others
        dealt = self._deal()
        if dealt is not None and dealt.holders is not None:
            self._setup = dataclasses.replace(self._setup, holders=dealt.holders)
        self.assignment = None if dealt is None else dealt.assignment
        chosen = check_chosen(plan.lanes, config.lanes or ())
        lanes = chosen if dealt is None else list(dealt.assignment.lanes_of(topology.rank))
        self._memory = self._setup.memory_bound(len(lanes))  # at the start
        self._loop: Callable[[], Loop | None] = lambda: None  # the last one, while somebody holds it
        self._ahead: range | None = None  # steps of the next loop, if the pipeline reads them already
        self._with_trainer: LoaderCounts | None = None  # of the loop whose batch the trainer has
        self._computed_s = -1.0  # what it took to compute; below 0: nobody has said
        self.allocate: Allocate = np.empty  # the arrays of batches; of the loops that begin after it was set
        self.reads_on = config.stride == 1  # of the next epoch while the last steps of one are worked
        if self._device is not None and self._device.type != "cpu":
            from shardkit.loader.device import pinned

            self.allocate = pinned()
        self.live = LiveLoader(lanes)
        self._rebalancer: Rebalancer | None = None
        if config.rebalance is not None and dealt is not None:
            self._rebalancer = make_rebalancer(
                config.rebalance, rank=topology.rank, dealt=dealt, record=self._record_decision
            )

    @cached_property
    def telemetry(self) -> Telemetry:
        """Numbers and tables of this loader that are polled while a run is watched."""
        return self.live.make_telemetry(self.plan, self.topology, self._setup.config.offset)

    def _deal(self) -> Dealt | None:
        """Compare with the ranks that begin together, and deal; None if the lanes of this one were chosen."""
        dealt, own = first_lanes(self.plan, self.topology, self._setup.config)
        if self._setup.config.store is None and not self.topology.is_shared:
            return dealt
        from shardkit.loader.dealing import compare_and_deal  # slow to import, and for several ranks only

        dealt, self._served = compare_and_deal(self._setup, dealt, own, self._made_by)
        if self._served is not None:
            weakref.finalize(self, self._served.close)
        return dealt

    def __repr__(self) -> str:
        rank, world, _ = self.topology
        return (
            f"<shardkit loader, rank {rank} of {world}: {len(self.lanes)} of {self.plan.lanes} lanes, "
            f"{len(self):,} steps a loop, next is step {self.handed_out:,}; {self.plan}>"
        )

    # ---- iteration

    def __len__(self) -> int:
        """Steps of one loop."""
        return self.plan.loop_steps

    def __iter__(self) -> Loop:
        """Batches (with `by_cell`, lists of batches, one per lane) from the cursor to the end of its epoch.

        The cursor is the batch after the last one that was handed out, so a loop that is left early continues in the
        next one; with ``restart=True`` every loop starts where the cursor's epoch begins. The new loop is the one that
        counts: one that was under way raises UsageError when it is asked for more.
        """
        start = self._next_start
        numbers, pipeline = self._read_ahead(start)
        if numbers is not pipeline.numbers:  # the pipeline went on from the epoch before
            self._follow(numbers, pipeline.lanes)
        self._ahead = None
        self._end_loop("another loop over this loader has begun")
        self.live.handed_out = start
        if self._rebalancer is not None:
            self._rebalancer.seek(start)
            self.live.lanes = self._rebalancer.lanes_now()
        counts = LoaderCounts()
        self.live.begin_loop(counts)
        pipeline.begin_loop(counts)
        stop = self.plan.epoch_bounds(start)[1]
        if self.plan.is_cut_at(stop):
            _log.warning(
                "this loop ends at step %d, where the plan is amended in mid-epoch; iterate again to continue there",
                stop,
            )
        loop = Loop(self._hand_out, self._finish, pipeline, numbers, stop, counts)
        self._loop = weakref.ref(loop)
        return loop

    def peek(self) -> Batch:
        """The batch that comes next, in the loop under way, else in the next one; moves nothing.

        State, ledger, statistics and lanes stay as they are, and no rank waits for another, so that one rank may look
        alone. It is a copy: what is done to it does not reach the loop.

        Raises:
            ShardkitError: whatever handing it out would raise, and will.
        """
        loop = self._loop()
        if loop is not None and loop.is_under_way:
            with loop.turn():
                if self._rebalancer is not None:
                    self._move_lanes(loop, self._rebalancer.lanes_ahead(loop.left[0]))
                one = loop.pipeline.peek()
        else:
            one = self._read_ahead(self._next_start)[1].peek()
        if one is None:
            raise UsageError(
                f"there is no batch from step {self._next_start} on in this loader's share of the steps"
            )
        return copy.deepcopy(self._handed(one))

    @property
    def _next_start(self) -> int:
        """Step at which the next loop begins."""
        step = self.live.handed_out
        return self.plan.epoch_bounds(step)[0] if self._setup.config.restart else step

    def _read_ahead(self, start: int) -> tuple[range, Pipeline]:
        """Return the steps of the loop that begins at `start`, and the pipeline that reads them."""
        lanes = self.lanes if self._rebalancer is None else self._rebalancer.lanes_ahead(start)
        pipeline = self.live.pipeline
        if self._ahead is None or pipeline is None or pipeline.lanes != lanes or self._is_forked():
            check_geometry(self.plan, start)
            config = self._setup.config
            numbers = range(start + config.offset, self.plan.epoch_bounds(start)[1], config.stride)
            pipeline = self._open_pipeline(numbers, lanes)
            self._ahead = numbers
        return self._ahead, pipeline

    def _open_pipeline(self, numbers: range, lanes: list[int]) -> Pipeline:
        """Close the pipeline, and open one that reads these steps of these lanes."""
        self._close_pipeline()
        resources = self._open_resources()
        self._follow(numbers, lanes)
        resources.memory = max(resources.memory, self.memory_needed)  # lanes may have come
        self.live.pipeline = Pipeline(
            self._setup, resources, numbers, lanes, self.allocate, self._to_device,
            goes_on=self.reads_on, prefetch=self.live.chosen_prefetch,
        )  # fmt: skip
        return self.live.pipeline

    def _follow(self, numbers: range, lanes: list[int]) -> None:
        """Tell what reads over a network which steps come; how far it looks is counted from the first of them."""
        resources = self.resources
        if resources is not None and resources.remote is not None and numbers:
            resources.remote.start(numbers.start, lanes, resources.window.is_loaded)

    def _to_device(self, pipeline: Pipeline, steps: Iterator[StepBatches]) -> Iterator[StepBatches]:
        if self._device is None:
            return steps
        from shardkit.loader.device import CudaStream, DeviceFeed

        stream = None if self._device.type == "cpu" else CudaStream(self._device)
        ahead = self._setup.config.device_prefetch
        return DeviceFeed(steps, lambda: pipeline.queued_steps, self._device, ahead, self._finish_on, stream)

    def _move_lanes(self, loop: Loop, lanes: list[int], *, again: bool = False) -> None:
        """Read the rest of a loop with these lanes, if they are others than before, or to read it `again`.

        Rebalancing and `resize` move lanes; both do it here.
        """
        if again or lanes != loop.pipeline.lanes:
            loop.pipeline = self._open_pipeline(loop.left, lanes)
            loop.pipeline.begin_loop(loop.counts)

    def _hand_out(self, loop: Loop) -> Batch:
        live, rebalancer = self.live, self._rebalancer
        self._came_back(loop)
        if rebalancer is not None:
            live.lanes = rebalancer.lanes_at(loop.left[0])
            self._move_lanes(loop, live.lanes)
        one = loop.pipeline.take()
        if one is None:  # another thread has closed the pipeline
            loop.ended_by = loop.ended_by or "the loader was closed"
            raise loop.ended()
        if rebalancer is not None:
            rebalancer.handed_out(int(np.count_nonzero(one.lane_counts)), loop.counts.last_wait_s)
        left = loop.left = loop.left[1:]
        assert live.resources is not None, "the step came from there"
        live.resources.record_step(one, live.lanes, loop.counts, last=not left)
        if not left and loop.pipeline.goes_on:
            self._ahead = range(loop.stop, self.plan.epoch_bounds(loop.stop)[1])
        config = self._setup.config
        live.handed_out = one.step - config.offset + config.stride if left else loop.stop
        live.cells += len(live.lanes)
        self._with_trainer = loop.counts
        live.handed_at, self._computed_s = time.perf_counter(), -1.0
        return self._handed(one)

    def _handed(self, one: StepBatches) -> Batch:
        """What a step is to its user; lists are the rare way (`by_cell`), and every other program's loop is typed."""
        handed: Any = one.batches if self._setup.config.by_cell else one.batches[0]
        batch: Batch = handed
        return batch

    def _came_back(self, loop: Loop) -> None:
        """The trainer has done with the last batch of this loop, if it had one."""
        counts = loop.counts
        if self._with_trainer is counts:
            self._with_trainer = None
            counts.computed_s += max(0.0, self._computed_s)
            if self._rebalancer is not None:
                self._rebalancer.came_back()

    def _finish(self, loop: Loop) -> None:
        self._came_back(loop)
        if not loop.pipeline.goes_on:
            loop.pipeline.close()
        if loop.ended_by is None:
            self.live.handed_out = loop.stop  # also if this loader had no step of the epoch

    def _end_loop(self, reason: str) -> None:
        """The loop under way, if there is one, hands out nothing more."""
        loop = self._loop()
        if loop is not None:
            loop.ended_by = loop.ended_by or reason

    def _record_decision(self, step: int, **details: Any) -> None:
        self._setup.events.record("rebalance", step=step, **details)
        if self.resources is not None and self.resources.journal is not None:
            self.resources.journal.event(step, "rebalance", **details)

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
        self._computed_s = time.perf_counter() - self.live.handed_at if seconds is None else seconds
        if self._rebalancer is not None:
            self._rebalancer.computed(seconds)

    def _open_resources(self) -> LoaderResources:
        """Threads and files, opened by the first loop of this process: a loader that was forked opens its own."""
        resources, live, setup = self.live.resources, self.live, self._setup
        if resources is None or resources.process != os.getpid():
            resources = live.resources = LoaderResources(
                setup, self._memory, self.memory_needed, self._function
            )
            if setup.config.run is not None:  # whoever has no run does not wait for these imports
                from shardkit.loader.steering import open_watch

                resources.watch = open_watch(setup, live, self.telemetry)
            # not through `self`: what the threads of the resources hold must not keep the loader alive
            weakref.finalize(self, resources.close_unwatched)
        return resources

    def _is_forked(self) -> bool:
        """Whether what is open is a parent process's."""
        return self.resources is None or self.resources.process != os.getpid()

    def _close_pipeline(self) -> None:
        """Stop reading for the loop under way, or for the next one."""
        self._ahead = None
        if self.live.pipeline is not None and not self._is_forked():
            self.live.pipeline.close()
        self.live.pipeline = None

    # ---- state

    def state_dict(self, after: Batch | Sequence[Batch] | None = None) -> dict[str, Any]:
        """Where to continue: after `after`, else after the last batch handed out. JSON-able, < 1 KB.

        What was prefetched but not handed out does not count. A state taken after the last batch of an epoch begins
        the next epoch.
        """
        if after is None:
            step = self.handed_out
        else:
            step = (after if isinstance(after, Batch) else after[0]).step + 1
        return {
            "version": STATE_VERSION,
            "step": step,
            "plan": self.plan.digest,
            "manifest": self._setup.sources.manifest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, on any rank of any world.

        Where the plan is an amendment, the state of a plan that it descends from fits too, up to the step at which
        they part.

        Raises:
            StateError: it was taken with another plan or manifest, or by a newer version; says in what they differ.
        """
        self.seek(check_state(state, self.plan, self._setup.sources.manifest))

    def seek(self, step: int) -> None:
        """Begin the next loop at `step`, counted over the whole run; with ``restart=True``, at its epoch's first step.

        Raises:
            StateError: there is no such step.
        """
        step = check_step("step", step)
        self._end_loop(f"the loader was moved to step {step}")
        self._close_pipeline()
        self.live.handed_out = step

    def resize(self, *, rank: int, world: int) -> None:
        """Continue as rank `rank` of `world` from the next step on: what a restart does, without the restart.

        Lanes and batches are those of a new loader that was made with these arguments, without a process group, and
        loaded this one's state. A loop under way continues with its next step. Call it between two steps, before the
        same step on every rank. A rank that leaves closes its loader; a rank that joins makes one and loads the state
        of any other. The journal continues in a new file, and blocks in memory are read again.

        Raises:
            ConfigurationError: so many ranks cannot share the lanes, or the lanes were chosen by mesh=, lanes= or
                rebalance=. The loader stays as it was.
            UsageError: another thread is taking a batch.
        """
        config = self._setup.config
        for name in ("mesh", "lanes", "rebalance"):
            if getattr(config, name) is not None:
                raise ConfigurationError(
                    f"resize: {name}= decides the lanes of this loader; make it without {name}="
                )
        topology = find_topology(rank, world)
        check_shares(self.plan, topology.world, uneven=config.uneven)
        assignment = fixed_shares(self.plan, topology.world, config.assignment).assignment
        lanes = list(assignment.lanes_of(topology.rank))
        memory = self._setup.memory_bound(len(lanes))
        loop = self._loop()
        with contextlib.nullcontext() if loop is None else loop.turn():
            self._close_pipeline()
            self._close_resources()
            self._setup = dataclasses.replace(self._setup, topology=topology)
            self.topology, self.assignment, self.live.lanes, self._memory = (
                topology,
                assignment,
                lanes,
                memory,
            )
            if "telemetry" in self.__dict__:
                self.telemetry.rank, self.telemetry.world = topology.rank, topology.world
            if loop is not None and loop.is_under_way:
                self._move_lanes(loop, lanes, again=True)

    # ---- the rest

    @property
    def lanes(self) -> list[int]:
        """Of this rank, now."""
        return self.live.lanes

    @property
    def resources(self) -> LoaderResources | None:
        """What is open in this process."""
        return self.live.resources

    @property
    def memory_needed(self) -> int:
        """Bytes that the windows of this rank's lanes need."""
        return self._setup.memory_needed(len(self.lanes))

    @property
    def handed_out(self) -> int:
        """The step after the last one handed out."""
        return self.live.handed_out

    @property
    def epoch(self) -> int:
        """Number of the epoch in which the next batch lies, from 0; the next epoch's once its last batch is handed out.

        A run that resumes trains ``for epoch in range(loader.epoch, epochs)``.
        """
        return self.plan.epoch_of(self.live.handed_out)

    def stats(self) -> dict[str, float]:
        """Counters of the current or last loop, and of all block loads of this loader.

        Names are stable; times end in `_s` (seconds), sizes in `_bytes`; see SPEC.md for each.
        """
        moves = {} if self._rebalancer is None else {"moves": float(self._rebalancer.moves)}
        return self.live.of_loop() | moves

    def __reduce__(self) -> NoReturn:
        """Threads and files do not travel."""
        raise UsageError(
            "a loader stays in its process (a forked child may go on with it); to another one send the dataset, the "
            "plan and loader.state_dict(), make the loader there and load the state"
        )

    def close(self) -> None:
        """Stop threads and processes, sync and close the journal; may be called twice."""
        self._end_loop("the loader was closed")
        self._close_pipeline()
        self._close_resources()
        if self._served is not None:
            self._served.close()

    def _close_resources(self) -> None:
        if self.resources is not None and not self._is_forked():
            self.resources.close()
        self.live.resources = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
