"""The pipeline that turns steps into batches, in order and ahead of the trainer: plan → load → gather → transform.

It has up to two threads besides the block threads. The first plans groups of steps and queues their blocks. The second
gathers one step at a time. A step that needs only gathering, for well below a millisecond, is gathered in the trainer's
own `next` instead: copying into memory that this core has just freed costs less than handing the step over, and no
thread competes with the trainer for the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import accumulate, cycle, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s
from shardkit.errors import UsageError
from shardkit.loader.background import Background
from shardkit.loader.batch import Batch, LoaderCounts, StepBatches, may_pin, to_tensors
from shardkit.loader.block_window import CLOSED, Admission, BlockWindow
from shardkit.loader.gather import Allocate, RowAddresses, is_only_copied
from shardkit.loader.resources import LoaderResources, Watchdog
from shardkit.loader.row_work import BegunRows, RowWork
from shardkit.loader.schedule import StepGroup, first_lanes, most_steps, plan_group, steps_that_fit
from shardkit.loader.settings import LoaderSetup
from shardkit.plan import Plan

__all__ = ["GroupBlocks", "Pipeline"]

T = TypeVar("T")

_GROUPS_AHEAD = 4  # besides the group being gathered and the group being planned
# Up to this size, handing a step over costs as much as gathering it in the trainer's own `next`.
_INLINE_BYTES = 8 << 20
_TOGETHER_BYTES, _LENT_BYTES, _TOGETHER_STEPS = 4 << 20, 1 << 20, 8
_DEFAULT_PREFETCH = 4
_NO_SAMPLES = np.zeros(0, dtype=np.int64)


class GroupBlocks:
    """The blocks of one group of steps.

    Attributes:
        group: the steps.
        which: (n,) int64 slot that holds the block of each row.
    """

    def __init__(
        self,
        window: BlockWindow,
        group: StepGroup,
        admitted: Admission,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the blocks of an admitted group.

        Once `stopped` returns True, a thread that is woken from `wait` raises UsageError.
        """
        self._loop, slots, self._needs, self._origin = admitted
        self.group, self.which = group, slots[group.which] if len(slots) else group.which
        self._window = window
        self._stopped = stopped

    def wait(self, step: int, most: int, timeout_s: float, on_stall: Callable[[float], None]) -> range:
        """Wait for the blocks of a step; return up to `most` steps from it on whose blocks are loaded.

        An error of loading a block of the step is raised here.
        """
        self._check()
        done = self._window.wait_for(self._needs[step], timeout_s, on_stall)
        self._check()
        end = min(step + most, bisect_right(self._needs, done))
        if failed := self._window.first_failed:
            number, error = failed
            if number < self._needs[step]:
                raise error
            end = min(end, bisect_right(self._needs, number))
        return range(step, end)

    def take(self, steps: range, borders: list[int], rows: RowAddresses) -> list[dict[str, Any]]:
        """Return the rows of these steps, see `RowAddresses.take`, and release their blocks."""
        with self._window.in_use:
            self._check()
            found = rows.take(self._window.facts, borders, self._window.loads)
            self._window.advance(self._origin + steps.stop)
        return found

    def _check(self) -> None:
        if self._stopped() or self._window.loop != self._loop:
            raise UsageError(CLOSED)


class _GatheredStep(NamedTuple):
    step: int
    rows: int
    lane_counts: Int64s
    parts: Sequence[tuple[int, dict[str, Any], Mapping[str, NDArray[np.bool_]], Int64s, Int64s]]
    """(lane, fields, valid, samples, slots) for each batch; lane −1 stands for all lanes."""


class _BegunStep(NamedTuple):
    """A step whose rows workers may be decoding."""

    step: int
    rows: int
    parts: list[tuple[int, BegunRows]]  # (lane, rows)
    lane_counts: Int64s


class Pipeline:
    """Reads steps ahead of the trainer, epoch after epoch; each step is taken once.

    After an error every later call raises it again, so a loop that failed cannot look complete.

    Args:
        setup: setup of the loader.
        resources: open resources of the loader.
        numbers: steps of the first epoch, ascending.
        goes_on: read the next epoch after the last step of one is planned.
        lanes: lanes whose cells are read.
        allocate: makes the arrays of batches.
        prefetch: number of finished steps that may wait, if it was changed while the loader ran; otherwise 0.
    """

    def __init__(
        self,
        setup: LoaderSetup,
        resources: LoaderResources,
        numbers: range,
        lanes: Sequence[int],
        allocate: Allocate,
        *,
        goes_on: bool,
        prefetch: int = 0,
    ) -> None:
        self._setup, self._resources, self.lanes = setup, resources, list(lanes)
        self.numbers, self.goes_on = numbers, goes_on
        self._counts = LoaderCounts()
        self._allocate = allocate
        self._rows_per_step = max(1, setup.plan.cell_size * len(lanes))
        self._bytes_per_step = self._rows_per_step * setup.sources.row_bytes(setup.fields)
        self._most_steps = most_steps(self._rows_per_step, self._bytes_per_step)
        self._pin = setup.tensors and setup.config.device is None and may_pin()
        self._work = resources.row_work(allocate)
        self._prefetch = self._steps_ahead(prefetch)
        # Small steps are gathered several at a time, because each gather waits for the interpreter when it ends.
        # With another allocator fewer steps are gathered at once, so that its memory is reused sooner.
        most = _TOGETHER_BYTES if allocate is np.empty else _LENT_BYTES
        fit = most // max(1, self._bytes_per_step)
        self._together = 1 if self._prefetch else max(1, min(_TOGETHER_STEPS, fit))
        self._watchdog = Watchdog(setup, resources, len(lanes), self._work)
        self._process = os.getpid()
        self._stopping = threading.Event()
        self._current: StepGroup | None = None  # the group that is being gathered or awaited
        self._loop = resources.window.begin_loop()
        epochs = _and_after(numbers, setup.plan) if goes_on else iter([numbers])
        self._groups = self._behind("plan", self._queue_groups(epochs), 1, "plan")
        self._ahead: Background[StepBatches] | None = None
        if self._prefetch:
            self._ahead = self._behind("assembly", self._steps(), self._prefetch, "assemble")
        self._output: Iterator[StepBatches] = self._steps() if self._ahead is None else self._ahead
        self._taken: Iterator[StepBatches] = self._outputs()
        if setup.device is not None:
            self._taken = setup.device.feed(self._taken, lambda: self.queued_steps)
        self._next: StepBatches | None = None
        self._waited_s = 0.0  # seconds that the next step was waited for
        self._error: Exception | None = None
        resources.close_pipeline = self.close

    def _steps_ahead(self, changed: int) -> int:
        """Return how many finished steps may wait; 0 to gather each step in the trainer's own `next`."""
        chosen = self._setup.config.prefetch
        if chosen is None:
            schema, fields = self._setup.sources.schema, self._setup.fields
            only_copied = self._work is None and all(is_only_copied(schema[name]) for name in fields)
            leaves = self._pin or self._setup.config.device is not None
            is_cheap = only_copied and self._bytes_per_step <= _INLINE_BYTES and not leaves
            alone = self._setup.config.rows_are_seeded and self._setup.config.workers == "threads"
            chosen = 0 if is_cheap or alone else _DEFAULT_PREFETCH
        return chosen and (changed or chosen)

    def _behind(self, name: str, items: Iterator[T], depth: int, stage: str) -> Background[T]:
        def note(what: str, seconds: float) -> None:
            key = f"{name}_{what}_s"
            setattr(self._counts, key, getattr(self._counts, key) + seconds)

        return Background(
            items, depth, name=f"shardkit-{name}", waited=note, on_stall=lambda waited: self._report(waited, stage),
            stall_s=self._setup.config.stall_s, stop=self._stop,
        )  # fmt: skip

    def _outputs(self) -> Iterator[StepBatches]:
        while True:
            if self._process != os.getpid():
                raise UsageError(
                    "this loop was begun in the parent process, and its threads and blocks are there; iterate "
                    "over the loader again to begin one here"
                )
            with contextlib.nullcontext() if self._work is None else self._work.trainer_waits:
                one = next(self._output, None)
            if one is None:
                return
            yield one

    def peek(self) -> StepBatches | None:
        """Return the next step; None after the last one, or if the pipeline was closed."""
        if self._error is not None:
            raise self._error
        if self._next is None:
            started = time.perf_counter()
            try:
                self._next = next(self._taken, None)
            except BaseException as error:
                if self._stopping.is_set() and isinstance(error, Exception):
                    return None  # another thread has closed the pipeline during the wait
                if not isinstance(error, Exception):
                    text = f"this loop was interrupted by {type(error).__name__}"
                    error = UsageError(f"{text}; iterate again, or load a state")
                self._error = error
                self.close()
                raise
            self._waited_s = time.perf_counter() - started
            if self._next is None:
                self.close()
        return self._next

    def take(self) -> StepBatches | None:
        """Remove the next step, count it and return it; None as in `peek`."""
        one, self._next = self.peek(), None
        if one is not None:
            self._counts.last_wait_s = self._waited_s
            self._counts.consumer_wait_s += self._waited_s
            self._counts.steps += 1
            self._counts.samples += len(one.samples)
        return one

    def begin_loop(self, counts: LoaderCounts) -> None:
        """Count in `counts` from now on."""
        self._counts = counts

    @property
    def queued_groups(self) -> int:
        """Number of groups planned ahead."""
        return len(self._groups)

    @property
    def queued_steps(self) -> int:
        """Number of finished steps that wait for the trainer."""
        return 0 if self._ahead is None else len(self._ahead)

    @property
    def prefetch(self) -> int:
        """Number of finished steps that may wait; 0 if steps are gathered on request."""
        return 0 if self._ahead is None else self._ahead.depth

    @prefetch.setter
    def prefetch(self, value: int) -> None:
        if self._ahead is not None:
            self._ahead.depth = max(1, value)

    def close(self) -> None:
        """Stop the threads and drop finished steps; may be called twice and from any thread."""
        if self._process != os.getpid():
            return  # a forked child has no threads, and their locks may be held for ever
        self._stop()
        if self._ahead is not None:
            self._ahead.close()
        self._groups.close()
        self._output = iter(())
        self._resources.window.end_loop(self._loop)

    def _stop(self) -> None:
        self._stopping.set()
        self._resources.window.wake(self._loop)

    def _report(self, waited: float, stage: str = "load") -> None:
        self._counts.stalls += 1
        self._watchdog.report_stall(waited, stage, self._current)

    # ---- plan and load

    def _queue_groups(self, epochs: Iterator[range]) -> Iterator[GroupBlocks]:
        """Yield groups of steps whose blocks are queued; block threads load them in order of first use."""
        size = 1  # the first batch waits for one step
        mixing = self._setup.mixing
        for left in epochs:
            self._resources.window.begin_epoch()
            while left and not self._stopping.is_set():
                steps = left[:size]
                if mixing is not None:
                    steps = left[: min(size, mixing.decided_after(left[0], self._stopping.is_set) - left[0])]
                    if not steps:  # stopped
                        return
                started = time.perf_counter()
                planned: StepGroup | None = self._plan(steps)
                self._counts.plan_s += time.perf_counter() - started
                left, size = left[len(steps) :], min(self._most_steps, 4 * size)
                while planned is not None and not self._stopping.is_set():
                    started = time.perf_counter()
                    admitted, planned = self._admit(planned)
                    self._counts.plan_s += time.perf_counter() - started
                    self._watchdog.note_admission()
                    yield admitted
            if self._stopping.is_set():
                return

    def _plan(self, numbers: range) -> StepGroup:
        plan, times = self._setup.plan, self._resources.times
        found = plan_group(plan, self._setup.sources.rows.locate, self.lanes, numbers)
        if times is not None:
            times.expect(found.blocks.tolist(), first_lanes(found, plan.cell_size))
        return found

    def _admit(self, planned: StepGroup) -> tuple[GroupBlocks, StepGroup | None]:
        """Queue the blocks of as many steps as fit into memory; return these steps, and the rest or None."""
        window = self._resources.window
        sizes, own, held = window.sizes(planned)
        steps, needed = steps_that_fit(planned, sizes, held, window.budget)
        if needed > window.budget:
            if self._resources.make_room(needed):
                return self._admit(planned)
            self._watchdog.over_memory(planned.numbers[0], needed)
        group, rest = planned.split(steps)
        count = len(group.blocks)  # blocks are ordered by first use, so the first ones belong to `group`
        admitted = window.admit(group, sizes[:count], own[:count])
        return GroupBlocks(window, group, admitted, self._stopping.is_set), rest

    # ---- gather and transform

    def _steps(self) -> Iterator[StepBatches]:
        """Yield steps in order; if rows are decoded, workers decode the following steps meanwhile."""
        if self._work is None:
            for gathered in self._gather_steps():
                ready = [self._handed_on(one) for one in reversed(gathered)]
                gathered.clear()
                while ready:  # pop, so that a batch is freed when the trainer drops it
                    yield ready.pop()
            return
        ahead = min(self._prefetch, self._work.steps_ahead(self._rows_per_step))
        with contextlib.closing(self._begun_steps(self._work)) as begun:
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
                    del done  # so that the trainer's reference is the last one
                if one is None:
                    break
        finally:
            for left in begun:
                for _, part in left.parts:
                    part.give_up()
        if error is not None:
            raise error

    def _begun_steps(self, work: RowWork) -> Generator[_BegunStep]:
        for gathered in self._gather_steps():
            gathered.reverse()
            while gathered:
                step, rows, lane_counts, parts = gathered.pop()
                begun = []
                for lane, fields, valid, samples, slots in parts:
                    started = time.perf_counter()
                    one = work.begin(fields, step, samples, slots, rows)
                    if one.pieces:
                        self._counts.transform_s += time.perf_counter() - started
                    begun.append((lane, one._replace(valid=valid) if valid else one))
                yield _BegunStep(step, rows, begun, lane_counts)

    def _gather_steps(self) -> Iterator[list[_GatheredStep]]:
        """Yield gathered steps in order, several at a time, as soon as their blocks are loaded."""
        setup, stall_s = self._setup, self._setup.config.stall_s
        short = self._most_steps  # planning far ahead at first would delay the first batches
        for needed in self._groups:
            self._current = group = needed.group
            short -= len(group.numbers)
            if short <= 0 and self._groups.depth < _GROUPS_AHEAD:
                self._groups.depth = _GROUPS_AHEAD
            rows = RowAddresses(setup.sources.schema, setup.fields, needed.which, group.row, self._allocate)
            offset = 0
            while offset < len(group.numbers):
                started = time.perf_counter()
                steps = needed.wait(offset, self._together, stall_s, self._report)
                self._counts.load_wait_s += time.perf_counter() - started
                yield self._gather(needed, rows, steps)
                offset = steps.stop

    def _gather(self, needed: GroupBlocks, rows: RowAddresses, steps: range) -> list[_GatheredStep]:
        started = time.perf_counter()
        group, split, by_cell = needed.group, self._setup.missing.split, self._setup.config.by_cell
        lane_counts = group.lane_counts[steps.start : steps.stop]
        borders: list[int] = group.borders[steps.start : steps.stop + 1].tolist()
        ends = list(accumulate(lane_counts.ravel().tolist(), initial=borders[0])) if by_cell else borders
        lanes = self.lanes if by_cell else [-1]
        parts = [
            # copies, so that a batch does not keep the arrays of the whole group alive
            (lane, *split(fields), group.samples[a:b].copy(), group.slots[a:b].copy())
            for lane, fields, (a, b) in zip(cycle(lanes), needed.take(steps, ends, rows), pairwise(ends))
        ]
        numbers, count = group.numbers[steps.start : steps.stop], len(lanes)
        self._counts.gather_s += time.perf_counter() - started
        return [
            _GatheredStep(number, b - a, counts, parts[count * n : count * (n + 1)])
            for n, (number, counts, (a, b)) in enumerate(
                zip(numbers, lane_counts, pairwise(borders), strict=True)
            )
        ]

    def _handed_on(self, gathered: _GatheredStep) -> StepBatches:
        """Return a step whose rows need no decoding and no transform."""
        step, rows, lane_counts, parts = gathered
        weight = self._weight(step, rows)
        return _together(step, [self._batch(step, weight, *part) for part in parts], lane_counts, [])

    def _finish(self, begun: _BegunStep) -> StepBatches:
        """Return a step after decoding and transforms; steps are finished in the order in which they were begun."""
        work, weight, batches = self._work, self._weight(begun.step, begun.rows), []
        assert work is not None, "somebody has the rows"
        for lane, part in begun.parts:
            started = time.perf_counter()
            fields, samples = work.finish(part)
            self._counts.transform_s += time.perf_counter() - started
            batches.append(self._batch(begun.step, weight, lane, fields, part.valid, samples, part.slots))
        return _together(begun.step, batches, begun.lane_counts, work.take_replacements())

    def _weight(self, step: int, rows: int) -> float:
        plan, world = self._setup.plan, self._setup.topology.world
        if world == 1:
            return 1.0
        everyone = plan.global_batch
        if rows != plan.cell_size * len(self.lanes):  # a short step: count what all ranks hold
            everyone = int((plan.step(step) >= 0).sum())
        return rows * world / everyone

    def _batch(
        self, step: int, weight: float, lane: int, fields: dict[str, Any], valid: Mapping[str, NDArray[np.bool_]],
        samples: Int64s, slots: Int64s,
    ) -> Batch:  # fmt: skip
        batch = Batch(fields, step=step, lane=lane, samples=samples, slots=slots, weight=weight, valid=valid)
        return to_tensors(batch, pin=self._pin) if self._setup.tensors else batch


def _and_after(numbers: range, plan: Plan) -> Iterator[range]:
    """Yield these steps of an epoch, then the steps of each following epoch."""
    while numbers:
        yield numbers
        numbers = range(numbers.stop, plan.epoch_bounds(numbers.stop)[1])


def _together(
    step: int, batches: list[Batch], lane_counts: Int64s, replaced: list[dict[str, Any]]
) -> StepBatches:
    if len(batches) == 1:
        samples = batches[0].samples
    else:
        samples = np.concatenate([batch.samples for batch in batches]) if batches else _NO_SAMPLES
    return StepBatches(step, batches, samples, lane_counts, replaced)
