"""Run a simulation: reads, times and costs per epoch, for shardkit's lanes or for a full shuffle."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from shardkit.arrays import Bools, Float64s, Int64s
from shardkit.errors import ConfigurationError
from shardkit.plan import Plan, make_plan
from shardkit.plan.permutation import Feistel, derive
from shardkit_tools.simulation.cluster import Cluster, with_changes
from shardkit_tools.simulation.faults import Moves, Stops, recovery, restart
from shardkit_tools.simulation.reading import (
    BlockMap,
    PlannedDataset,
    Reads,
    Tell,
    choose_sample,
    open_population,
    read_lanes,
)
from shardkit_tools.simulation.timing import RankLoads, Times, time_steps

Unit = Literal["sample", "block"]
"""Unit fetched for a sample of a full shuffle."""

DEFAULT_BUDGET = 12_000_000
"""Number of rows per epoch that are simulated exactly."""

_SHUFFLE_SHARE = 12  # a full shuffle follows the budget divided by this number of items

_MONTH_S = 30 * 86400.0


def prepare(cluster: Cluster) -> PlannedDataset:
    """Make the population and the plan of a cluster's job.

    Raises:
        ConfigurationError: the plan has fewer lanes than the cluster has ranks.
    """
    work = cluster.work
    population = open_population(cluster.data)
    if not work.lanes and work.global_batch < cluster.world:
        raise ConfigurationError(
            f"global_batch is {work.global_batch}, the cluster has {cluster.world} ranks: at least one sample for each "
            "is expected; take a larger global_batch"
        )
    plan = make_plan(population, global_batch=work.global_batch, seed=work.seed, lanes=work.lanes or None,
                     window_blocks=work.window_blocks)  # fmt: skip
    check_world(plan, cluster)
    return PlannedDataset(population, BlockMap.of(population), plan)


def check_world(plan: Plan, cluster: Cluster) -> None:
    """Raise ConfigurationError unless every rank has a lane."""
    if plan.lanes < cluster.world:
        raise ConfigurationError(
            f"{plan.lanes} lanes for {cluster.world} ranks: at least one each is expected; set lanes, a divisor of "
            f"global_batch={plan.global_batch}"
        )


def simulate_lanes(
    cluster: Cluster,
    prepared: PlannedDataset,
    *,
    budget: int = DEFAULT_BUDGET,
    slow: Mapping[int, float] | None = None,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Simulate shardkit's lanes, with a cache that knows the plan.

    `budget` rows per epoch are simulated exactly. `slow` maps ranks that are slow throughout to their factor.
    """
    check_world(prepared.plan, cluster)
    plan = prepared.plan
    sample = choose_sample(cluster, plan.lanes, prepared.population.rows, budget)
    reads = read_lanes(cluster, prepared, sample, tell)
    tell("walking the steps")
    moves = Moves(cluster, plan.lanes, dict(slow or {}))
    result = _time_epochs(cluster, prepared, reads, plan.loop_steps, moves)
    lane_bytes = prepared.stored_bytes / plan.lanes
    moved = [(step, lanes) for step, lanes in moves.moved_lanes if lanes]
    left = sum(lanes * lane_bytes * (1 - step % plan.loop_steps / plan.loop_steps) for step, lanes in moved)
    result["rebalancing"] = {
        "decisions": moves.decisions,
        "lanes_to_other_nodes": sum(n for _, n in moved),
        "bytes": left,
    }
    result["restart"] = restart(cluster, plan.lanes, reads.held_bytes)
    result["plan"] = {"digest": plan.digest, "lanes": plan.lanes, "cell_size": plan.cell_size,
                      "global_batch": plan.global_batch, "steps_per_epoch": plan.loop_steps}  # fmt: skip
    result["sample"] = {
        "nodes": len(sample.nodes),
        "ranks": len(reads.loads),
        "lanes": sum(map(len, sample.lanes.values())),
    }
    return result


def simulate_shuffle(
    cluster: Cluster,
    prepared: PlannedDataset,
    *,
    unit: Unit = "sample",
    budget: int = DEFAULT_BUDGET,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Simulate a full shuffle with caches that evict the least recently used item."""
    tell(f"shuffling all rows, reading {unit}s")
    reads = shuffled_reads(cluster, prepared, unit=unit, budget=budget // _SHUFFLE_SHARE)
    moves = Moves(with_changes(cluster, ["rebalance=false"]), prepared.plan.lanes)
    return _time_epochs(
        cluster, prepared, reads, prepared.blocks.num_samples // cluster.work.global_batch, moves
    )


def _time_epochs(
    cluster: Cluster, prepared: PlannedDataset, reads: Reads, steps: int, moves: Moves
) -> dict[str, Any]:
    """Return the results of all epochs of `steps` steps each, including faults."""
    total = steps * cluster.work.epochs
    by_step = [np.bincount(one.step, one.store_bytes, total) for one in reads.loads]
    stops = Stops(cluster, reads.held_bytes, np.mean(by_step, axis=0))
    times = time_steps(cluster, reads.loads, total, moves, stops=stops)
    epochs = []
    computing_s = cluster.work.cell * prepared.plan.lanes / cluster.world * steps
    for number in range(cluster.work.epochs):
        part = slice(number * steps, (number + 1) * steps)
        seconds, stall = float(times.step_s[part].sum()), float(times.stall_s[part].sum())
        read = {
            "egress_bytes": float(reads.store_bytes[number]),
            "requests": float(reads.requests[number]),
        }
        epochs.append({
            "seconds": seconds,
            "step_s": seconds / steps,
            "stall_s": stall,
            "stall_share": stall / seconds if seconds else 0.0,
            **read,
            "cache_hit_rate": float(reads.hit_rate[number]),
            **costs(cluster, seconds=seconds, computing_s=computing_s, stored_bytes=prepared.stored_bytes, **read),
        })  # fmt: skip
    step_s = float(times.step_s.mean())
    return {
        "epochs": epochs,
        "dataset": {
            "rows": prepared.blocks.num_samples,
            "shards": prepared.population.num_shards,
            "bytes": prepared.stored_bytes,
        },
        "rank_stall_s": float(times.rank_stall_s.mean()),
        "cache_hits": reads.cache_hits,
        "reduce_s": times.reduce_s,
        "compute_s": float(times.compute_s.mean()),
        "cache_bytes_per_node": reads.held_bytes,
        "distinct_bytes_per_node": reads.distinct_bytes,
        "recovery": recovery(cluster, step_s, reads.held_bytes),
        "failures": stops.failures,
        "outages": stops.outages,
        "stood_s": times.stood_s,
        "error": {"egress": reads.error, "stall": _stall_error(cluster, reads, times)},
    }


def _stall_error(cluster: Cluster, reads: Reads, times: Times) -> float | None:
    """Return the relative increase of the stall expected from sampling all ranks; None if it is unknown."""
    whole, looked = float(times.stall_s.sum()), len(reads.loads)
    if looked == cluster.world or not whole:
        return 0.0
    if looked < 2:
        return None
    gained = whole - float(times.halves.sum(axis=1).mean())
    return gained * math.log2(cluster.world / looked) / whole


# ---- Baseline: full shuffle in each epoch, caches that evict the least recently used item (SPEC.md §4)


_ITEMS, _EPOCH = 21, 22  # keys derived from the seed, one per purpose
_LOADS = 8  # largest number of timed loads per rank and step; they represent all loads


def shuffled_reads(cluster: Cluster, prepared: PlannedDataset, *, unit: Unit, budget: int) -> Reads:
    """Simulate the reads of a full shuffle by following a sample of items through the caches of all nodes.

    The error is two standard errors of the number of misses, with independent reads.
    """
    blocks = prepared.blocks
    seed = cluster.work.seed
    samples, item, size, share = _items(blocks, unit, budget, seed)
    epochs, batch = cluster.work.epochs, cluster.work.global_batch
    last = blocks.num_samples // batch * batch  # an incomplete last batch is dropped
    parts = []
    for epoch in range(epochs):
        place = Feistel(derive(seed, _EPOCH, epoch), blocks.num_samples).inverse(samples)
        kept = place < last
        parts.append((np.full(int(kept.sum()), epoch), place[kept], item[kept]))
    epoch_of, place, which = (np.concatenate(column) for column in zip(*parts, strict=True))
    rank = place % batch * cluster.world // batch
    node = rank // cluster.nodes.ranks
    order = np.lexsort((place, epoch_of, node))
    epoch_of, node, which = epoch_of[order], node[order], which[order]
    missed, held = _caches(node, which, size, int(cluster.nodes.cache * share), cluster.nodes.nodes)
    row_bytes = blocks.row_bytes.mean() if unit == "block" else None
    read = size[which] if row_bytes is None else np.full(len(which), row_bytes)
    count = np.bincount(epoch_of, minlength=epochs)
    requests = np.bincount(epoch_of[missed], minlength=epochs)
    store_bytes = np.bincount(epoch_of[missed], size[which[missed]], epochs)
    cache_bytes = np.bincount(epoch_of[~missed], read[~missed], epochs)
    miss_rate = requests / np.maximum(1, count)
    sizes = store_bytes / np.maximum(1, requests), cache_bytes / np.maximum(1, count - requests)
    return Reads(
        requests / share,
        store_bytes / share,
        1 - miss_rate,
        float((count - requests).sum()) / share,
        held / share,
        prepared.stored_bytes / cluster.nodes.nodes,
        _error(int(missed.sum()), len(missed), share),
        [_equal_loads(cluster, blocks, miss_rate, sizes)],
    )


def _equal_loads(
    cluster: Cluster, blocks: BlockMap, miss_rate: Float64s, sizes: tuple[Float64s, Float64s]
) -> RankLoads:
    """Return loads of a rank that are equal in all steps.

    `sizes` holds the mean bytes of an item by epoch, from the store and from the cache.
    """
    batch, epochs = cluster.work.global_batch, cluster.work.epochs
    steps, rows = blocks.num_samples // batch, max(1, batch // cluster.world)
    each = min(rows, _LOADS)
    step = np.repeat(np.arange(steps * epochs), each)
    epoch = step // steps
    from_store = np.diff(np.floor(np.cumsum(miss_rate[epoch]) + 0.5), prepend=0.0) > 0
    ahead = max(1, int(cluster.nodes.memory / (rows * blocks.row_bytes.mean())))
    size = np.where(from_store, sizes[0][epoch], sizes[1][epoch]).astype(np.int64)
    return RankLoads(0, step, np.maximum(epoch * steps, step - ahead), size, from_store, np.ones_like(from_store),
                     each / rows)  # fmt: skip


def _items(blocks: BlockMap, unit: Unit, budget: int, seed: int) -> tuple[Int64s, Int64s, Int64s, float]:
    """Return (samples to follow, item of each sample, bytes of each item, sampled share of all items)."""
    key = derive(seed, _ITEMS)
    if unit == "sample":
        number = min(budget, blocks.num_samples)
        samples = Feistel(key, blocks.num_samples)(np.arange(number, dtype=np.int64))
        segment = np.searchsorted(blocks.first_sample, samples, side="right") - 1
        size = np.maximum(1, blocks.row_bytes[segment]).astype(np.int64)
        return samples, np.arange(number), size, number / blocks.num_samples
    per_block = max(1, -(-blocks.num_samples // blocks.num_blocks))
    number = min(max(1, budget // per_block), blocks.num_blocks)
    chosen = Feistel(key, blocks.num_blocks)(np.arange(number, dtype=np.int64))
    segment = np.searchsorted(blocks.first_block, chosen, side="right") - 1
    inside = (chosen - blocks.first_block[segment]) * blocks.block_rows[segment]
    first = blocks.first_sample[segment] + inside
    rows = np.minimum(blocks.block_rows[segment], blocks.first_sample[segment + 1] - first)
    item = np.repeat(np.arange(number), rows)
    starts = np.cumsum(rows) - rows
    samples = np.repeat(first - starts, rows) + np.arange(len(item))
    return samples, item, blocks.weigh(chosen)[0], number / blocks.num_blocks


def _caches(node: Int64s, which: Int64s, size: Int64s, limit: int, nodes: int) -> tuple[Bools, float]:
    """Return (bool array of misses, mean bytes in a node's cache at the end). Reads are sorted by node and time."""
    missed = np.ones(len(node), dtype=bool)
    borders = np.searchsorted(node, np.arange(nodes + 1))
    held = 0.0
    for first, last in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        items = which[first:last]
        if limit and last > first:
            missed[first:last] = least_recently_used(items.tolist(), size[items].tolist(), limit)
        held += min(limit, int(size[np.unique(items)].sum()))
    return missed, held / nodes


def _error(misses: int, reads: int, share: float) -> float:
    if share >= 1 or not misses:
        return 0.0
    return 2 * math.sqrt((1 - misses / reads) / misses)


def least_recently_used(keys: Iterable[Hashable], sizes: Sequence[int], limit: int) -> Bools:
    """Return a bool array of the reads that miss in a least-recently-used cache of `limit` bytes."""
    held: OrderedDict[Hashable, int] = OrderedDict()
    total = 0
    missed = np.zeros(len(sizes), dtype=bool)
    for i, key in enumerate(keys):
        if key in held:
            held.move_to_end(key)
            continue
        missed[i] = True
        size = sizes[i]
        if size > limit:
            continue
        held[key] = size
        total += size
        while total > limit:
            total -= held.popitem(last=False)[1]
    return missed


# ---- Cost and energy (SPEC.md §6)


def costs(
    cluster: Cluster,
    *,
    seconds: float,
    computing_s: float,
    requests: float,
    egress_bytes: float,
    stored_bytes: float,
) -> dict[str, float]:
    """Return the cost of a period: ``dollars``, ``dollars_requests_and_egress`` (included) and ``joules`` of the nodes.

    `computing_s` are seconds of computation per rank, and `stored_bytes` are the bytes of one copy of the dataset.
    """
    nodes, store = cluster.nodes, cluster.store
    busy = min(1.0, computing_s / seconds) if seconds else 0.0
    watts = nodes.power_idle + (nodes.power_busy - nodes.power_idle) * busy
    machines = seconds / 3600 * nodes.nodes * nodes.price_per_hour
    asked = requests / 1e6 * store.price_per_million_requests
    egress = egress_bytes / 1e9 * store.price_per_gb
    storage = stored_bytes / 1e9 * store.copies * store.price_per_gb_month * seconds / _MONTH_S
    return {
        "dollars": machines + asked + egress + storage,
        "dollars_requests_and_egress": asked + egress,
        "joules": nodes.nodes * watts * seconds,
    }
