"""One stream out of the tapes of all lanes: whichever is furthest behind goes next (SPEC.md §5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["RoundRobin"]

Numbers = NDArray[np.int64]


class RoundRobin:
    """Numbers the positions of several tapes, the lowest first: they level out, then advance together.

    Args:
        starts: int64[tapes], the position at which each tape stands.
    """

    def __init__(self, starts: Numbers) -> None:
        self._order: Numbers = np.argsort(starts, kind="stable")
        self._start: Numbers = starts[self._order]
        self._rank: Numbers = np.argsort(self._order)
        # draws before the level of each start is reached: every tape below it has come up to it
        width = np.arange(len(starts), dtype=np.int64)
        self._before: Numbers = width * self._start - (np.cumsum(self._start) - self._start)

    def at(self, number: Numbers) -> tuple[Numbers, Numbers]:
        """Tape and position of each draw."""
        _, level, rank = self._split(number)
        return self._order[rank], level

    def standing(self, number: int) -> Numbers:
        """Where every tape stands after so many draws: int64[tapes]."""
        width, level, rank = (int(a[0]) for a in self._split(np.array([number])))
        place = np.arange(len(self._start))
        at = np.where(place < width, level + (place < rank), self._start)
        return at[self._rank]

    def number(self, tape: int, position: int) -> int:
        """The draw that takes a position, at or behind the tape's start."""
        width = int(np.searchsorted(self._start, position, side="right"))
        return (
            int(self._before[width - 1])
            + (position - int(self._start[width - 1])) * width
            + int(self._rank[tape])
        )

    def _split(self, number: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Tapes that have come up to the level of each draw, the level, and which of them draws."""
        width = np.searchsorted(self._before, number, side="right")
        rounds, rank = np.divmod(number - self._before[width - 1], width)
        return width, self._start[width - 1] + rounds, rank
