"""Reductions of gradients between ranks over gloo, beside a bare all-reduce of the same numbers.

What ranks run imports torch where it is needed: torch reads the environment when it is imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.errors import MissingDependency, RunError
from shardkit_tools.benchmarks.results import Contest, Entry, Round

if TYPE_CHECKING:
    from torch import Tensor

    from shardkit_trainer.distributed import World

LIMIT = "all_reduce"
REDUCTIONS = {
    "fp32": "shardkit fp32",
    "bf16": "shardkit bf16",
    "int8": "shardkit int8",
    "topk": "shardkit topk",
    "powersgd": "shardkit powersgd",
    "fp64": "shardkit exact fp64",
    "int64": "shardkit exact int64",
}
"""Reduction → what tables call it."""

_PATIENCE_S = 120.0
_MEETING = timedelta(seconds=60)
_ROUND_ELEMENTS = 1 << 22  # reduced in a round: fewer are over before the clock has seen them
_COLUMNS = 256
_MATRICES = 4


@contextlib.contextmanager
def reduce_contest(elements: int, scratch: Path, *, ranks: int = 2) -> Iterator[Contest]:
    """A contest of reductions of ``elements`` float32 numbers; its ranks run while the context lasts."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency('the reduce benchmark needs torch; run: pip install "shardkit[train]"')
    count = max(5, _ROUND_ELEMENTS // elements)
    with contextlib.ExitStack() as stack:
        store, spawn = str(scratch / "store"), multiprocessing.get_context("spawn")
        group = [
            stack.enter_context(ProcessPoolExecutor(1, spawn, _join, (rank, ranks, store, elements)))
            for rank in range(ranks)
        ]

        def reducing(kind: str) -> Callable[[], Round]:
            return lambda: _round(group, kind, count, 4.0 * elements * count)

        yield Contest(
            f"reduce {elements:,}",
            {"elements": elements, "ranks": ranks},
            [
                Entry("bare all-reduce, fp32", "limit", reducing(LIMIT)),
                *(Entry(label, "shardkit", reducing(kind)) for kind, label in REDUCTIONS.items()),
            ],
        )


def _round(ranks: Sequence[ProcessPoolExecutor], kind: str, count: int, amount: float) -> Round:
    """All ranks reduce ``count`` times; the slowest one's clock, everybody's CPU."""
    try:
        found = [rank.submit(_reduce, kind, count) for rank in ranks]
        seconds, cpu_s = zip(*(one.result(_PATIENCE_S) for one in found), strict=True)
    except (BrokenExecutor, TimeoutError):
        raise RunError(f"reduce {kind}: a rank of the benchmark ended") from None
    return Round(amount, max(seconds), sum(cpu_s))


# ---- In the process of a rank; the classes are those that the trainer's `strategies` use


_joined: dict[str, Callable[[], object]] = {}
"""Of this process: name → one reduction."""


def _join(rank: int, size: int, path: str, elements: int) -> None:
    """Meet the other ranks at a file."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":  # the loopback device has another name elsewhere
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from shardkit_trainer.distributed import World

    torch.set_num_threads(1)
    store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_MEETING)
    _joined.update(_kinds(World(rank, size, torch.device("cpu"), store, owned=True), elements))


def _reduce(kind: str, count: int) -> tuple[float, float]:
    """Reduce so often, together with the others; seconds, and CPU seconds."""
    import torch.distributed as dist

    dist.barrier()
    cpu, begun = time.process_time(), time.perf_counter()
    for _ in range(count):
        _joined[kind]()
    return time.perf_counter() - begun, time.process_time() - cpu


@dataclass
class _Bucket:
    """What DDP's hook gets, of all parameters."""

    line: Tensor
    of: list[Tensor]

    def buffer(self) -> Tensor:
        return self.line

    def parameters(self) -> list[Tensor]:
        return self.of


def _kinds(world: World, elements: int) -> dict[str, Callable[[], object]]:
    """Name → one reduction of ``elements`` numbers of 32 bits."""
    import torch
    import torch.distributed as dist

    from shardkit_trainer.configuration import ParallelConfig
    from shardkit_trainer.reductions import Compression, ExactSum
    from shardkit_trainer.strategy import FlatLayout

    generator = torch.Generator().manual_seed(world.rank)
    rows = max(1, elements // (_COLUMNS * _MATRICES))
    parameters = [torch.zeros(rows, _COLUMNS) for _ in range(_MATRICES)]
    names = [f"w{n}" for n in range(_MATRICES)]
    gradient = torch.randn(rows * _COLUMNS * _MATRICES, generator=generator)
    line = gradient.clone()

    def compressed(kind: Any) -> Callable[[], object]:
        made = Compression(names, parameters, ParallelConfig(reduction=kind), world)
        return lambda: made.hook(_Bucket(line.copy_(gradient), parameters)).wait()

    def exact(kind: str) -> Callable[[], object]:
        layout = FlatLayout.of(parameters, 1)
        made = ExactSum(parameters, layout, kind, world, world.size)

        def run() -> None:
            for parameter, part in zip(parameters, torch.split(gradient, rows * _COLUMNS), strict=True):
                parameter.grad = part.view(rows, _COLUMNS)
            made.add_cell()
            made.reduce()
            for index, parameter in enumerate(parameters):
                made.gradient(index, 0, parameter.numel())
            made.clear()

        return run

    return {
        LIMIT: lambda: dist.all_reduce(line.copy_(gradient)),
        "fp32": lambda: world.all_reduce(line.copy_(gradient)).div_(world.size),
        **{kind: compressed(kind) for kind in ("bf16", "int8", "topk", "powersgd")},
        **{kind: exact(kind) for kind in ("fp64", "int64")},
    }
