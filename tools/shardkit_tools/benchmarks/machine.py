"""On what a benchmark ran: facts that belong beside every figure."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["machine_facts", "versions"]

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
