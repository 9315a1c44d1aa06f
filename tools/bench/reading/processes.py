"""Run each reader in its own process, and send it commands over a pipe (`worker`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.interruptions.environments import ENVIRONMENTS

__all__ = ["PEERS", "SHARES_DATA", "THREADS_ONLY", "Job", "Reader", "build_data", "interpreter"]

PEERS = {
    "memmap": "memory map + gather under DataLoader (cannot resume)",
    "mosaicml": "MosaicML Streaming",
    "litdata_reader": "LitData",
    "webdataset_reader": "webdataset (cannot resume)",
    "hf_map": "HF datasets, map (cannot resume)",
    "hf_iterable": "HF datasets, iterable",
    "grain_reader": "Grain + ArrayRecord",
    "lance_reader": "Lance (cannot resume)",
    "lancedb_reader": "LanceDB StreamingDataset",
    "energon": "Energon",
    "spdl_reader": "SPDL over a memory map (cannot resume)",
    "ffcv_reader": "FFCV (cannot resume)",
}
"""Module of a peer → its name in tables. Only ArrayRecord compares checksums as it reads."""

_ENVIRONMENTS = {
    "mosaicml": "mosaicml",
    "litdata_reader": "litdata_streaming",
    "webdataset_reader": "wds_split",
    "hf_map": "hf_map",
    "hf_iterable": "hf_iterable",
    "grain_reader": "grain_dataloader",
    "lance_reader": "lancedb_streaming",
    "lancedb_reader": "lancedb_streaming",
    "energon": "energon",
}
"""Reader → adapter of the interruption benchmark whose environment it can use."""

SHARES_DATA = {
    "limit": "memmap",
    "private_blocks": "memmap",
    "hf_iterable": "hf_map",
    "spdl_reader": "memmap",
}
"""Reader → reader whose data it uses."""

THREADS_ONLY = frozenset({"spdl_reader", "ffcv_reader"})
"""Readers without worker processes."""


def interpreter(peers: str, reader: str) -> str:
    """Return the interpreter of a reader.

    Args:
        peers: an interpreter, or the folder of the environments of tools/bench/interruptions.
    """
    if not os.path.isdir(peers):
        return peers
    name = ENVIRONMENTS[_ENVIRONMENTS[reader]].name if reader in _ENVIRONMENTS else ""
    return os.path.join(peers, name, "bin", "python") if name else sys.executable


_PATIENCE_S = 240.0  # some readers hang
_BUILD_PATIENCE_S = 1800.0
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A reader and the data that it reads.

    Attributes:
        reader: name of a module of `readers`.
        workload: name of a workload.
        scale: share of the workload's full number of rows.
        directory: location of the reader's data.
        workers: number of processes that the reader itself starts.
        settings: further arguments of the reader's `open_reader`.
        python: interpreter that has the reader's packages.
        environment: variables added to the environment of this process.
    """

    reader: str
    workload: str
    scale: float
    directory: str
    workers: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


class Reader(contextlib.AbstractContextManager["Reader"]):
    """A reader's process; the context manager kills it on exit."""

    def __init__(self, job: Job) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", **job.environment}
        if os.path.abspath(job.python) != os.path.abspath(
            sys.executable
        ):  # environments may share one binary
            environment.pop("PYTHONPATH", None)  # it points to our packages
        # without bytecode, a package that runs from its source tree is compiled at every start
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        told = json.dumps({**asdict(job), "environment": {}, "started": time.perf_counter()})
        self._process = subprocess.Popen(
            [job.python, str(_WORKER), told],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
            start_new_session=True,  # so that it is killed together with the processes that it starts
        )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        """Kill the process and its children, because the children of some readers never end by themselves."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def ask(self, command: str) -> dict[str, Any]:
        """Return the answer to a command; {"error": …} if the process fails or exceeds the time limit."""
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


def build_data(
    jobs: Mapping[str, Job], told: Callable[[str], None] = print, at_once: int = 1
) -> dict[str, str]:
    """Build every reader's data, `at_once` in parallel; return reader → why its data could not be built."""

    def one(name: str) -> tuple[str, dict[str, Any]]:
        with Reader(jobs[name]) as builder:
            answer = builder.ask("build")
        told(f"  built {name}: {answer}")
        return name, answer

    with ThreadPoolExecutor(at_once) as pool:
        answers = dict(pool.map(one, jobs))
    return {name: answer["error"] for name, answer in answers.items() if "error" in answer}
