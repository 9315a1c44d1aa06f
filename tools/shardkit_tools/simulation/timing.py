"""How long steps take: fetching ahead, checking, computing, waiting for the slowest, summing gradients (SPEC.md §2)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit_tools.simulation.cluster import Cluster
from shardkit_tools.simulation.demand import Groups
from shardkit_tools.simulation.faults import Moves

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

# ---- When the blocks of a rank's groups are there: block by block, or as a flow where ranks stand for more than they
# hold. Both keep the same rules (SPEC.md §2): reading ahead in the order of need, as far as a number of bytes; a number
# of requests at a time; groups leased two ahead; threads that take, check and gather.


@dataclass(frozen=True, eq=False)
class Items:
    """The blocks of a rank, in the order in which they are needed."""

    group: Int64s  # int64[n], ascending
    size: Int64s  # int64[n], bytes
    from_store: Bools  # bool[n]; the others come from the cache
    own: Bools  # bool[n], a request of its own; else it comes with the one before


@dataclass(frozen=True, eq=False)
class RankFlow:
    """What one rank fetches in each step, and how its steps are grouped."""

    rank: int  # in the world
    requests: Floats  # float64[steps], to the store
    loads: Floats  # float64[steps], blocks that the loader's threads take, from store and cache
    store_bytes: Floats  # float64[steps]
    cache_bytes: Floats
    groups: Groups  # see there
    items: Items | None = None  # the single blocks, where the rank stands for itself


@dataclass(frozen=True)
class _Speeds:
    """A rank's share of what there is; seconds per byte."""

    latency: float
    stream: float
    wire: float
    per_request: float
    disk: float
    verify: float
    ahead: int

    @classmethod
    def of(cls, cluster: Cluster) -> _Speeds:
        nodes, store = cluster.nodes, cluster.store
        bandwidth = min(nodes.nic / nodes.ranks, store.bandwidth * store.copies / cluster.world)
        allowed = store.requests_per_second * store.copies / cluster.world
        return cls(
            store.latency,
            1 / store.stream,
            1 / bandwidth,
            1 / allowed if allowed else 0.0,
            nodes.ranks / nodes.disk_read,
            1 / nodes.verify,
            min(store.ahead, nodes.memory // 4),
        )


class BlockFetching:
    """One rank, block by block.

    Args:
        cluster: the cluster.
        flow: with items.
    """

    def __init__(self, cluster: Cluster, flow: RankFlow) -> None:
        assert flow.items is not None
        items = flow.items
        self._speeds = _Speeds.of(cluster)
        self._first = np.searchsorted(items.group, np.arange(len(flow.groups.first))).tolist()
        self._size, self._stored, self._own = (
            items.size.tolist(),
            items.from_store.tolist(),
            items.own.tolist(),
        )
        ends = np.concatenate(([0], np.cumsum(items.size)))
        before = np.searchsorted(ends, ends[1:] - self._speeds.ahead, side="left") - 1
        self._taken_before = np.minimum(before, np.arange(len(items.size)) - 1).tolist()
        self._leased_with = flow.groups.leased_with.tolist()
        self._popped = [0.0] * len(flow.groups.opens)
        self._taken: list[float] = []
        self._servers = [float("-inf")] * cluster.store.concurrency
        self._threads = [float("-inf")] * cluster.nodes.threads
        self._admitted = 0.0
        self._wire = self._disk = self._last = self._checked = float("-inf")

    def begin(self, group: int, now: float) -> float:
        """The loader begins a group; when all its blocks are checked."""
        self._popped[group] = now
        leased = self._popped[self._leased_with[group]]
        verify, threads = self._speeds.verify, self._threads
        for i in range(self._first[group], self._first[group + 1]):
            before = self._taken_before[i]
            if before >= 0:
                self._admitted = max(self._admitted, self._taken[before])
            taken = max(leased, threads[0])
            self._taken.append(taken)
            there = max(taken, self._arrives(i, taken)) + self._size[i] * verify
            heapq.heapreplace(threads, there)
            self._checked = max(self._checked, there)
        return self._checked

    def _arrives(self, i: int, taken: float) -> float:
        """When a block is there: read ahead, or by the thread that wants it before reading ahead gets to it."""
        speeds, size, begun = self._speeds, self._size[i], min(self._admitted, taken)
        if not self._stored[i]:
            self._disk = max(self._disk, begun) + size * speeds.disk
            return self._disk
        if not self._own[i]:  # comes with the one before, and takes its time on the wire
            self._wire += size * speeds.wire
            self._last = max(self._last + size * speeds.stream, self._wire + speeds.latency)
            return self._last
        service = speeds.latency + size * speeds.stream
        if self._admitted <= taken:
            start = max(begun, self._servers[0])
            heapq.heapreplace(self._servers, start + service)
        else:
            start = begun
        self._wire = max(self._wire, start) + max(size * speeds.wire, speeds.per_request)
        self._last = max(start + service, self._wire + speeds.latency)
        return self._last


class FlowFetching:
    """All ranks at once, as columns; amounts may be fractions.

    Args:
        cluster: the cluster.
        flows: of equal length.
    """

    def __init__(self, cluster: Cluster, flows: Sequence[RankFlow]) -> None:
        speeds = _Speeds.of(cluster)
        self._requests = np.stack([f.requests for f in flows])
        store_bytes = np.stack([f.store_bytes for f in flows])
        self._cached = np.stack([f.cache_bytes for f in flows])
        all_bytes = store_bytes + self._cached
        ranks, steps = self._requests.shape
        self._wire_s = np.maximum(store_bytes * speeds.wire, self._requests * speeds.per_request)
        self._disk_s, self._verify_s = self._cached * speeds.disk, all_bytes * speeds.verify
        each = np.divide(
            store_bytes, self._requests, out=np.zeros_like(store_bytes), where=self._requests > 0
        )
        self._service = speeds.latency + each * speeds.stream  # s: of one request
        self._latency, self._servers = speeds.latency, cluster.store.concurrency
        self._before = np.stack([_taken_before(row, speeds.ahead) for row in all_bytes])
        self._freed_by = np.stack([_freed_by(f.loads, cluster.nodes.threads) for f in flows])
        number = [f.groups.of(np.arange(steps)) for f in flows]
        self.group_end = np.stack([f.groups.first[n + 1] for f, n in zip(flows, number, strict=True)])
        self._group = np.stack(number)
        self._leased_with = np.stack([f.groups.leased_with[n] for f, n in zip(flows, number, strict=True)])
        self._popped = np.zeros((ranks, int(self._group.max()) + 1))
        self._fetched = np.zeros((ranks, steps + 1))  # when all of the steps before this one was there
        self._bucket, self._wire = np.full(ranks, -np.inf), np.full(ranks, -np.inf)
        self._disk, self._checked = np.full(ranks, -np.inf), np.full(ranks, -np.inf)
        self._ranks = np.arange(ranks)

    def begin(self, step: int, begins: Bools, now: float) -> Floats:
        """Ranks whose group begins at a step; when all its blocks are checked."""
        self._popped[begins, self._group[begins, step]] = now
        ends = np.where(begins, self.group_end[:, step], 0)
        for ahead in range(step, int(ends.max())):
            self._fetch(ahead, ends > ahead)
        return self._checked

    def _fetch(self, step: int, active: Bools) -> None:
        admitted = self._admitted(step)
        n, s = self._requests[:, step], self._service[:, step]
        bucket = np.maximum(self._bucket, admitted - s) + n * s / self._servers
        wire = np.maximum(self._wire, admitted) + self._wire_s[:, step]
        disk = np.maximum(self._disk, admitted) + self._disk_s[:, step]
        stored = np.maximum(np.maximum(bucket, admitted) + s, wire + self._latency)
        there = np.maximum(self._fetched[:, step], np.where(n > 0, stored, -np.inf))
        there = np.maximum(there, np.where(self._cached[:, step] > 0, disk, -np.inf))
        checked = np.maximum(self._checked, there) + self._verify_s[:, step]
        self._bucket = np.where(active & (n > 0), bucket, self._bucket)
        self._wire = np.where(active & (n > 0), wire, self._wire)
        self._disk = np.where(active, disk, self._disk)
        self._checked = np.where(active, checked, self._checked)
        self._fetched[:, step + 1] = np.where(active, there, self._fetched[:, step + 1])

    def _admitted(self, step: int) -> Floats:
        """When reading ahead gets to a step: the loader has taken enough of what was read before."""
        last = self._before[:, step]
        safe = np.maximum(last, 0)
        leased = self._popped[self._ranks, self._leased_with[self._ranks, safe]]
        free = self._fetched[self._ranks, self._freed_by[self._ranks, safe]]
        return np.where(last >= 0, np.maximum(free, leased), 0.0)


def _taken_before(num_bytes: Floats, ahead: int) -> Int64s:
    """For each step the last one that must have been taken by the loader before it is fetched; -1 for none."""
    ends = np.concatenate(([0.0], np.cumsum(num_bytes)))
    first = np.searchsorted(ends, ends[1:] - ahead - 1e-6, side="left")
    return np.minimum(first, np.arange(len(num_bytes))) - 1


def _freed_by(loads: Floats, threads: int) -> Int64s:
    """For each step how many steps must be there for a thread to be free to take its blocks."""
    ends = np.concatenate(([0.0], np.cumsum(loads)))
    first = np.searchsorted(ends, ends[:-1] - threads + 1, side="left")
    return np.minimum(first, np.arange(len(loads)))


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
