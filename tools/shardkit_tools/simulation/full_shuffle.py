"""The usual way: all rows shuffled again each epoch, a cache that drops what was used least recently (SPEC.md §4)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardkit.plan.permutation import Feistel, derive
from shardkit_tools.simulation.cluster import Cluster
from shardkit_tools.simulation.reading import BlockMap, Prepared, Reads
from shardkit_tools.simulation.timing import RankLoads

Unit = Literal["sample", "block"]
"""What is fetched for a sample of a full shuffle."""

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

_ITEMS, _EPOCH = 21, 22  # what a key below the seed is for
_LOADS = 8  # of a rank that are timed in a step, at most; they stand for all


def shuffled_reads(cluster: Cluster, prepared: Prepared, *, unit: Unit, budget: int) -> Reads:
    """Follow a sample of items through the caches of all nodes: what they read, and what a rank loads in each step.

    The error is two standard errors of the misses: each read hits or misses for itself.

    Args:
        cluster: the cluster.
        prepared: the dataset.
        unit: what is read and cached: single samples, or the blocks that hold them.
        budget: samples that are followed in each epoch.
    """
    blocks = prepared.blocks
    seed = cluster.work.seed
    samples, item, size, share = _items(blocks, unit, budget, seed)
    epochs, batch = cluster.work.epochs, cluster.work.global_batch
    last = blocks.num_samples // batch * batch  # the remainder is dropped
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
        cache_bytes / share,
        1 - miss_rate,
        float((count - requests).sum()) / share,
        held / share,
        prepared.stored_bytes / cluster.nodes.nodes,
        _error(int(missed.sum()), len(missed), share),
        [_equal_loads(cluster, blocks, miss_rate, sizes)],
    )


def _equal_loads(
    cluster: Cluster, blocks: BlockMap, miss_rate: Floats, sizes: tuple[Floats, Floats]
) -> RankLoads:
    """What a rank loads where all steps need the same; bytes of an item by epoch, from the store and from the cache."""
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
    """Samples that are followed, the item each belongs to, bytes of each item, and the share of all items."""
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
    """Which reads miss, in order of node and time; and the mean bytes that a node holds at the end."""
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
    """Which reads miss in a cache of ``limit`` bytes that drops what was used least recently."""
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
