"""Going on in process when ranks have died or joined: what is left of the state, and who gets it (SPEC.md §5)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardkit.errors import RunError

from .distributed import World
from .strategy import Strategy, local_part

PACK_BYTES = 32 << 20  # what is sent at once, where a single box is not larger
ALIGNMENT = 16  # bytes: any dtype can be viewed at such a place of a pack

State = Mapping[str, Mapping[str, Tensor]]
"""Part of the state ("model", "optimizer", …) → name → what this rank holds of the tensor."""
Key = str
"""Part of the state and name, joined by a dot: as checkpoints name it."""


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Part(NamedTuple):
    """A box of a tensor, to be sent."""

    key: Key
    box: Box


class Holdings:
    """A rank's parts of a state: plain memory, without the groups, meshes and modules that it belonged to.

    Attributes:
        shapes: of the whole tensors.
        boxes: what is held of each, and where it lies in memory.
    """

    def __init__(self, state: State):
        self.shapes: dict[Key, list[int]] = {}
        self.boxes: dict[Key, list[tuple[Box, Tensor]]] = {}
        for part, tensors in state.items():
            for name, tensor in tensors.items():
                self.shapes[f"{part}.{name}"] = list(tensor.shape)
                self.boxes[f"{part}.{name}"] = list(_boxes(tensor.detach()))

    def described(self) -> dict[str, Any]:
        return {
            "shapes": self.shapes,
            "boxes": {key: [box for box, _ in held] for key, held in self.boxes.items()},
        }


def _boxes(tensor: Any) -> Iterator[tuple[Box, Tensor]]:
    if not hasattr(tensor, "__create_chunk_list__"):
        yield Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor
        return
    for chunk in tensor.__create_chunk_list__():
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if math.prod(box.sizes):
            memory = tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
            yield box, local_part(memory)


def covers(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Whether distinct boxes are a whole tensor of ``shape``, none of them overlapping another."""
    distinct = list(boxes)
    if sum(math.prod(box.sizes) for box in distinct) != math.prod(shape):
        return False
    return not any(_common(one, other) for one, other in combinations(distinct, 2))


def _common(one: Box, other: Box) -> Box | None:
    """What two boxes have in common."""
    pairs = list(zip(*one, *other, strict=True))
    low = tuple(max(o, p) for o, _, p, _ in pairs)
    sizes = tuple(min(o + s, p + t) - at for (o, s, p, t), at in zip(pairs, low, strict=True))
    return Box(low, sizes) if all(size > 0 for size in sizes) else None


def hand_out(world: World, sources: Mapping[int, Sequence[Part]], own: Holdings, target: State) -> None:
    """Copy every part from the rank that has it into every ``target`` that needs it; collective.

    Args:
        world: the ranks.
        sources: the parts that each rank gives, the same on every rank.
        own: what this rank holds.
        target: what it shall hold; all of it is given by somebody.
    """
    wanted = Holdings(target).boxes
    dtypes = {f"{part}.{name}": tensor.dtype for part, ts in target.items() for name, tensor in ts.items()}
    for source, parts in sorted(sources.items()):
        for pack in _packs(parts, dtypes):
            end = max(at + n for _, at, n in pack)
            buffer = torch.zeros(end, dtype=torch.uint8, device=world.device)
            views = [
                (one, buffer[at : at + n].view(dtypes[one.key]).view(one.box.sizes)) for one, at, n in pack
            ]
            if source == world.rank:
                for one, view in views:
                    view.copy_(dict(own.boxes[one.key])[one.box])
            dist.broadcast(buffer, source)
            for one, view in views:
                for box, memory in wanted[one.key]:
                    _copy_common(one.box, view, box, memory)


def _packs(parts: Iterable[Part], dtypes: Mapping[Key, torch.dtype]) -> Iterator[list[tuple[Part, int, int]]]:
    """(part, first byte, bytes) of parts that are sent together."""
    pack: list[tuple[Part, int, int]] = []
    at = 0
    for part in parts:
        length = math.prod(part.box.sizes) * dtypes[part.key].itemsize
        if pack and at + length > PACK_BYTES:
            yield pack
            pack, at = [], 0
        pack.append((part, at, length))
        at += -(-length // ALIGNMENT) * ALIGNMENT
    if pack:
        yield pack


def _copy_common(given: Box, source: Tensor, wanted: Box, target: Tensor) -> None:
    common = _common(given, wanted)
    if common is None:
        return
    for dimension, (low, size) in enumerate(zip(*common, strict=True)):
        source = source.narrow(dimension, low - given.offsets[dimension], size)
        target = target.narrow(dimension, low - wanted.offsets[dimension], size)
    with torch.no_grad():
        target.copy_(source)


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

    Ranks that still wait in a collective of that group wait for these.
    """

    progress: Progress
    holdings: Holdings

    @classmethod
    def of(cls, strategy: Strategy, progress: Progress, *, held: bool) -> Kept:
        """Nothing but how far it came, where the ranks have no state in common, or not ``held``."""
        strategy.abandon()
        return cls(progress, Holdings(strategy.state() if held and strategy.whole() else {}))


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
