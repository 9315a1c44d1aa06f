"""Reductions of gradients between ranks over gloo, beside a bare all-reduce of the same numbers."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any

from shardkit.errors import MissingDependency, RunError
from shardkit_tools.benchmarks.results import Contest, Entry, Round

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
_ROUND_ELEMENTS = 1 << 22  # reduced in a round: fewer are over before the clock has seen them


def _begin(*given: Any) -> None:
    """A rank's process begins; torch reads the environment when it is imported."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":  # the loopback device has another name elsewhere
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from shardkit_tools.benchmarks import reduction_ranks

    reduction_ranks.join(*given)


def _reduce(kind: str, count: int) -> tuple[float, float]:
    from shardkit_tools.benchmarks import reduction_ranks

    return reduction_ranks.reduce(kind, count)


def _round(ranks: Sequence[ProcessPoolExecutor], kind: str, count: int, amount: float) -> Round:
    """All ranks reduce ``count`` times; the slowest one's clock, everybody's CPU."""
    try:
        found = [rank.submit(_reduce, kind, count) for rank in ranks]
        seconds, cpu_s = zip(*(one.result(_PATIENCE_S) for one in found), strict=True)
    except (BrokenExecutor, TimeoutError):
        raise RunError(f"reduce {kind}: a rank of the benchmark ended") from None
    return Round(amount, max(seconds), sum(cpu_s))


@contextlib.contextmanager
def reduce_contest(elements: int, *, ranks: int = 2) -> Iterator[Contest]:
    """A contest of reductions of ``elements`` float32 numbers; its ranks run while the context lasts.

    Args:
        elements: of the gradient.
        ranks: processes.

    Raises:
        MissingDependency: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency('the reduce benchmark needs torch; run: pip install "shardkit[train]"')
    count = max(5, _ROUND_ELEMENTS // elements)
    with tempfile.TemporaryDirectory(prefix="reduce-bench-") as folder, contextlib.ExitStack() as stack:
        store, spawn = os.path.join(folder, "store"), multiprocessing.get_context("spawn")
        group = [
            stack.enter_context(ProcessPoolExecutor(1, spawn, _begin, (rank, ranks, store, elements)))
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
