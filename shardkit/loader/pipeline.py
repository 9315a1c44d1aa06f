"""The pipeline that turns steps into batches, in order and ahead of the trainer: plan → load → gather → transform.

It has up to two threads besides the block threads: one plans groups of steps and queues their blocks, one gathers step
after step. Where gathering takes well below a millisecond, it is done in the trainer's own `next`: memory that is
still in this core's cache is reused, which is faster than handing the step to another thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import accumulate, cycle, pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from shardkit.arrays import Int64s
from shardkit.loader.batch import Batch, EpochCounts, LoaderCounts, StepBatches, may_pin, to_tensors
from shardkit.loader.block_memory import MemoryBound
from shardkit.loader.block_window import BlockWindow, GroupBlocks
from shardkit.loader.gather import (
    Allocate,
    RowAddresses,
    StepGroup,
    first_lanes,
    is_only_copied,
    most_steps,
    plan_group,
)
from shardkit.loader.row_work import BatchRows, RowWork
from shardkit.loader.settings import LoaderSetup

if TYPE_CHECKING:
    from shardkit.telemetry.recorder import BlockTimes

__all__ = ["Pipeline"]

T = TypeVar("T")

_GROUPS_AHEAD = 4  # besides the group being gathered and the group being planned
# Up to this size, handing a step over costs as much as gathering it in the trainer's own `next`.
_INLINE_BYTES = 8 << 20
_TOGETHER_BYTES, _LENT_BYTES, _TOGETHER_STEPS = 4 << 20, 1 << 20, 8
_DEFAULT_PREFETCH = 4
_NO_SAMPLES = np.zeros(0, dtype=np.int64)


class Background(Generic[T]):
    """Iterator over items that a daemon thread produces ahead, up to `depth` of them.

    An error of `items` is raised by `__next__` after the items before it. `waited` is called with "blocked" and the
    seconds that the thread waited for room, or "starved" and the seconds that the consumer waited for an item;
    `on_stall` after every `stall_s` seconds without an item.
    """

    def __init__(
        self,
        items: Generator[T],
        depth: int,
        *,
        name: str,
        waited: Callable[[str, float], None],
        on_stall: Callable[[float], None],
        stall_s: float,
    ) -> None:
        self._items, self.depth, self._waited = items, depth, waited
        self._on_stall, self._stall_s = on_stall, stall_s
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._finished = self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._ready)

    def deepen(self, depth: int) -> None:
        """Change the maximum number of finished items that wait."""
        with self._changed:
            self.depth = depth
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            if not self._ready and not self._finished:
                self._wait_for_item()
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify()
                return item
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    def _wait_for_item(self) -> None:
        started = time.perf_counter()
        limit = self._stall_s
        while not self._ready and not self._finished and not self._closed:
            if not self._changed.wait(self._stall_s):
                waited = time.perf_counter() - started
                if waited >= limit:
                    limit += self._stall_s
                    self._on_stall(waited)
        self._waited("starved", time.perf_counter() - started)

    def close(self) -> None:
        """Stop the thread, drop finished items and join; may be called twice and from any thread."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
        except BaseException as error:  # noqa: BLE001  every failure must reach the caller's thread
            self._error = error
        finally:
            self._items.close()
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _put(self, item: T) -> bool:
        with self._changed:
            if len(self._ready) >= self.depth and not self._closed:
                started = time.perf_counter()
                while len(self._ready) >= self.depth and not self._closed:
                    self._changed.wait()
                self._waited("blocked", time.perf_counter() - started)
            if self._closed:
                return False
            self._ready.append(item)
            self._changed.notify()
        return True


class _Step(NamedTuple):
    number: int
    rows: int
    lane_counts: Int64s
    parts: list[BatchRows]  # one per batch


class Pipeline:
    """Reads steps ahead of the trainer, epoch after epoch; each step is taken once.

    An error closes it. With `goes_on` the next epoch is read after the last of `numbers` is planned. `prefetch` is the
    number of finished steps that may wait, if it was changed while the loader ran; otherwise 0.

    Attributes:
        lanes: lanes that are read.
        numbers: steps that were read first.
        left: steps of their epoch that were not taken; after the last one with `goes_on`, the next epoch.
    """

    def __init__(
        self,
        setup: LoaderSetup,
        window: BlockWindow,
        memory: MemoryBound,
        work: RowWork | None,
        times: BlockTimes | None,
        counts: LoaderCounts,
        numbers: range,
        lanes: Sequence[int],
        allocate: Allocate,
        *,
        goes_on: bool,
        prefetch: int = 0,
    ) -> None:
        self._setup, self._window, self._memory, self._work, self._times = setup, window, memory, work, times
        self._counts, self.lanes, self._goes_on = counts, list(lanes), goes_on
        self.numbers = self.left = numbers
        self._allocate = allocate
        self._rows_per_step = max(1, setup.plan.cell_size * len(lanes))
        self._bytes_per_step = self._rows_per_step * setup.sources.row_bytes(setup.fields)
        self._most_steps = most_steps(self._rows_per_step, self._bytes_per_step)
        self._pin = setup.tensors and setup.config.device is None and may_pin()
        self._prefetch = self._steps_ahead(prefetch)
        # Small steps are gathered several at a time, because each gather waits for the interpreter when it ends.
        # With another allocator fewer steps are gathered at once, so that its memory is reused sooner.
        most = _TOGETHER_BYTES if allocate is np.empty else _LENT_BYTES
        fit = most // max(1, self._bytes_per_step)
        self._together = 1 if self._prefetch else max(1, min(_TOGETHER_STEPS, fit))
        self._stopping = threading.Event()
        self._current: StepGroup | None = None  # the group that is being gathered or awaited
        self._loop = window.loop
        self._groups = self._behind("plan", self._queue_groups(), 1, "plan")
        self._ahead: Background[StepBatches] | None = None
        if self._prefetch:
            self._ahead = self._behind("assembly", self._steps(), self._prefetch, "assemble")
        self._output: Iterator[StepBatches] = self._steps() if self._ahead is None else self._ahead
        if setup.device is not None:
            self._output = setup.device.feed(self._output, lambda: self.queued[1])
        self._next: StepBatches | None = None
        self._waited_s = 0.0  # seconds that the next step was waited for

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

    def _behind(self, name: str, items: Generator[T], depth: int, stage: str) -> Background[T]:
        def note(what: str, seconds: float) -> None:
            key = f"{name}_{what}_s"
            setattr(self._counts, key, getattr(self._counts, key) + seconds)

        return Background(
            items, depth, name=f"shardkit-{name}", waited=note, on_stall=lambda waited: self._report(waited, stage),
            stall_s=self._setup.config.stall_s,
        )  # fmt: skip

    def peek(self) -> StepBatches | None:
        """Return the next step; None after the last one, or if the pipeline was closed."""
        if self._next is None:
            started = time.perf_counter()
            try:
                if self._work is None:
                    self._next = next(self._output, None)
                else:
                    with self._work.trainer_waits:
                        self._next = next(self._output, None)
            except BaseException as error:
                if self._stopping.is_set() and isinstance(error, Exception):
                    return None  # another thread has closed the pipeline during the wait
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
            self.left = self.left[1:] or self._next_epoch(self.left)
            self._counts.last_wait_s = self._waited_s
            self._counts.consumer_wait_s += self._waited_s
            self._counts.steps += 1
            self._counts.samples += len(one.samples)
        return one

    @property
    def queued(self) -> tuple[int, int]:
        """Number of groups planned ahead, and number of finished steps that wait for the trainer."""
        return len(self._groups), 0 if self._ahead is None else len(self._ahead)

    @property
    def prefetch(self) -> int:
        """Number of finished steps that may wait; 0 if steps are gathered on request."""
        return 0 if self._ahead is None else self._ahead.depth

    @prefetch.setter
    def prefetch(self, value: int) -> None:
        if self._ahead is not None:
            self._ahead.deepen(max(1, value))

    def close(self) -> None:
        """Stop the threads and drop finished steps; may be called twice and from any thread."""
        self._stopping.set()
        self._window.end_loop(self._loop)
        if self._ahead is not None:
            self._ahead.close()
        self._groups.close()
        self._output = iter(())

    @property
    def is_closed(self) -> bool:
        """True if it reads no more steps: it was closed, met an error or has delivered the last one."""
        return self._stopping.is_set()

    def _next_epoch(self, left: range) -> range:
        """Return the steps of the next epoch, which are read after `left`; an empty range if none are."""
        stop = self._setup.plan.epoch_bounds(left.stop)[1] if self._goes_on else left.stop
        return range(left.stop, stop)

    def _report(self, waited: float, stage: str = "load") -> None:
        from shardkit.loader.stalls import report_stall  # stalls are rare

        self._counts.stalls += 1
        at = None if self._work is None else self._work.at
        report_stall(self._setup, waited, stage, self._current, at=at, loading=self._window.queue.longest())

    # ---- plan and load

    def _queue_groups(self) -> Generator[GroupBlocks]:
        """Yield groups of steps whose blocks are queued; block threads load them in order of first use."""
        epoch, size = self.numbers, 1  # the first batch waits for one step
        mixing, window = self._setup.mixing, self._window
        while epoch and not self._stopping.is_set():
            window.begin_epoch()
            left = epoch
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
                while planned is not None:
                    started = time.perf_counter()
                    admitted, planned = window.admit(self._loop, planned, self._memory.over_memory)
                    self._counts.plan_s += time.perf_counter() - started
                    if self._memory.note_admission(window.epoch, window.mean_block()):
                        window.epoch = EpochCounts()
                    yield admitted
            epoch = self._next_epoch(epoch)

    def _plan(self, numbers: range) -> StepGroup:
        plan, times = self._setup.plan, self._times
        found = plan_group(plan, self._setup.sources.rows.locate, self.lanes, numbers)
        if times is not None:
            times.expect(found.blocks.tolist(), first_lanes(found, plan.cell_size))
        return found

    # ---- gather and transform

    def _steps(self) -> Generator[StepBatches]:
        """Yield steps in order, while workers decode the following ones; an error comes after the steps before it."""
        work, begun, error = self._work, deque[_Step](), None
        ahead = 0 if work is None else min(self._prefetch, work.steps_ahead(self._rows_per_step))
        gathered = self._gather_steps()
        try:
            while error is None or begun:
                try:
                    if error is None:
                        begun.append(next(gathered) if work is None else self._begin(work, next(gathered)))
                except Exception as raised:  # noqa: BLE001  raised below, StopIteration too
                    error = raised
                while begun and (error is not None or len(begun) > ahead):
                    done = self._finish(begun[0])
                    begun.popleft()
                    yield done
                    del done  # so that the trainer's reference is the last one
        finally:
            for left in begun:
                for part in left.parts:
                    part.give_up()
        if not isinstance(error, StopIteration):
            raise error

    def _begin(self, work: RowWork, step: _Step) -> _Step:
        started = time.perf_counter()
        step.parts[:] = [work.begin(part, step.number, step.rows) for part in step.parts]
        self._counts.transform_s += time.perf_counter() - started
        return step

    def _gather_steps(self) -> Iterator[_Step]:
        """Yield steps in order; several are gathered at a time, as soon as their blocks are loaded."""
        setup, stall_s = self._setup, self._setup.config.stall_s
        short = self._most_steps  # planning far ahead at first would delay the first batches
        for needed in self._groups:
            self._current = group = needed.group
            short -= len(group.numbers)
            if short <= 0 and self._groups.depth < _GROUPS_AHEAD:
                self._groups.deepen(_GROUPS_AHEAD)
            rows = RowAddresses(setup.sources.schema, setup.fields, needed.which, group.row, self._allocate)
            offset = 0
            while offset < len(group.numbers):
                started = time.perf_counter()
                steps = needed.wait(offset, self._together, stall_s, self._report)
                self._counts.load_wait_s += time.perf_counter() - started
                gathered = self._gather(needed, rows, steps)
                offset = steps.stop
                gathered.reverse()
                while gathered:  # pop, so that a batch is freed when the trainer drops it
                    yield gathered.pop()

    def _gather(self, needed: GroupBlocks, rows: RowAddresses, steps: range) -> list[_Step]:
        started = time.perf_counter()
        group, split, by_cell = needed.group, self._setup.missing.split, self._setup.config.by_cell
        lane_counts = group.lane_counts[steps.start : steps.stop]
        borders: list[int] = group.borders[steps.start : steps.stop + 1].tolist()
        ends = list(accumulate(lane_counts.ravel().tolist(), initial=borders[0])) if by_cell else borders
        lanes = self.lanes if by_cell else [-1]
        parts = [
            # copies, so that a batch does not keep the arrays of the whole group alive
            BatchRows(lane, *split(fields), group.samples[a:b].copy(), group.slots[a:b].copy())
            for lane, fields, (a, b) in zip(cycle(lanes), needed.take(steps, ends, rows), pairwise(ends))
        ]
        numbers, count = group.numbers[steps.start : steps.stop], len(lanes)
        self._counts.gather_s += time.perf_counter() - started
        return [
            _Step(number, b - a, counts, parts[count * n : count * (n + 1)])
            for n, (number, counts, (a, b)) in enumerate(
                zip(numbers, lane_counts, pairwise(borders), strict=True)
            )
        ]

    def _finish(self, step: _Step) -> StepBatches:
        """Return a step after decoding and transforms; steps are finished in the order in which they were begun."""
        weight, work, batches = self._weight(step.number, step.rows), self._work, []
        for part in step.parts:
            fields, samples = part.fields, part.samples
            if work is not None:
                started = time.perf_counter()
                fields, samples = work.finish(part, step.number)
                self._counts.transform_s += time.perf_counter() - started
            batch = Batch(
                fields, step=step.number, lane=part.lane, samples=samples, slots=part.slots, weight=weight,
                valid=part.valid,
            )  # fmt: skip
            batches.append(to_tensors(batch, pin=self._pin) if self._setup.tensors else batch)
        samples = batches[0].samples if batches else _NO_SAMPLES
        if len(batches) > 1:
            samples = np.concatenate([batch.samples for batch in batches])
        replaced = [] if work is None else work.take_replacements()
        return StepBatches(step.number, batches, samples, step.lane_counts, replaced)

    def _weight(self, step: int, rows: int) -> float:
        plan, world = self._setup.plan, self._setup.topology.world
        if world == 1:
            return 1.0
        everyone = plan.global_batch
        if rows != plan.cell_size * len(self.lanes):  # a short step: count what all ranks hold
            everyone = int((plan.step(step) >= 0).sum())
        return rows * world / everyone
