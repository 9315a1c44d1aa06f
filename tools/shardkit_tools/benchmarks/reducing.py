"""Reductions of gradients between ranks over gloo, beside a bare all-reduce of the same numbers."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from shardkit.errors import MissingDependency, RunError
from shardkit_tools.benchmarks.rounds import Contest, Entry, Round

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


def _work(connection: Connection, rank: int, ranks: int, store: str, elements: int) -> None:
    """The life of a rank; torch reads the environment when it is imported."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":  # the loopback device has another name elsewhere
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from shardkit_tools.benchmarks import reduction_ranks

    reduction_ranks.serve(connection, rank, ranks, store, elements)


class _Ranks:
    """Processes on this machine that reduce when told to."""

    def __init__(self, ranks: int, elements: int, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ranks: list[tuple[SpawnProcess, Connection]] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            given = (theirs, rank, ranks, os.path.join(folder, "store"), elements)
            process = context.Process(target=_work, args=given, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def run(self, kind: str, count: int, amount: float) -> Round:
        """All ranks reduce ``count`` times; the slowest one's clock, everybody's CPU."""
        try:
            for _, connection in self._ranks:
                connection.send((kind, count))
            if not all(connection.poll(_PATIENCE_S) for _, connection in self._ranks):
                raise TimeoutError
            seconds, cpu_s = zip(*(connection.recv() for _, connection in self._ranks), strict=True)
        except (EOFError, OSError):
            raise RunError(f"reduce {kind}: a rank of the benchmark ended") from None
        return Round(amount, max(seconds), sum(cpu_s))

    def close(self) -> None:
        """Kill them; they hold nothing."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()


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
    with tempfile.TemporaryDirectory(prefix="reduce-bench-") as folder:
        group = _Ranks(ranks, elements, folder)

        def reducing(kind: str) -> Callable[[], Round]:
            return lambda: group.run(kind, count, 4.0 * elements * count)

        try:
            yield Contest(
                f"reduce {elements:,}",
                {"elements": elements, "ranks": ranks},
                [
                    Entry("bare all-reduce, fp32", "limit", reducing(LIMIT)),
                    *(Entry(label, "shardkit", reducing(kind)) for kind, label in REDUCTIONS.items()),
                ],
            )
        finally:
            group.close()
