"""The near future of one rank as data: which rows of which blocks the next steps need. Pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["GridReader", "LocateRows", "StepGroup", "plan_group"]

Int64s = NDArray[np.int64]


class GridReader(Protocol):
    """What the loader asks of a plan."""

    @property
    def lanes(self) -> int: ...
    @property
    def cell_size(self) -> int: ...
    @property
    def digest(self) -> str: ...
    def cells(self, start: int, stop: int, lanes: Int64s) -> Int64s:
        """(stop - start, len(lanes), cell_size) int64 sample numbers; −1 in the empty slots of a short step."""
        ...


class LocateRows(Protocol):
    """Sample numbers → rows of blocks; `storage.RowMap.locate`."""

    def __call__(self, samples: Int64s, /) -> tuple[Int64s, Int64s, Int64s, Int64s]: ...


class StepGroup(NamedTuple):
    """Some consecutive steps of one rank, worked out at once so that a step costs microseconds.

    Rows of all steps lie end to end; those of step `start + i` are `borders[i]:borders[i + 1]`.
    """

    start: int
    samples: Int64s  # (n,) sample numbers; empty slots are gone
    slots: Int64s  # (n,) lane · cell_size + slot: the place in the grid
    lane_counts: Int64s  # (steps, lanes) rows of each cell
    borders: Int64s  # (steps + 1,)
    block: Int64s  # (n,) dataset-wide block number
    row: Int64s  # (n,) row inside the block
    needed: list[Int64s]  # per step: the distinct blocks, ascending

    @property
    def steps(self) -> int:
        return len(self.needed)


def plan_group(plan: GridReader, locate: LocateRows, lanes: Int64s, start: int, stop: int) -> StepGroup:
    """Work out steps `start` … `stop - 1` for the rank that owns `lanes` (ascending)."""
    cells = plan.cells(start, stop, lanes)  # (steps, lanes, m)
    places = np.broadcast_to(lanes[:, None] * plan.cell_size + np.arange(plan.cell_size), cells.shape)
    present = cells >= 0
    samples = cells[present]
    lane_counts = present.sum(axis=2, dtype=np.int64)
    borders = np.zeros(len(cells) + 1, dtype=np.int64)
    np.cumsum(lane_counts.sum(axis=1), out=borders[1:])
    _, _, block, row = locate(samples)
    edges = borders.tolist()
    needed = [np.unique(block[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return StepGroup(start, samples, places[present], lane_counts, borders, block, row, needed)
