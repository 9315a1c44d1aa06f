"""Describe the machine and the versions that figures depend on."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from shardkit.extras import installed

_PACKAGES = ("shardkit", "torch", "torchvision", "numpy", "pyarrow", "zstandard", "pillow")


def machine_facts() -> dict[str, Any]:
    """Return the date, machine and versions that the figures depend on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "processor": _processor(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": installed(_PACKAGES),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
