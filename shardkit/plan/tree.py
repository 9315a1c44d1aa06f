"""Tree rounding: which stratum of a pool a draw belongs to, exact on every prefix (SPEC.md §5)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import gcd

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tree"]


class Tree:
    """Shares draws out over members by integer masses.

    A Huffman-shaped binary tree: at a node with masses a, b, of n draws floor((2na + a + b) / (2(a + b))) go to the
    left. Each draw goes to exactly one member; on any prefix a member is within one of its share. The pattern repeats
    after ``period`` draws.

    Args:
        masses: positive integers, their sum (after taking out common factors) below 2**31.
    """

    def __init__(self, masses: Sequence[int]) -> None:
        common = gcd(*masses)
        self.masses: NDArray[np.int64] = np.array([m // common for m in masses], dtype=np.int64)
        self.period = int(self.masses.sum())
        # heap of (mass, tie, node); leaves are nodes 0..n-1, inner nodes follow
        heap = [(m, i, i) for i, m in enumerate(self.masses.tolist())]
        heapq.heapify(heap)
        total = self.masses.tolist()
        left, right = [-1] * len(total), [-1] * len(total)
        while len(heap) > 1:
            a, b = heapq.heappop(heap), heapq.heappop(heap)
            node = len(total)
            total.append(a[0] + b[0])
            left.append(b[2])  # the heavier child is the left one
            right.append(a[2])
            heapq.heappush(heap, (total[node], node, node))
        self._root = len(total) - 1
        self._left, self._right = np.array(left), np.array(right)
        self._mass: NDArray[np.int64] = np.array(total, dtype=np.int64)

    def draws(self, number: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Member of each draw, and how many draws that member had before it; O(depth) per draw."""
        turns, left_over = np.divmod(number, self.period)
        node = np.full(number.shape, self._root, dtype=np.int64)
        count = left_over
        inner = np.flatnonzero(self._left[node] >= 0)
        while len(inner):
            at, n = node[inner], count[inner]
            mass, share = self._mass[at], self._mass[self._left[at]]
            before = (2 * n * share + mass) // (2 * mass)
            goes_left = (2 * (n + 1) * share + mass) // (2 * mass) > before
            node[inner] = np.where(goes_left, self._left[at], self._right[at])
            count[inner] = np.where(goes_left, before, n - before)
            inner = inner[self._left[node[inner]] >= 0]
        return node, count + turns * self.masses[node]

    def totals(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draws of every member among the first ``number``: (len(number), members) int64."""
        turns: NDArray[np.int64] = number // self.period
        left_over = number % self.period
        counts = np.zeros((len(number), len(self._mass)), dtype=np.int64)
        counts[:, self._root] = left_over
        for node in range(self._root, len(self.masses) - 1, -1):  # parents come after their children
            a, b = self._left[node], self._right[node]
            share = (2 * counts[:, node] * self._mass[a] + self._mass[node]) // (2 * self._mass[node])
            counts[:, a], counts[:, b] = share, counts[:, node] - share
        members: NDArray[np.int64] = counts[:, : len(self.masses)] + turns[:, None] * self.masses
        return members
