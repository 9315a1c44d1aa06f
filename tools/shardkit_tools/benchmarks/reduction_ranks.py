"""One rank of the reduction benchmark: the classes are those that the trainer's `strategies` use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from shardkit_trainer.configuration import ParallelConfig
from shardkit_trainer.distributed import World
from shardkit_trainer.reductions import Compression, ExactSum
from shardkit_trainer.strategy import FlatLayout

COLUMNS = 256
MATRICES = 4
PATIENCE = timedelta(seconds=60)


@dataclass
class _Bucket:
    """What DDP's hook gets, of all parameters."""

    line: Tensor
    of: list[Tensor]

    def buffer(self) -> Tensor:
        return self.line

    def parameters(self) -> list[Tensor]:
        return self.of


_joined: dict[str, Callable[[], object]] = {}
"""Of this process: name → one reduction."""


def join(rank: int, size: int, path: str, elements: int) -> None:
    """Join the others.

    Args:
        rank: of ``size``.
        size: ranks.
        path: of a file that the ranks meet at.
        elements: numbers that are reduced.
    """
    torch.set_num_threads(1)
    store: c10d.Store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    world = World(rank, size, torch.device("cpu"), store, owned=True)
    _joined.update(_kinds(world, elements))


def reduce(kind: str, count: int) -> tuple[float, float]:
    """Reduce so often, together with the others; seconds, and CPU seconds."""
    dist.barrier()
    cpu, begun = time.process_time(), time.perf_counter()
    for _ in range(count):
        _joined[kind]()
    return time.perf_counter() - begun, time.process_time() - cpu


def _kinds(world: World, elements: int) -> dict[str, Callable[[], object]]:
    """Name → one reduction of ``elements`` numbers of 32 bits."""
    generator = torch.Generator().manual_seed(world.rank)
    rows = max(1, elements // (COLUMNS * MATRICES))
    parameters = [torch.zeros(rows, COLUMNS) for _ in range(MATRICES)]
    names = [f"w{n}" for n in range(MATRICES)]
    gradient = torch.randn(rows * COLUMNS * MATRICES, generator=generator)
    line = gradient.clone()

    def plain() -> None:
        dist.all_reduce(line.copy_(gradient))

    def mean() -> None:
        world.all_reduce(line.copy_(gradient)).div_(world.size)

    def compressed(kind: Any) -> Callable[[], object]:
        made = Compression(names, parameters, ParallelConfig(reduction=kind), world)
        return lambda: made.hook(_Bucket(line.copy_(gradient), parameters)).wait()

    def exact(kind: str) -> Callable[[], object]:
        layout = FlatLayout.of(parameters, 1)
        made = ExactSum(parameters, layout, kind, world, world.size)

        def run() -> None:
            for parameter, part in zip(parameters, torch.split(gradient, rows * COLUMNS), strict=True):
                parameter.grad = part.view(rows, COLUMNS)
            made.add_cell()
            made.reduce()
            for index, parameter in enumerate(parameters):
                made.gradient(index, 0, parameter.numel())
            made.clear()

        return run

    return {
        "all_reduce": plain,
        "fp32": mean,
        **{kind: compressed(kind) for kind in ("bf16", "int8", "topk", "powersgd")},
        **{kind: exact(kind) for kind in ("fp64", "int64")},
    }
