"""The usual way: all rows shuffled again each epoch, a cache that drops what was used least recently (SPEC.md §4)."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardkit.plan.permutation import Feistel, derive
from shardkit_tools.simulation.cluster import Cluster
from shardkit_tools.simulation.demand import least_recently_used
from shardkit_tools.simulation.populations import BlockMap
from shardkit_tools.simulation.reading import Prepared, Reads

Unit = Literal["sample", "block"]
"""What is fetched for a sample of a full shuffle."""

Int64s = NDArray[np.int64]

_ITEMS, _EPOCH = 21, 22  # what a key below the seed is for


def shuffled_reads(cluster: Cluster, prepared: Prepared, *, unit: Unit, budget: int) -> Reads:
    """Follow a sample of items through all nodes' caches: what all nodes read, without flows.

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
    return Reads(
        requests / share,
        np.bincount(epoch_of[missed], size[which[missed]], epochs) / share,
        np.bincount(epoch_of[~missed], read[~missed], epochs) / share,
        1 - requests / np.maximum(1, count),
        float((count - requests).sum()) / share,
        held / share,
        prepared.stored_bytes / cluster.nodes.nodes,
        _error(int(missed.sum()), len(missed), share),
        [],
    )


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


def _caches(
    node: Int64s, which: Int64s, size: Int64s, limit: int, nodes: int
) -> tuple[NDArray[np.bool_], float]:
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
