"""Measure the time of an all-reduce between processes of this machine, over gloo."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from shardkit.errors import MissingDependency, RunError
from shardkit.extras import install_command

_PATIENCE_S = 120.0
_MEETING = timedelta(seconds=60)
_ROUND_ELEMENTS = 1 << 22  # elements per round; shorter rounds cannot be timed reliably
_ROUNDS = 3
_ELEMENTS = (1 << 16, 1 << 20)


def measure_all_reduce(*, ranks: int) -> dict[int, float]:
    """Return the median seconds of an all-reduce of float32 numbers, by size in bytes.

    Raises:
        MissingDependency: torch is not installed.
        RunError: a measuring process died or timed out.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(f"measuring an all-reduce needs torch; run: {install_command('train')}")
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        group = [
            stack.enter_context(ProcessPoolExecutor(1, spawn, _join, (rank, ranks, store)))
            for rank in range(ranks)
        ]
        _round(group, _ELEMENTS[0])  # the first round connects the ranks and is not counted
        return {4 * n: statistics.median(_round(group, n) for _ in range(_ROUNDS)) for n in _ELEMENTS}


def _round(group: Sequence[ProcessPoolExecutor], elements: int) -> float:
    """Return the seconds per all-reduce on the slowest rank."""
    try:
        return max(one.result(_PATIENCE_S) for one in [rank.submit(_reduce, elements) for rank in group])
    except (BrokenExecutor, TimeoutError):
        raise RunError(
            "a process that measures the all-reduce ended; run: shardkit tune --no-reduce"
        ) from None


# ---- Run in the process of a rank, which imports torch after setting the environment


def _join(rank: int, ranks: int, path: str) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":  # other systems have another name for the loopback device
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(path, ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_MEETING)


def _reduce(elements: int) -> float:
    import torch
    import torch.distributed as dist

    gradient, count = torch.ones(elements), max(5, _ROUND_ELEMENTS // elements)
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(gradient)
    return (time.perf_counter() - begun) / count
