"""Readers, each in a process of its own, told what to do over a pipe (`worker`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from shardkit_tools.benchmarks.reading.workloads import Workload

__all__ = ["OWN", "PEERS", "PEER_NAMES", "SHARES_DATA", "THREADS_ONLY", "Reader", "build_data", "spread"]

OWN = ("shardkit_reader", "shardkit_compact")
"""Readers that are shardkit."""

PEER_NAMES = {
    "memmap": "memory map + gather",
    "mosaicml": "MosaicML Streaming",
    "litdata_reader": "LitData",
    "webdataset_reader": "webdataset",
    "hf_map": "HF datasets, map",
    "hf_iterable": "HF datasets, iterable",
    "grain_reader": "Grain + ArrayRecord",
    "lance_reader": "Lance",
    "energon": "Energon",
    "spdl_reader": "SPDL over a memory map",
    "ffcv_reader": "FFCV",
}
"""Module of a peer → what tables call it."""

PEERS = tuple(PEER_NAMES)
"""Modules of the peers."""

SHARES_DATA = {"shardkit_compact": "shardkit_reader", "hf_iterable": "hf_map", "spdl_reader": "memmap"}
"""Readers that read what another one has built."""
THREADS_ONLY = frozenset({"spdl_reader", "ffcv_reader"})
"""Readers without worker processes."""
_PATIENCE_S = 240.0  # some readers hang
_BUILD_PATIENCE_S = 1800.0
_WORKER = Path(__file__).with_name("worker.py")


class Reader:
    """One reader's process; a context manager that ends it.

    Args:
        name: module of `peers`.
        workload: what is read.
        scale: share of its stated rows.
        directory: the readers' data lie below it.
        workers: processes that the reader itself starts.
        python: interpreter that has the reader's packages.
    """

    def __init__(
        self, name: str, workload: Workload, scale: float, directory: Path, workers: int, python: str
    ) -> None:
        self.name, self.workers = name, workers
        data = directory / SHARES_DATA.get(name, name)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        if os.path.abspath(python) != os.path.abspath(
            sys.executable
        ):  # two environments may share one binary
            environment.pop("PYTHONPATH", None)  # it leads to our packages
        # an installed package is compiled once; one that runs from its source tree would be at every start
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process = subprocess.Popen(
            [python, str(_WORKER), name, workload.name, str(scale), str(data), str(workers)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
            start_new_session=True,  # with the processes that it starts, and may leave behind, it is ended as a group
        )  # fmt: skip

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def ask(self, command: str) -> dict[str, Any]:
        """One answer; {"error": …} where the process failed or took longer than anybody would wait."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(_BUILD_PATIENCE_S if command == "build" else _PATIENCE_S, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            return dict(json.loads(line)) if line else {"error": "the process ended"}
        except (OSError, ValueError) as error:
            return {"error": str(error)}
        finally:
            timer.cancel()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process and all that it has started: what some readers leave running never ends by itself."""
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def build_data(
    workload: Workload,
    scale: float,
    scratch: Path,
    pythons: Mapping[str, str],
    told: Callable[[str], None] = print,
    jobs: int = 1,
) -> dict[str, str]:
    """Make every reader's data.

    Args:
        workload: what is read.
        scale: share of its stated rows.
        scratch: the data lie below it.
        pythons: reader → interpreter.
        told: called with a line per reader, on any thread.
        jobs: how many are made at a time.

    Returns:
        Reader → why its data could not be made.
    """

    def one(name: str) -> tuple[str, dict[str, Any]]:
        with Reader(name, workload, scale, scratch, 0, pythons[name]) as builder:
            answer = builder.ask("build")
        told(f"  built {name}: {answer}")
        return name, answer

    with ThreadPoolExecutor(jobs) as pool:
        answers = dict(pool.map(one, (name for name in pythons if name not in SHARES_DATA)))
    return {name: answer["error"] for name, answer in answers.items() if "error" in answer}


def spread(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median, lowest and highest rate of some epochs, and what they cost."""
    good = [a for a in answers if "error" not in a and a.get("samples")]
    if not good:
        return {"error": answers[0].get("error", "no samples") if answers else "not run"}
    rates = [a["samples"] / a["seconds"] for a in good]
    return {
        "median": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "cpu_us_per_sample": statistics.median(a["cpu_s"] / a["samples"] for a in good) * 1e6,
        "samples": good[0]["samples"],
        "whole": all(a.get("whole", True) for a in good),
        "peak_rss": max(a.get("peak_rss", 0) for a in good),
    }
