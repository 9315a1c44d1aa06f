"""From steps to batches, ahead of the trainer and in order: plan → load → gather → transform → queue."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from shardkit.loader.assembly import StepBatches
from shardkit.loader.block_window import BlockWindow
from shardkit.loader.schedule import StepGroup

__all__ = ["Pipeline", "PipelineCounts"]

# One step's worth of Python costs tens of microseconds; steps are therefore worked out and gathered some at a time.
_GROUP_BYTES = 8 << 20
_MAX_GROUP_STEPS = 64
_PLANNED_GROUPS = 3
_POLL_S = 0.1  # how often a blocked thread looks whether it was told to stop


class PipelineCounts:
    """Seconds and steps of the stages."""

    __slots__ = ("consumer_wait_s", "gather_s", "load_wait_s", "plan_s", "producer_blocked_s", "steps")

    def __init__(self) -> None:
        self.plan_s = 0.0
        self.load_wait_s = 0.0
        self.gather_s = 0.0
        self.producer_blocked_s = 0.0
        self.consumer_wait_s = 0.0
        self.steps = 0


class Pipeline:
    """One pass over `numbers`, ascending steps, on a thread of its own.

    Args:
        plan_group: works out some steps (`schedule.plan_group` with plan and lanes bound).
        assemble: gathers and transforms one group, in step order.
        window: the blocks in memory; owned and closed by this pipeline.
        bytes_per_step: rough size of a step of this rank, sets how many steps are gathered at once.
        prefetch: how many steps may wait in the queue, at least one group.
    """

    def __init__(
        self,
        plan_group: Callable[[range], StepGroup],
        assemble: Callable[[StepGroup, BlockWindow], list[StepBatches]],
        window: BlockWindow,
        *,
        numbers: range,
        bytes_per_step: int,
        prefetch: int,
    ) -> None:
        self._plan_group = plan_group
        self._assemble = assemble
        self._window = window
        self._left = numbers
        self._group_steps = max(1, min(_MAX_GROUP_STEPS, _GROUP_BYTES // max(1, bytes_per_step)))
        groups = max(1, -(-prefetch // self._group_steps))
        self._queue: queue.Queue[list[StepBatches] | BaseException | None] = queue.Queue(groups)
        self._stopping = threading.Event()
        self.counts = PipelineCounts()
        self._thread = threading.Thread(target=self._run, name="shardkit-pipeline", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[StepBatches]:
        try:
            while True:
                started = time.perf_counter()
                item = self._queue.get()
                self.counts.consumer_wait_s += time.perf_counter() - started
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                for one in item:
                    self.counts.steps += 1
                    yield one
        finally:
            self.close()

    def close(self) -> None:
        """Stop the thread, drop what was prefetched; may be called twice and from any thread."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._produce()
            self._put(None)
        except BaseException as error:  # noqa: BLE001  every failure must reach the caller's thread
            self._put(error)
        finally:
            self._window.close()

    def _produce(self) -> None:
        planned: deque[StepGroup] = deque()
        while not self._stopping.is_set():
            self._plan_ahead(planned)
            if not planned:
                return
            group = planned[0]
            self._request(planned)
            started = time.perf_counter()
            steps = self._assemble(group, self._window)
            self.counts.gather_s += time.perf_counter() - started
            planned.popleft()
            self._window.unpin(group.blocks)
            self._put(steps)

    def _plan_ahead(self, planned: deque[StepGroup]) -> None:
        started = time.perf_counter()
        while len(planned) < _PLANNED_GROUPS and self._left:
            # the first batch should not wait for a whole group
            steps = 1 if not planned and self.counts.plan_s == 0.0 else self._group_steps
            group = self._plan_group(self._left[:steps])
            while len(group.numbers) > 1 and not self._window.holds(group.blocks):
                self._group_steps = len(group.numbers) // 2
                group = self._plan_group(self._left[: self._group_steps])
            self._left = self._left[len(group.numbers) :]
            self._window.pin(group.blocks)
            planned.append(group)
        self.counts.plan_s += time.perf_counter() - started

    def _request(self, planned: deque[StepGroup]) -> None:
        for position, group in enumerate(planned):
            if not self._window.request(group.blocks, must=position == 0):
                return

    def _put(self, item: list[StepBatches] | BaseException | None) -> None:
        started = time.perf_counter()
        while not self._stopping.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
                break
            except queue.Full:
                continue
        self.counts.producer_blocked_s += time.perf_counter() - started
