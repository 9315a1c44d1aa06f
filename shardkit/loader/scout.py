"""What the steps of one loop need, worked out in groups and leased ahead of them, at the start even before the loop."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardkit.loader.block_window import BlockWindow, Lease
from shardkit.loader.schedule import StepGroup, most_steps
from shardkit.loader.statistics import LoaderCounts

__all__ = ["Scout", "ScoutSettings"]

# Groups share most of their blocks. What is missing of one is loaded before its first step is handed out: at most this
# part of the budget, so that no step waits long for what it does not need.
_LOADED_AT_ONCE = 12
_BEFORE_THE_LOOP = 4  # this part of the budget may be leased for a loop that has not begun


@dataclass(frozen=True, kw_only=True)
class ScoutSettings:
    """How many steps are worked out at once.

    Attributes:
        rows_per_step, bytes_per_step: of this rank.
        over_memory: called where the blocks of one step alone exceed the memory bound: (step, their bytes).
        leased: called after every lease.
    """

    rows_per_step: int
    bytes_per_step: int
    over_memory: Callable[[int, int], None]
    leased: Callable[[], None]


class Scout:
    """Groups of steps of one loop with their leases, in order; iterate once, on one thread at a time.

    Args:
        plan_group: works out some steps (`schedule.plan_group` with plan and lanes bound).
        window: where blocks are leased.
        numbers: the steps of the loop, ascending.
        lanes: whose steps they are.
        settings: see there.
    """

    def __init__(
        self,
        plan_group: Callable[[range], StepGroup],
        window: BlockWindow,
        numbers: range,
        lanes: list[int],
        settings: ScoutSettings,
    ) -> None:
        self.numbers, self.lanes = numbers, list(lanes)
        self.counts = LoaderCounts()  # of the loop that uses it
        self._plan_group, self._window, self._settings = plan_group, window, settings
        self._stopping = threading.Event()
        self._hurried: Callable[[], bool] = self._stopping.is_set
        self._leases: list[Lease] = []
        self._ready: deque[tuple[StepGroup, Lease]] = deque()
        window.begin_loop()
        self._groups = self._lease_groups()

    def __iter__(self) -> Iterator[tuple[StepGroup, Lease]]:
        while self._ready and not self._stopping.is_set():
            yield self._ready.popleft()
        yield from self._groups

    def run_ahead(self, hurried: Callable[[], bool]) -> None:
        """Work out and lease the first groups now, while the loop before is still under way.

        Args:
            hurried: somebody waits for this call to end.

        Raises:
            Exception: whatever planning or finding the blocks raises; nothing is leased then.
        """
        self._hurried, leased = hurried, 0
        try:
            for group, lease in self._groups:
                self._ready.append((group, lease))
                leased += self._window.measure(group.blocks)[0]
                if leased > self._window.budget // _BEFORE_THE_LOOP or hurried():
                    break
            if self._window.nbytes > self._window.budget:
                self._give_up()  # a hurried lease does not wait for room
        except BaseException:
            self._give_up()
            raise
        finally:
            self._hurried = self._stopping.is_set

    def _give_up(self) -> None:
        self.stop()
        self.release()

    def suits(self, numbers: range, lanes: list[int]) -> bool:
        """Whether this is the scout for these steps of these lanes, and what it has found can be used.

        That is not so where a block failed to load, for the loop tries again.
        """
        if numbers != self.numbers or lanes != self.lanes or self._stopping.is_set():
            return False
        return not any(lease.failed() for _, lease in self._ready)

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
        self._ready.clear()
        for lease in list(self._leases):
            lease.release()
        self._leases.clear()

    def _lease_groups(self) -> Iterator[tuple[StepGroup, Lease]]:
        settings, window, left = self._settings, self._window, self.numbers
        most = most_steps(settings.rows_per_step, settings.bytes_per_step)
        size = 1  # the first batch should not wait for a whole group
        while left and not self._stopping.is_set():
            started = time.perf_counter()
            at_once = window.budget // _LOADED_AT_ONCE  # which may change on the way
            group = self._plan_group(left[:size])
            needed, missing = window.measure(group.blocks)
            while (size := len(group.numbers)) > 1:
                if needed > window.budget * 2 // 3:
                    most = size = size // 2  # nor would those that follow leave room for what is beside them
                elif missing > at_once:
                    size = max(1, math.floor(size * _growth(missing, at_once)))
                else:
                    break
                group = self._plan_group(left[:size])
                needed, missing = window.measure(group.blocks)
            if needed > window.budget:
                settings.over_memory(group.numbers[0], needed)
            left = left[len(group.numbers) :]
            size = min(most, math.ceil(size * _growth(missing, at_once)))
            self.counts.plan_s += time.perf_counter() - started
            lease = window.lease(group.blocks, self._hurried)
            self._leases.append(lease)
            settings.leased()
            yield group, lease


def _growth(missing: int, at_once: int) -> float:
    """How many times as many steps will have to load a little less than what may be loaded at once; at most four.

    Planned in vain is planned twice.
    """
    return min(4.0, 0.9 * at_once / max(1, missing))
