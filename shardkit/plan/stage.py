"""Stages: endless deals with fixed weights (SPEC.md §5).

`Tree` distributes the draws of a pool over its strata. `RoundRobin` combines the tapes of all lanes into one stream.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import gcd, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s

from .deal import Deal


class Tree:
    """Distribution of draws over members in proportion to integer masses.

    A Huffman-shaped binary tree: at a node with masses a, b, of n draws floor((2na + a + b) / (2(a + b))) go to the
    left. Each draw goes to exactly one member. In any prefix the count of a member differs from its share by less than
    one. The pattern repeats after ``period`` draws.

    Args:
        masses: positive integers; their sum without common factors must be below 2**31.
    """

    def __init__(self, masses: Sequence[int]) -> None:
        common = gcd(*masses)
        self.masses: NDArray[np.int64] = np.array([m // common for m in masses], dtype=np.int64)
        self.period = int(self.masses.sum())
        # heap of (mass, tie-breaker, node); nodes 0..n-1 are leaves, later ones inner nodes
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
        """Return the member of each draw and the number of earlier draws of that member; O(depth) per draw."""
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
        """Return the draws of every member among the first ``number`` draws: (len(number), members) int64."""
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


class RoundRobin:
    """Numbering of the positions of several tapes, lowest position first: tapes level out, then advance together.

    Args:
        starts: int64[tapes], initial position of each tape.
    """

    def __init__(self, starts: Int64s) -> None:
        self._order: Int64s = np.argsort(starts, kind="stable")
        self._start: Int64s = starts[self._order]
        self._rank: Int64s = np.argsort(self._order)
        # draws until all lower tapes reach the level of each start
        width = np.arange(len(starts), dtype=np.int64)
        self._before: Int64s = width * self._start - (np.cumsum(self._start) - self._start)

    def at(self, number: Int64s) -> tuple[Int64s, Int64s]:
        """Return the tape and the position of each draw."""
        _, level, rank = self._split(number)
        return self._order[rank], level

    def standing(self, number: int) -> Int64s:
        """Return the position of every tape after ``number`` draws: int64[tapes]."""
        width, level, rank = (int(a[0]) for a in self._split(np.array([number])))
        place = np.arange(len(self._start))
        at = np.where(place < width, level + (place < rank), self._start)
        return at[self._rank]

    def number(self, tape: int, position: int) -> int:
        """Return the number of the draw that takes a position, which must not be before the tape's start."""
        width = int(np.searchsorted(self._start, position, side="right"))
        return (
            int(self._before[width - 1])
            + (position - int(self._start[width - 1])) * width
            + int(self._rank[tape])
        )

    def _split(self, number: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return for each draw the number of tapes at its level, the level, and the rank of the tape that draws."""
        width = np.searchsorted(self._before, number, side="right")
        rounds, rank = np.divmod(number - self._before[width - 1], width)
        return width, self._start[width - 1] + rounds, rank


_COARSE = 64
"""Fewest steps of a phase in which weights are rounded, if no phase of this length or shorter is exact."""


class StageGroup(NamedTuple):
    """A stratum or a pool of rare strata, drawn from the tapes of lanes or from shared tapes."""

    strata: tuple[int, ...]
    mass: int
    shared: bool


def plan_groups(
    masses: Sequence[int], names: Sequence[str], shared: NDArray[np.bool_], batch: int
) -> list[StageGroup]:
    """Return the common strata by (-mass, name), then the pool of handed rare strata, then the pool of shared ones.

    Only the last group may be expected less than once per global batch, so a rare pool of handed strata is merged with
    the pool of shared ones.
    """
    total = sum(masses)
    alive = sorted((s for s in range(len(masses)) if masses[s]), key=lambda s: (-masses[s], names[s]))
    groups = [StageGroup((s,), masses[s], bool(shared[s])) for s in alive if batch * masses[s] >= total]
    rare = [s for s in alive if batch * masses[s] < total]
    handed = tuple(s for s in rare if not shared[s])
    common = tuple(s for s in rare if shared[s])
    weight = sum(masses[s] for s in handed)
    if common and handed and batch * weight < total:
        handed, common = (), tuple(rare)
    for strata, is_shared in ((handed, False), (common, True)):
        if strata:
            groups.append(StageGroup(strata, sum(masses[s] for s in strata), is_shared))
    return groups


def whole_turn(
    groups: Sequence[StageGroup], batch: int, target: int, *, fixed: int | None = None
) -> tuple[int, list[int]]:
    """Return the steps of a phase and its samples of each group.

    All phases of a turn have the same counts, so that all lanes have drawn the same after each turn. Counts must be
    whole numbers: a multiple of the shortest exact phase if that is short enough, otherwise counts rounded by largest
    remainder, which then replace the weights of the plan. ``fixed`` is the number of steps if it may not be chosen.
    """
    total = sum(g.mass for g in groups)
    exact = lcm(*(total // gcd(total, batch * g.mass) for g in groups))
    if fixed is None and exact <= max(target, _COARSE):
        steps = exact * max(1, target // exact)
        return steps, [steps * batch * g.mass // total for g in groups]
    steps = fixed or max(target, _COARSE)
    slots = steps * batch
    counts = [max(1, slots * g.mass // total) for g in groups]
    by_rest = sorted(range(len(groups)), key=lambda i: (-(slots * groups[i].mass % total), i))
    for i in by_rest[: max(0, slots - sum(counts))]:
        counts[i] += 1
    counts[0] -= sum(counts) - slots  # the largest group compensates for a rare pool that was raised to 1
    return steps, counts


class Stage:
    """Sample counts of an endless deal. Steps passed to its methods are counted from ``start``.

    Args:
        start: first step, counted over the run.
        groups: groups in the order of `plan_groups`.
        phase: steps and samples per group of one phase, from `whole_turn`.
        batch, lanes: B and L.
    """

    def __init__(
        self, start: int, groups: Sequence[StageGroup], phase: tuple[int, list[int]], batch: int, lanes: int
    ) -> None:
        self.start, self.groups, self.batch, self.lanes = start, tuple(groups), batch, lanes
        steps, counts = phase
        self.turn = steps * lanes
        sums = [sum(counts[: i + 1]) for i in range(len(counts))]
        self.deal = Deal(sums, batch, lanes, self.turn)
        self._per_turn: Int64s = np.array(
            sums, dtype=np.int64
        )  # samples of groups <= g per lane and whole turn
        self.shares = counts

    def lane_counts(self, steps: Int64s, lane: int | Int64s, chosen: Int64s) -> Int64s:
        """Return the samples of chosen groups drawn by a lane before each step: (n, k) int64."""
        turns, rest = np.divmod(steps, self.turn)
        whole = np.diff(self._per_turn, prepend=0)[chosen]
        return turns[:, None] * whole + self.deal.lane_counts(rest, lane, chosen)

    def steps_of(self, draws: Int64s, lane: int, group: int) -> Int64s:
        """Return the step of each of a lane's draws of a group, by bisection: (n,) int64."""
        chosen = np.array([group])
        turns = draws // int(np.diff(self._per_turn, prepend=0)[group])
        low, high = turns * self.turn, (turns + 1) * self.turn - 1  # draws before `low` <= the draw's number
        while (low < high).any():
            middle = (low + high + 1) // 2
            there = self.lane_counts(middle, lane, chosen)[:, 0] <= draws
            low, high = np.where(there, middle, low), np.where(there, high, middle - 1)
        return low

    def shared_draws(self, draws: Int64s, group: int) -> tuple[Int64s, Int64s]:
        """Return the step and the lane of draws of a group, numbered over all lanes: int64[n] each."""
        per_turn = int(np.diff(self._per_turn, prepend=0)[group]) * self.lanes
        turns = draws // per_turn
        low, high = turns * self.turn, (turns + 1) * self.turn - 1

        def offsets(steps: Int64s) -> tuple[Int64s, Int64s]:
            sums = self.prefix(steps)
            below = sums[:, group - 1] if group else np.zeros(len(steps), dtype=np.int64)
            return below, sums[:, group] - below

        while (low < high).any():
            middle = (low + high + 1) // 2
            there = offsets(middle)[1] <= draws
            low, high = np.where(there, middle, low), np.where(there, high, middle - 1)
        below, before = offsets(low)
        slot = offsets(low + 1)[0] - below + draws - before
        return low, (slot + low % self.turn * self.lanes // self.turn) % self.lanes

    def drift(self, group: int) -> int:
        """Return the largest difference between lanes in draws of a group at borders of phases.

        Between borders the difference exceeds it by at most 2.
        """
        lanes = np.arange(self.lanes, dtype=np.int64)
        borders = -(-lanes * self.turn // self.lanes)
        drawn = self.deal.lane_counts(
            np.repeat(borders, self.lanes), np.tile(lanes, self.lanes), np.array([group])
        )
        return int(np.ptp(drawn.reshape(self.lanes, self.lanes), axis=1).max())

    def prefix(self, steps: Int64s) -> Int64s:
        """Return the samples of groups <= g drawn by all lanes before each step: (n, groups) int64."""
        turns, rest = np.divmod(steps, self.turn)
        return turns[:, None] * (self._per_turn * self.lanes) + self.deal.prefix(rest)

    def slots(self, steps: Int64s, lane: int, group: int) -> tuple[Int64s, Int64s]:
        """Return a lane's draws of a group in consecutive steps, numbered over all lanes in slot order.

        Returns:
            (counts int64[n], numbers int64[sum(counts)]): draws in each step, and the number of each draw.
        """
        sums = self.prefix(np.append(steps, steps[-1] + 1))
        offsets = np.diff(sums, axis=0)
        low = offsets[:, group - 1] if group else np.zeros(len(steps), dtype=np.int64)
        before = sums[:-1, group] - (sums[:-1, group - 1] if group else 0)
        phase = steps % self.turn * self.lanes // self.turn
        skip = (lane - phase - low) % self.lanes  # slots of the group before this lane's first one
        size = offsets[:, group] - low
        counts = np.maximum(0, -((skip - size) // self.lanes))
        at = np.repeat(before + skip - (np.cumsum(counts) - counts) * self.lanes, counts)
        return counts, at + np.arange(len(at), dtype=np.int64) * self.lanes

    def lane_of(self, step: int, group: int, number: int) -> int:
        """Return the lane of draw ``number`` of a group, numbered over all lanes, which is made in ``step``."""
        sums = self.prefix(np.array([step, step + 1]))
        low = int(sums[1, group - 1] - sums[0, group - 1]) if group else 0
        before = int(sums[0, group] - (sums[0, group - 1] if group else 0))
        phase = step % self.turn * self.lanes // self.turn
        return (low + number - before + phase) % self.lanes


def first_step(count: Callable[[int], int], number: int, limit: int | None) -> int | None:
    """Return the step of draw ``number``: the last k with count(k) <= number, or None if it is not before ``limit``."""
    if limit is None:
        limit = 1
        while count(limit) <= number:
            limit *= 2
            if limit > 1 << 62:
                return None
    elif count(limit) <= number:
        return None
    return bisect_right(range(limit), number, key=count) - 1
