"""The changing part of a running loader: loops, states to resume from, and numbers for telemetry and control."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardkit.errors import ConfigurationError, StateError, UsageError
from shardkit.loader.batch import Batch, LoaderCounts, WindowCounts
from shardkit.loader.pipeline import Pipeline
from shardkit.loader.ranks import Topology
from shardkit.loader.resources import LoaderResources
from shardkit.plan import Plan
from shardkit.plan.natural import NaturalGrid
from shardkit.plan.weighted import WeightedGrid
from shardkit.ranges import Range, shown

if TYPE_CHECKING:
    from shardkit.telemetry import Telemetry

__all__ = ["STATE_VERSION", "LiveLoader", "Loop", "StepCosts", "check_geometry", "check_state"]

_RECENT, _SPARSE, _EVERY = 32, 32, 16  # number of last steps, and of earlier steps that are multiples of 16


class StepCosts:
    """Costs of recent steps, computed when telemetry polls them, so that making a step costs nothing.

    Args:
        plan: plan of the loader.
        lanes: returns the lanes of the rank.
        handed_out: returns the step after the last one handed out.
    """

    def __init__(self, plan: Plan, lanes: Callable[[], Sequence[int]], handed_out: Callable[[], int]) -> None:
        self._plan, self._lanes, self._handed_out = plan, lanes, handed_out
        self._plain: Plan | None = None
        self._known: dict[int, tuple[float, float]] = {}

    def table(self) -> list[list[float]]:
        """Return rows of (step, cost, cost if the plan ignored costs); empty if the plan has no costs.

        Ranks are polled at different moments. Earlier multiples of 16 are included so that the ranks of a fast run
        have steps in common.
        """
        grid, end = self._plan.grid, self._handed_out()
        if not isinstance(grid, NaturalGrid | WeightedGrid) or grid.costs is None:
            return []
        recent = range(max(self._plan.from_step, end - _RECENT), end)
        sparse = range(recent.start // _EVERY * _EVERY, self._plan.from_step - 1, -_EVERY)[:_SPARSE]
        wanted = sorted({*recent, *(step for step in sparse if step < end)})
        missing = [step for step in wanted if step not in self._known]
        if self._plain is None:
            self._plain = self._plan.without_costs()
        lanes = list(self._lanes())
        for span in _runs(missing):
            both = [
                grid.costs.of_cells(plan.steps(span.start, span.stop, lanes)).sum(axis=1)
                for plan in (self._plan, self._plain)
            ]
            self._known |= zip(span, zip(*(one.tolist() for one in both), strict=True), strict=True)
        self._known = {step: self._known[step] for step in wanted}
        return [[step, *self._known[step]] for step in wanted]


def _runs(steps: Sequence[int]) -> list[range]:
    """Group ascending numbers into runs of consecutive ones."""
    found: list[range] = []
    for step in steps:
        if found and found[-1].stop == step:
            found[-1] = range(found[-1].start, step + 1)
        else:
            found.append(range(step, step + 1))
    return found


class Loop(Iterator[Batch]):
    """Iterator over the steps of one epoch; ``iter(loader)`` returns one.

    Args:
        hand_out: takes the next step of this loop from its pipeline and returns it as the trainer gets it.
        finish: called when another batch is requested after the last step.
        pipeline: reads the steps; replaced when lanes move.
        numbers: the steps.
        stop: first step of the next epoch.
        counts: counters of this loop.
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
    """State of a running loader; telemetry and control hold this object, so that they do not keep the loader alive.

    Attributes:
        lanes: lanes that the rank works now.
        counts: counters of the current or last loop.
        pipeline: reads for the current loop or for the next one; None if nothing is read.
        resources: resources that are open in this process; None before the first loop.
        handed_out: the step after the last one handed out.
        started_at: ``time.perf_counter`` at the start of the loop.
        handed_at: ``time.perf_counter`` when the last batch was handed out.
        computed_s: seconds that the rank's part of the last step took; negative if not reported.
        cells: number of cells handed out in all loops.
        chosen_prefetch: number of finished steps that may wait, if it was changed while the loader ran; otherwise 0.
    """

    def __init__(self, lanes: list[int]) -> None:
        self.lanes = lanes
        self.counts = LoaderCounts()
        self.pipeline: Pipeline | None = None
        self.resources: LoaderResources | None = None
        self.handed_out = self.cells = self.chosen_prefetch = 0
        self.started_at = self.handed_at = 0.0
        self.computed_s = -1.0
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
            more["memory_bytes"] = float(self.resources.memory)
            more["verification_failures"] = float(self.resources.verification_failures)
        return dict(found) | self._now() | more

    def _now(self) -> dict[str, float]:
        found = {"step": float(self.handed_out)}
        if self.pipeline is not None:
            found["queued_groups"] = float(self.pipeline.queued_groups)
            found["queued_steps"] = float(self.pipeline.queued_steps)
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

    def make_telemetry(self, plan: Plan, topology: Topology, worker: int) -> Telemetry:
        """Return the numbers and tables of this loader that telemetry polls."""
        from shardkit.telemetry import Telemetry  # imported here because most loaders are not watched

        telemetry = Telemetry(
            rank=topology.rank, world=topology.world, worker=worker, lanes=lambda: list(self.lanes)
        )
        costs = StepCosts(plan, lambda: self.lanes, lambda: self.handed_out)
        telemetry.add_table("step_costs", costs.table)

        def of_blocks(name: str, default: Any) -> Callable[[], Any]:
            def read() -> Any:
                resources = self.resources
                if resources is None or resources.times is None:
                    return default
                resources.note_times()
                return getattr(resources.times, name)()

            return read

        telemetry.add_source("loader", self.of_all_loops)
        telemetry.add_source("reads", self.reads)
        telemetry.add_source("blocks", of_blocks("numbers", {}))
        telemetry.add_table("hot_shards", of_blocks("hot_shards", []))
        telemetry.add_table("slow_blocks", of_blocks("slowest", []))
        telemetry.add_table("lane_loads", of_blocks("lane_loads", []))
        return telemetry


def _numbers(counts: LoaderCounts | WindowCounts, but: str = "") -> dict[str, float]:
    names = (one.name for one in fields(counts))
    return {name: float(getattr(counts, name)) for name in names if name != but}


# ---- states

_STEPS = Range(0, 2**62)
STATE_VERSION = 1
"""Version of the dict that `Loader.state_dict` returns."""


def check_state(state: Mapping[str, Any], plan: Plan, manifest: str) -> int:
    """Return the step at which a state continues.

    Raises:
        StateError: the state is malformed, or belongs to another plan or manifest; see `Loader.load_state_dict`.
    """
    check_mapping(state)
    if state.get("version") != STATE_VERSION:
        raise StateError(
            f"loader state of version {state.get('version')!r}: this shardkit reads version {STATE_VERSION}"
        )
    step = check_step("loader state: step", state.get("step"))
    if _fits(state, plan, step):
        return step
    found = plan.parent
    while found is not None:
        if state.get("plan") == found.digest:
            raise StateError(
                f"this state is of step {step}, and the plan differs from step {plan.from_step} on; load a state of "
                f"step {plan.from_step} or earlier"
            )
        found = found.parent
    expected = {"manifest": manifest, "plan": plan.digest}
    differing = [name for name, value in expected.items() if state.get(name) != value]
    if differing:
        details = "; ".join(f"{n} is {state.get(n)!r} in the state, {expected[n]!r} here" for n in differing)
        raise StateError(
            f"this state belongs to other data: {details}. Open the dataset at that manifest and make the plan "
            "with the settings of the run, or start at step 0"
        )
    raise AssertionError("unreachable: the state has this plan and manifest")


def check_mapping(state: object) -> None:
    """Raise StateError for a value that cannot be a state."""
    if not isinstance(state, Mapping):
        raise StateError(
            f"loader state: {shown(state)} is no state; pass the dict that loader.state_dict() returned"
        )


def step_after(batch: object) -> int:
    """Return the step that follows a batch or a list of cells; raise StateError for other values."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(first, Batch):
        raise StateError(
            f"state_dict(after={shown(batch)}): the batch that the loader handed out is expected, before a "
            "collate_fn or a copy to a device changes its type"
        )
    return first.step + 1


def check_step(name: str, step: object) -> int:
    """Return a step number as an int; raise StateError if it is not one."""
    try:
        return int(_STEPS.check(name, step))
    except ConfigurationError as error:
        raise StateError(f"{error}: steps count from 0 over the whole run") from None


def check_geometry(plan: Plan, step: int) -> None:
    """Raise StateError if the step belongs to a parent plan with other lanes, cells or rows."""
    found = plan
    while found.parent is not None and step < found.from_step:
        until, found = found.from_step, found.parent
        there = (found.lanes, found.cell_size, found.population.identity)
        if there != (plan.lanes, plan.cell_size, plan.population.identity):
            raise StateError(
                f"step {step}: up to step {until} this plan is its parent's, with {found.lanes} lanes of "
                f"{found.cell_size} samples over manifest {found.population.identity[:19]}…; read these steps with the "
                f"parent plan, then go on with this one at step {until}"
            )


def _fits(state: Mapping[str, Any], plan: Plan, step: int) -> bool:
    """Return True if the state was taken with `plan`, or with an ancestor of it before the amendment took effect."""
    found: Plan | None = plan
    while found is not None:
        if state.get("plan") == found.digest:
            return state.get("manifest") == found.population.identity
        if step > found.from_step:
            return False
        found = found.parent
    return False
