"""Eviction by next use with a heap, for a simulation of millions of reads whose next uses are known.

It decides as `shardkit.reading.cache.eviction.choose_victims` does, which a property test compares.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator

from shardkit.reading.cache.eviction import SLACK


class FurthestFirst:
    """Cache entries with known next uses; evicts as `choose_victims` does, in O(log n) per operation."""

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
        """Record a read; if the entry is held, set its next use (inf for none) and return True."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        if entry[1] != next_use:
            self._entries[key] = (entry[0], next_use, entry[2])
            heapq.heappush(self._heap, (-next_use, entry[2], key))
        return True

    def add(self, key: Hashable, size: int, next_use: float) -> bool:
        """Add a fetched block, evicting others if necessary; return False if it is not kept."""
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
        counted = False  # whether the new block is among the victims
        knows = math.isfinite(next_use)
        while freed < room:
            top = self._top()
            if not counted and (top is None or -top[0] < next_use):
                # entries as far away as the new block are older, and are evicted before it
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
        """Return True if any entry has a next use. Without a plan, the oldest entry is evicted."""
        return (self._top() is not None and math.isfinite(self._heap[0][0])) or any(
            math.isfinite(far) for far, _, _ in dropped
        )
