"""The rest of an epoch, dealt again with another batch or other lanes, and the epochs after it (SPEC.md §6)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .cells import assemble, permute_cells
from .deal import Deal
from .leftover import NaturalLeftover
from .natural import NaturalGrid
from .permutation import derive, derive_each
from .recent import Recent
from .stage import first_step
from .strata import group_strata

__all__ = ["RestGrid"]

Numbers = NDArray[np.int64]

_REST = 5  # what a key below the seed is for
_CHUNK = 64


class RestGrid:
    """First what an epoch has left, then the epochs of ``after``.

    The rest's groups are those of the grid that left it; groups that are rare in it are pooled as ever. Its rows come
    in the order in which that grid would have drawn them, cut into new hands, and every cell is permuted.

    Args:
        left: the rest of an epoch.
        after: the grid of the following epochs; gives batch, lanes, seed and remainder.
    """

    def __init__(self, left: NaturalLeftover, after: NaturalGrid) -> None:
        self.left, self.after = left, after
        self.order = after.order
        self.lanes, self.cell_size = after.lanes, after.cell_size
        rows, batch = left.starts[-1].tolist(), after.global_batch
        groups = group_strata(range(len(rows)), rows, rows, batch)
        self.members = groups.strata
        sums = groups.cumulative() or [1]
        self.full_steps, spare = divmod(groups.total, batch)
        self.short = after.remainder == "short" and spare > 0
        self.steps = self.full_steps + self.short
        self.deal = Deal(sums, batch, after.lanes, self.full_steps)
        drawn = self.deal.lane_prefix(np.full(after.lanes, self.full_steps), np.arange(after.lanes))
        self._drawn = np.diff(drawn, axis=1, prepend=0)
        hands = drawn + self.deal.short_step(spare) if self.short else drawn
        hands = np.diff(hands, axis=1, prepend=0)
        self._cut: Numbers = np.concatenate(
            (np.zeros((1, hands.shape[1]), np.int64), np.cumsum(hands, axis=0))
        )
        self._cells: Recent[tuple[int, int], Numbers] = Recent(3 * after.lanes)
        self.epoch = left.epoch

    def bounds(self, step: int) -> tuple[int, int]:
        """First and end step of the rest, or of the epoch that holds a step."""
        if step < self.steps:
            return 0, self.steps
        first, last = self.after.bounds(step + self.ahead)
        return first - self.ahead, last - self.ahead

    @property
    def ahead(self) -> int:
        """Steps by which the following grid counts further than this one."""
        return (self.epoch + 1) * self.after.steps_per_epoch - self.steps

    def cells(self, start: int, stop: int, lane: int) -> Numbers:
        """Cells of one lane for steps [start, stop): (steps, m) int64."""
        parts = []
        while start < min(stop, self.steps):
            number = start // _CHUNK if start < self.full_steps else -1
            first = number * _CHUNK if number >= 0 else self.full_steps
            cells = self._cells.get((lane, number), self._draw)
            count = min(stop - start, first + len(cells) - start)
            parts.append(cells[start - first : start - first + count])
            start += count
        if start < stop:
            parts.append(self.after.cells(start + self.ahead, stop + self.ahead, lane))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _draw(self, key: tuple[int, int]) -> Numbers:
        lane, number = key
        if number < 0:
            counts = (self._cut[lane + 1] - self._cut[lane] - self._drawn[lane])[None, :]
            first, low = self.full_steps, self._drawn[lane]
        else:
            first = number * _CHUNK
            steps = np.arange(first, min(self.full_steps, first + _CHUNK) + 1, dtype=np.int64)
            before = self.deal.lane_counts(steps, lane, np.arange(len(self.members)))
            counts, low = np.diff(before, axis=0), before[0]
        begin = self._cut[lane] + low
        draws = np.concatenate([self._take(g, int(a), int(a + n)) for g, (a, n) in
                                enumerate(zip(begin, counts.sum(axis=0), strict=True))])  # fmt: skip
        cells: Numbers = assemble(draws, counts[None], self.cell_size)[0]
        if self.after.shuffle != "none":
            steps = np.arange(first, first + len(cells), dtype=np.int64)
            base = derive(self.after.seed, _REST, self.epoch, lane)
            cells = permute_cells(
                cells, derive_each(base, steps), len(draws) if number < 0 else self.cell_size
            )
        cells.flags.writeable = False
        return cells

    def _take(self, group: int, lo: int, hi: int) -> Numbers:
        """Rows [lo, hi) of a group of the rest: a pool is the rests of its members, one after the other."""
        parts, base = [np.empty(0, dtype=np.int64)], 0
        for member in self.members[group]:
            rows = int(self.left.starts[-1, member])
            a, b = max(lo, base), min(hi, base + rows)
            if b > a:
                parts.append(self.left.take(*(np.array([v]) for v in (member, a - base, b - base))))
            base += rows
        return np.concatenate(parts)

    def locate(self, sample: int, number: int) -> tuple[int, int, int] | None:
        """(step, lane, slot) of a sample in the rest of the amended epoch, or in a later epoch."""
        if number > self.epoch:
            found = self.after.locate(sample, number)
            return None if found is None else (found[0] - self.ahead, found[1], found[2])
        place = self.left.index(sample) if number == self.epoch else None
        if place is None:
            return None
        group = next(g for g, m in enumerate(self.members) if place[0] in m)
        members = self.members[group]
        at = place[1] + sum(int(self.left.starts[-1, m]) for m in members[: members.index(place[0])])
        lane = int(np.searchsorted(self._cut[:, group], at, side="right")) - 1
        if lane >= self.lanes:
            return None  # the remainder of the rest is dropped
        at -= int(self._cut[lane, group])
        step, chosen = self.full_steps, np.array([group])
        if at < int(self._drawn[lane, group]):
            step = first_step(
                lambda k: int(self.deal.lane_counts(np.array([k]), lane, chosen)[0, 0]), at, self.full_steps
            )  # type: ignore[assignment]
        slot = int(np.flatnonzero(self.cells(step, step + 1, lane)[0] == sample)[0])
        return step, lane, slot
