"""When each block is needed next, as the plan says: what makes eviction optimal instead of a guess. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["NEVER", "Future", "choose_victims"]

NEVER: Final = np.iinfo(np.int64).max
"""Distance of a block that no known plan needs again."""

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]
Float64s = NDArray[np.float64]


class Future(NamedTuple):
    """The uses that one process will make of blocks, over a stretch of its plan.

    `uses` of block `places[i]` are `steps[starts[i] : starts[i + 1]]`, ascending.
    """

    places: UInt64s  # (n,) ascending; see `place_ids`
    starts: Int64s  # (n + 1,)
    steps: Int64s  # (m,)

    @classmethod
    def of(cls, places: UInt64s, steps: Int64s) -> Future:
        """From uses in any order: block `places[i]` is needed at `steps[i]`."""
        order = np.lexsort((steps, places))
        places, steps = places[order], steps[order]
        first = np.ones(len(places), dtype=bool)
        first[1:] = places[1:] != places[:-1]
        starts = np.append(np.flatnonzero(first), len(places)).astype(np.int64)
        return cls(places[first], starts, steps)

    def distance(self, places: UInt64s, now: int) -> Int64s:
        """Steps from `now` until each of `places` ((k,) any order) is needed; NEVER where it is not.

        A use at `now` itself counts as 0. Costs O(m + k log m).

        Args:
            places: See `place_ids`.
            now: Uses before this step are over.
        """
        result = np.full(len(places), NEVER, dtype=np.int64)
        if not len(self.places):
            return result
        which = np.minimum(np.searchsorted(self.places, places), len(self.places) - 1)
        known = np.flatnonzero(self.places[which] == places)
        if not len(known):
            return result
        which = which[known]
        # One sorted array for all blocks: the block's rank in the high part, the step in the low.
        base = int(self.steps.min(initial=now))
        span = int(self.steps.max(initial=now)) - base + 2
        ranks = np.repeat(np.arange(len(self.places)), np.diff(self.starts))
        keys = ranks * span + (self.steps - base)
        wanted = which * span + min(max(now - base, 0), span - 1)
        found = np.searchsorted(keys, wanted)
        there = found < self.starts[which + 1]
        result[known[there]] = self.steps[found[there]] - now
        return result


def choose_victims(sizes: Int64s, distances: Float64s, last_uses: Float64s, room: int) -> Int64s:
    """Which entries to drop for `room` bytes: furthest next use first (Belady 1966), least recently used among equals.

    Args:
        sizes: (n,) bytes.
        distances: (n,) until the next use, inf for never.
        last_uses: (n,) times.
        room: Bytes to free.

    Returns:
        Indices in the order in which to drop them; all entries where they do not suffice.
    """
    order = np.lexsort((last_uses, -distances))
    freed = np.cumsum(sizes[order])
    return order[: int(np.searchsorted(freed, room)) + 1] if room > 0 else order[:0]
