"""Which kernels a machine has: what golden hashes of floating-point work are kept by."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["kernels"]


def kernels() -> str:
    """The torch release, the architecture and the processor's maker.

    With instruction sets switched off (tests/golden/portable_kernels.json) all processors of one maker compute alike.
    Those of two do not: MKL promises equal bits among Intel's only.
    """
    import torch

    return f"torch {torch.__version__}, {platform.machine()}, {_maker()}"


def _maker() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
