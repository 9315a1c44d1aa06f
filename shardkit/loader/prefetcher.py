"""What the steps of one loop need, worked out in groups and leased ahead of them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardkit.loader.block_window import BlockWindow, Lease
from shardkit.loader.schedule import StepGroup, most_steps
from shardkit.loader.statistics import LoaderCounts

__all__ = ["PrefetchSettings", "Prefetcher"]

# Groups share most of their blocks. What is missing of one is loaded before its first step is handed out: at most this
# part of the budget, so that no step waits long for what it does not need.
_LOADED_AT_ONCE = 12


@dataclass(frozen=True, kw_only=True)
class PrefetchSettings:
    """How many steps are worked out at once.

    Attributes:
        rows_per_step, bytes_per_step: of this rank.
        make_room: asked to have room for the bytes of a step that is planned alone, before it is leased.
        over_memory: called where the blocks of one step alone exceed the memory bound: (step, their bytes).
        leased: called after every lease.
    """

    rows_per_step: int
    bytes_per_step: int
    make_room: Callable[[int], bool]
    over_memory: Callable[[int, int], None]
    leased: Callable[[], None]


class Prefetcher:
    """Groups of steps of one loop with their leases, in order; iterate once.

    Args:
        plan_group: works out some steps (`schedule.plan_group` with plan and lanes bound).
        window: where blocks are leased.
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
        self._leases: list[Lease] = []
        window.begin_loop()

    def __iter__(self) -> Iterator[tuple[StepGroup, Lease]]:
        settings, window, left = self._settings, self._window, self._left
        most = most_steps(settings.rows_per_step, settings.bytes_per_step)
        size = 1  # the first batch should not wait for a whole group
        while left and not self._stopping.is_set():
            started = time.perf_counter()
            group, missing, most = self._next_group(left, size, most)
            left = left[len(group.numbers) :]
            size = min(
                most, math.ceil(len(group.numbers) * _growth(missing, window.budget // _LOADED_AT_ONCE))
            )
            self._counts.plan_s += time.perf_counter() - started
            lease = window.lease(group.blocks, self._stopping.is_set)
            self._leases.append(lease)
            settings.leased()
            yield group, lease

    def _next_group(self, left: range, size: int, most: int) -> tuple[StepGroup, int, int]:
        """As many steps as leave room for those beside them; bytes to be loaded; the most that later ones may be."""
        settings, window = self._settings, self._window
        at_once = window.budget // _LOADED_AT_ONCE  # which may change on the way
        while True:
            group = self._plan_group(left[:size])
            needed, missing = window.measure(group.blocks)
            size = len(group.numbers)
            if size > 1 and needed > window.budget * 2 // 3:
                most = size = size // 2  # nor would those that follow leave room for what is beside them
            elif size > 1 and missing > at_once:
                size = max(1, math.floor(size * _growth(missing, at_once)))
            else:
                break
        if size == 1:
            settings.make_room(needed)
        if needed > window.budget:
            settings.over_memory(group.numbers[0], needed)
        return group, missing, most

    def stop(self) -> None:
        """No more groups."""
        self._stopping.set()
        self._window.wake()

    def done(self, lease: Lease) -> None:
        """The steps of this lease have been gathered."""
        lease.release()
        self._leases.remove(lease)

    def release(self) -> None:
        """Give up what is leased; may be called twice, and only while nobody iterates."""
        for lease in self._leases:
            lease.release()
        self._leases.clear()


def _growth(missing: int, at_once: int) -> float:
    """How many times as many steps will have to load a little less than what may be loaded at once; at most four.

    Planned in vain is planned twice.
    """
    return min(4.0, 0.9 * at_once / max(1, missing))
