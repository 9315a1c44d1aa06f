"""All benchmarks of `shardkit bench`, one after the other, at one scale; and on what machine they ran."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
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
    gathered = _Gathered(repeats, told)
    with _scratch(scratch) as folder:
        for part in parts:
            for name, contest in _contests(part, scale, Path(folder), told):
                gathered.add(name, contest)
                for left in Path(folder).iterdir():  # the data of one contest at a time
                    _remove(left)
    facts: dict[str, Any] = {
        **machine_facts(),
        "parts": list(parts),
        "scale": scale,
        "repeats": repeats,
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
    }
    return Result(facts, tuple(gathered.ratios), gathered.failures, gathered.rates)


class _Gathered:
    """What has been found so far."""

    def __init__(self, repeats: int, told: Told) -> None:
        self._repeats, self._told = repeats, told
        self.ratios: list[Ratio] = []
        self.failures: dict[str, str] = {}
        self.rates: dict[str, Any] = {}

    def add(self, name: str, making: AbstractContextManager[Contest]) -> None:
        """Hold a contest; what cannot be measured here is noted, and the others go on."""
        try:
            with making as contest:
                held = hold(contest, self._repeats, self._told)
        except (ShardkitError, OSError) as error:
            self.failures[name] = str(error)
            return
        self.ratios += ratios_of(held)
        self.rates[held.name] = dict(held.rounds)
        self.failures |= {f"{held.name}: {entry}": text for entry, text in held.failures.items()}


def _contests(
    part: str, scale: float, scratch: Path, told: Told
) -> Iterator[tuple[str, AbstractContextManager[Contest]]]:
    """Names and contests of a part; a contest begins when its context is entered."""
    if part == "read":
        for name, workload in WORKLOADS.items():
            told(f"read {name}: making data")
            yield f"read {name}", read_contest(workload, scale, scratch / name)
    elif part == "build":
        yield "build tokens", _build(scale, scratch, told)
    elif part == "plan":
        yield "plan resume", contextlib.nullcontext(plan_contest(scale))
    else:
        for elements in _ELEMENTS:
            yield f"reduce {elements:,}", reduce_contest(elements)


@contextlib.contextmanager
def _build(scale: float, scratch: Path, told: Told) -> Iterator[Contest]:
    told("build tokens: making data")
    yield build_contest(scale, scratch)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


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
