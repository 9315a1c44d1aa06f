"""How long steps take: fetching ahead, checking, computing, waiting for the slowest, summing gradients (SPEC.md §2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit_tools.simulation.cluster import Cluster
from shardkit_tools.simulation.faults import Moves
from shardkit_tools.simulation.fetching import BlockFetching, FlowFetching, RankFlow

Floats = NDArray[np.float64]

Interruptions = Callable[[int, float, float], float]
"""(step, now, mean seconds of a step so far) → seconds that the whole run stands still."""


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds."""

    step_s: Floats  # float64[steps], of whole steps, interruptions included
    stall_s: Floats  # float64[steps], the longest wait for data of any sampled rank
    halves: Floats  # float64[2, steps], the longest among every other of them
    rank_stall_s: Floats  # float64[ranks], waits of each rank in all steps
    compute_s: Floats  # float64[steps], of the slowest rank
    reduce_s: float  # of a step, what is not hidden
    stood_s: float  # all interruptions


class _Waits:
    """When each rank's next blocks are there."""

    def __init__(self, cluster: Cluster, flows: Sequence[RankFlow], steps: int) -> None:
        self._begins = np.stack([_marks(f.groups.first[:-1], steps) for f in flows])
        self._none = np.zeros(len(flows))
        self._flow: FlowFetching | None = None
        self._ranks: list[BlockFetching] = []
        self._group = [0] * len(flows)
        if all(f.items is not None for f in flows):
            self._ranks = [BlockFetching(cluster, f) for f in flows]
        else:
            self._flow = FlowFetching(cluster, flows)

    def at(self, step: int, now: float) -> Floats:
        """Seconds that each rank waits at a step."""
        begins = self._begins[:, step]
        if not begins.any():
            return self._none
        if self._flow is not None:
            ready = self._flow.begin(step, begins, now)
            return np.where(begins, np.maximum(0.0, ready - now), 0.0)
        waits = np.zeros(len(begins))
        for rank in np.flatnonzero(begins).tolist():
            waits[rank] = max(0.0, self._ranks[rank].begin(self._group[rank], now) - now)
            self._group[rank] += 1
        return waits


def _marks(places: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    marks = np.zeros(length, dtype=bool)
    marks[places] = True
    return marks


def time_steps(
    cluster: Cluster,
    flows: Sequence[RankFlow],
    moves: Moves,
    *,
    stops: Interruptions | None = None,
) -> Times:
    """Walk the steps.

    Args:
        cluster: the cluster.
        flows: of the sampled ranks; all of equal length.
        moves: slow ranks and lanes of the whole world.
        stops: what stops everybody.
    """
    ranks, steps = len(flows), len(flows[0].requests)
    waits = _Waits(cluster, flows, steps)
    reduce_s, which = reduce_seconds(cluster), np.array([f.rank for f in flows])
    step_s, stall_s, compute_s = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    halves, rank_stall = np.zeros((2, steps)), np.zeros(ranks)
    now = stood = 0.0
    own, slowest, exposed = np.zeros(ranks), 0.0, 0.0
    for step in range(steps):
        if moves.at(step, now) or not step:
            everybody = moves.compute_s
            own, slowest = everybody[which], float(everybody.max())
            exposed = exposed_seconds(reduce_s, cluster.reduce.overlap, slowest)
        began, wait = now, waits.at(step, now)
        rank_stall += wait
        stall_s[step] = wait.max()
        halves[0, step], halves[1, step] = wait[::2].max(), wait[1::2].max(initial=0.0)
        now += max(float((wait + own).max()), slowest) + exposed
        if stops is not None:
            stopped = stops(step, now, (now - stood) / (step + 1))  # a step without what interrupted it
            now, stood = now + stopped, stood + stopped
        step_s[step], compute_s[step] = now - began, slowest
    return Times(step_s, stall_s, halves, rank_stall, compute_s, exposed, stood)


# ---- All-reduce


def ring_seconds(ranks: int, num_bytes: float, bandwidth: float, latency: float) -> float:
    """Reduce-scatter and all-gather round a ring: optimal in bytes (Patarasuk and Yuan 2009)."""
    if ranks < 2:
        return 0.0
    return 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * num_bytes / bandwidth


def tree_seconds(ranks: int, num_bytes: float, bandwidth: float, latency: float) -> float:
    """Pipelined double binary tree: few hops, all links busy (Sanders, Speck, Träff 2009)."""
    if ranks < 2:
        return 0.0
    return 2 * (ranks - 1).bit_length() * latency + 2 * num_bytes / bandwidth


def hierarchical_seconds(
    nodes: int, ranks: int, num_bytes: float, *, inner: float, outer: float, latency: float
) -> float:
    """Reduce-scatter inside a node, rings over nodes for each part, all-gather inside.

    Args:
        nodes: of the world.
        ranks: of a node.
        num_bytes: that are summed.
        inner: bytes/s between ranks of a node.
        outer: bytes/s of a node to others; its ranks share them.
        latency: of a message.
    """
    inside = ring_seconds(ranks, num_bytes, inner, latency)
    return inside + ring_seconds(nodes, num_bytes / ranks, outer / ranks, latency)


def reduce_seconds(cluster: Cluster) -> float:
    """All-reduce of a step on this cluster."""
    reduce, nodes = cluster.reduce, cluster.nodes
    if reduce.model == "none" or not reduce.gradient:
        return 0.0
    outer = nodes.nic / reduce.oversubscription
    if reduce.model == "hierarchical":
        return hierarchical_seconds(nodes.nodes, nodes.ranks, reduce.gradient, inner=reduce.inner_bandwidth,
                                    outer=outer, latency=reduce.link_latency)  # fmt: skip
    slowest = reduce.inner_bandwidth if nodes.nodes == 1 else min(reduce.inner_bandwidth, outer)
    model = ring_seconds if reduce.model == "ring" else tree_seconds
    return model(cluster.world, reduce.gradient, slowest, reduce.link_latency)


def exposed_seconds(total: float, overlap: float, compute: float) -> float:
    """What is left of an all-reduce when a share of it hides behind the computation."""
    return total - min(total * overlap, compute)
