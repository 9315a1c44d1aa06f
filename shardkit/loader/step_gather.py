"""The steps of one group, gathered by several threads at once and handed out in order.

The thread that asks for a step works too: while the step it wants is being gathered elsewhere, it gathers what nobody
has begun. So no thread waits for another as long as there is anything to copy, whichever of them the machine runs
more of, and where no helping thread ever runs all is as without them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

__all__ = ["GatherThreads", "StepGather", "own_rows_of", "rows_of"]

Columns = dict[str, Any]

_AHEAD_BYTES = 8 << 20  # that may be gathered before their turn
_WORTH_BYTES = 1 << 16  # less is copied sooner than another thread wakes up


class GatherThreads(NamedTuple):
    """Who gathers beside the thread that asks.

    Attributes:
        pool: of `number` threads; None where there are none.
    """

    pool: Executor | None
    number: int


class StepGather:
    """Columns of each step of one group, in order; iterate once, and close.

    No thread touches the group's blocks any more once `close` has returned.

    Args:
        take: copies rows `first` … `last - 1`; called by several threads at once.
        borders: (steps + 1) of the rows of the steps.
        threads: who helps.
        step_bytes: of one step, about.
        beside: called by helping threads, between two copies, once half of the steps are begun.
    """

    def __init__(
        self,
        take: Callable[[int, int], Columns],
        borders: Sequence[int],
        *,
        threads: GatherThreads,
        step_bytes: int,
        beside: Callable[[], None] | None = None,
    ) -> None:
        self._take, self._borders, self._threads, self._beside = take, borders, threads, beside
        self._parts = len(borders) - 1  # each a step, in buffers of its own: whoever keeps it keeps no other
        worth = threads.pool is not None and step_bytes >= _WORTH_BYTES
        # so that whoever is late with a part holds nobody up
        self._ahead = max(threads.number + 1, _AHEAD_BYTES // max(1, step_bytes)) if worth else 0
        self._changed = threading.Condition()
        self._done: dict[int, Columns | Exception] = {}  # gathered, not handed out
        self._next = 0  # the first part that nobody has begun
        self._limit = 0  # parts from here on may not be begun yet
        self._helping = 0  # threads that help, or are asked to
        self._waits = False  # the thread that asks has nothing to do

    def __iter__(self) -> Generator[Columns]:
        for part in range(self._parts):
            yield self._gathered(part)

    def _gathered(self, part: int) -> Columns:
        self._allow(min(self._parts, part + 1 + self._ahead))
        while part not in self._done:
            mine = self._begin()
            if mine is None:
                self._wait_for(part)
            else:
                self._gather(mine)
        found = self._done.pop(part)
        if isinstance(found, Exception):
            raise found
        return found

    def _allow(self, limit: int) -> None:
        """Parts below `limit` may be begun; ask for help where half of what may be done ahead is not begun."""
        self._limit = limit
        pool = self._threads.pool
        if pool is None or not self._ahead or self._helping == self._threads.number:
            return
        with self._changed:
            wanted = 2 * (limit - self._next) > self._ahead
            self._helping += wanted
        if wanted:
            try:
                pool.submit(self._help)
            except RuntimeError:  # the interpreter ends, and takes no more work
                with self._changed:
                    self._helping -= 1

    def _begin(self) -> int | None:
        with self._changed:
            if self._next >= self._limit:
                return None
            self._next += 1
            return self._next - 1

    def _gather(self, part: int) -> None:
        try:
            self._done[part] = self._take(self._borders[part], self._borders[part + 1])
        except Exception as error:  # noqa: BLE001  raised when its turn comes, as without help
            self._done[part] = error

    def _help(self) -> None:
        while (part := self._begin()) is not None:
            self._gather(part)
            if self._waits:
                with self._changed:
                    self._changed.notify_all()
            if self._beside is not None and 2 * self._next >= self._parts:
                self._beside()
        with self._changed:
            self._helping -= 1
            self._changed.notify_all()

    def _wait_for(self, part: int) -> None:
        with self._changed:
            self._waits = True
            while part not in self._done:
                self._changed.wait()
            self._waits = False

    def close(self) -> None:
        """No more steps; waits for whoever copies. May be called twice."""
        with self._changed:
            self._limit = 0
            while self._helping:
                self._changed.wait()


def rows_of(value: Any, first: int, last: int) -> Any:
    """Rows of a column as `RowAddresses.take` gives it; of an array, a view."""
    if isinstance(value, tuple):
        values, borders = value
        part = borders[first : last + 1]
        return values[part[0] : part[-1]], part - part[0]
    return value[first:last]


def own_rows_of(value: Any, first: int, last: int) -> Any:
    """The same in memory of their own: whoever keeps them keeps no other rows."""
    found = rows_of(value, first, last)
    if isinstance(found, tuple):
        return found[0].copy(), found[1]
    return found if isinstance(found, list) else found.copy()
