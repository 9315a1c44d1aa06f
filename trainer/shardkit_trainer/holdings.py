"""Which parts of a state each rank holds, told to all, and handed from those that have them to those that need them.

A part is a box of a saved tensor: the same description as in checkpoints, so what any sharding holds fits any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from .distributed import World
from .strategy import local_part

__all__ = ["Box", "Holdings", "Key", "Part", "State", "covers", "hand_out"]

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
        """Shapes and boxes: plain data."""
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
    """Copy every part from the rank that has it into whoever's ``target`` needs it; collective.

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
