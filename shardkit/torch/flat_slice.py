"""`FlatSlice`: a part of a flattened tensor, as sharded optimizers keep it (the trainer's SPEC.md §3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


def rectangles(shape: Sequence[int], low: int, high: int) -> list[tuple[list[int], list[int]]]:
    """Return elements low … high−1 of a C-order tensor as at most 2·dimensions − 1 boxes (offsets, sizes), in order.

    Checkpoints describe parts of a tensor as boxes.
    """
    if low >= high:
        return []
    if not shape:
        return [([], [])]
    rest = list(shape[1:])
    row = math.prod(rest)

    def inside(at: int, low: int, high: int) -> list[tuple[list[int], list[int]]]:
        return [([at, *offsets], [1, *sizes]) for offsets, sizes in rectangles(rest, low, high)]

    first, last = low // row, high // row  # rows that contain low and high
    if first == last:
        return inside(first, low % row, high % row)
    boxes = []
    if low % row:
        boxes += inside(first, low % row, row)
        first += 1
    if first < last:
        boxes.append(([first] + [0] * len(rest), [last - first, *rest]))
    return boxes + inside(last, 0, high % row)


class FlatSlice(torch.Tensor):
    """A run of elements of a larger tensor, for torch.distributed.checkpoint; it has the shape of the larger tensor.

    Implements DCP's protocol for tensors that know their own parts: a slice is saved as boxes, and other shardings can
    be loaded from it or into it. Arithmetic on it is an error.
    """

    run: torch.Tensor
    low: int
    boxes: list[tuple[list[int], list[int]]]

    @staticmethod
    def __new__(cls, run: torch.Tensor, shape: Sequence[int], low: int) -> FlatSlice:
        """Wrap ``run``, the elements low … low + len(run) − 1 of a tensor of ``shape``; shares its memory."""
        made: FlatSlice = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's documented way to make one
            cls, torch.Size(shape), dtype=run.dtype, device=run.device
        )
        made.run, made.low = run, low
        made.boxes = rectangles(shape, low, low + run.numel())
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise an error for every operation except detach, which planners call."""
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

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        at = 0
        for offsets, sizes in self.boxes:
            length = math.prod(sizes)
            if index.offset is not None and list(index.offset) == offsets:
                return self.run[at : at + length].view(sizes)
            at += length
        raise ValueError(f"no part of this slice starts at {index.offset}; it has {self.boxes}")
