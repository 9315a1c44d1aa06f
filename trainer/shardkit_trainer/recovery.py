"""Going on in process when ranks have died or joined: what is left of the state, and who gets it (SPEC.md §5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardkit.errors import RunError

from .distributed import World
from .holdings import Box, Holdings, Key, Part, covers, hand_out
from .strategy import Strategy

__all__ = ["Carried", "Kept", "Progress", "carry_over", "check_layout"]


@dataclass(frozen=True)
class Progress:
    """What belongs to a state besides its tensors.

    Attributes:
        step: steps taken.
        updates: of them those that changed the parameters.
        loss_scale: of half precision.
        skipped: the latest steps in a row whose gradient was not finite.
        record: what is reported of the latest step; empty where none was taken.
    """

    step: int
    updates: int
    loss_scale: float
    skipped: int
    record: dict[str, Any]


@dataclass(frozen=True)
class Carried:
    """What a new group has of the state before.

    Attributes:
        progress: what it goes on from; None where a part of the state is gone.
        furthest: of its ranks, the one that has taken the most steps; None where all are new.
        unsent: (ranks that are gone, of how many) whose share of what compression had not sent is lost.
    """

    progress: Progress | None
    furthest: Progress | None
    unsent: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Kept:
    """What a rank keeps of a group that it leaves: plain memory, so that the group's sockets close.

    Whoever still waits in a collective of that group waits for these.
    """

    progress: Progress
    holdings: Holdings

    @classmethod
    def of(cls, strategy: Strategy, progress: Progress) -> Kept:
        """Nothing but how far it came, where the ranks have no state in common."""
        strategy.abandon()
        return cls(progress, Holdings(strategy.state() if strategy.whole() else {}))


def carry_over(world: World, kept: Kept | None, strategy: Strategy) -> Carried:
    """Give every rank its part of the state that the survivors hold together; collective.

    A reduction may finish on some ranks and fail on others, so survivors can be one step apart: the largest step of
    which every part is left is taken. Parts are known by where they lie in a tensor, never by the rank that had them.

    Args:
        world: the new ranks.
        kept: of the ranks before; None where this process is new.
        strategy: the one to fill.
    """
    own = kept.holdings if kept else Holdings({})
    told = world.exchange({"progress": asdict(kept.progress) if kept else None, **own.described()})
    known = [Progress(**one["progress"]) if one["progress"] else None for one in told]
    furthest = max((one for one in known if one is not None), key=lambda one: one.step, default=None)
    shapes: dict[Key, Sequence[int]] = {key: shape for one in told for key, shape in one["shapes"].items()}
    target = strategy.loading_state({key: {"shape": shape} for key, shape in shapes.items()})
    for step in sorted({one.step for one in known if one is not None}, reverse=True):
        there = [rank for rank, one in enumerate(known) if one is not None and one.step == step]
        sources, gone = _sources({rank: told[rank] for rank in there}, Holdings(target).shapes)
        if sources:
            hand_out(world, sources, own, target)
            progress = next(one for one in known if one is not None and one.step == step)
            strategy.after_load(progress.updates)
            return Carried(progress, furthest, gone)
    return Carried(None, furthest)


def _boxes_of(told: Mapping[str, Any], key: Key) -> list[Box]:
    return [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in told["boxes"].get(key, ())]


def _sources(
    told: Mapping[int, Mapping[str, Any]], needed: Mapping[Key, Sequence[int]]
) -> tuple[dict[int, list[Part]], tuple[int, int]]:
    """Which rank gives which parts, nothing where they are not the whole state; and what is gone of the unsent."""
    sources: dict[int, list[Part]] = {rank: [] for rank in told}
    gone = (0, 0)
    for key, shape in needed.items():
        first: dict[Box, int] = {}
        for rank, one in told.items():
            for box in _boxes_of(one, key):
                first.setdefault(box, rank)
        if not covers(first, shape):
            if not key.startswith("reduction."):
                return {}, gone
            gone = (shape[0] - len(told), shape[0])  # a row per rank; those of the dead are lost with them
        for box, rank in first.items():
            sources[rank].append(Part(key, box))
    return sources, gone


def check_layout(world: World, strategy: Strategy) -> None:
    """Refuse a state that is not laid out for this group; collective, once when a group has formed.

    What the ranks hold of a tensor must be the whole of it, every part in equally many ranks, and each rank must stand
    where its sharding believes it to stand: else two ranks would train the same shard, and a third one nobody.

    Raises:
        RunError: on every rank.
    """
    told = world.exchange({"trouble": strategy.misplaced(), **Holdings(strategy.state()).described()})
    reasons = [f"rank {rank} {one['trouble']}" for rank, one in enumerate(told) if one["trouble"]]
    for key, shape in told[0]["shapes"].items():
        held = [set(_boxes_of(one, key)) for one in told]
        holders = Counter(box for boxes in held for box in boxes)
        if not covers(holders, shape) or len(set(holders.values())) > 1:
            parts = ", ".join(f"rank {rank}: {[list(b) for b in boxes]}" for rank, boxes in enumerate(held))
            reasons.append(f"of {key} {shape} (offsets, sizes) are held by {parts}")
    if reasons:
        raise RunError(
            f"the state of the {world.size} ranks does not fit their group, so no step is taken with it: {reasons[0]}"
            f" ({len(reasons)} in all). Start the run again: it goes on from its newest checkpoint"
        )
