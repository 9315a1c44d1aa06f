"""Which blocks to fetch with one request, of those that will be needed soon. Pure, but for the questions it asks.

A request costs about as much as some hundred kilobytes, so small blocks that lie near each other come together: those
between two of them come along for nothing as far as `spare` allows, and where blocks can be kept, those around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import BlockRequest

GRAIN_BYTES: Final = 256 * 2**10
"""A smaller request is worth filling up with what lies around it, if that is needed later anyway."""
MAX_GAP_BYTES: Final = 64 * 2**10
"""Between two blocks of one request: more is not fetched for nothing, whatever may be spared."""
MAX_JOINED_BYTES: Final = 4 * 2**20
"""Of one request for several blocks: the first of them waits for the last."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to be read ahead."""

    step: int
    """At which it is needed first; -1 where it only comes along."""
    block: int
    """Dataset-wide number."""
    store: LocatedStore
    request: BlockRequest

    @property
    def end(self) -> int:
        """Behind its last byte in the shard."""
        return self.request.offset + self.request.length


def join(wanted: Sequence[Wanted], *, spare: int) -> list[list[Wanted]]:
    """Blocks that come with one request each, in the order in which their first is needed.

    Args:
        wanted: In any order; each block once.
        spare: The most bytes between blocks that may be fetched for nothing, over all requests. The smallest gaps
            are closed first.
    """
    ordered = sorted(wanted, key=lambda one: (one.request.name, one.request.offset))
    gaps: list[tuple[int, int]] = []
    for i in range(1, len(ordered)):
        before, after = ordered[i - 1], ordered[i]
        gap = after.request.offset - before.end
        if before.request.name == after.request.name and 0 <= gap <= MAX_GAP_BYTES:
            gaps.append((gap, i))
    joined: set[int] = set()
    for gap, i in sorted(gaps):
        if gap > spare:
            break
        spare -= gap
        joined.add(i)
    groups: list[list[Wanted]] = []
    for i, one in enumerate(ordered):
        if i in joined and one.end - groups[-1][0].request.offset <= MAX_JOINED_BYTES:
            groups[-1].append(one)
        else:
            groups.append([one])
    first = [min((one.step for one in group if one.step >= 0), default=-1) for group in groups]
    return [groups[i] for i in sorted(range(len(groups)), key=first.__getitem__) if first[i] >= 0]


def neighbours(
    wanted: Sequence[Wanted], beside: Callable[[int], range], may_come: Callable[[int], Wanted | None]
) -> list[Wanted]:
    """Blocks around the wanted ones, within the same aligned stretch of `GRAIN_BYTES` of the shard.

    Args:
        wanted: What is fetched in any case.
        beside: Block → the blocks of its shard.
        may_come: Block → itself, as it is asked for; None where it is not needed later, or is there already.
    """
    taken = {one.block for one in wanted}
    found: list[Wanted] = []
    for one in wanted:
        first = one.request.offset // GRAIN_BYTES * GRAIN_BYTES
        shard = beside(one.block)
        for blocks in (range(one.block - 1, shard.start - 1, -1), range(one.block + 1, shard.stop)):
            for block in blocks:
                if block in taken:
                    continue  # its own surroundings are looked at in their turn
                other = may_come(block)
                if other is None or other.request.offset < first or other.end > first + GRAIN_BYTES:
                    break  # what lies behind a gap is not worth it
                taken.add(block)
                found.append(other)
    return found
