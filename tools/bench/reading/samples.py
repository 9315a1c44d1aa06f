"""Find workloads and the modes of reading a batch; runs in peers' environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.reading.workloads import PICTURES, WORKLOADS, Workload, touch

__all__ = ["MODES", "find"]


def find(name: str) -> Workload:
    return PICTURES if name == PICTURES.name else WORKLOADS[name]


def _count(value: Any) -> int:
    return value if isinstance(value, int) else len(value)


def _read_once(value: Any) -> int:
    """Read every byte as cheaply as can be."""
    if isinstance(value, int):
        return value
    if not isinstance(value, (list, tuple)):
        _sum(value)
    elif isinstance(value[0], str):
        "".join(value)
    else:
        for one in value:
            _sum(one)
    return len(value)


def _sum(value: Any) -> None:
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = np.frombuffer(value, np.uint8)
    else:
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    data[: len(data) // 8 * 8].view(np.int64).sum()


MODES: dict[str, Callable[[Any], int]] = {"delivered": _count, "touched": touch, "read": _read_once}
"""Mode → function that reads a batch (nothing, first values, every byte) and returns its number of samples."""
