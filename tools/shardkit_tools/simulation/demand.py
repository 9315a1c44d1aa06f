"""What ranks need of the plan, block by block, and where it comes from: memory, the node's cache, the store.

Cells are the plan's own, grouped as the loader groups them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.loader.schedule import most_steps
from shardkit.plan import Plan
from shardkit.reading.cache.eviction import FurthestFirst
from shardkit_tools.simulation.populations import BlockMap

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

_CHUNK_ROWS = 1 << 21
_SHARE_OF_MEMORY = 3  # groups under way at a time; the loader halves a group whose blocks exceed this part


@dataclass(frozen=True, eq=False)
class Groups:
    """How a rank's steps are taken together."""

    first: Int64s  # int64[g + 1], first step of each group, and the end of the last; counted over all epochs
    opens: Bools  # bool[g], the group is the first of an epoch
    leased_with: Int64s  # int64[g], the group with whose beginning the blocks of each are leased

    def of(self, steps: Int64s) -> Int64s:
        return np.searchsorted(self.first, steps, side="right") - 1


@dataclass(frozen=True, eq=False)
class Needs:
    """Blocks that a rank's groups need, each once per group, in the order in which they are first needed."""

    step: Int64s  # int64[n], first step of the group that needs it
    group: Int64s  # int64[n], ascending
    block: Int64s  # int64[n], dataset-wide

    @property
    def is_new(self) -> Bools:
        """Whether the group before did not need the block too: what counts as a use for the cache's future."""
        order = np.lexsort((self.group, self.block))
        block, group = self.block[order], self.group[order]
        goes_on = np.zeros(len(order), dtype=bool)
        goes_on[1:] = (block[1:] == block[:-1]) & (group[1:] == group[:-1] + 1)
        new = np.empty(len(order), dtype=bool)
        new[order] = ~goes_on
        return new


def group_steps(
    steps: int, epochs: int, rows_per_step: int, bytes_per_step: int, most: int | None = None
) -> Groups:
    """Groups of 1, 4, 16 … steps up to what the loader takes, starting again in each epoch."""
    top = most or most_steps(rows_per_step, bytes_per_step)
    sizes, size, left = [], 1, steps
    while left:
        sizes.append(min(size, left))
        left -= sizes[-1]
        size = min(top, size * 4)
    first = np.cumsum([0, *sizes * epochs], dtype=np.int64)
    opens = np.arange(len(sizes) * epochs) % len(sizes) == 0
    return Groups(first, opens, _leased_with(opens, np.zeros(len(opens), dtype=np.int64)))


def _leased_with(opens: Bools, later: Int64s) -> Int64s:
    """The second group before each, or so many later as memory demands; none before its epoch."""
    number = np.arange(len(opens))
    opened: Int64s = np.maximum.accumulate(np.where(opens, number, 0))
    with_group: Int64s = np.maximum(opened, number - 2 + later)
    return with_group


def lease_when_there_is_room(groups: Groups, needs: Needs, sizes: Int64s, budget: int) -> Groups:
    """The groups, with those leased later whose blocks do not fit beside the blocks of the two before.

    The loader keeps the blocks of a group until the next one begins, and waits for room before it leases more.

    Args:
        groups: of a rank.
        needs: of the rank.
        sizes: (n,) bytes that each need takes in memory.
        budget: bytes of memory.
    """
    order = np.lexsort((needs.group, needs.block))
    block, group = needs.block[order], needs.group[order]
    one, two = np.zeros(len(order), dtype=bool), np.zeros(len(order), dtype=bool)
    same = block[1:] == block[:-1]
    one[1:] = same & (group[1:] - group[:-1] == 1)
    two[1:] = same & (group[1:] - group[:-1] == 2)
    two[2:] |= (block[2:] == block[:-2]) & (group[2:] - group[:-2] == 2)
    weight, count = sizes[order], len(groups.opens)
    alone = np.bincount(group, weight, count)
    pair = np.concatenate(([0.0], alone[:-1])) + np.bincount(group, weight * ~one, count)
    triple = np.concatenate(([0.0], pair[:-1])) + np.bincount(group, weight * ~(one | two), count)
    later = np.where(pair > budget, 2, np.where(triple > budget, 1, 0))
    return Groups(groups.first, groups.opens, _leased_with(groups.opens, later.astype(np.int64)))


def rank_needs(
    plan: Plan,
    blocks: BlockMap,
    lanes: Sequence[int],
    *,
    epochs: int,
    memory: int,
    block_bytes: int,
    weight: float = 1.0,
) -> tuple[Groups, Needs]:
    """What a rank needs in the first epochs.

    Args:
        plan: of the dataset.
        blocks: of the same dataset.
        lanes: the sampled ones, ascending.
        epochs: how many.
        memory: bytes that the rank has for blocks.
        block_bytes: of a whole block.
        weight: lanes of the rank for each sampled one.
    """
    steps = plan.loop_steps
    rows = max(1, round(plan.cell_size * len(lanes) * weight))
    row_bytes = max(1, int(blocks.row_bytes.mean())) if len(blocks.row_bytes) else 1
    most = most_steps(rows, rows * row_bytes)
    budget = memory // _SHARE_OF_MEMORY
    while most > 1 and _distinct(plan, blocks, lanes, min(steps, most)) * block_bytes * weight > budget:
        most //= 2
    groups = group_steps(steps, epochs, rows, rows * row_bytes, most)
    parts = [
        _needed(plan, blocks, lanes, groups, first, last) for first, last in _chunks(groups, plan, lanes)
    ]
    return groups, Needs(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _distinct(plan: Plan, blocks: BlockMap, lanes: Sequence[int], steps: int) -> int:
    """Blocks of the longest group of an epoch, which begins after the short ones."""
    start = min(plan.loop_steps - steps, steps * 4 // 3)
    samples = plan.steps(start, start + steps, lanes).ravel()
    return len(np.unique(blocks.blocks_of(samples[samples >= 0])))


def _chunks(groups: Groups, plan: Plan, lanes: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of groups with a bounded number of rows."""
    per_step = plan.cell_size * len(lanes)
    runs, first = [], 0
    for last in range(1, len(groups.first)):
        rows = int(groups.first[last] - groups.first[first]) * per_step
        if rows >= _CHUNK_ROWS or last == len(groups.first) - 1:
            runs.append((first, last))
            first = last
    return runs


def _needed(
    plan: Plan, blocks: BlockMap, lanes: Sequence[int], groups: Groups, first: int, last: int
) -> tuple[Int64s, Int64s, Int64s]:
    start, stop = int(groups.first[first]), int(groups.first[last])
    # (steps, samples of these lanes): lanes one after the other, as the loader concatenates them
    cells = plan.steps(start, stop, lanes).reshape(stop - start, -1)
    step, place = np.nonzero(cells >= 0)
    block = blocks.blocks_of(cells[step, place])
    step += start
    group = groups.of(step)
    base = blocks.num_blocks
    _, where = np.unique((group - first) * base + block, return_index=True)
    where.sort()
    return step[where], group[where], block[where]


def through_memory(needs: Needs, sizes: Int64s, budget: int) -> Bools:
    """Which of the needs are loads, because memory does not hold the block: the loader's `BlockWindow`.

    The least recently used goes first; what one of the last three groups needs stays.

    Args:
        needs: of one rank.
        sizes: (n,) bytes that each takes in memory.
        budget: bytes.
    """
    held: dict[int, tuple[int, int]] = {}  # block → (bytes, last group); in order of use
    total = 0
    loads = np.zeros(len(needs.block), dtype=bool)
    borders = np.flatnonzero(np.diff(needs.group, prepend=-1, append=-2)).tolist()
    names, weights = needs.block.tolist(), sizes.tolist()
    for first, last in itertools.pairwise(borders):
        group = int(needs.group[first])
        missing = []
        for i in range(first, last):
            entry = held.pop(names[i], None)
            if entry is None:
                missing.append(i)
            else:
                held[names[i]] = (entry[0], group)
        need = sum(weights[i] for i in missing)
        while total + need > budget and held:
            oldest = next(iter(held))
            if held[oldest][1] >= group - 2:
                break
            total -= held.pop(oldest)[0]
        for i in missing:
            held[names[i]] = (weights[i], group)
        total += need
        loads[missing] = True
    return loads


_JOINED = 16  # blocks among which reading ahead finds those that lie end to end (`reading.cache`)


@dataclass(frozen=True, eq=False)
class Loads:
    """Blocks that the ranks of a node load, ordered by step, then rank."""

    step: Int64s  # int64[n]
    rank: Int64s
    block: Int64s
    size: Int64s
    next_use: NDArray[np.float64]
    """Float64[n], the step at which any rank of the node needs the block next; inf for never."""

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


class NodeReads(NamedTuple):
    """What became of a node's loads."""

    from_store: Bools  # bool[n]; the others were in the cache
    held: int  # bytes in the cache at the end


def through_cache(loads: Loads, limit: int) -> NodeReads:
    """Serve loads from a cache of ``limit`` bytes that knows the future; 0 for none."""
    if not limit:
        return NodeReads(np.ones(len(loads.block), dtype=bool), 0)
    cache = FurthestFirst(limit)
    missed = np.zeros(len(loads.block), dtype=bool)
    rows = zip(loads.block.tolist(), loads.size.tolist(), loads.next_use.tolist(), strict=True)
    for i, (block, size, next_use) in enumerate(rows):
        if not cache.use(block, next_use):
            missed[i] = True
            if size <= limit:
                cache.add(block, size, next_use)
    return NodeReads(missed, cache.held)


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

    Of each `_JOINED` blocks those that follow each other in a shard are one request.

    Args:
        block: (n,) that are read from the store, dataset-wide.
        shard: (n,) of each.
    """
    own = np.ones(len(block), dtype=bool)
    if not len(block):
        return own
    place = np.arange(len(block))
    batch = place // _JOINED
    order = np.lexsort((block, batch))
    joins = (
        (batch[order[1:]] == batch[order[:-1]])
        & (block[order[1:]] == block[order[:-1]] + 1)
        & (shard[order[1:]] == shard[order[:-1]])
        & (place[order[1:]] > place[order[:-1]])  # a run grows at its end only
    )
    own[order[1:][joins]] = False
    return own
