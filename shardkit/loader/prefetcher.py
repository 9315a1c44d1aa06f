"""What the steps of one loop need, worked out in groups and loaded ahead of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardkit.loader.block_window import BlockWindow, GroupBlocks
from shardkit.loader.schedule import StepGroup, most_steps, steps_that_fit
from shardkit.loader.statistics import LoaderCounts

__all__ = ["PrefetchSettings", "Prefetcher"]


@dataclass(frozen=True, kw_only=True)
class PrefetchSettings:
    """How many steps are worked out at once.

    Attributes:
        rows_per_step, bytes_per_step: of this rank.
        make_room: asked to have room for the bytes of a step that does not fit, before it is admitted.
        over_memory: called where the blocks of one step alone exceed the memory bound: (step, their bytes).
        admitted: called after every group.
    """

    rows_per_step: int
    bytes_per_step: int
    make_room: Callable[[int], bool]
    over_memory: Callable[[int, int], None]
    admitted: Callable[[], None]


class Prefetcher:
    """Groups of steps of one loop with their blocks, in order; iterate once.

    A group is handed on before its blocks are loaded, and these are loaded while its steps are worked: as early as
    there is room, in the order of first need.

    Args:
        plan_group: works out some steps (`schedule.plan_group` with plan and lanes bound).
        window: where blocks are loaded.
        numbers: the steps of the loop, ascending.
        settings: see there.
        counts: where time goes.
    """

    def __init__(
        self,
        plan_group: Callable[[range], StepGroup],
        window: BlockWindow,
        numbers: range,
        settings: PrefetchSettings,
        counts: LoaderCounts,
    ) -> None:
        self._plan_group, self._window, self._left = plan_group, window, numbers
        self._settings, self._counts = settings, counts
        self._stopping = threading.Event()
        self._loop = window.begin_loop()

    def __iter__(self) -> Iterator[GroupBlocks]:
        settings, left = self._settings, self._left
        most = most_steps(settings.rows_per_step, settings.bytes_per_step)
        size = 1  # the first batch should not wait for a whole group
        while left and not self._stopping.is_set():
            started = time.perf_counter()
            planned: StepGroup | None = self._plan_group(left[:size])
            self._counts.plan_s += time.perf_counter() - started
            left, size = left[size:], min(most, 4 * size)
            while planned is not None and not self._stopping.is_set():
                started = time.perf_counter()
                admitted, planned = self._admit(planned)
                self._counts.plan_s += time.perf_counter() - started
                settings.admitted()
                yield admitted
                self._window.load(admitted)

    def _admit(self, planned: StepGroup) -> tuple[GroupBlocks, StepGroup | None]:
        """As many steps as there is room for, and the others."""
        settings, window = self._settings, self._window
        sizes, held = window.sizes(planned.blocks)
        steps, needed = steps_that_fit(planned, sizes, held, window.budget)
        if needed > window.budget:
            if settings.make_room(needed):
                return self._admit(planned)
            settings.over_memory(planned.numbers[0], needed)
        group, rest = planned.split(steps)
        needed_first = sizes[: len(group.blocks)]  # blocks are in the order of first need
        return window.admit(group, needed_first, self._stopping.is_set), rest

    def end(self) -> None:
        """Nothing is loaded for this loop any more; once nobody iterates, and as often as one likes."""
        self._window.end_loop(self._loop)

    def stop(self) -> None:
        """No more groups."""
        self._stopping.set()
        self._window.wake()
