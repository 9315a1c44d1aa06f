"""Number of samples of each group that every lane has drawn before any step, in closed form (SPEC.md §2).

A `Deal` covers one turn: ``steps`` steps in ``lanes`` phases. The slots of a step, sorted by group, are distributed
round-robin: in phase p slot i goes to lane (i + p) mod L. All sums and roundings are exact. `assemble` builds the cells
of each step from draws, and `permute_cells` permutes the slots of each cell (§4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .permutation import order_rows

_SAFE = 2**62


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum of ``(a * i + b) // m`` over 0 <= i < n.

    Takes O(log m) steps (Euclid-like reduction of lattice point counts).
    """
    total = 0
    if a < 0:
        total -= n * (n - 1) // 2 * ((a % m - a) // m)
        a %= m
    if b < 0:
        total -= n * ((b % m - b) // m)
        b %= m
    while n:
        if a >= m:
            total += n * (n - 1) // 2 * (a // m)
            a %= m
        if b >= m:
            total += n * (b // m)
            b %= m
        last = a * n + b
        if last < m:
            break
        n, b = last // m, last % m
        m, a = a, m
    return total


def golden_step(n: int) -> int:
    """Return the smallest step coprime to n from n / golden ratio upwards.

    Its multiples are spread evenly modulo n.
    """
    if n <= 2:
        return 1
    step = (math.isqrt(5 * n * n) - n) // 2
    while math.gcd(step, n) != 1:
        step += 1
    return step


def divisors(n: int) -> list[int]:
    """Return all divisors of n in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def muldiv(
    factor: NDArray[np.int64], other: NDArray[np.int64], offset: NDArray[np.int64] | int, divisor: int
) -> NDArray[np.int64]:
    """Return ``(factor * other + offset) // divisor``, exact.

    Arrays broadcast. All values must be >= 0 and the result must fit int64. Products that could exceed 2**62 are
    computed with Python integers.
    """
    bound = int(factor.max(initial=0)) * int(other.max(initial=0)) + int(np.max(offset, initial=0))
    if bound < _SAFE and divisor < _SAFE:
        small: NDArray[np.int64] = ((factor * other + offset) // divisor).astype(np.int64, copy=False)
        return small
    exact = factor.astype(object) * other.astype(object) + offset
    quotient: NDArray[np.int64] = (exact // divisor).astype(np.int64)
    return quotient


def ragged(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate ``arange(start, start + length)`` over all pairs: int64[sum(lengths)]."""
    ends = np.cumsum(lengths)
    numbers: NDArray[np.int64] = np.repeat(starts - (ends - lengths), lengths)
    numbers += np.arange(len(numbers), dtype=np.int64)
    return numbers


Counts = NDArray[np.int64]


class Deal:
    """Sample counts of one turn.

    Args:
        cumulative: total mass of groups 0..g for each g (Python integers, ascending; the last is N).
        global_batch: B, a multiple of ``lanes``.
        lanes: L.
        steps: S, steps of the turn.
        dither: number added to every prefix before rounding, 0 <= dither < N.
    """

    def __init__(
        self, cumulative: Sequence[int], global_batch: int, lanes: int, steps: int, dither: int = 0
    ) -> None:
        self.total = cumulative[-1]
        self.batch, self.lanes, self.steps, self.dither = global_batch, lanes, steps, dither
        parts = [divmod(global_batch * c, self.total) for c in cumulative]
        self._low: Counts = np.array(
            [q for q, _ in parts], dtype=np.int64
        )  # q_g: slots below group g+1, rounded down
        self._carry: NDArray[np.int64] = np.array(
            [f for _, f in parts], dtype=_fit(self.total)
        )  # f_g: remainder of that division, per step
        self._ramp: Counts = -(
            (np.arange(lanes + 1, dtype=np.int64) * -steps) // lanes
        )  # first step of each phase
        self._turn, self._residue = self._low // lanes, self._low % lanes

    def prefix(self, steps: NDArray[np.int64]) -> Counts:
        """Return C: samples of groups <= g drawn by all lanes before each step; (len(steps), groups)."""
        return steps[:, None] * self._low + muldiv(steps[:, None], self._carry, self.dither, self.total)

    def phase(self, step: int) -> int:
        """Return the phase p of a step."""
        return step * self.lanes // self.steps if self.steps else 0

    def lane_prefix(
        self, steps: NDArray[np.int64], lane: NDArray[np.int64] | int, chosen: NDArray[np.int64] | None = None
    ) -> Counts:
        """Return D: samples of groups <= g drawn by ``lane`` before each step.

        Returns:
            (n, k) int64 for the k chosen groups, all by default; the column of the last group is ``steps * B / L``.
        """
        of = slice(None) if chosen is None else chosen
        residue, carry = self._residue[of], self._carry[of]
        at = steps[:, None]
        if not (residue.any() or carry.any()):  # every step has whole rounds, as for the last group
            return at * self._turn[of]
        lanes = np.asarray(lane, dtype=np.int64).reshape(-1, 1)
        # Slots 0..q-1 of each step: q // L rounds, and one more while the phase is in (lane - q % L, lane].
        first = lanes - residue + 1  # if negative, the range of phases wraps around
        inside = self._time(at, lanes + 1) - self._time(at, np.maximum(first, 0))
        wrapped = np.where(first < 0, at - self._time(at, np.minimum(first, 0) + self.lanes), 0)
        drawn = at * self._turn[of] + inside + wrapped
        # Slot q exists in the steps that carry; it reaches this lane in one phase of the turn.
        phase = (lanes - residue) % self.lanes
        begin, end = self._ramp[phase], self._ramp[phase + 1]
        return drawn + self._carries(carry, begin, np.clip(at, begin, end))

    def lane_counts(
        self, steps: NDArray[np.int64], lane: NDArray[np.int64] | int, chosen: NDArray[np.int64]
    ) -> Counts:
        """Return the samples of the chosen groups drawn by ``lane`` before each step: (n, k) int64."""
        drawn = self.lane_prefix(steps, lane, chosen)
        above_first = chosen > 0
        if not above_first.any():
            return drawn
        below = self.lane_prefix(steps, lane, np.maximum(chosen - 1, 0))
        return drawn - np.where(above_first, below, 0)

    def _time(self, at: Counts, phase: Counts) -> Counts:
        """Return the number of steps before ``at`` whose phase is below ``phase``."""
        return np.minimum(at, self._ramp[phase])

    def _carries(self, carry: NDArray[np.int64], begin: Counts, end: Counts) -> Counts:
        """Return the number of steps in [begin, end) that carry; exact, with Python integers only if needed."""
        if (int(self.steps) + 1) * self.total < 2**62:
            start = (begin * carry + self.dither) % self.total
        else:
            start = (begin.astype(object) * carry + self.dither) % self.total
        return muldiv(end - begin, carry, start, self.total)

    def short_step(self, rows: int) -> Counts:
        """Return the counts of the short step of ``rows`` slots, cumulated over groups <= g: (L, groups)."""
        if not rows:
            return np.zeros((self.lanes, len(self._low)), dtype=np.int64)
        left = self._remainder()[None, :]
        lane = np.arange(self.lanes, dtype=np.int64)[:, None]
        counts: Counts = np.maximum(0, (left - lane + self.lanes - 1) // self.lanes)
        return counts

    def _remainder(self) -> Counts:
        """Return the samples of groups <= g that remain after the full steps of the turn."""
        rest = self.total - self.steps * self.batch
        # N_g - floor((S B N_g + dither) / N) = ceil((N_g (N - S B) - dither) / N), and N_g B = q_g N + f_g
        cumulative = (self._low.astype(object) * self.total + self._carry) // self.batch
        return np.array([-((self.dither - int(c) * rest) // self.total) for c in cumulative], dtype=np.int64)


def _fit(total: int) -> type:
    return np.int64 if total < 2**62 else object


def chunk_steps(global_batch: int, lanes: int, most: int) -> int:
    """Return how many steps to draw and cache at once: at most 2**16 samples per lane and 2**20 over all lanes."""
    return max(1, min(most, (1 << 20) // global_batch, (1 << 16) * lanes // global_batch))


def assemble(draws: NDArray[np.int64], counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Distribute draws over the cells of steps.

    Args:
        draws: sample numbers, ordered by (lane, group, step).
        counts: (lanes, steps, groups), draws of each group in each cell.
        size: m, slots of a cell.

    Returns:
        int64[lanes, steps, m]: draws of each cell ordered by group; -1 in the remaining slots.
    """
    lanes, steps = counts.shape[:2]
    out = np.full(lanes * steps * size, -1, dtype=np.int64)
    first = np.arange(lanes * steps, dtype=np.int64).reshape(lanes, steps, 1) * size
    slot = np.cumsum(counts, axis=2) - counts + first
    out[ragged(slot.transpose(0, 2, 1).ravel(), counts.transpose(0, 2, 1).ravel())] = draws
    return out.reshape(lanes, steps, size)


def permute_cells(cells: NDArray[np.int64], keys: NDArray[np.uint64], filled: int) -> NDArray[np.int64]:
    """Permute the first ``filled`` slots of each cell under its key."""
    ranks = order_rows(keys, filled)
    if filled == cells.shape[1]:
        return np.take_along_axis(cells, ranks, axis=1)
    out = cells.copy()
    out[:, :filled] = np.take_along_axis(cells, ranks, axis=1)
    return out
