"""Pure planning of groups of steps for one rank: the rows and blocks that the next steps need."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s
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


# Planning costs the same for a group as for a step. At these sizes its share of the time is negligible.
_GROUP_ROWS = 32768
_GROUP_BYTES = 256 << 20
_MAX_GROUP_STEPS = 512

LocateRows = Callable[[Int64s], tuple[Int64s, Int64s, Int64s, Int64s]]
"""Maps sample numbers to (shard, row, block, row in block), each (n,); `RowMap.locate`."""


class StepGroup(NamedTuple):
    """Consecutive steps of one rank, planned together so that a step costs microseconds.

    Arrays over rows concatenate all steps; the rows of step `numbers[i]` are `borders[i]:borders[i + 1]`.
    """

    numbers: range  # the steps, counted over the whole run
    samples: Int64s  # (n,) sample numbers, without empty slots
    slots: Int64s  # (n,) places in the grid: lane · cell_size + slot
    lane_counts: Int64s  # (steps, lanes) rows of each cell
    borders: Int64s  # (steps + 1,)
    block_of: Int64s  # (n,) dataset-wide block number
    row: Int64s  # (n,) row inside the block
    blocks: Int64s  # (blocks,) distinct block numbers, ordered by first use
    which: Int64s  # (n,) index into `blocks`
    first: Int64s  # (blocks,) index in `numbers` of the first step that needs each block
    last: Int64s  # (blocks,) index of the last step that needs it

    def split(self, steps: int) -> tuple[StepGroup, StepGroup | None]:
        """Return the first `steps` steps, and the rest or None."""
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
    """Plan the steps `numbers` (ascending) of the rank that owns `lanes` (ascending)."""
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
    """Make a group from its rows and their places; see `StepGroup`."""
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
    """Return the distinct values (ascending), the first and last index of each, and the inverse indices.

    Equivalent to `np.unique` for values from 0 to 2**40, in a third of the time: a sort is cheaper than an argsort.
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
    """Return how many of a group's steps fit into `room` bytes, and the bytes that the first step needs.

    A block takes memory from the first to the last step that needs it; a block that is `held` takes it from the start.
    At least one step is returned.
    """
    change = np.zeros(len(group.numbers) + 1, dtype=np.int64)
    np.add.at(change, np.where(held, 0, group.first), sizes)
    np.add.at(change, group.last + 1, -sizes)
    over = np.flatnonzero(np.cumsum(change) > room)
    return max(1, int(over[0])) if len(over) else len(group.numbers), int(sizes[group.first == 0].sum())


def first_lanes(group: StepGroup, cell_size: int) -> list[int]:
    """Return the lane that needs each of `group.blocks` first.

    Lanes share blocks only at the boundaries of the plan's hands.
    """
    first = np.empty(len(group.blocks), dtype=np.int64)
    first[group.which[::-1]] = group.slots[::-1]  # of equal indices the last assignment holds: the first row
    lanes: list[int] = (first // cell_size).tolist()
    return lanes


def _cells(plan: Plan, lanes: list[int], numbers: range) -> Int64s:
    if numbers.step == 1:
        return plan.steps(numbers.start, numbers.stop, lanes)
    return np.concatenate([plan.steps(step, step + 1, lanes) for step in numbers])


def most_steps(rows_per_step: int, bytes_per_step: int) -> int:
    """Return the largest number of steps of a group."""
    by_size = min(_GROUP_ROWS // max(1, rows_per_step), _GROUP_BYTES // max(1, bytes_per_step))
    return max(1, min(_MAX_GROUP_STEPS, by_size))
