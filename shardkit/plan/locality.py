"""Shards and bytes read by lanes and nodes, and the lanes that read a block (SPEC.md §8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkit.arrays import Int64s

from .amendment import AnyGrid, RestGrid
from .assignment import assign
from .lengths import BucketGrid, JoinedGrid
from .natural import NaturalGrid
from .plan import Plan
from .population import Population
from .weighted import WeightedGrid


@dataclass(frozen=True)
class NodeReads:
    """Shards read by nodes in one epoch, or in one pass over all hands.

    Attributes:
        nodes: number of nodes; each has an equal number of neighbouring lanes.
        shards: number of distinct shards read by each node.
        bytes: bytes of these shards; -1 if the population does not know their sizes.
        per_shard: shards summed over nodes, divided by the distinct shards of all nodes; at least 1.0.
    """

    nodes: int
    shards: tuple[int, ...]
    bytes: tuple[int, ...]
    per_shard: float


def lane_shards(plan: Plan, lane: int, epoch: int = 0) -> Int64s:
    """Return the distinct shards with rows of a lane in an epoch, or in pass ``epoch`` with explicit weights."""
    return np.unique(np.concatenate([_grid_shards(grid, lane, epoch) for grid in parts(plan.grid)]))


def parts(grid: AnyGrid) -> list[NaturalGrid | WeightedGrid]:
    """Return the natural and weighted grids that a grid is made of."""
    if isinstance(grid, BucketGrid):
        return list(grid.grids)
    if isinstance(grid, (RestGrid, JoinedGrid)):
        return parts(grid.after if isinstance(grid, RestGrid) else grid.inner)
    return [grid]


def _grid_shards(grid: NaturalGrid | WeightedGrid, lane: int, epoch: int) -> Int64s:
    if isinstance(grid, NaturalGrid):
        hand = grid.hands(epoch, (lane,))
        return np.unique(grid.order.pieces(hand.group, hand.lo, hand.hi).shard)
    over_all = grid.dealt_over_all()
    strata = np.flatnonzero((grid.rows > 0) & ~over_all)
    lo, hi = grid.tapes.hands(lane, strata, np.full(len(strata), epoch))
    common = np.flatnonzero((grid.rows > 0) & over_all)  # any lane may draw any row of these
    strata, lo = np.concatenate((strata, common)), np.concatenate((lo, np.zeros_like(common)))
    return np.unique(grid.order.pieces(strata, lo, np.concatenate((hi, grid.rows[common]))).shard)


def node_reads(plan: Plan, nodes: int, shards: Sequence[Int64s] | None = None, epoch: int = 0) -> NodeReads:
    """Return the shards and bytes that each of ``nodes`` nodes reads; ``shards`` lists the shards of each lane."""
    each = [lane_shards(plan, lane, epoch) for lane in range(plan.lanes)] if shards is None else shards
    owners = assign(plan.lanes, nodes, nodes=range(nodes))
    sets = [
        np.unique(np.concatenate([each[lane] for lane in owners.lanes_of(node)])) for node in range(nodes)
    ]
    size = plan.population.shard_bytes
    whole = len(np.unique(np.concatenate(sets)))
    return NodeReads(
        nodes,
        tuple(len(s) for s in sets),
        tuple(-1 if size is None else int(size[s].sum()) for s in sets),
        sum(len(s) for s in sets) / max(1, whole),
    )


class LaneOfBlock:
    """Function from blocks to the lanes whose hands contain most of their rows, in every epoch (SPEC.md §8).

    The lane is computed without hands, because hands begin at l/L of their base orders. It can be wrong by one block at
    borders of hands. It is not valid for the rest of an epoch after a change of lanes, nor for strata with few rows
    per lane, which all lanes draw from.

    Args:
        population: rows of the plan.
        lanes: L.
        blocks: int64[segments], number of blocks of each segment.
    """

    def __init__(self, population: Population, lanes: int, blocks: Int64s) -> None:
        rows, stratum = population.segment_rows, population.segment_stratum
        order = np.argsort(stratum, kind="stable")
        ends = np.cumsum(rows[order])
        total = np.bincount(stratum, rows, len(population.strata)).astype(np.int64)
        self._begin = np.empty_like(ends)  # position of each segment in the base order of its stratum
        self._begin[order] = ends - rows[order] - (np.cumsum(total) - total)[stratum[order]]
        self._rows, self._total, self._lanes = rows, np.maximum(1, total)[stratum], lanes
        self._blocks, self._first = blocks, np.cumsum(blocks) - blocks

    def __call__(self, block: Int64s) -> Int64s:
        """Return the lane of each block: int64[n] for int64[n] block numbers in the dataset."""
        segment = np.searchsorted(self._first, block, side="right") - 1
        twice = 2 * (block - self._first[segment]) + 1
        middle = self._begin[segment] + self._rows[segment] * twice // (2 * self._blocks[segment])
        found: Int64s = np.minimum(middle * self._lanes // self._total[segment], self._lanes - 1)
        return found
