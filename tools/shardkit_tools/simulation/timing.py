"""Model the duration of steps: reading ahead, checking, computing, waiting and all-reduce (SPEC.md §2)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkit.arrays import Bools, Float64s, Int64s
from shardkit_tools.simulation.cluster import Cluster
from shardkit_tools.simulation.faults import Moves, Stops


@dataclass(frozen=True, eq=False)
class RankLoads:
    """The n block loads of a rank, in the order of need."""

    rank: int  # number of the rank in the world
    step: Int64s  # int64[n], ascending: first step that needs the block, counted over all epochs
    after: Int64s  # int64[n], step at whose beginning memory has room for the block
    size: Int64s  # int64[n], bytes
    from_store: Bools  # bool[n], False: from the cache
    own: Bools  # bool[n], True if the block begins a request, False if it belongs to the previous block's
    share: float = 1.0  # sampled share of the rank's loads

    @property
    def store_bytes(self) -> Float64s:
        """float64[n], bytes read from the store per load, scaled to the whole rank."""
        return self.size * self.from_store / self.share

    def by_epoch(self, steps: int, epochs: int) -> Float64s:
        """Return (4, epochs): requests, store bytes, misses and loads, scaled to the whole rank."""
        stored = self.from_store
        amounts = (self.own & stored, self.size * stored, stored, np.ones(len(stored)))
        sums = [np.bincount(self.step // steps, amount, epochs) for amount in amounts]
        return np.stack(sums) / self.share


class BlockFetching:
    """Arrival times of the blocks of a rank (SPEC.md §2)."""

    def __init__(self, cluster: Cluster, loads: RankLoads) -> None:
        nodes, store = cluster.nodes, cluster.store
        bandwidth = min(nodes.nic / nodes.ranks, store.bandwidth * store.copies / cluster.world) * loads.share
        allowed = store.requests_per_second * store.copies / cluster.world * loads.share
        self._latency = store.latency
        self._stream, self._verify = 1 / store.stream, 1 / nodes.verify  # seconds per byte
        self._wire_s, self._disk_s = 1 / bandwidth, nodes.ranks / (nodes.disk_read * loads.share)
        self._request_s = 1 / allowed if allowed else 0.0
        self._servers, self._served = _crew(store.concurrency * loads.share)
        self._threads, self._held = _crew(nodes.threads * loads.share)
        self._step, self._after, self._size = loads.step.tolist(), loads.after.tolist(), loads.size.tolist()
        self._stored, self._own = loads.from_store.tolist(), loads.own.tolist()
        ends = np.concatenate(([0], np.cumsum(loads.size)))
        ahead = min(store.ahead, nodes.memory // 4) * loads.share
        before = np.searchsorted(ends, ends[1:] - ahead, side="left") - 1
        self._taken_before = np.minimum(before, np.arange(len(loads.size)) - 1).tolist()
        self._begun: list[float] = []  # time at which each step began
        self._taken: list[float] = []  # time at which a thread took each block
        self._admitted = 0.0
        self._wire = self._disk = self._last = self._checked = float("-inf")

    def wait(self, now: float) -> float:
        """Begin the next step at `now`. Return the seconds until all its blocks are checked."""
        step = len(self._begun)
        self._begun.append(now)
        threads = self._threads
        for i in range(len(self._taken), len(self._step)):
            if self._step[i] > step:
                break
            before = self._taken_before[i]
            if before >= 0:
                self._admitted = max(self._admitted, self._taken[before])
            taken = max(self._begun[self._after[i]], threads[0])
            self._taken.append(taken)
            there = max(taken, self._arrives(i, taken)) + self._size[i] * self._verify
            heapq.heapreplace(threads, taken + (there - taken) * self._held)
            self._checked = max(self._checked, there)
        return max(0.0, self._checked - now)

    def _arrives(self, i: int, taken: float) -> float:
        """Return the arrival time of block `i`, by read-ahead or, if that has not reached it, by the taking thread."""
        size, begun = self._size[i], min(self._admitted, taken)
        if not self._stored[i]:
            self._disk = max(self._disk, begun) + size * self._disk_s
            return self._disk
        if not self._own[i]:  # part of the previous block's request: only the transfer takes time
            self._wire += size * self._wire_s
            self._last = max(self._last + size * self._stream, self._wire + self._latency)
            return self._last
        service = self._latency + size * self._stream
        if self._admitted <= taken:
            begun = max(begun, self._servers[0])
            heapq.heapreplace(self._servers, begun + service * self._served)
        self._wire = max(self._wire, begun) + max(size * self._wire_s, self._request_s)
        self._last = max(begun + service, self._wire + self._latency)
        return self._last


def _crew(size: float) -> tuple[list[float], float]:
    """Return the times at which servers are free, and a factor on busy time, as their number is rounded up."""
    whole = max(1, math.ceil(size))
    return [float("-inf")] * whole, whole / size


@dataclass(frozen=True, eq=False)
class Times:
    """Simulated times in seconds."""

    step_s: Float64s  # float64[steps], duration of each step, including interruptions
    stall_s: Float64s  # float64[steps], longest wait for data of a sampled rank
    halves: Float64s  # float64[2, steps], longest wait among the even and the odd sampled ranks
    rank_stall_s: Float64s  # float64[ranks], total wait of each sampled rank
    compute_s: Float64s  # float64[steps], computation of the slowest rank
    reduce_s: float  # all-reduce per step that does not overlap with computation
    stood_s: float  # total of all interruptions


def time_steps(
    cluster: Cluster,
    loads: Sequence[RankLoads],
    steps: int,
    moves: Moves,
    *,
    stops: Stops | None = None,
) -> Times:
    """Simulate all steps in order."""
    ranks, which = [BlockFetching(cluster, one) for one in loads], np.array([one.rank for one in loads])
    reduce_s = reduce_seconds(cluster)
    step_s, stall_s, compute_s = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    halves, rank_stall = np.zeros((2, steps)), np.zeros(len(ranks))
    now = stood = 0.0
    own, slowest, exposed = np.zeros(len(ranks)), 0.0, 0.0
    for step in range(steps):
        if moves.at(step, now) or not step:
            everybody = moves.compute_s
            own, slowest = everybody[which], float(everybody.max())
            exposed = exposed_seconds(reduce_s, cluster.reduce.overlap, slowest)
        began, wait = now, np.array([rank.wait(now) for rank in ranks])
        rank_stall += wait
        stall_s[step] = wait.max()
        halves[0, step], halves[1, step] = wait[::2].max(), wait[1::2].max(initial=0.0)
        now += max(float((wait + own).max()), slowest) + exposed
        if stops is not None:
            stopped = stops(step, now, (now - stood) / (step + 1))  # mean step without interruptions
            now, stood = now + stopped, stood + stopped
        step_s[step], compute_s[step] = now - began, slowest
    return Times(step_s, stall_s, halves, rank_stall, compute_s, exposed, stood)


# ---- All-reduce


def ring_seconds(ranks: int, num_bytes: float, bandwidth: float, latency: float) -> float:
    """Return the seconds of a ring all-reduce: optimal in bytes (Patarasuk and Yuan 2009)."""
    if ranks < 2:
        return 0.0
    return 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * num_bytes / bandwidth


def tree_seconds(ranks: int, num_bytes: float, bandwidth: float, latency: float) -> float:
    """Return the seconds of a pipelined double binary tree: few hops (Sanders, Speck, Träff 2009)."""
    if ranks < 2:
        return 0.0
    return 2 * (ranks - 1).bit_length() * latency + 2 * num_bytes / bandwidth


def hierarchical_seconds(
    nodes: int, ranks: int, num_bytes: float, *, inner: float, outer: float, latency: float
) -> float:
    """Return the seconds of reduce-scatter in a node, a ring over nodes for each part, and all-gather in a node.

    Bandwidths in a node and between nodes are bytes per second, and the latency is seconds per hop.
    """
    inside = ring_seconds(ranks, num_bytes, inner, latency)
    return inside + ring_seconds(nodes, num_bytes / ranks, outer / ranks, latency)


def reduce_seconds(cluster: Cluster) -> float:
    """Return the seconds of a step's all-reduce on the cluster."""
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
    """Return the seconds of an all-reduce that do not overlap with computation."""
    return total - min(total * overlap, compute)
