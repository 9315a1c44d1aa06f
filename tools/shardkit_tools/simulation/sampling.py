"""Which nodes, ranks and lanes are looked at, and how far off that may be (SPEC.md §3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.plan import assign
from shardkit_tools.simulation.cluster import Cluster

__all__ = ["Sample", "choose_sample", "standard_error"]

_LANE_ROWS = 100_000  # what opening a lane's hand for an epoch costs, in rows drawn


@dataclass(frozen=True)
class Sample:
    """What is looked at.

    Attributes:
        nodes: their numbers.
        ranks: ranks of each node, counted in the node.
        lanes: lanes of each rank that are looked at, by (node, rank in it).
        node_share: lanes looked at, over all lanes of a node.
        rank_share: lanes looked at, over all lanes of a rank.
        total: what sums over the sample are multiplied by.
    """

    nodes: tuple[int, ...]
    ranks: tuple[int, ...]
    lanes: dict[tuple[int, int], tuple[int, ...]]
    node_share: float
    rank_share: float
    total: float

    @property
    def is_whole(self) -> bool:
        """Nothing is left out."""
        return self.total == 1.0 and self.rank_share == 1.0


def choose_sample(cluster: Cluster, lanes: int, rows: int, budget: int) -> Sample:
    """As many nodes as the budget of rows allows, else some ranks of two, else some lanes of those.

    Args:
        cluster: the cluster.
        lanes: L.
        rows: of an epoch.
        budget: rows drawn in an epoch.
    """
    all_nodes, all_ranks = cluster.nodes.nodes, cluster.nodes.ranks
    affordable = max(1, budget // (rows // lanes + _LANE_ROWS))
    per_node, per_rank = lanes / all_nodes, lanes / cluster.world
    least = min(2, all_nodes)
    nodes = min(all_nodes, max(least, int(affordable // per_node)))
    ranks = min(all_ranks, max(2 if nodes == 1 else 1, int(affordable // (nodes * per_rank))))
    own = max(1, min(math.ceil(per_rank), affordable // (nodes * ranks)))
    chosen = tuple(i * all_nodes // nodes for i in range(nodes))
    inside = tuple(i * all_ranks // ranks for i in range(ranks))
    owned = assign(lanes, cluster.world).shares()
    found = {}
    for node in chosen:
        for rank in inside:
            mine = owned[node * all_ranks + rank]
            found[node, rank] = tuple(mine[: min(own, len(mine))])
    looked = sum(map(len, found.values()))
    of_ranks = sum(len(owned[node * all_ranks + rank]) for node, rank in found)
    of_nodes = sum(len(owned[node * all_ranks + r]) for node in chosen for r in range(all_ranks))
    return Sample(chosen, inside, found, looked / of_nodes, looked / of_ranks, lanes / of_ranks)


def standard_error(parts: NDArray[np.float64], share: float) -> float | None:
    """Two standard errors of a total, relative, from equal parts of it; None where there is but one.

    Args:
        parts: (n,) what each unit of the sample gave.
        share: of all units that were looked at.
    """
    mean = float(parts.mean()) if len(parts) else 0.0
    if share >= 1 or not mean:
        return 0.0
    if len(parts) < 2:
        return None
    return 2 * float(parts.std(ddof=1)) / mean / math.sqrt(len(parts)) * math.sqrt(1 - share)
