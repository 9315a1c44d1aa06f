"""The near future of one rank as data: which rows of which blocks the next steps need. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.plan import Plan

__all__ = [
    "LocateRows",
    "StepGroup",
    "first_lanes",
    "group_rows",
    "most_steps",
    "plan_group",
    "steps_that_fit",
]

Int64s = NDArray[np.int64]

# Planning costs the same for a group as for a step: as many rows as make it vanish. Few large rows do that too.
_GROUP_ROWS = 32768
_GROUP_BYTES = 256 << 20
_MAX_GROUP_STEPS = 512

LocateRows = Callable[[Int64s], tuple[Int64s, Int64s, Int64s, Int64s]]
"""Sample numbers → (shard, row, block, row in block); `storage.RowMap.locate`."""


class StepGroup(NamedTuple):
    """Some consecutive steps of one rank, worked out at once so that a step costs microseconds.

    Rows of all steps lie end to end; those of step `numbers[i]` are `borders[i]:borders[i + 1]`.
    """

    numbers: range  # which steps, counted over the whole run
    samples: Int64s  # (n,) sample numbers; empty slots are gone
    slots: Int64s  # (n,) lane · cell_size + slot: the place in the grid
    lane_counts: Int64s  # (steps, lanes) rows of each cell
    borders: Int64s  # (steps + 1,)
    block_of: Int64s  # (n,) dataset-wide block number
    row: Int64s  # (n,) row inside the block
    blocks: Int64s  # the distinct blocks, in the order in which steps first need them
    which: Int64s  # (n,) index into `blocks`
    first: Int64s  # (blocks,) the place in `numbers` of the first step that needs each
    last: Int64s  # (blocks,) and of the last one

    def split(self, steps: int) -> tuple[StepGroup, StepGroup | None]:
        """The first so many steps, at least one, and the others."""
        if steps >= len(self.numbers):
            return self, None
        at = int(self.borders[steps])
        return (
            group_rows(self.numbers[:steps], self.samples[:at], self.slots[:at], self.lane_counts[:steps],
                     self.block_of[:at], self.row[:at]),
            group_rows(self.numbers[steps:], self.samples[at:], self.slots[at:], self.lane_counts[steps:],
                     self.block_of[at:], self.row[at:]),
        )  # fmt: skip


def plan_group(plan: Plan, locate: LocateRows, lanes: list[int], numbers: range) -> StepGroup:
    """Work out the steps `numbers` (ascending) for the rank that owns `lanes` (ascending)."""
    cells = _cells(plan, lanes, numbers)  # (steps, lanes, m)
    places = np.broadcast_to(
        np.array(lanes, dtype=np.int64)[:, None] * plan.cell_size + np.arange(plan.cell_size), cells.shape
    )
    present = cells >= 0
    samples = cells[present]
    _, _, block, row = locate(samples)
    return group_rows(numbers, samples, places[present], present.sum(axis=2, dtype=np.int64), block, row)


def group_rows(
    numbers: range, samples: Int64s, slots: Int64s, lane_counts: Int64s, block_of: Int64s, row: Int64s
) -> StepGroup:
    """Steps of which the rows and their places are known; see `StepGroup`."""
    borders = np.zeros(len(lane_counts) + 1, dtype=np.int64)
    np.cumsum(lane_counts.sum(axis=1), out=borders[1:])
    blocks, first, last, which = _distinct(block_of)
    by_deadline = np.argsort(first)
    rank = np.empty_like(by_deadline)
    rank[by_deadline] = np.arange(len(by_deadline))
    first, last = (np.searchsorted(borders, one[by_deadline], side="right") - 1 for one in (first, last))
    return StepGroup(
        numbers, samples, slots, lane_counts, borders, block_of, row, blocks[by_deadline], rank[which],
        first, last,
    )  # fmt: skip


def _distinct(values: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Distinct values ascending, where each comes first and last, and which of them is at each place.

    As `np.unique` of values from 0 to 2**40, in a third of the time: sorting numbers is cheaper than an order of them.
    """
    bits = len(values).bit_length()
    ordered = np.sort(values << bits | np.arange(len(values)))
    place, ordered = ordered & ((1 << bits) - 1), ordered >> bits
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    which = np.empty_like(place)
    which[place] = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(place)))
    ends = np.append(begins[1:], len(place))[: len(begins)] - 1
    return ordered[begins], place[begins], place[ends], which


def steps_that_fit(group: StepGroup, sizes: Int64s, held: NDArray[np.bool_], room: int) -> tuple[int, int]:
    """How many of a group's steps can be worked one after the other within so many bytes, and what the first needs.

    A block takes room from the first step that needs it, or from the beginning where it is held, to the last one.
    """
    change = np.zeros(len(group.numbers) + 1, dtype=np.int64)
    np.add.at(change, np.where(held, 0, group.first), sizes)
    np.add.at(change, group.last + 1, -sizes)
    over = np.flatnonzero(np.cumsum(change) > room)
    return max(1, int(over[0])) if len(over) else len(group.numbers), int(sizes[group.first == 0].sum())


def first_lanes(group: StepGroup, cell_size: int) -> list[int]:
    """The lane that needs each of `group.blocks` first; lanes share blocks at the borders of their hands only."""
    first = np.empty(len(group.blocks), dtype=np.int64)
    first[group.which[::-1]] = group.slots[::-1]  # of equal indices the last assignment holds: the first row
    lanes: list[int] = (first // cell_size).tolist()
    return lanes


def _cells(plan: Plan, lanes: list[int], numbers: range) -> Int64s:
    if numbers.step == 1:
        return plan.steps(numbers.start, numbers.stop, lanes)
    return np.concatenate([plan.steps(step, step + 1, lanes) for step in numbers])


def most_steps(rows_per_step: int, bytes_per_step: int) -> int:
    """How many steps of a rank are planned at once; the first group is one step, each later one four times as long."""
    by_size = min(_GROUP_ROWS // max(1, rows_per_step), _GROUP_BYTES // max(1, bytes_per_step))
    return max(1, min(_MAX_GROUP_STEPS, by_size))
