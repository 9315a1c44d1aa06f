"""shardkit with few lanes and small windows, for one process: the window stays near the cache."""

from __future__ import annotations

from typing import Any

import shardkit

from .shardkit_reader import TORCH, _Reader, build

__all__ = ["TORCH", "build", "open_reader"]


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    """The reader of a workload that was built."""
    return _Reader(shardkit.open(directory), workload, workers, lanes=4, window_blocks=8)
