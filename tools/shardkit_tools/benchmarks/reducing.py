"""Reductions of gradients between ranks over gloo, beside a bare all-reduce of the same numbers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

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


class _Ranks:
    """Processes on this machine that reduce when told to."""

    def __init__(self, ranks: int, elements: int, folder: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if sys.platform == "linux":  # the loopback device has another name elsewhere
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "shardkit_tools.benchmarks.reduction_ranks", str(rank), str(ranks),
                 os.path.join(folder, "store"), str(elements)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def run(self, kind: str, count: int, amount: float) -> Round:
        """All ranks reduce ``count`` times; the slowest one's clock, everybody's CPU."""
        timer = threading.Timer(_PATIENCE_S, self.end)
        timer.start()
        pipes = [(one.stdin, one.stdout) for one in self._processes]
        try:
            for told, _ in pipes:
                assert told is not None, "ranks are told by pipes"
                told.write(f"{kind} {count}\n")
                told.flush()
            answers = [json.loads(said.readline()) for _, said in pipes if said is not None]
        except (OSError, ValueError):
            raise RunError(f"reduce {kind}: a rank of the benchmark ended") from None
        finally:
            timer.cancel()
        return Round(amount, max(a["seconds"] for a in answers), sum(a["cpu_s"] for a in answers))

    def end(self) -> None:
        """Kill them; they hold nothing."""
        for process in self._processes:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Kill them and let go of the pipes."""
        self.end()
        for process in self._processes:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


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
