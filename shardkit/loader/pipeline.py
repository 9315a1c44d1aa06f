"""From steps to batches, ahead of the trainer and in order: plan → load → gather → transform.

Two stages on at most two threads of their own beside the block loaders. One plans groups of steps and has their blocks
loaded; the other gathers a step at a time. Where gathering is all that a step needs and takes well below a millisecond,
it runs in the trainer's own `next`: a copy into memory that this core has just freed costs less than handing it over,
and no thread fights the trainer for the interpreter. Otherwise it runs ahead on a thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import UsageError
from shardkit.loader.background import Background
from shardkit.loader.batch import Batch, may_pin, to_tensors
from shardkit.loader.block_window import GroupBlocks
from shardkit.loader.gather import Allocate, RowAddresses, is_only_copied
from shardkit.loader.resources import LoaderResources
from shardkit.loader.row_work import BegunRows
from shardkit.loader.schedule import StepGroup, first_lanes, most_steps, plan_group, steps_that_fit
from shardkit.loader.settings import LoaderSetup
from shardkit.loader.watchdog import Watchdog

__all__ = ["LoaderCounts", "Pipeline", "StepBatches"]

T = TypeVar("T")

_GROUPS_AHEAD = 1  # beside the one that is gathered and the one that is planned
# A step of at most this size is gathered in the trainer's own `next`: to hand it over would cost as much as it saves.
_INLINE_BYTES = 8 << 20
_TOGETHER_BYTES, _TOGETHER_STEPS = 1 << 20, 8
_DEFAULT_PREFETCH = 4
_NO_SAMPLES = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class LoaderCounts:
    """Of one loop: plain numbers that cost nanoseconds. Each is a key of `Loader.stats`; times are seconds."""

    assembly_blocked_s: float = 0.0  # the assembly thread waited for room
    assembly_starved_s: float = 0.0  # the trainer waited for it
    computed_s: float = 0.0  # the rank's own part of steps, where the loop says when it is done
    consumer_wait_s: float = 0.0  # the trainer waited in `next`
    gather_s: float = 0.0
    last_wait_s: float = 0.0  # of the step handed out last
    load_wait_s: float = 0.0  # gathering waited for blocks
    plan_blocked_s: float = 0.0  # the plan thread waited for room
    plan_s: float = 0.0
    plan_starved_s: float = 0.0  # gathering waited for it
    samples: int = 0
    stalls: int = 0  # reports of the watchdog
    steps: int = 0
    substitutions: int = 0  # rows replaced or masked
    transform_s: float = 0.0  # decoding and transforms, as the assembling thread sees them


class _BegunStep(NamedTuple):
    """A step that is gathered, and in the hands of workers."""

    step: int
    rows: int
    parts: list[tuple[int, BegunRows]]  # (lane, rows) of each batch to be; lane -1: of all
    lane_counts: list[int]


class StepBatches(NamedTuple):
    """One step as it goes to the trainer."""

    step: int
    batches: list[Batch]  # one, or one per lane
    samples: NDArray[np.int64]  # (n,) all samples of the step, lane after lane
    lane_counts: list[int]
    replaced: list[dict[str, Any]]  # rows that were substituted or masked, as the journal records them


class Pipeline:
    """One pass over some steps.

    Args:
        setup, resources: of the loader.
        numbers: the steps, ascending.
        lanes: whose cells they are.
        counts: where time goes.
        allocate: makes the arrays of batches.
        prefetch: how many finished steps may wait, where somebody has changed that on the way; else 0.
    """

    def __init__(
        self,
        setup: LoaderSetup,
        resources: LoaderResources,
        numbers: range,
        lanes: Sequence[int],
        counts: LoaderCounts,
        allocate: Allocate,
        prefetch: int = 0,
    ) -> None:
        self._setup, self._resources, self._lanes, self._counts = setup, resources, list(lanes), counts
        self._allocate = allocate
        self._rows_per_step = max(1, setup.plan.cell_size * len(lanes))
        self._bytes_per_step = self._rows_per_step * setup.sources.row_bytes(setup.fields)
        self._pin = setup.tensors and setup.config.device is None and may_pin()
        self._work = resources.row_work(allocate)
        self._prefetch = self._steps_ahead(prefetch)
        # Every gather waits for the interpreter once it is done: some steps at a time where they are small.
        fit = _TOGETHER_BYTES // max(1, self._bytes_per_step)
        self._together = 1 if self._prefetch else max(1, min(_TOGETHER_STEPS, fit))
        self._watchdog = Watchdog(setup, resources, len(lanes), self._work)
        self._process = os.getpid()
        self._stopping = threading.Event()
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._current: StepGroup | None = None  # the group that is gathered or waited for
        self._loop = resources.window.begin_loop()
        self._groups = self._behind("plan", self._planned(numbers), _GROUPS_AHEAD, "plan")
        self._ahead: Background[StepBatches] | None = None
        if self._prefetch:
            self._ahead = self._behind("assembly", self._steps(), self._prefetch, "assemble")
        self._output: Iterator[StepBatches] = self._steps() if self._ahead is None else self._ahead

    def _steps_ahead(self, changed: int) -> int:
        """How many finished steps may wait; 0 where each is gathered in the trainer's own `next`."""
        chosen = self._setup.config.prefetch
        if chosen is None:
            schema, fields = self._setup.sources.schema, self._setup.fields
            only_copied = self._work is None and all(is_only_copied(schema[name]) for name in fields)
            leaves = self._pin or self._setup.config.device is not None
            is_cheap = only_copied and self._bytes_per_step <= _INLINE_BYTES and not leaves
            chosen = 0 if is_cheap else _DEFAULT_PREFETCH
        return chosen and (changed or chosen)

    def _behind(self, name: str, items: Iterator[T], depth: int, stage: str) -> Background[T]:
        def note(what: str, seconds: float) -> None:
            key = f"{name}_{what}_s"
            setattr(self._counts, key, getattr(self._counts, key) + seconds)

        return Background(
            items, depth, name=f"shardkit-{name}", waited=note, on_stall=lambda waited: self._report(waited, stage),
            stall_s=self._setup.config.stall_s, stop=self._stop,
        )  # fmt: skip

    def __iter__(self) -> Iterator[StepBatches]:
        try:
            while True:
                if self._process != os.getpid():
                    raise UsageError(
                        "this loop was begun in the parent process, and its threads and blocks are there; iterate "
                        "over the loader again to begin one here"
                    )
                one = next(self._output, None)
                if one is None:
                    return
                yield one
        finally:
            self.close()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, or until the end."""
        return (self._ended or time.perf_counter()) - self._started

    @property
    def queued_groups(self) -> int:
        """Groups planned ahead."""
        return len(self._groups)

    @property
    def queued_steps(self) -> int:
        """Finished steps that wait for the trainer."""
        return 0 if self._ahead is None else len(self._ahead)

    @property
    def prefetch(self) -> int:
        """How many finished steps may wait; 0 where steps are gathered when they are asked for."""
        return 0 if self._ahead is None else self._ahead.depth

    @prefetch.setter
    def prefetch(self, value: int) -> None:
        if self._ahead is not None:
            self._ahead.depth = max(1, value)

    def close(self) -> None:
        """Stop the threads, drop what was made ahead; may be called twice and from any thread."""
        if self._process != os.getpid():
            return  # a forked child has none of the threads, and perhaps their locks as they were held
        self._stop()
        self._ended = self._ended or time.perf_counter()
        if self._ahead is not None:
            self._ahead.close()
        self._groups.close()
        self._output = iter(())
        self._resources.window.end_loop(self._loop)

    def _stop(self) -> None:
        self._stopping.set()
        self._resources.window.wake(self._loop)

    def _report(self, waited: float, stage: str) -> None:
        self._counts.stalls += 1
        self._watchdog.stalled(waited, stage, self._current)

    def _report_load(self, waited: float) -> None:
        self._report(waited, "load")

    # ---- plan and load

    def _planned(self, left: range) -> Iterator[GroupBlocks]:
        """Groups of steps, handed on before their blocks are loaded.

        These are loaded while the steps are worked: as early as there is room, in the order of first need.
        """
        most, size = (
            most_steps(self._rows_per_step, self._bytes_per_step),
            1,
        )  # the first batch waits for one step
        while left and not self._stopping.is_set():
            started = time.perf_counter()
            planned: StepGroup | None = self._plan(left[:size])
            self._counts.plan_s += time.perf_counter() - started
            left, size = left[size:], min(most, 4 * size)
            while planned is not None and not self._stopping.is_set():
                started = time.perf_counter()
                admitted, planned = self._admit(planned)
                self._counts.plan_s += time.perf_counter() - started
                self._watchdog.admitted()
                yield admitted

    def _plan(self, numbers: range) -> StepGroup:
        plan, times = self._setup.plan, self._resources.times
        found = plan_group(plan, self._setup.sources.rows.locate, self._lanes, numbers)
        if times is not None:
            times.expect(found.blocks.tolist(), first_lanes(found, plan.cell_size))
        return found

    def _admit(self, planned: StepGroup) -> tuple[GroupBlocks, StepGroup | None]:
        """As many steps as there is room for, and the others."""
        window = self._resources.window
        sizes, plain, held = window.sizes(planned)
        steps, needed = steps_that_fit(planned, sizes, held, window.budget)
        if needed > window.budget:
            if self._resources.make_room(needed):
                return self._admit(planned)
            self._watchdog.over_memory(planned.numbers[0], needed)
        group, rest = planned.split(steps)
        count = len(group.blocks)  # they are in the order of first need
        return window.admit(group, sizes[:count], plain[:count], self._stopping.is_set), rest

    # ---- gather and transform

    def _steps(self) -> Iterator[StepBatches]:
        """Steps in order, finished while workers have those after them."""
        ahead = 0 if self._work is None else min(self._prefetch, self._work.steps_ahead(self._rows_per_step))
        with contextlib.closing(self._begun_steps()) as begun:
            if ahead:
                yield from self._finished_behind(begun, ahead)
            else:
                yield from map(self._finish, begun)

    def _finished_behind(self, steps: Iterator[_BegunStep], ahead: int) -> Iterator[StepBatches]:
        begun: deque[_BegunStep] = deque()
        error: Exception | None = None
        one: _BegunStep | None
        try:
            while True:
                try:
                    one = next(steps, None)
                except Exception as raised:  # noqa: BLE001  raised below, after the steps before it
                    one, error = None, raised
                if one is not None:
                    begun.append(one)
                while begun and (one is None or len(begun) > ahead):
                    done = self._finish(begun[0])
                    begun.popleft()
                    yield done
                    del done  # the trainer may let go of it
                if one is None:
                    break
        finally:
            for left in begun:
                for _, part in left.parts:
                    part.give_up()
        if error is not None:
            raise error

    def _begun_steps(self) -> Generator[_BegunStep]:
        for blocks in self._groups:
            self._current = blocks.group
            yield from self._begin(blocks)

    def _begin(self, needed: GroupBlocks) -> Iterator[_BegunStep]:
        """The steps of a group, in order, each as soon as its blocks are there."""
        group, counts, setup = needed.group, self._counts, self._setup
        rows = RowAddresses(setup.sources.schema, setup.fields, needed.which, group.row, self._allocate)
        borders, stall_s, offset = group.borders.tolist(), setup.config.stall_s, 0

        while offset < len(group.numbers):
            started = time.perf_counter()
            steps = needed.wait(offset, self._together, stall_s, self._report_load)
            counts.load_wait_s += time.perf_counter() - started
            lane_counts = group.lane_counts[offset : steps.stop].tolist()
            cells = lane_counts if setup.config.by_cell else [[sum(one)] for one in lane_counts]
            ends = list(accumulate(chain.from_iterable(cells), initial=borders[offset]))
            started = time.perf_counter()
            found = needed.take(steps, ends, rows)
            taken = zip(pairwise(ends), map(setup.missing.split, found), strict=True)
            counts.gather_s += time.perf_counter() - started
            for step, of_lanes, sizes in zip(steps, lane_counts, cells, strict=True):
                parts, number, size = [], group.numbers[step], sum(sizes)
                for lane in self._lanes if setup.config.by_cell else [-1]:
                    (a, b), (fields, valid) = next(taken)
                    # copies: a batch that is kept keeps no other step of its group
                    samples, slots = group.samples[a:b].copy(), group.slots[a:b].copy()
                    begun = self._begin_work(fields, number, samples, slots, size)
                    parts.append((lane, begun._replace(valid=valid) if valid else begun))
                yield _BegunStep(number, size, parts, of_lanes)
            offset = steps.stop

    def _begin_work(
        self,
        fields: dict[str, Any],
        step: int,
        samples: NDArray[np.int64],
        slots: NDArray[np.int64],
        rows: int,
    ) -> BegunRows:
        if self._work is None:
            return BegunRows(fields, {}, step, samples, slots, [])
        started = time.perf_counter()
        begun = self._work.begin(fields, step, samples, slots, rows)
        if begun.pieces:
            self._counts.transform_s += time.perf_counter() - started
        return begun

    def _finish(self, begun: _BegunStep) -> StepBatches:
        """The step as it goes to the trainer; steps are finished in the order in which they were begun."""
        weight = self._weight(begun.step, begun.rows)
        batches = [self._batch(lane, part, weight) for lane, part in begun.parts]
        if len(batches) == 1:
            samples = batches[0].samples
        else:
            samples = np.concatenate([batch.samples for batch in batches]) if batches else _NO_SAMPLES
        replaced = [] if self._work is None else self._work.take_replaced()
        return StepBatches(begun.step, batches, samples, begun.lane_counts, replaced)

    def _weight(self, step: int, rows: int) -> float:
        plan, world = self._setup.plan, self._setup.topology.world
        if world == 1:
            return 1.0
        everyone = plan.global_batch
        if rows != plan.cell_size * len(self._lanes):  # a short step: count what all ranks hold
            everyone = int((plan.step(step) >= 0).sum())
        return rows * world / everyone

    def _batch(self, lane: int, begun: BegunRows, weight: float) -> Batch:
        fields, samples = begun.fields, begun.samples
        if self._work is not None:
            started = time.perf_counter()
            fields, samples = self._work.finish(begun)
            self._counts.transform_s += time.perf_counter() - started
        batch = Batch(
            fields,
            step=begun.step,
            lane=lane,
            samples=samples,
            slots=begun.slots,
            weight=weight,
            valid=begun.valid,
        )
        return to_tensors(batch, pin=self._pin) if self._setup.tensors else batch
