"""All benchmarks of `shardkit bench`, one after the other, at one scale; and on what machine they ran."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.errors import ShardkitError, UsageError
from shardkit_tools.benchmarks.contests import build_contest, plan_contest, read_contest
from shardkit_tools.benchmarks.reducing import reduce_contest
from shardkit_tools.benchmarks.results import Ratio, Result, ratios_of
from shardkit_tools.benchmarks.rounds import Contest, hold
from shardkit_tools.benchmarks.workloads import WORKLOADS

PARTS = ("read", "build", "plan", "reduce")
"""Of the suite."""

SCALE = 0.02
"""Share of the stated sizes that `shardkit bench` works on by default."""

_ELEMENTS = (1 << 16, 1 << 20)
Told = Callable[[str], None]


def measure(
    parts: Sequence[str],
    *,
    scale: float = SCALE,
    repeats: int = 5,
    scratch: str | None = None,
    told: Told = lambda text: None,
) -> Result:
    """Run benchmarks.

    Args:
        parts: of `PARTS`.
        scale: share of the stated sizes (200,000 token rows, 1.6 GB to build, 10⁷ rows to plan).
        repeats: rounds of each.
        scratch: folder on the disk to be measured; by default that of temporary files.
        told: called with what is going on.

    Raises:
        UsageError: the folder cannot be used.
    """
    load = os.getloadavg()[0]
    ratios: list[Ratio] = []
    failures: dict[str, str] = {}
    rates: dict[str, Any] = {}
    with _scratch(scratch) as folder:
        for name, making in _contests(parts, scale, Path(folder)):
            told(f"{name}: making data")
            try:  # what cannot be measured here is noted, and the others go on
                with making() as contest:
                    held = hold(contest, repeats, told)
            except (ShardkitError, OSError) as error:
                failures[name] = str(error)
            else:
                ratios += ratios_of(held)
                rates[held.name] = dict(held.rounds)
                failures |= {f"{held.name}: {entry}": text for entry, text in held.failures.items()}
            for left in Path(folder).iterdir():  # the data of one contest at a time
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink()
    facts: dict[str, Any] = {
        **machine_facts(),
        "parts": list(parts),
        "scale": scale,
        "repeats": repeats,
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
    }
    return Result(facts, tuple(ratios), failures, rates)


Making = Callable[[], AbstractContextManager[Contest]]


def _contests(parts: Sequence[str], scale: float, scratch: Path) -> list[tuple[str, Making]]:
    """Names and contests; one begins when its context is entered."""
    found: dict[str, list[tuple[str, Making]]] = {
        "read": [
            (f"read {name}", partial(read_contest, workload, scale, scratch / name))
            for name, workload in WORKLOADS.items()
        ],
        "build": [("build tokens", partial(build_contest, scale, scratch))],
        "plan": [("plan resume", partial(plan_contest, scale))],
        "reduce": [(f"reduce {elements:,}", partial(reduce_contest, elements)) for elements in _ELEMENTS],
    }
    return [contest for part in parts for contest in found[part]]


def _scratch(given: str | None) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="shardkit-bench-", dir=given)
    except OSError as error:
        raise UsageError(
            f"--scratch {given}: {error.strerror}; expected a folder on the disk to be measured"
        ) from None


_PACKAGES = ("shardkit", "torch", "numpy", "pyarrow", "zstandard", "mosaicml-streaming", "litdata", "webdataset",
             "datasets", "grain", "array-record", "pylance", "megatron-energon", "spdl", "ffcv", "torchvision",
             "pillow")  # fmt: skip
_PROGRAM = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions(python: str) -> dict[str, str]:
    """Installed versions of what may be measured, in the environment of an interpreter.

    Raises:
        OSError, subprocess.CalledProcessError: it is not a Python interpreter.
    """
    done = subprocess.run([python, "-c", _PROGRAM, *_PACKAGES], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def machine_facts() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "processor": _processor(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions(sys.executable),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
