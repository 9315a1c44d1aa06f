"""A stage: a deal with fixed weights that turns without end (SPEC.md §5).

`Tree` shares a pool's draws out over its strata, `RoundRobin` makes one stream of all lanes' tapes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import gcd, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .deal import Deal

Numbers = NDArray[np.int64]


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


_COARSE = 64
"""Steps of a phase over which weights are rounded to whole samples where they come out exactly in no shorter phase."""


class StageGroup(NamedTuple):
    """What is dealt as one: a stratum, or a pool of rare ones; from lanes' tapes, or from shared ones."""

    strata: tuple[int, ...]
    mass: int
    shared: bool


def plan_groups(
    masses: Sequence[int], names: Sequence[str], shared: NDArray[np.bool_], batch: int
) -> list[StageGroup]:
    """Common strata by (-mass, name), then the pool of handed rare strata, then the pool of shared ones.

    Only the last group may be expected less than once per global batch; a pool that is not joins the last one.
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


def whole_turn(groups: Sequence[StageGroup], batch: int, target: int) -> tuple[int, list[int]]:
    """Steps of a phase, and how many samples of each group it holds.

    Every phase of a turn is dealt alike, so that after each whole turn all lanes have had the same. That takes whole
    numbers per phase: the shortest exact phase where it is short enough, else the nearest whole numbers (largest
    remainder), which are then the plan's weights.
    """
    total = sum(g.mass for g in groups)
    exact = lcm(*(total // gcd(total, batch * g.mass) for g in groups))
    if exact <= max(target, _COARSE):
        steps = exact * max(1, target // exact)
        return steps, [steps * batch * g.mass // total for g in groups]
    steps = max(target, _COARSE)
    slots = steps * batch
    counts = [max(1, slots * g.mass // total) for g in groups]
    by_rest = sorted(range(len(groups)), key=lambda i: (-(slots * groups[i].mass % total), i))
    for i in by_rest[: max(0, slots - sum(counts))]:
        counts[i] += 1
    counts[0] -= sum(counts) - slots  # a rare pool that was lifted to 1 is paid for by the largest group
    return steps, counts


class Stage:
    """Counts of a deal from ``start`` on; steps of its methods are counted from there.

    Args:
        start: step of the run.
        groups: what is dealt.
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
        self._per_turn: Numbers = np.array(
            sums, dtype=np.int64
        )  # samples of groups <= g per lane and whole turn
        self.shares = counts

    def lane_counts(self, steps: Numbers, lane: int | Numbers, chosen: Numbers) -> Numbers:
        """Samples of chosen groups drawn by a lane before each step: (n, k)."""
        turns, rest = np.divmod(steps, self.turn)
        whole = np.diff(self._per_turn, prepend=0)[chosen]
        return turns[:, None] * whole + self.deal.lane_counts(rest, lane, chosen)

    def drift(self, group: int) -> int:
        """How far lanes come apart in draws of a group: at the borders of phases, between them within 2 of it."""
        lanes = np.arange(self.lanes, dtype=np.int64)
        borders = -(-lanes * self.turn // self.lanes)
        drawn = self.deal.lane_counts(
            np.repeat(borders, self.lanes), np.tile(lanes, self.lanes), np.array([group])
        )
        return int(np.ptp(drawn.reshape(self.lanes, self.lanes), axis=1).max())

    def prefix(self, steps: Numbers) -> Numbers:
        """Samples of groups <= g drawn by all lanes before each step: (n, groups)."""
        turns, rest = np.divmod(steps, self.turn)
        return turns[:, None] * (self._per_turn * self.lanes) + self.deal.prefix(rest)

    def slots(self, steps: Numbers, lane: int, group: int) -> tuple[Numbers, Numbers]:
        """A lane's draws of a group, numbered over all lanes in slot order.

        Returns:
            (counts int64[n], numbers int64[sum(counts)]): of each step, and the number of each draw.
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
        """The lane that gets draw ``number`` (over all lanes) of a group in a step."""
        sums = self.prefix(np.array([step, step + 1]))
        low = int(sums[1, group - 1] - sums[0, group - 1]) if group else 0
        before = int(sums[0, group] - (sums[0, group - 1] if group else 0))
        phase = step % self.turn * self.lanes // self.turn
        return (low + number - before + phase) % self.lanes


def first_step(count: Callable[[int], int], number: int, limit: int | None) -> int | None:
    """The step in which draw ``number`` falls: the last k with count(k) <= number; None if not before ``limit``."""
    if limit is None:
        limit = 1
        while count(limit) <= number:
            limit *= 2
            if limit > 1 << 62:
                return None
    elif count(limit) <= number:
        return None
    return bisect_right(range(limit), number, key=count) - 1
