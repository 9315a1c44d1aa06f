"""Which nodes, ranks and lanes are simulated, what they fetch, and what all nodes read then (SPEC.md §1, §3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
from shardkit_tools.simulation.populations import BlockMap
from shardkit_tools.simulation.timing import Items, RankFlow

Floats = NDArray[np.float64]
Tell = Callable[[str], None]
"""Called with a line on what is being computed."""


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
    """What was read, of all nodes, by epoch; and what the ranks that were sampled fetched."""

    requests: Floats  # float64[epochs], as the next three
    store_bytes: Floats
    cache_bytes: Floats
    hit_rate: Floats
    cache_hits: float  # in all epochs
    held_bytes: float  # in a node's cache at the end
    distinct_bytes: float  # that a node needs at all
    error: float | None  # relative, of the bytes; None where it is not known
    flows: list[RankFlow]


def read_lanes(cluster: Cluster, prepared: Prepared, sample: Sample, tell: Tell) -> Reads:
    """What the nodes of a sample read, scaled up."""
    nodes = []
    for place, node in enumerate(sample.nodes):
        tell(f"reading: node {place + 1} of {len(sample.nodes)}")
        nodes.append(_read_node(cluster, prepared, sample, node))
    flows = [flow for _, own, _ in nodes for flow in own]
    by_node = np.stack([columns for columns, _, _ in nodes])  # (nodes, 5, epochs)
    held, distinct = np.mean([memory for _, _, memory in nodes], axis=0).tolist()
    sums = by_node.sum(axis=0)
    requests, store_bytes, cache_bytes, misses, loads = sums * sample.total
    is_alone = cluster.nodes.nodes == 1 and len(flows) > 1  # then its ranks are the units of the error
    units = np.array([one.store_bytes.sum() for one in flows]) if is_alone else by_node[:, 1].sum(axis=1)
    error = standard_error(units, sample.rank_share / sample.total)
    hit_rate = 1 - sums[3] / np.maximum(1, sums[4])
    hits = float((loads - misses).sum())
    return Reads(requests, store_bytes, cache_bytes, hit_rate, hits, held, distinct, error, flows)


def _read_node(
    cluster: Cluster, prepared: Prepared, sample: Sample, node: int
) -> tuple[Floats, list[RankFlow], tuple[float, float]]:
    """Columns (5, epochs): requests, store bytes, cache bytes, misses, loads; flows; bytes held and needed."""
    plan, blocks = prepared.plan, prepared.blocks
    epochs, steps = cluster.work.epochs, plan.loop_steps
    whole_block = int(prepared.population.shard_block_rows.max() * blocks.row_bytes.max())
    weight, memory = 1 / sample.rank_share, int(cluster.nodes.memory * sample.rank_share)
    seen: list[tuple[NDArray[np.int64], ...]] = []
    uses: list[tuple[NDArray[np.int64], ...]] = []
    groups: dict[int, Groups] = {}
    for place in sample.ranks:
        own, needs = rank_needs(plan, blocks, sample.lanes[node, place], epochs=epochs + 1,
                                memory=cluster.nodes.memory, block_bytes=whole_block, weight=weight)  # fmt: skip
        sizes, _ = blocks.weigh(needs.block)
        in_memory = np.full(len(sizes), whole_block, dtype=np.int64)
        own = lease_when_there_is_room(own, needs, in_memory, memory)
        loads = np.flatnonzero(through_memory(needs, in_memory, memory) & (needs.step < epochs * steps))
        new = needs.is_new
        uses.append((needs.step[new], needs.block[new]))
        rank = np.full(len(loads), place, dtype=np.int64)
        seen.append((needs.step[loads], rank, needs.block[loads], sizes[loads]))
        last = int(np.searchsorted(own.first, epochs * steps))
        groups[place] = Groups(own.first[: last + 1], own.opens[:last], own.leased_with[:last])
    step, rank, block, size = (np.concatenate(column) for column in zip(*seen, strict=True))
    use_step, use_block = (np.concatenate(column) for column in zip(*uses, strict=True))
    ordered = Loads.of(step, rank, block, size, (use_step, use_block))
    cached = through_cache(ordered, int(cluster.nodes.cache * sample.node_share))
    flows, columns = [], np.zeros((5, epochs))
    for place, own in groups.items():
        mine, number = np.flatnonzero(ordered.rank == place), node * cluster.nodes.ranks + place
        flow, by_step = _flow(number, ordered, blocks, cached.from_store, mine, own, weight, epochs * steps)
        flows.append(flow)
        columns += by_step.reshape(5, epochs, steps).sum(axis=2)
    needed = blocks.weigh(np.unique(ordered.block))[0].sum()
    return columns, flows, (cached.held / sample.node_share, float(needed) / sample.node_share)


def _flow(
    rank: int,
    loads: Loads,
    blocks: BlockMap,
    from_store: NDArray[np.bool_],
    mine: NDArray[np.int64],
    groups: Groups,
    weight: float,
    steps: int,
) -> tuple[RankFlow, Floats]:
    """A rank's fetches by step, for all its lanes; and its columns, float64[5, steps]."""
    step, block, size, stored = loads.step[mine], loads.block[mine], loads.size[mine], from_store[mine]
    own = np.ones(len(mine), dtype=bool)
    own[stored] = count_requests(block[stored], blocks.weigh(block[stored])[1])
    amounts = (own & stored, size * stored, size * ~stored, stored, np.ones(len(mine)))
    columns = np.stack([np.bincount(step, amount, steps)[:steps] * weight for amount in amounts])
    requests, store_bytes, cache_bytes, _, all_loads = columns
    items = Items(groups.of(step), size, stored, own) if weight == 1 else None
    return RankFlow(rank, requests, all_loads, store_bytes, cache_bytes, groups, items), columns


_LANE_ROWS = 100_000  # what opening a lane's hand for an epoch costs, in rows drawn


@dataclass(frozen=True)
class Sample:
    """The nodes, ranks and lanes that are simulated."""

    nodes: tuple[int, ...]  # their numbers
    ranks: tuple[int, ...]  # ranks of each node, counted in the node
    lanes: dict[tuple[int, int], tuple[int, ...]]  # sampled lanes of each rank, by (node, rank in it)
    node_share: float  # sampled lanes over all lanes of a node
    rank_share: float  # sampled lanes over all lanes of a rank
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
        share: of all units that were sampled.
    """
    mean = float(parts.mean()) if len(parts) else 0.0
    if share >= 1 or not mean:
        return 0.0
    if len(parts) < 2:
        return None
    return 2 * float(parts.std(ddof=1)) / mean / math.sqrt(len(parts)) * math.sqrt(1 - share)
