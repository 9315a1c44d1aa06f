"""Readers, each in a process of its own, told what to do over a pipe (`worker`)."""

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

__all__ = ["PEERS", "SHARES_DATA", "THREADS_ONLY", "Job", "Reader", "build_data"]

PEERS = {
    "memmap": "memory map + gather under DataLoader (cannot resume)",
    "mosaicml": "MosaicML Streaming",
    "litdata_reader": "LitData",
    "webdataset_reader": "webdataset (cannot resume)",
    "hf_map": "HF datasets, map (cannot resume)",
    "hf_iterable": "HF datasets, iterable",
    "grain_reader": "Grain + ArrayRecord",
    "lance_reader": "Lance (cannot resume)",
    "energon": "Energon",
    "spdl_reader": "SPDL over a memory map (cannot resume)",
    "ffcv_reader": "FFCV (cannot resume)",
}
"""Module of a peer → its name in tables. Only ArrayRecord compares checksums as it reads."""

SHARES_DATA = {
    "limit": "memmap",
    "private_blocks": "memmap",
    "hf_iterable": "hf_map",
    "spdl_reader": "memmap",
}
"""Readers that read what another one has built."""

THREADS_ONLY = frozenset({"spdl_reader", "ffcv_reader"})
"""Readers without worker processes."""

_PATIENCE_S = 240.0  # some readers hang
_BUILD_PATIENCE_S = 1800.0
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process is to read.

    Attributes:
        reader: module of `readers`. workload: name.
        scale: share of the workload's stated rows.
        directory: the reader's data.
        workers: processes that the reader itself starts.
        settings: further arguments of its `open_reader`.
        python: interpreter that has its packages.
        environment: added to that of this process.
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
    """One reader's process; a context manager that ends it."""

    def __init__(self, job: Job) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", **job.environment}
        if os.path.abspath(job.python) != os.path.abspath(
            sys.executable
        ):  # environments may share one binary
            environment.pop("PYTHONPATH", None)  # it leads to our packages
        # an installed package is compiled once; one that runs from its source tree would be at every start
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        told = json.dumps({**asdict(job), "environment": {}, "started": time.perf_counter()})
        self._process = subprocess.Popen(
            [job.python, str(_WORKER), told],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
            start_new_session=True,  # with the processes that it starts, and may leave behind, it is ended as a group
        )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        """Kill the process and all that it has started: what some readers leave running never ends by itself."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

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


def build_data(
    jobs: Mapping[str, Job], told: Callable[[str], None] = print, at_once: int = 1
) -> dict[str, str]:
    """Make every reader's data, as many `at_once`; returns reader → why its data could not be made."""

    def one(name: str) -> tuple[str, dict[str, Any]]:
        with Reader(jobs[name]) as builder:
            answer = builder.ask("build")
        told(f"  built {name}: {answer}")
        return name, answer

    with ThreadPoolExecutor(at_once) as pool:
        answers = dict(pool.map(one, jobs))
    return {name: answer["error"] for name, answer in answers.items() if "error" in answer}
