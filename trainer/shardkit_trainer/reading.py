"""This rank's cells of the steps to come: the next ones are taken from the loader while a step is computed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["CellsAhead"]


class CellsAhead:
    """The cells of steps ``step`` … ``end``−1, epoch after epoch, one step ahead.

    Gathering and journaling a small step takes the interpreter for longer than 1 % of it. `ask` is called when torch
    begins to compute without the interpreter, so that a thread has it meanwhile.

    Args:
        loader: at ``step``.
        in_turn: take cells only when they are needed: rebalancing is told what a step has cost before the next one.
    """

    def __init__(self, loader: Any, step: int, end: int, *, in_turn: bool):
        self._loader, self._asked, self._end, self._in_turn = loader, step, end, in_turn
        self._cells = self._follow(step)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cells-ahead")
        self._next: Future[Any] | None = None

    def _follow(self, step: int) -> Iterator[Any]:
        """The loader begins to read an epoch while the last step of the one before is computed."""
        ahead = iter(self._loader)
        while True:
            epoch, ahead = ahead, None
            for cells in epoch:
                step += 1
                if step < self._end and step == self._loader.plan.epoch_bounds(step - 1)[1]:
                    ahead = iter(self._loader)
                yield cells
            ahead = ahead or iter(self._loader)

    def ask(self) -> None:
        """Begin to take the next step's cells, if there is a next step."""
        if self._next is None and self._asked < self._end and not self._in_turn:
            self._next = self._thread.submit(next, self._cells)

    def take(self) -> Any:
        """The next step's cells; waits for them."""
        self._asked += 1
        if self._next is None:
            return next(self._cells)
        cells, self._next = self._next.result(), None
        return cells

    def close(self) -> None:
        """Wait until nothing more is taken; to be called before the loader is closed."""
        self._thread.shutdown(cancel_futures=True)
