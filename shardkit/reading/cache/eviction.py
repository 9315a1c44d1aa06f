"""When each block is needed next, as the plan says; so what a full cache drops, and what it does not take. Pure.

`decide` is the rule on plain arrays; `BlockCache` uses it. `FurthestFirst` keeps the same rule in a heap for somebody
who knows every next use as a step, such as a simulation over millions of reads; the two decide alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

NEVER: Final = np.iinfo(np.int64).max
"""Distance of a block that no known plan needs again."""

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]
Float64s = NDArray[np.float64]

SLACK: Final = 0.02
"""Evicting makes room for this share of the limit at a time."""


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


class Verdict(NamedTuple):
    """What becomes of a new block.

    Attributes:
        admitted: False where the new block would be the first to go: it is used and not kept.
        victims: which of the entries are dropped for it, in that order.
    """

    admitted: bool
    victims: Int64s


def decide(
    sizes: Int64s,
    distances: Float64s,
    added: Float64s,
    *,
    held: int,
    limit: int,
    new_size: int,
    new_distance: float,
) -> Verdict:
    """Make room for a new block, or leave it out (Belady 1966, with bypass).

    Whatever is needed furthest from now goes first, the new block included; of equal ones what was added first. Room is
    made for `SLACK` of the limit at a time.

    Args:
        sizes: (n,) bytes of the entries.
        distances: (n,) time until each is needed next, inf for never.
        added: (n,) when each was added.
        held: Bytes of all entries.
        limit: Bytes that may be held.
        new_size: Bytes of the new block.
        new_distance: Until it is needed again, after its use now.
    """
    nothing: Int64s = np.empty(0, dtype=np.int64)
    wanted = held + new_size - limit
    if wanted <= 0:
        return Verdict(True, nothing)
    room = max(wanted, int(limit * SLACK))
    sizes = np.append(sizes, new_size)
    distances = np.append(distances, new_distance)
    latest = float(added.max(initial=0.0)) + 1.0
    victims = choose_victims(sizes, distances, np.append(added, latest), room)
    needed = np.cumsum(sizes[victims])
    new = len(sizes) - 1
    if new in victims[: int(np.searchsorted(needed, wanted)) + 1] and np.isfinite(distances).any():
        return Verdict(False, nothing)
    victims = victims[victims != new]
    return Verdict(held - int(sizes[victims].sum()) + new_size <= limit, victims)


class FurthestFirst:
    """The entries of a cache whose user tells every next use; decides as `decide` does, in O(log n)."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self._entries: dict[Hashable, tuple[int, float, int]] = {}  # size, next use, when added
        self._heap: list[tuple[float, int, Hashable]] = []  # (-next use, added, key); stale ones are skipped
        self._clock = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._entries)

    def use(self, key: Hashable, next_use: float) -> bool:
        """A read: True where it is held, which sets its next use; inf for never."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        if entry[1] != next_use:
            self._entries[key] = (entry[0], next_use, entry[2])
            heapq.heappush(self._heap, (-next_use, entry[2], key))
        return True

    def add(self, key: Hashable, size: int, next_use: float) -> bool:
        """A block was fetched: keep it, dropping others for it, or not (False)."""
        wanted = self.held + size - self.limit
        if wanted > 0 and not self._make_room(wanted, size, next_use):
            return False
        self._clock += 1
        self._entries[key] = (size, next_use, self._clock)
        self.held += size
        heapq.heappush(self._heap, (-next_use, self._clock, key))
        return True

    def _make_room(self, wanted: int, size: int, next_use: float) -> bool:
        room, freed = max(wanted, int(self.limit * SLACK)), 0
        dropped: list[tuple[float, int, Hashable]] = []
        counted = False  # whether the new block's turn to go has come
        knows = math.isfinite(next_use)
        while freed < room:
            top = self._top()
            if not counted and (top is None or -top[0] < next_use):
                # entries as far away as the new block were added before it, and go first
                if freed < wanted and (knows or self._knows(dropped)):
                    for one in dropped:
                        heapq.heappush(self._heap, one)
                    return False
                counted = True
                freed += size
                continue
            if top is None:
                break
            heapq.heappop(self._heap)
            dropped.append(top)
            freed += self._entries[top[2]][0]
        for _, _, key in dropped:
            self.held -= self._entries.pop(key)[0]
        return self.held + size <= self.limit

    def _top(self) -> tuple[float, int, Hashable] | None:
        while self._heap:
            far, added, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry[1] == -far and entry[2] == added:
                return self._heap[0]
            heapq.heappop(self._heap)
        return None

    def _knows(self, dropped: list[tuple[float, int, Hashable]]) -> bool:
        """Whether any entry has a next use at all; without a plan the oldest goes, whatever is new."""
        return (self._top() is not None and math.isfinite(self._heap[0][0])) or any(
            math.isfinite(far) for far, _, _ in dropped
        )
