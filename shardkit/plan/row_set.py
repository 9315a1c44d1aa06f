"""Sets of sample numbers as bitmaps: the rows that a pass has not drawn, and numbering within such a set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s

from .population import Population

_PART = 1 << 20  # members that are numbered again at once
_BYTES = 16  # bytes of the bitmap per entry of the table of counts
_BITS: NDArray[np.uint8] = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
_COUNT: NDArray[np.int64] = _BITS.sum(axis=1, dtype=np.int64)
# _PLACE[b, i]: place of the i-th set bit of byte b, from the most significant bit
_PLACE: NDArray[np.int64] = np.argsort(1 - _BITS, axis=1, kind="stable").astype(np.int64)


class RowSet:
    """Set of sample numbers below ``size``; takes 1.5 bits per number below ``size``.

    The rank of a member is the number of smaller members.

    Args:
        size: number of samples of the population.
        parts: arrays of the members, int64, in any order.
    """

    def __init__(self, size: int, parts: Iterable[Int64s]) -> None:
        self._size = size
        bits = np.zeros((size // (8 * _BYTES) + 1) * _BYTES, dtype=np.uint8)
        for part in parts:
            np.bitwise_or.at(bits, part >> 3, (128 >> (part & 7)).astype(np.uint8))
        self._bits: NDArray[np.uint8] = bits.reshape(-1, _BYTES)
        counts = np.bitwise_count(self._bits).sum(axis=1, dtype=np.int64)
        self._before: Int64s = np.concatenate(([0], np.cumsum(counts)))

    def __len__(self) -> int:
        return int(self._before[-1])

    def __contains__(self, sample: int) -> bool:
        place = sample & (8 * _BYTES - 1)
        return bool(int(self._bits[sample // (8 * _BYTES), place >> 3]) & 128 >> (place & 7))

    def all(self) -> Int64s:
        """Return all members, ascending: int64."""
        return self.members(np.arange(len(self), dtype=np.int64))

    def members(self, ranks: Int64s) -> Int64s:
        """Return the members with these ranks: int64, of the same shape; -1 for rank -1."""
        out, filled = ranks.copy(), ranks >= 0
        number = ranks[filled]
        entry = np.searchsorted(self._before, number, side="right") - 1
        rest = number - self._before[entry]
        found = self._bits[entry]  # (n, 16)
        sums = np.cumsum(_COUNT[found], axis=1)
        byte = (sums <= rest[:, None]).sum(axis=1)
        each = np.arange(len(number))
        rest -= sums[each, byte] - _COUNT[found[each, byte]]
        out[filled] = (entry * _BYTES + byte) * 8 + _PLACE[found[each, byte], rest]
        return out

    def ranks(self, samples: Int64s) -> Int64s:
        """Return the number of members below each of these numbers, which may equal ``size``: int64."""
        entry, place = np.divmod(samples, 8 * _BYTES)
        found = self._bits[entry]
        whole = np.where(np.arange(_BYTES) < (place >> 3)[:, None], _COUNT[found], 0).sum(axis=1)
        byte = found[np.arange(len(found)), place >> 3].astype(np.int64)
        ranks: Int64s = self._before[entry] + whole + _COUNT[byte & (0xFF00 >> (place & 7)) & 0xFF]
        return ranks

    def without(self, removed: Int64s) -> RowSet:
        """Return the set after some sample numbers are removed and all others are numbered again.

        Args:
            removed: ascending sample numbers, int64.
        """
        return RowSet(self._size - len(removed), self._renumber(removed))

    def _renumber(self, removed: Int64s) -> Iterator[Int64s]:
        for first in range(0, len(self), _PART):
            numbers = self.members(np.arange(first, min(len(self), first + _PART), dtype=np.int64))
            before = np.searchsorted(removed, numbers)
            stays = np.append(removed, -1)[before] != numbers
            yield numbers[stays] - before[stays]

    def of(self, population: Population) -> Population:
        """Return the population of the members only; its sample numbers are their ranks."""
        borders = np.concatenate(([0], np.cumsum(population.segment_rows)))
        return replace(population, segment_rows=np.diff(self.ranks(borders)))
