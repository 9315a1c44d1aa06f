"""Going on in process when ranks have died or joined: what is left of the state, and who gets it (SPEC.md §5)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
"""Part of the state ("model", "optimizer", …) → name → what a rank holds of the tensor."""


class Box(NamedTuple):
    """A part of a tensor, which has the key that checkpoints give it: part of the state and name, joined by a dot."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def common(self, other: Box) -> Box | None:
        """What it has in common with another box of its tensor."""
        pairs = list(zip(*self[1:], *other[1:], strict=True))
        low = tuple(max(o, p) for o, _, p, _ in pairs)
        sizes = tuple(min(o + s, p + t) - at for (o, s, p, t), at in zip(pairs, low, strict=True))
        return Box(self.key, low, sizes) if all(size > 0 for size in sizes) else None


def tensors_of(state: State) -> dict[str, Tensor]:
    """The tensors of a state by key."""
    return {f"{part}.{name}": one for part, tensors in state.items() for name, one in tensors.items()}


def boxes_of(state: State) -> dict[Box, Tensor]:
    """A rank's boxes: plain memory, without the groups, meshes and modules that it belonged to."""
    found: dict[Box, Tensor] = {}
    for key, tensor in tensors_of(state).items():
        one: Any = tensor.detach()
        if not hasattr(one, "__create_chunk_list__"):
            found[Box(key, (0,) * one.dim(), tuple(one.shape))] = one
            continue
        for chunk in one.__create_chunk_list__():
            if math.prod(chunk.sizes):
                memory = one.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
                found[Box(key, tuple(chunk.offsets), tuple(chunk.sizes))] = local_part(memory)
    return found


def _shapes(state: State) -> dict[str, list[int]]:
    return {key: list(tensor.shape) for key, tensor in tensors_of(state).items()}


def _told_boxes(told: Mapping[str, Any]) -> list[Box]:
    """The boxes that a rank has told of."""
    return [Box(key, tuple(offsets), tuple(sizes)) for key, offsets, sizes in told["boxes"]]


def covers(boxes: Collection[Box], shape: Sequence[int]) -> bool:
    """Whether distinct boxes are a whole tensor of ``shape``, none of them overlapping another."""
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        return False
    return not any(one.common(other) for one, other in combinations(boxes, 2))


def hand_out(
    world: World, sources: Mapping[int, Sequence[Box]], own: Mapping[Box, Tensor], target: State
) -> None:
    """Copy every box from the rank that has it into every ``target`` that needs it; collective."""
    wanted: dict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
    for box, memory in boxes_of(target).items():
        wanted[box.key].append((box, memory))
    dtypes = {key: tensor.dtype for key, tensor in tensors_of(target).items()}
    for source, boxes in sorted(sources.items()):
        for pack in _packs(boxes, dtypes):
            end = max(at + n for _, at, n in pack)
            buffer = torch.zeros(end, dtype=torch.uint8, device=world.device)
            views = {box: buffer[at : at + n].view(dtypes[box.key]).view(box.sizes) for box, at, n in pack}
            if source == world.rank:
                for box, view in views.items():
                    view.copy_(own[box])
            dist.broadcast(buffer, source)
            for given, view in views.items():
                for box, memory in wanted[given.key]:
                    _copy_common(given, view, box, memory)


def _packs(boxes: Iterable[Box], dtypes: Mapping[str, torch.dtype]) -> Iterator[list[tuple[Box, int, int]]]:
    """(box, first byte, bytes) of boxes that are sent together."""
    pack: list[tuple[Box, int, int]] = []
    at = 0
    for box in boxes:
        length = math.prod(box.sizes) * dtypes[box.key].itemsize
        if pack and at + length > PACK_BYTES:
            yield pack
            pack, at = [], 0
        pack.append((box, at, length))
        at += -(-length // ALIGNMENT) * ALIGNMENT
    if pack:
        yield pack


def _copy_common(given: Box, source: Tensor, wanted: Box, target: Tensor) -> None:
    common = given.common(wanted)
    if common is None:
        return
    for dimension, (low, size) in enumerate(zip(*common[1:], strict=True)):
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
    boxes: dict[Box, Tensor]
    shapes: dict[str, list[int]]

    @classmethod
    def of(cls, strategy: Strategy, progress: Progress, *, held: bool) -> Kept:
        """Nothing but how far it came, where the ranks have no state in common, or not ``held``."""
        strategy.abandon()
        state = strategy.state() if held and strategy.whole() else {}
        return cls(progress, boxes_of(state), _shapes(state))


def carry_over(world: World, kept: Kept | None, strategy: Strategy) -> Carried:
    """Give every rank its part of the state that the survivors hold together; collective.

    A reduction may finish on some ranks and fail on others, so survivors can be one step apart: the largest step of
    which every box is left is taken. Boxes are known by where they lie in a tensor, never by the rank that had them.
    """
    own, shapes = ({}, {}) if kept is None else (kept.boxes, kept.shapes)
    mine = {"progress": asdict(kept.progress) if kept else None, "boxes": list(own), "shapes": shapes}
    told = world.exchange(mine)
    known = {rank: Progress(**one["progress"]) for rank, one in enumerate(told) if one["progress"]}
    furthest = max(known.values(), key=lambda one: one.step, default=None)
    saved = {key: {"shape": shape} for one in told for key, shape in one["shapes"].items()}
    target = strategy.loading_state(saved)
    for step in sorted({one.step for one in known.values()}, reverse=True):
        there = {rank: one for rank, one in known.items() if one.step == step}
        sources, gone = _sources({rank: _told_boxes(told[rank]) for rank in there}, _shapes(target))
        if sources:
            hand_out(world, sources, own, target)
            progress = there[min(there)]
            strategy.after_load(progress.updates)
            return Carried(progress, furthest, gone)
    return Carried(None, furthest)


def _sources(
    held: Mapping[int, Iterable[Box]], needed: Mapping[str, Sequence[int]]
) -> tuple[dict[int, list[Box]], tuple[int, int]]:
    """Which rank gives which boxes, nothing where they are not the whole state; and what is gone of the unsent."""
    first: dict[str, dict[Box, int]] = {key: {} for key in needed}
    for rank, boxes in held.items():
        for box in boxes:
            if box.key in first:
                first[box.key].setdefault(box, rank)
    sources: dict[int, list[Box]] = {rank: [] for rank in held}
    gone = (0, 0)
    for key, shape in needed.items():
        if not covers(first[key], shape):
            if not key.startswith("reduction."):
                return {}, gone
            gone = (shape[0] - len(held), shape[0])  # a row per rank; those of the dead are lost with them
        for box, rank in first[key].items():
            sources[rank].append(box)
    return sources, gone


def check_layout(world: World, strategy: Strategy) -> None:
    """Refuse a state that is not laid out for this group; collective, once when a group has formed.

    What the ranks hold of a tensor must be the whole of it, every box in equally many ranks, and each rank must stand
    where its sharding believes it to stand: else two ranks would train the same shard, and a third one nobody.
    """
    state = strategy.state()
    told = world.exchange({"trouble": strategy.misplaced(), "boxes": list(boxes_of(state))})
    reasons = [f"rank {rank} {one['trouble']}" for rank, one in enumerate(told) if one["trouble"]]
    holders: dict[str, Counter[Box]] = defaultdict(Counter)
    for one in told:
        for box in _told_boxes(one):
            holders[box.key][box] += 1
    for key, shape in _shapes(state).items():
        if not covers(holders[key], shape) or len(set(holders[key].values())) > 1:
            parts = ", ".join(f"{[*box[1:]]} by {count} ranks" for box, count in holders[key].items())
            reasons.append(f"of {key} {shape} (offsets, sizes) are held {parts}")
    if reasons:
        raise RunError(
            f"the state of the {world.size} ranks does not fit their group, so no step is taken with it: {reasons[0]}"
            f" ({len(reasons)} in all). Start the run again: it goes on from its newest checkpoint"
        )
