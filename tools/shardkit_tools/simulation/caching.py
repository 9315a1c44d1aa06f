"""Where the blocks of a node come from: memory, its cache, the store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.reading.cache.eviction import FurthestFirst

__all__ = ["Loads", "NodeReads", "count_requests", "least_recently_used", "through_cache"]

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

_LOOKED_AT_TOGETHER = (
    16  # blocks among which reading ahead finds those that lie end to end (`storage.cache.supply`)
)


@dataclass(frozen=True, eq=False)
class Loads:
    """Blocks that the ranks of a node load, ordered by step, then rank.

    Attributes:
        step, rank, block, size: int64[n].
        next_use: float64[n], the step at which any rank of the node needs the block next; inf for never.
    """

    step: Int64s
    rank: Int64s
    block: Int64s
    size: Int64s
    next_use: NDArray[np.float64]

    @classmethod
    def of(
        cls, step: Int64s, rank: Int64s, block: Int64s, size: Int64s, uses: tuple[Int64s, Int64s]
    ) -> Loads:
        """Put in order, and look up what comes next.

        Args:
            step: of the loads, in any order; equal ones keep theirs.
            rank: of each.
            block: of each, dataset-wide.
            size: bytes of each.
            uses: (step, block) of everything that the node's ranks will ask for, in any order.
        """
        order = np.lexsort((rank, step))
        step, rank, block, size = step[order], rank[order], block[order], size[order]
        return cls(step, rank, block, size, _next_uses(step, block, *uses))


def _next_uses(step: Int64s, block: Int64s, use_step: Int64s, use_block: Int64s) -> NDArray[np.float64]:
    """For each (step, block): the first use of the block after the step."""
    names, number = np.unique(use_block, return_inverse=True)
    span = int(max(step.max(initial=0), use_step.max(initial=0))) + 2
    keys = np.sort(number * span + use_step)
    at = np.searchsorted(names, block)
    known = (at < len(names)) & (
        names[np.minimum(at, max(0, len(names) - 1))] == block if len(names) else False
    )
    found = np.searchsorted(keys, at * span + step + 1)
    there = known & (found < len(keys))
    there[there] = keys[found[there]] // span == at[there]
    result = np.full(len(step), np.inf)
    result[there] = keys[found[there]] % span
    return result


@dataclass(frozen=True, eq=False)
class NodeReads:
    """What became of a node's loads.

    Attributes:
        loads: the loads.
        from_store: bool[n]; the others were in the cache.
        held: bytes in the cache at the end.
    """

    loads: Loads
    from_store: Bools
    held: int


def through_cache(loads: Loads, limit: int) -> NodeReads:
    """Serve loads from a cache of ``limit`` bytes that knows the future; 0 for none."""
    if not limit:
        return NodeReads(loads, np.ones(len(loads.block), dtype=bool), 0)
    cache = FurthestFirst(limit)
    missed = np.zeros(len(loads.block), dtype=bool)
    rows = zip(loads.block.tolist(), loads.size.tolist(), loads.next_use.tolist(), strict=True)
    for i, (block, size, next_use) in enumerate(rows):
        if not cache.use(block, next_use):
            missed[i] = True
            if size <= limit:
                cache.add(block, size, next_use)
    return NodeReads(loads, missed, cache.held)


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


def count_requests(block: Int64s, shard: NDArray[np.integer]) -> Bools:
    """Which reads of one rank are requests of their own, in the order in which they are read ahead.

    Of each `_LOOKED_AT_TOGETHER` blocks those that follow each other in a shard are one request.

    Args:
        block: (n,) that are read from the store, dataset-wide.
        shard: (n,) of each.
    """
    own = np.ones(len(block), dtype=bool)
    if not len(block):
        return own
    place = np.arange(len(block))
    batch = place // _LOOKED_AT_TOGETHER
    order = np.lexsort((block, batch))
    joins = (
        (batch[order[1:]] == batch[order[:-1]])
        & (block[order[1:]] == block[order[:-1]] + 1)
        & (shard[order[1:]] == shard[order[:-1]])
        & (place[order[1:]] > place[order[:-1]])  # a run grows at its end only
    )
    own[order[1:][joins]] = False
    return own
