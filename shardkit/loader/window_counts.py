"""Counters of a window of blocks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WindowCounts"]


@dataclass(slots=True)
class WindowCounts:
    """Counters of one window; plain numbers, read without a lock."""

    block_loads: int = 0
    block_reloads: int = 0  # blocks loaded again because they were evicted earlier in the epoch
    block_uses: int = 0
    bytes_loaded: int = 0
    evictions: int = 0
    load_s: float = 0.0  # seconds, summed over threads
    peak_bytes: int = 0
