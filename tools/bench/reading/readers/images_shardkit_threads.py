"""shardkit over JPEGs with two threads instead of two processes: Pillow decodes and resizes without the interpreter."""

from __future__ import annotations

from typing import Any

from .images_shardkit import Images, build

__all__ = ["build", "open_reader"]


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> Images:
    """The reader of a workload that was built."""
    return Images(directory, workload.batch, threads=max(1, workers))
