"""Slices of flattened tensors in checkpoints: what sharded optimizers keep (the trainer's SPEC.md §3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


def rectangles(shape: Sequence[int], low: int, high: int) -> list[tuple[list[int], list[int]]]:
    """The elements low … high−1 of a C-order tensor as boxes (offsets, sizes), in order, at most 2·dimensions − 1.

    Checkpoints describe parts of a tensor by boxes; a run of elements is a few of them.
    """
    if not shape:
        return [([], [])] if low < high else []
    row = math.prod(shape[1:])
    if low >= high or not row:
        return []
    if len(shape) == 1:
        return [([low], [high - low])]
    boxes: list[tuple[list[int], list[int]]] = []
    first, last = low // row, (high - 1) // row
    if first == last and (low % row or high % row):
        return [
            ([first, *o], [1, *s]) for o, s in rectangles(shape[1:], low - first * row, high - first * row)
        ]
    if low % row:
        boxes += [([first, *o], [1, *s]) for o, s in rectangles(shape[1:], low % row, row)]
        first += 1
    whole = high // row - first
    if whole > 0:
        boxes.append(([first, *([0] * (len(shape) - 1))], [whole, *shape[1:]]))
    if high % row:
        boxes += [([high // row, *o], [1, *s]) for o, s in rectangles(shape[1:], 0, high % row)]
    return boxes


class FlatSlice(torch.Tensor):
    """A run of elements of a larger tensor for torch.distributed.checkpoint: has that one's shape, holds the run.

    Implements DCP's protocol for tensors that know their own parts, so a slice is saved as boxes and any other sharding
    can be loaded from them, or into it. It is a description: arithmetic on it is an error.
    """

    run: Tensor
    low: int
    boxes: list[tuple[list[int], list[int]]]

    @staticmethod
    def __new__(cls, run: Tensor, shape: Sequence[int], low: int) -> FlatSlice:
        """Wrap ``run``, the elements low … low + len(run) − 1 of a tensor of ``shape``; shares its memory."""
        made: FlatSlice = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's documented way to make one
            cls, torch.Size(shape), dtype=run.dtype, device=run.device
        )
        made.run, made.low = run, low
        made.boxes = rectangles(shape, low, low + run.numel())
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse: only detach passes, which planners call."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"FlatSlice only describes a part of a tensor; {func} is not defined on it")

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.run.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        at = 0
        for offsets, sizes in self.boxes:
            length = math.prod(sizes)
            if index.offset is not None and list(index.offset) == offsets:
                return self.run[at : at + length].view(sizes)
            at += length
        raise ValueError(f"no part of this slice starts at {index.offset}; it has {self.boxes}")
