"""Which blocks took longest, which shards are hot, what lanes cost: fed by the threads that load blocks."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

_SLOWEST: Final = 16
_HOTTEST: Final = 24
_LANES: Final = 64
_EXPECTED: Final = 1 << 16


class BlockTimes:
    """Loads by shard and by lane, and the slowest of them. About 1 µs per block; safe from many threads.

    Args:
        name: gives the text that a person finds a shard by.
        is_local: whether a shard is a local file.
    """

    def __init__(self, name: Callable[[int], str], is_local: Callable[[int], bool]) -> None:
        self._name, self._is_local = name, is_local
        self._lock = threading.Lock()
        self._shards: dict[int, list[int]] = {}  # shard → [loads, bytes]
        self._slowest: list[tuple[float, float, int, int]] = []  # heap of (seconds, when, shard, block)
        self._lanes: dict[int, list[float]] = {}  # lane → [loads, seconds, bytes]
        self._expected: dict[int, int] = {}  # block of the dataset → lane that needs it first

    def expect(self, blocks: Iterable[int], lanes: Iterable[int]) -> None:
        """Which lane needs which block of the dataset first; call it before they are loaded."""
        with self._lock:
            if len(self._expected) > _EXPECTED:  # of blocks that were held already, and never loaded again
                self._expected.clear()
            self._expected.update(zip(blocks, lanes, strict=True))

    def note(self, shard: int, block: int, seconds: float, num_bytes: int, number: int = -1) -> None:
        """A block of a shard has been loaded, verified and decompressed.

        Args:
            shard: its number.
            block: in the shard.
            seconds: that it took.
            num_bytes: stored.
            number: of the block in the dataset, as in `expect`.
        """
        with self._lock:
            lane = self._expected.pop(number, None)
            if lane is not None:
                cost = self._lanes.setdefault(lane, [0, 0.0, 0])
                cost[0] += 1
                cost[1] += seconds
                cost[2] += num_bytes
            counts = self._shards.setdefault(shard, [0, 0])
            counts[0] += 1
            counts[1] += num_bytes
            if len(self._slowest) < _SLOWEST:
                heapq.heappush(self._slowest, (seconds, time.time(), shard, block))
            elif seconds > self._slowest[0][0]:
                heapq.heapreplace(self._slowest, (seconds, time.time(), shard, block))

    def hot_shards(self) -> list[list[object]]:
        """Rows of (shard, loads, bytes), most bytes first."""
        return [[self._name(shard), *counts] for shard, counts in self._most(self._shards, _HOTTEST)]

    def lane_loads(self) -> list[list[object]]:
        """Rows of (lane, loads, seconds, bytes), most seconds first."""
        most = self._most(self._lanes, _LANES)
        return [[lane, loads, round(seconds, 6), num_bytes] for lane, (loads, seconds, num_bytes) in most]

    def _most(self, counts: Mapping[int, Sequence[float]], number: int) -> list[tuple[int, list[float]]]:
        """Those with the largest second count, copied."""
        with self._lock:
            largest = heapq.nlargest(number, counts.items(), key=lambda item: (item[1][1], -item[0]))
            return [(one, list(found)) for one, found in largest]

    def slowest(self) -> list[list[object]]:
        """Rows of (seconds, time, shard, block), slowest first."""
        with self._lock:
            found = sorted(self._slowest, reverse=True)
        return [
            [round(seconds, 6), round(at, 3), self._name(shard), block] for seconds, at, shard, block in found
        ]

    def numbers(self) -> dict[str, float]:
        """Shards read so far, and bytes of blocks that came from local files."""
        with self._lock:
            counts = list(self._shards.items())
        local = sum(one[1] for shard, one in counts if self._is_local(shard))
        return {"shards": float(len(counts)), "local_bytes": float(local)}
