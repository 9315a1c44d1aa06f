"""The loader: delivers a plan's cells to one rank, verified and in order, resumable at any step."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np

from shardkit.errors import UsageError
from shardkit.loader.batch import Batch, StepBatches
from shardkit.loader.block_memory import check_memory, memory_needed
from shardkit.loader.gather import Allocate
from shardkit.loader.pipeline import Pipeline
from shardkit.loader.resources import LiveLoader, LoaderResources, Loop
from shardkit.loader.settings import (
    LoaderConfig,
    Sources,
    Topology,
    check_lanes,
    fixed_assignment,
    make_setup,
)
from shardkit.loader.states import STATE_VERSION, check_geometry, check_state, check_step, step_after
from shardkit.plan import Assignment, Plan
from shardkit.ranges import shown

if TYPE_CHECKING:
    from shardkit.loader.lanes import Rebalancer
    from shardkit.reading.cache.serving import CacheServer
    from shardkit.telemetry import Telemetry

__all__ = ["Loader"]

_log = logging.getLogger("shardkit.loader")


class Loader:
    """Iterable over the batches of one rank; each iteration yields the steps of one epoch.

    Batches come in the plan's order, regardless of the order in which blocks arrive. The state is a step number and two
    digests, so any rank of any world can load it.

    A loader is in one of three states, which follow from its last loop and its pipeline (SPEC.md §3)::

        idle ── iter() ──▶ under way ── last step handed out ──▶ ahead ── iter() ──▶ under way
        idle ── peek() ──▶ ahead
        any  ── seek(), load_state_dict(), close(), leaving a loop early ──▶ idle
    """

    def __init__(self, plan: Plan, sources: Sources, config: LoaderConfig) -> None:
        self.plan = plan
        self._setup = make_setup(plan, sources, config)
        self._served: CacheServer | None = None  # this node's cache, served to other nodes
        self._rebalancer: Rebalancer | None = None
        self.assignment: Assignment | None = None  # lanes of all ranks; None if this rank's were chosen
        lanes = self._share_lanes()
        check_memory(self._setup, len(lanes))
        self._loop: Callable[[], Loop | None] = lambda: None  # weak reference to the last loop
        device = self._setup.device
        # makes the arrays of batches, from the next loop on
        self.allocate: Allocate = np.empty if device is None else device.allocate()
        self.reads_on = config.stride == 1  # read the next epoch while the last steps of one are worked
        self.live = LiveLoader(lanes)

    @cached_property
    def telemetry(self) -> Telemetry:
        """Numbers and tables of this loader that are polled while a run is monitored."""
        from shardkit.loader.monitoring import make_telemetry  # most loaders are not watched

        return make_telemetry(self.live, self.plan, self.topology, self._setup.config.offset)

    def _share_lanes(self) -> list[int]:
        """Compare what all ranks read, distribute the lanes and return the lanes of this rank."""
        setup, config, rank = self._setup, self._setup.config, self.topology.rank
        if config.lanes is None:
            self.assignment = fixed_assignment(self.plan, self.topology, config)
            own = list(self.assignment.lanes_of(rank))
        else:
            own = check_lanes(self.plan.lanes, config.lanes)
        if config.store is None and config.rebalance is None and not self.topology.is_shared:
            return own
        from shardkit.loader.lanes import (
            make_rebalancer,
            share_lanes,
        )  # slow to import; only several ranks need it

        shares = share_lanes(setup, self.assignment, own)
        if shares is None:
            return own
        self.assignment, self._served = shares.assignment, shares.served
        if self._served is not None:
            weakref.finalize(self, self._served.close)
        self._setup = msgspec.structs.replace(setup, holders=shares.holders)
        self._rebalancer = make_rebalancer(
            config.rebalance, rank=rank, dealt=shares, record=self._record_decision
        )
        return list(shares.assignment.lanes_of(rank))

    def __repr__(self) -> str:
        rank, world, _ = self.topology
        return (
            f"<shardkit loader, rank {rank} of {world}: {len(self.lanes)} of {self.plan.lanes} lanes, "
            f"{len(self):,} steps a loop, next is step {self.handed_out:,}; {self.plan}>"
        )

    # ---- iteration

    def __len__(self) -> int:
        """Return the number of steps of one loop."""
        return self.plan.loop_steps

    def __getitem__(self, number: object) -> NoReturn:
        """Refuse a sample number, for which a DataLoader of torch that is given a loader asks."""
        raise UsageError(
            "a loader yields whole batches in the order of its plan, and has no samples by number: iterate over it "
            "without torch's DataLoader. For worker processes write "
            "shardkit.torch.DataLoader(shardkit.torch.dataset(ds, plan), num_workers=…), for single samples ds[number]"
        )

    def __iter__(self) -> Loop:
        """Return an iterator over the batches from the cursor to the end of its epoch.

        With `by_cell` it yields lists of batches, one per lane. The cursor is the step after the last one handed out,
        so a loop that is left early continues in the next one. With ``restart=True`` every loop starts at the first
        step of the cursor's epoch. A loop that was under way raises UsageError from now on.
        """
        start, live = self._next_start, self.live
        numbers = self._steps_from(start)
        self._end_loop("another loop over this loader has begun")
        pipeline = self._read(numbers, self._lanes_ahead(start))
        if numbers != pipeline.numbers:  # it has continued from the epoch before
            self._open_resources().read_ahead(numbers, pipeline.lanes)
        self._came_back()
        live.handed_out = start
        if self._rebalancer is not None:
            self._rebalancer.seek(start)
            live.lanes = self._rebalancer.lanes_now()
        live.begin_loop()
        stop = self.plan.epoch_bounds(start)[1]
        if self.plan.is_cut_at(stop):
            _log.warning(
                "this loop ends at step %d, where the plan is amended in mid-epoch; iterate again to continue there",
                stop,
            )
        loop = Loop(self._hand_out, self._finish, self._leave, numbers, stop)
        self._loop = weakref.ref(loop)
        return loop

    def peek(self) -> Batch:
        """Return a copy of the next batch of the loop under way, or of the next loop, without advancing.

        State, ledger, statistics and lanes do not change. No rank waits for another, so a single rank may call it.
        Changes to the copy do not affect the batch that is handed out.

        Raises:
            UsageError: this loader has no further batch.
            ShardkitError: the error that handing out the batch will raise.
        """
        loop = self._loop()
        if loop is not None and loop.is_under_way:
            with loop.turn():
                one = loop.run(lambda one: self._read(one.left, self._lanes_ahead(one.left[0])).peek())
        else:
            start = self._next_start
            one = self._read(self._steps_from(start), self._lanes_ahead(start)).peek()
        if one is None:
            raise UsageError(
                f"there is no batch from step {self._next_start} on in this loader's share of the steps"
            )
        return copy.deepcopy(self._batch_of(one))

    @property
    def _next_start(self) -> int:
        """The step at which the next loop begins."""
        step = self.live.handed_out
        return self.plan.epoch_bounds(step)[0] if self._setup.config.restart else step

    def _steps_from(self, start: int) -> range:
        """Return the steps of the loop that begins at `start`."""
        if start < self.plan.from_step:
            check_geometry(self.plan, start)
        config = self._setup.config
        return range(start + config.offset, self.plan.epoch_bounds(start)[1], config.stride)

    def _lanes_ahead(self, step: int) -> list[int]:
        return self.lanes if self._rebalancer is None else self._rebalancer.lanes_ahead(step)

    def _read(self, numbers: range, lanes: list[int]) -> Pipeline:
        """Return the pipeline that reads these steps of these lanes next; lanes move here and nowhere else."""
        return self._open_resources().read(numbers, lanes, self.allocate, goes_on=self.reads_on)

    def _hand_out(self, loop: Loop) -> Batch:
        live, rebalancer, config = self.live, self._rebalancer, self._setup.config
        self._came_back()
        if rebalancer is not None:
            live.lanes = rebalancer.lanes_at(loop.left[0])
        resources = live.resources
        one = None if resources is None else self._read(loop.left, live.lanes).take()
        if resources is None or one is None:  # another thread has closed the loader, or ended the loop
            loop.close("the loader was closed")
            raise loop.ended()
        left = loop.left = loop.left[1:]
        resources.record_step(one, live.lanes, last=not left)
        if (mixing := self._setup.mixing) is not None:
            assert resources.journal is not None, "a mixer needs a run directory"
            if mixing.delivered(one.step, resources.journal.event):
                resources.read_ahead(left, live.lanes)
        cursor = one.step - config.offset + config.stride if left else loop.stop
        live.hand_out(cursor, int(np.count_nonzero(one.lane_counts)))
        return self._batch_of(one)

    def _batch_of(self, one: StepBatches) -> Batch:
        """Return the batch of a step; with `by_cell`, the list of its cells, which the type leaves out."""
        handed: Any = one.batches if self._setup.config.by_cell else one.batches[0]
        batch: Batch = handed
        return batch

    def _came_back(self) -> None:
        """Note that the trainer has finished the last batch, if it had one."""
        live = self.live
        if live.come_back() and self._rebalancer is not None:
            self._rebalancer.finished(live.step_cells, live.computed_s, live.counts.last_wait_s)

    def _finish(self, loop: Loop) -> None:
        """Note that the trainer asks for more than the steps of a loop, unless another one has begun since."""
        if loop.ended_by is None:
            self._came_back()
            self.live.handed_out = loop.stop  # needed if this loader had no step in the epoch
            if not self.reads_on:
                self._close_pipeline()

    def _leave(self, loop: Loop) -> None:
        """Stop reading for a loop, unless another one has begun since."""
        if self._loop() in (None, loop):
            self._close_pipeline()

    def _end_loop(self, reason: str) -> None:
        """End the last loop with this reason, and stop reading for it if it was under way."""
        loop = self._loop()
        if loop is not None:
            loop.close(reason)

    def _record_decision(self, step: int, **details: Any) -> None:
        self._setup.events.record("rebalance", step=step, **details)
        if self.resources is not None and self.resources.journal is not None:
            self.resources.journal.event(step, "rebalance", **details)

    def watch(self, module: Any) -> None:
        """Call `computed` whenever a gradient of `module` is ready; the last one marks the end of the rank's part.

        This suits plain and DistributedDataParallel models, whose last gradient is ready before ranks wait for each
        other. If ranks wait during the computation (fully_shard, pipelines), measure the time yourself and pass it to
        `computed`.
        """
        if not hasattr(module, "parameters"):
            raise UsageError(f"loader.watch({shown(module)}): a module of torch is expected")
        own = weakref.ref(self)  # a model must not keep its loader alive

        def note(_parameter: Any) -> None:
            if (loader := own()) is not None:
                loader.computed()

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note)

    def computed(self, seconds: float | None = None) -> None:
        """Report that this rank has computed its part of the step, by default now.

        Call it in every step before ranks wait for each other; the last call of a step counts. Telemetry and
        `rebalance` need it to distinguish slow ranks from ranks that wait for them.

        Args:
            seconds: time that the computation took; None for the time since the batch was handed out.
        """
        self.live.computed_s = time.perf_counter() - self.live.handed_at if seconds is None else seconds

    def _open_resources(self) -> LoaderResources:
        """Return the threads and files; the first loop of each process opens them, also in a forked child."""
        resources, live, setup = self.live.resources, self.live, self._setup
        if resources is None or resources.process != os.getpid():
            resources = live.resources = LoaderResources(setup, len(self.lanes), live.counts)
            if setup.config.run is not None:  # imported only for loaders with a run
                from shardkit.loader.monitoring import open_watch

                resources.watch = open_watch(setup, live, self.telemetry)
            # a method of the resources, not of `self`: the finaliser must not keep the loader alive
            weakref.finalize(self, resources.close_unwatched)
        return resources

    def _close_pipeline(self) -> None:
        if self.resources is not None:
            self.resources.close_pipeline()

    def note(self, batch: Batch | Sequence[Batch], losses: Any) -> None:
        """Record the losses of a batch in the run directory, for ``shardkit audit spikes``.

        Takes 8 bytes per sample at most, and one write of the page cache.

        Args:
            batch: as handed out by this loader; with ``by_cell=True`` the list of a step.
            losses: (n,) one per row, in the order of the batch or list, or (lanes,) one per cell; a tensor of any
                device, or an array.

        Raises:
            UsageError: the loader has no ``run=``, or arguments are of another kind or number.
            StoreError: the disk is full or unavailable.
        """
        if self._setup.config.run is None:
            raise UsageError("loader.note needs a run directory: make the loader with ds.loader(plan, run=…)")
        self._open_resources().note_losses([batch] if isinstance(batch, Batch) else batch, losses)

    # ---- state

    def state_dict(self, after: Batch | Sequence[Batch] | None = None) -> dict[str, Any]:
        """Return the state to resume from, a JSON-serialisable dict of less than 1 KB.

        Batches that were prefetched but not handed out come again. A state taken after the last batch of an epoch
        resumes at the next epoch.

        Args:
            after: batch (or list of batches) after which to continue; None for the last one handed out.

        Examples:
            >>> with ds.loader(plan) as loader:
            ...     batch = next(iter(loader))
            ...     state = loader.state_dict(after=batch)
            >>> state["step"]
            1
        """
        step = self.handed_out if after is None else step_after(after)
        return {
            "version": STATE_VERSION,
            "step": step,
            "plan": self.plan.digest,
            "manifest": self._setup.sources.manifest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, on any rank of any world.

        An amended plan also accepts states of the plans that it descends from, up to the step of the amendment.

        Raises:
            StateError: the state has another plan or manifest, which the message names, or another state version.

        Examples:
            >>> with ds.loader(plan, rank=1, world=5) as loader:
            ...     loader.load_state_dict(state)
            ...     next(iter(loader)).step
            1
        """
        self.seek(check_state(state, self.plan, self._setup.sources.manifest))

    def seek(self, step: int) -> None:
        """Begin the next loop at `step`, counted over the whole run; with ``restart=True``, at its epoch's first step.

        Raises:
            StateError: `step` is not a valid step number.

        Examples:
            >>> with ds.loader(plan) as loader:
            ...     loader.seek(25)
            ...     loader.epoch, next(iter(loader)).step
            (2, 25)
        """
        step = check_step("step", step)
        self._end_loop(f"the loader was moved to step {step}")
        self._close_pipeline()
        if self._setup.mixing is not None:
            self._setup.mixing.seek(step)
        self.live.handed_out = step

    def resize(self, *, rank: int, world: int) -> None:
        """Continue as rank `rank` of `world` from the next step on, as a restart would.

        Lanes and batches are as a new loader with these arguments would have them after it had loaded this loader's
        state; no process group is needed. A loop under way continues with its next step. Call it between two steps,
        before the same step on every rank. A rank that leaves closes its loader; a rank that joins makes a loader and
        loads the state of any other rank. The journal continues in a new file, and blocks in memory are read again.

        Raises:
            ConfigurationError: `world` ranks cannot share the lanes, or the lanes were chosen by mesh=, lanes= or
                rebalance=. The loader does not change.
            UsageError: another thread is taking a batch.
        """
        from shardkit.loader.lanes import resized_lanes

        topology, assignment, lanes = resized_lanes(self.plan, self._setup.config, rank, world)
        check_memory(self._setup, len(lanes))
        loop = self._loop()
        with contextlib.nullcontext() if loop is None else loop.turn():
            self._close_resources()
            self._setup = msgspec.structs.replace(self._setup, topology=topology)
            self.assignment, self.live.lanes = assignment, lanes
            if "telemetry" in self.__dict__:
                self.telemetry.rank, self.telemetry.world = topology.rank, topology.world
            if loop is not None and loop.is_under_way:
                self._read(loop.left, lanes)

    # ---- properties, statistics, close

    @property
    def topology(self) -> Topology:
        """Rank and world size of this process."""
        return self._setup.topology

    @property
    def lanes(self) -> list[int]:
        """Lanes that this rank works now."""
        return self.live.lanes

    @property
    def resources(self) -> LoaderResources | None:
        """Open threads and files; None before the first loop."""
        return self.live.resources

    @property
    def memory_needed(self) -> int:
        """Bytes of blocks that this rank's lanes mix at a time, plus a quarter."""
        return memory_needed(self._setup, len(self.lanes))

    @property
    def handed_out(self) -> int:
        """The step after the last one handed out."""
        return self.live.handed_out

    @property
    def epoch(self) -> int:
        """Number of the epoch that contains the next batch, from 0.

        It increases when the last batch of an epoch is handed out. A resumed run trains
        ``for epoch in range(loader.epoch, epochs)``.
        """
        return self.plan.epoch_of(self.live.handed_out)

    def stats(self) -> dict[str, float]:
        """Return counters of the current or last loop, and of all block loads of this loader.

        Names are stable. Names of times end in `_s` (seconds), names of sizes in `_bytes`. SPEC.md §7 lists them.

        Examples:
            >>> with ds.loader(plan) as loader:
            ...     batches = list(loader)
            >>> loader.stats()["steps"]
            10.0
        """
        moves = {} if self._rebalancer is None else {"moves": float(self._rebalancer.moves)}
        return self.live.of_loop() | moves

    def __reduce__(self) -> NoReturn:
        """Refuse to pickle: threads and files cannot be sent to another process."""
        raise UsageError(
            "a loader stays in its process (a forked child may go on with it); to another one send the dataset, the "
            "plan and loader.state_dict(), make the loader there and load the state"
        )

    def close(self) -> None:
        """Stop threads and processes, sync and close the journal; may be called twice."""
        self._end_loop("the loader was closed")
        self._close_resources()
        if self._served is not None:
            self._served.close()

    def _close_resources(self) -> None:
        if self.resources is not None:
            self.resources.close()
        self.live.resources = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
