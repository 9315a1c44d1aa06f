"""Which nodes, ranks and lanes are simulated, what they fetch, and what all nodes read then (SPEC.md §1, §3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.plan import Plan, Population, assign
from shardkit_tools.simulation.cluster import Cluster
from shardkit_tools.simulation.demand import (
    Groups,
    Loads,
    count_requests,
    lease_when_there_is_room,
    rank_needs,
    through_cache,
    through_memory,
)
from shardkit_tools.simulation.fetching import Items, RankFlow
from shardkit_tools.simulation.populations import BlockMap

Floats = NDArray[np.float64]
Tell = Callable[[str], None]
"""Is told what is being worked out."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A dataset and its plan, which most changes to a cluster leave alone."""

    population: Population
    blocks: BlockMap
    plan: Plan

    @property
    def stored_bytes(self) -> float:
        """Of the dataset, once."""
        shards = self.population.shard_bytes
        return float(self.population.rows if shards is None else shards.sum())


@dataclass(frozen=True, eq=False)
class Reads:
    """What was read, of all nodes, by epoch; and what the ranks that were looked at fetched.

    Attributes:
        requests, store_bytes, cache_bytes, hit_rate: float64[epochs].
        cache_hits: in all epochs.
        held_bytes: in a node's cache at the end.
        distinct_bytes: that a node needs at all.
        error: relative error of the bytes, None where it is not known.
        flows: of the ranks.
        ranks: that were looked at.
    """

    requests: Floats
    store_bytes: Floats
    cache_bytes: Floats
    hit_rate: Floats
    cache_hits: float
    held_bytes: float
    distinct_bytes: float
    error: float | None
    flows: list[RankFlow]


def read_lanes(cluster: Cluster, prepared: Prepared, sample: Sample, tell: Tell) -> Reads:
    """What the nodes of a sample read, scaled up."""
    flows: list[RankFlow] = []
    by_node: list[NDArray[np.float64]] = []
    held = distinct = 0.0
    for place, node in enumerate(sample.nodes):
        tell(f"reading: node {place + 1} of {len(sample.nodes)}")
        columns, own, bytes_held, bytes_needed = _read_node(cluster, prepared, sample, node)
        by_node.append(columns)
        flows += own
        held += bytes_held / len(sample.nodes)
        distinct += bytes_needed / len(sample.nodes)
    parts = np.stack(by_node)  # (nodes, 5, epochs): requests, store bytes, cache bytes, misses, loads
    totals = parts.sum(axis=0) * sample.total
    if len(sample.nodes) > 1 or cluster.nodes.nodes == 1 < len(flows):
        units = (
            parts[:, 1].sum(axis=1)
            if len(sample.nodes) > 1
            else np.array([f.store_bytes.sum() for f in flows])
        )
    else:
        units = parts[:, 1].sum(axis=1)
    hits = 1 - parts[:, 3, :].sum(axis=0) / np.maximum(1, parts[:, 4, :].sum(axis=0))
    return Reads(
        totals[0],
        totals[1],
        totals[2],
        hits,
        float((totals[4] - totals[3]).sum()),
        held,
        distinct,
        standard_error(units, sample.rank_share / sample.total),
        flows,
    )


def _read_node(
    cluster: Cluster, prepared: Prepared, sample: Sample, node: int
) -> tuple[Floats, list[RankFlow], float, float]:
    """Columns (5, epochs): requests, store bytes, cache bytes, misses, loads; flows; bytes held and needed."""
    plan, blocks = prepared.plan, prepared.blocks
    epochs, steps = cluster.work.epochs, plan.loop_steps
    whole_block = int(prepared.population.shard_block_rows.max() * blocks.row_bytes.max())
    weight = 1 / sample.rank_share
    seen: list[tuple[NDArray[np.int64], ...]] = []
    uses: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    groups: list[Groups] = []
    for place in sample.ranks:
        own, needs = rank_needs(plan, blocks, sample.lanes[node, place], epochs=epochs + 1,
                                memory=cluster.nodes.memory, block_bytes=whole_block, weight=weight)  # fmt: skip
        sizes, _ = blocks.weigh(needs.block)
        in_memory = np.full(len(sizes), whole_block, dtype=np.int64)
        memory = int(cluster.nodes.memory * sample.rank_share)
        own = lease_when_there_is_room(own, needs, in_memory, memory)
        loads = through_memory(needs, in_memory, memory)
        loads &= needs.step < epochs * steps
        new = needs.is_new
        uses.append((needs.step[new], needs.block[new]))
        chosen = np.flatnonzero(loads)
        rank = np.full(len(chosen), place, dtype=np.int64)
        seen.append((needs.step[chosen], rank, needs.block[chosen], sizes[chosen]))
        groups.append(_within(own, epochs * steps))
    step, rank, block, size = (np.concatenate(column) for column in zip(*seen, strict=True))
    asked = tuple(np.concatenate(column) for column in zip(*uses, strict=True))
    ordered = Loads.of(step, rank, block, size, (asked[0], asked[1]))
    cached = through_cache(ordered, int(cluster.nodes.cache * sample.node_share))
    flows, columns = [], np.zeros((5, epochs))
    for place, own in zip(sample.ranks, groups, strict=True):
        mine = ordered.rank == place
        flow, part = _flow(cluster, blocks, ordered, cached.from_store, mine, own, weight, steps)
        flows.append(replace(flow, rank=node * cluster.nodes.ranks + place))
        columns += part
    needed = blocks.weigh(np.unique(ordered.block))[0].sum() / sample.node_share
    return columns, flows, cached.held / sample.node_share, float(needed)


def _within(groups: Groups, steps: int) -> Groups:
    last = int(np.searchsorted(groups.first, steps))
    return Groups(groups.first[: last + 1], groups.opens[:last], groups.leased_with[:last])


def _flow(
    cluster: Cluster,
    blocks: BlockMap,
    loads: Loads,
    from_store: NDArray[np.bool_],
    mine: NDArray[np.bool_],
    groups: Groups,
    weight: float,
    steps: int,
) -> tuple[RankFlow, Floats]:
    """A rank's fetches by step, and its columns by epoch; both for all its lanes."""
    epochs = cluster.work.epochs
    total = epochs * steps
    stored, cached = np.flatnonzero(mine & from_store), np.flatnonzero(mine & ~from_store)
    own = count_requests(loads.block[stored], blocks.weigh(loads.block[stored])[1])
    items = _items(loads, mine, from_store, stored, own, groups) if weight == 1 else None

    def by_step(rows: NDArray[np.int64], amount: NDArray[Any]) -> Floats:
        return np.asarray(np.bincount(loads.step[rows], amount, total)[:total] * weight, dtype=np.float64)

    requests, store_bytes = by_step(stored, own), by_step(stored, loads.size[stored])
    cache_bytes = by_step(cached, loads.size[cached])
    ones = np.ones(len(stored)), np.ones(len(stored) + len(cached))
    misses, all_loads = by_step(stored, ones[0]), by_step(np.concatenate((stored, cached)), ones[1])
    columns = np.stack(
        [
            c.reshape(epochs, steps).sum(axis=1)
            for c in (requests, store_bytes, cache_bytes, misses, all_loads)
        ]
    )
    return RankFlow(0, requests, all_loads, store_bytes, cache_bytes, groups, items), np.asarray(
        columns, dtype=np.float64
    )


def _items(
    loads: Loads,
    mine: NDArray[np.bool_],
    from_store: NDArray[np.bool_],
    stored: NDArray[np.int64],
    own: NDArray[np.bool_],
    groups: Groups,
) -> Items:
    asked = np.ones(len(loads.step), dtype=bool)
    asked[stored] = own
    chosen = np.flatnonzero(mine)
    return Items(groups.of(loads.step[chosen]), loads.size[chosen], from_store[chosen], asked[chosen])


_LANE_ROWS = 100_000  # what opening a lane's hand for an epoch costs, in rows drawn


@dataclass(frozen=True)
class Sample:
    """What is looked at."""

    nodes: tuple[int, ...]  # their numbers
    ranks: tuple[int, ...]  # ranks of each node, counted in the node
    lanes: dict[
        tuple[int, int], tuple[int, ...]
    ]  # lanes of each rank that are looked at, by (node, rank in it)
    node_share: float  # lanes looked at, over all lanes of a node
    rank_share: float  # lanes looked at, over all lanes of a rank
    total: float  # what sums over the sample are multiplied by


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
