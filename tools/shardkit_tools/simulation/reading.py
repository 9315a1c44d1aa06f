"""Simulate reads: the blocks that ranks need, each served from memory, the node's cache or the store (SPEC.md §1).

SPEC.md §3 describes the sampling of nodes, ranks and lanes.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import shardkit
from shardkit.arrays import Bools, Float64s, Int64s
from shardkit.dataset.samples import population_of
from shardkit.errors import ConfigurationError
from shardkit.loader.gather import most_steps, plan_group
from shardkit.plan import Plan, Population, assign
from shardkit_tools.simulation.cluster import Cluster, Data
from shardkit_tools.simulation.eviction import FurthestFirst
from shardkit_tools.simulation.timing import RankLoads

Tell = Callable[[str], None]
"""Progress callback, called with a line of text."""

_SHARD_BYTES = 256 << 20
_ROW_BYTES = 100_000
_GROUPS_AHEAD = 5  # groups planned ahead of the current one: four queued, one planned (`loader.pipeline`)
_JOINED = 16  # blocks among which read-ahead joins consecutive ones (`reading.cache`)
_LANE_ROWS = 100_000  # cost of opening a lane for an epoch, in rows drawn

# ---- The simulated dataset


def open_population(data: Data) -> Population:
    """Return the population of ``data.root``, from its manifest, or a synthetic one."""
    if data.root:
        dataset = shardkit.open(data.root)
        return population_of(dataset.manifest, dataset.table)
    return synthetic_population(data)


def synthetic_population(data: Data) -> Population:
    """Return a population of rows spread evenly over shards, with strata of relative sizes 1, 1/2, 1/3 and so on.

    Raises:
        ConfigurationError: there are fewer rows than shards or strata.
    """
    total = data.bytes or data.rows * _ROW_BYTES
    shards = data.shards or max(1, -(-total // _SHARD_BYTES))
    if data.rows < shards or data.rows < data.strata:
        raise ConfigurationError(
            f"{data.rows} rows in {shards} shards and {data.strata} strata: at least one row of each is expected"
        )
    shares = np.array([2**40 // (s + 1) for s in range(data.strata)], dtype=object)
    ends = [int(data.rows * int(c) // int(shares.sum())) for c in np.cumsum(shares)]
    row_bytes = max(1, total // data.rows)
    recipe = f"synthetic {data.rows} {shards} {data.strata} {total} {data.block}"
    return spread_population(
        np.diff([0, *ends]),
        shards,
        block_rows=max(1, data.block // row_bytes),
        row_bytes=row_bytes,
        identity=f"sha256:{hashlib.sha256(recipe.encode()).hexdigest()}",
    )


def spread_population(
    strata: Int64s, shards: int, *, block_rows: int, row_bytes: int = 1, identity: str = "made up"
) -> Population:
    """Return a population whose strata are spread evenly over the shards, as a build writes them."""
    # Python integers if the products exceed int64
    kind = object if int(strata.max()) * shards >= 2**62 else np.int64
    ends = np.arange(shards + 1, dtype=kind)[:, None] * strata.astype(kind)[None, :] // shards
    rows = np.diff(ends.astype(np.int64), axis=0)  # (shards, strata)
    return Population(
        identity=identity,
        strata=tuple(f"stratum-{s}" for s in range(len(strata))),
        segment_shard=np.repeat(np.arange(shards, dtype=np.int32), len(strata)),
        segment_stratum=np.tile(np.arange(len(strata), dtype=np.int32), shards),
        segment_rows=rows.ravel(),
        shard_block_rows=np.full(shards, block_rows, dtype=np.int32),
        shard_bytes=rows.sum(axis=1) * row_bytes,
    )


@dataclass(frozen=True, eq=False)
class BlockMap:
    """Blocks of samples and their sizes, for n segments. As in the plan, blocks restart at every segment."""

    first_sample: Int64s  # int64[n + 1], first sample of each segment
    first_block: Int64s  # int64[n + 1], first dataset-wide block of each segment
    block_rows: Int64s  # int64[n], rows of a full block of the segment's shard
    row_bytes: Float64s  # float64[n], stored bytes per row of the segment's shard
    shard: NDArray[np.int32]  # int32[n], shard of each segment

    @classmethod
    def of(cls, population: Population) -> BlockMap:
        """Return the block map of a population."""
        rows, shard = population.segment_rows, population.segment_shard
        size = population.shard_block_rows[shard].astype(np.int64)
        per_shard = np.bincount(shard, rows, population.num_shards)
        stored = population.shard_bytes if population.shard_bytes is not None else per_shard
        each = stored / np.maximum(per_shard, 1)
        samples, blocks = (np.concatenate(([0], np.cumsum(counts))) for counts in (rows, -(-rows // size)))
        return cls(samples, blocks, size, each[shard], shard)

    @property
    def num_blocks(self) -> int:
        return int(self.first_block[-1])

    @property
    def num_samples(self) -> int:
        return int(self.first_sample[-1])

    @property
    def largest(self) -> int:
        """Bytes of the largest block."""
        return int((self.block_rows * self.row_bytes).max())

    def locate(self, samples: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Return (shard, row in the segment, dataset-wide block, row in the block) of each sample."""
        segment = np.searchsorted(self.first_sample, samples, side="right") - 1
        row, size = samples - self.first_sample[segment], self.block_rows[segment]
        return self.shard[segment].astype(np.int64), row, self.first_block[segment] + row // size, row % size

    def weigh(self, blocks: Int64s) -> tuple[Int64s, NDArray[np.int32]]:
        """Return (stored bytes, shard) of each block."""
        segment = np.searchsorted(self.first_block, blocks, side="right") - 1
        before = (blocks - self.first_block[segment]) * self.block_rows[segment]
        left = self.first_sample[segment + 1] - self.first_sample[segment] - before
        rows = np.minimum(left, self.block_rows[segment])
        return np.maximum(1, (rows * self.row_bytes[segment])).astype(np.int64), self.shard[segment]


@dataclass(frozen=True, eq=False)
class PlannedDataset:
    """A dataset and its plan, which can be reused for many descriptions of a cluster."""

    population: Population
    blocks: BlockMap
    plan: Plan

    @property
    def stored_bytes(self) -> float:
        """Stored bytes of one copy of the dataset."""
        shards = self.population.shard_bytes
        return float(self.population.rows if shards is None else shards.sum())


# ---- Blocks needed by a rank, and blocks kept in its memory


class Needs(NamedTuple):
    """Blocks needed by a rank's groups of steps, each once per group, in the order of first need."""

    step: Int64s  # int64[n], first step in the group that needs the block, counted over all epochs
    last: Int64s  # int64[n], last step in the group that needs the block
    block: Int64s  # int64[n], dataset-wide block
    planned: Int64s  # int64[n], step at whose beginning the group is planned and loading may begin


def group_starts(steps: int, most: int) -> Int64s:
    """Return the first step of each group of an epoch, then the end.

    Group sizes are the loader's: 1, 4, 16 … `most`.
    """
    starts, size = [0], 1
    while starts[-1] < steps:
        starts.append(min(steps, starts[-1] + size))
        size = min(most, size * 4)
    return np.array(starts, dtype=np.int64)


def rank_needs(
    plan: Plan, blocks: BlockMap, lanes: Sequence[int], *, epochs: int, memory: int, share: float = 1.0
) -> Needs:
    """Return the blocks that a rank needs.

    Groups of steps are halved until their blocks fit into `memory` bytes. `lanes` are a `share` of the rank's lanes.
    """
    steps, own = plan.loop_steps, list(lanes)
    rows = max(1, round(plan.cell_size * len(own) / share))
    row_bytes = max(1, int(blocks.row_bytes.mean())) if len(blocks.row_bytes) else 1
    most = most_steps(rows, rows * row_bytes)
    while most > 1:
        # begins after the shorter groups at the start of an epoch
        first = min(steps - min(steps, most), min(steps, most) * 4 // 3)
        longest = plan_group(plan, blocks.locate, own, range(first, first + min(steps, most)))
        if len(longest.blocks) * blocks.largest <= memory:
            break
        most //= 2
    starts = group_starts(steps, most).tolist()
    groups = [(begin + first, begin + last) for begin in range(0, epochs * steps, steps)
              for first, last in itertools.pairwise(starts)]  # fmt: skip
    parts = []
    for number, (first, last) in enumerate(groups):
        group = plan_group(plan, blocks.locate, own, range(first, last))
        planned = groups[max(0, number - _GROUPS_AHEAD)][0]
        parts.append(
            (group.first + first, group.last + first, group.blocks, np.full(len(group.blocks), planned))
        )
    return Needs(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def through_memory(needs: Needs, room: int) -> tuple[Bools, Int64s]:
    """Find the needs that must be loaded, by the rule of the loader's `BlockWindow`.

    The block whose last planned step is the oldest is evicted, once that step is over.

    Returns:
        bool[n], True for a load, and int64[n], the step at whose beginning memory has room for it.
    """
    held: dict[int, int] = {}  # block → last planned step that needs it
    by_last: list[tuple[int, int]] = []  # heap of (last planned step, block), including outdated entries
    loads = np.ones(len(needs.step), dtype=bool)
    after = needs.planned.copy()
    rows = zip(needs.step.tolist(), needs.last.tolist(), needs.block.tolist(), strict=True)
    for i, (step, last, block) in enumerate(rows):
        if block in held:
            loads[i] = False
        else:
            while len(held) >= room and by_last and by_last[0][0] < step:
                over, gone = heapq.heappop(by_last)
                if held.get(gone) == over:
                    del held[gone]
                    after[i] = max(after[i], over + 1)
        held[block] = last
        heapq.heappush(by_last, (last, block))
    return loads, after


# ---- Sources of loads


def next_uses(step: Int64s, block: Int64s, use_step: Int64s, use_block: Int64s) -> Float64s:
    """Return the step of the next use of each load's block after the load, or inf if there is none."""
    span = int(use_step.max(initial=0)) + 1
    keys = np.append(np.sort(use_block * span + use_step), -1)
    later = keys[np.searchsorted(keys[:-1], block * span + step, side="right")]
    return np.where(later // span == block, later % span, np.inf)


def through_cache(block: Int64s, size: Int64s, next_use: Float64s, limit: int) -> tuple[Bools, int]:
    """Serve loads from a cache of `limit` bytes that evicts the block with the furthest next use.

    Returns:
        bool array, True for loads from the store, and the bytes in the cache at the end.
    """
    cache = FurthestFirst(limit)
    missed = np.ones(len(block), dtype=bool)
    if limit:
        rows = zip(block.tolist(), size.tolist(), next_use.tolist(), strict=True)
        for i, (one, num_bytes, later) in enumerate(rows):
            missed[i] = not cache.use(one, later)
            if missed[i] and num_bytes <= limit:
                cache.add(one, num_bytes, later)
    return missed, cache.held


def count_requests(block: Int64s, shard: NDArray[np.integer]) -> Bools:
    """Return a bool array of the reads that begin a request. Reads of one rank are in the order of reading ahead.

    Blocks that follow each other in a shard form one request, among `_JOINED` blocks at a time.
    """
    own = np.ones(len(block), dtype=bool)
    place = np.arange(len(block))
    batch = place // _JOINED
    order = np.lexsort((block, batch))
    before, after = order[:-1], order[1:]
    joins = (
        (batch[after] == batch[before])
        & (block[after] == block[before] + 1)
        & (shard[after] == shard[before])
        & (place[after] > place[before])  # blocks are only appended to a request
    )
    own[after[joins]] = False
    return own


# ---- Sampling of nodes, ranks and lanes


class Sample(NamedTuple):
    """The nodes, ranks and lanes that are simulated."""

    nodes: tuple[int, ...]  # numbers of the nodes
    ranks: tuple[int, ...]  # ranks in each node, counted from 0 in the node
    lanes: dict[tuple[int, int], tuple[int, ...]]  # (node, rank in the node) → sampled lanes
    node_share: float  # sampled share of the lanes of a node
    rank_share: float  # sampled share of the lanes of a rank
    total: float  # factor from sums over the sampled ranks to the cluster


def choose_sample(cluster: Cluster, lanes: int, rows: int, budget: int) -> Sample:
    """Choose as many nodes as the budget allows; if it is small, some ranks of two nodes, or some of their lanes."""
    all_nodes, all_ranks = cluster.nodes.nodes, cluster.nodes.ranks
    affordable = max(1, budget // (rows // lanes + _LANE_ROWS))
    per_node, per_rank = lanes / all_nodes, lanes / cluster.world
    nodes = min(all_nodes, max(min(2, all_nodes), int(affordable // per_node)))
    ranks = min(all_ranks, max(2 if nodes == 1 else 1, int(affordable // (nodes * per_rank))))
    own = max(1, min(math.ceil(per_rank), affordable // (nodes * ranks)))
    chosen = tuple(i * all_nodes // nodes for i in range(nodes))
    inside = tuple(i * all_ranks // ranks for i in range(ranks))
    owned = assign(lanes, cluster.world).shares()
    found = {(n, r): tuple(owned[n * all_ranks + r][:own]) for n in chosen for r in inside}
    looked = sum(map(len, found.values()))
    of_ranks = sum(len(owned[node * all_ranks + rank]) for node, rank in found)
    of_nodes = sum(len(owned[node * all_ranks + r]) for node in chosen for r in range(all_ranks))
    return Sample(chosen, inside, found, looked / of_nodes, looked / of_ranks, lanes / of_ranks)


@dataclass(frozen=True, eq=False)
class Reads:
    """Reads of all nodes by epoch, and the loads of the sampled ranks."""

    requests: Float64s  # float64[epochs], requests to the store
    store_bytes: Float64s  # float64[epochs], bytes from the store
    hit_rate: Float64s  # float64[epochs], share of loads served by the caches
    cache_hits: float  # loads served by the caches in all epochs
    held_bytes: float  # bytes in a node's cache at the end
    distinct_bytes: float  # distinct bytes that a node loads
    error: float | None  # relative error of the bytes; None if unknown
    loads: list[RankLoads]  # loads of the sampled ranks


def read_lanes(cluster: Cluster, prepared: PlannedDataset, sample: Sample, tell: Tell) -> Reads:
    """Simulate the reads of the sampled nodes and scale them to the cluster."""
    loads: list[RankLoads] = []
    columns, kept = [], []
    for place, node in enumerate(sample.nodes):
        tell(f"reading: node {place + 1} of {len(sample.nodes)}")
        own, distinct, held = _read_node(cluster, prepared, sample, node)
        columns.append(sum(one.by_epoch(prepared.plan.loop_steps, cluster.work.epochs) for one in own))
        kept.append((held / sample.node_share, distinct / sample.node_share))
        loads += own
    by_node = np.stack(columns)  # (nodes, 4, epochs)
    held_bytes, distinct_bytes = np.mean(kept, axis=0).tolist()
    requests, store_bytes, misses, all_loads = by_node.sum(axis=0) * sample.total
    # with one node, its ranks are the units of the error
    is_alone = cluster.nodes.nodes == 1 and len(loads) > 1
    units = [one.store_bytes.sum() for one in loads] if is_alone else by_node[:, 1].sum(axis=1)
    error = standard_error(np.array(units), sample.rank_share / sample.total)
    hit_rate, hits = 1 - misses / np.maximum(1, all_loads), float((all_loads - misses).sum())
    return Reads(requests, store_bytes, hit_rate, hits, held_bytes, distinct_bytes, error, loads)


def _read_node(
    cluster: Cluster, prepared: PlannedDataset, sample: Sample, node: int
) -> tuple[list[RankLoads], int, int]:
    """Return (loads of each sampled rank of a node, distinct bytes loaded, bytes in the node's cache at the end)."""
    plan, blocks, share = prepared.plan, prepared.blocks, sample.rank_share
    stop, memory = cluster.work.epochs * plan.loop_steps, int(cluster.nodes.memory * share)
    loaded: list[tuple[Int64s, ...]] = []
    uses: list[tuple[Int64s, Int64s]] = []
    for place in sample.ranks:
        needs = rank_needs(plan, blocks, sample.lanes[node, place], epochs=cluster.work.epochs + 1, memory=memory,
                           share=share)  # fmt: skip
        is_load, after = through_memory(needs, max(1, memory // blocks.largest))
        own = np.flatnonzero(is_load & (needs.step < stop))
        uses.append((needs.step, needs.block))
        loaded.append((needs.step[own], np.full(len(own), place), after[own], needs.block[own]))
    step, rank, after, block = (np.concatenate(column) for column in zip(*loaded, strict=True))
    order = np.lexsort((rank, step))
    step, rank, after, block = step[order], rank[order], after[order], block[order]
    size, shard = blocks.weigh(block)
    later = next_uses(step, block, *(np.concatenate(column) for column in zip(*uses, strict=True)))
    stored, held = through_cache(block, size, later, int(cluster.nodes.cache * sample.node_share))
    found = []
    for place in sample.ranks:
        mine = np.flatnonzero(rank == place)
        from_store = stored[mine]
        is_own = np.ones(len(mine), dtype=bool)
        is_own[from_store] = count_requests(block[mine[from_store]], shard[mine[from_store]])
        number = node * cluster.nodes.ranks + place
        found.append(RankLoads(number, step[mine], after[mine], size[mine], from_store, is_own, share))
    return found, int(blocks.weigh(np.unique(block))[0].sum()), held


def standard_error(parts: Float64s, share: float) -> float | None:
    """Return two relative standard errors of a total, or None if it has a single sampled part.

    `parts` are the amounts of the sampled `share` of the whole.
    """
    mean = float(parts.mean()) if len(parts) else 0.0
    if share >= 1 or not mean:
        return 0.0
    if len(parts) < 2:
        return None
    return 2 * float(parts.std(ddof=1)) / mean / math.sqrt(len(parts)) * math.sqrt(1 - share)
