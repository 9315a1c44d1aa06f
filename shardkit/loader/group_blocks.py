"""Wait for the blocks of a group of steps, step by step, and gather rows from them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import UsageError
from shardkit.loader.block_window import CLOSED, Admitted, BlockWindow
from shardkit.loader.gather import RowAddresses
from shardkit.loader.schedule import StepGroup

__all__ = ["GroupBlocks"]

Int64s = NDArray[np.int64]


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
        admitted: Admitted,
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
