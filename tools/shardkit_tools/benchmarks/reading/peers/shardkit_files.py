"""shardkit where the data do not fit into memory: files are read, verified and decompressed in every epoch."""

from __future__ import annotations

from typing import Any

import shardkit
from shardkit.loader import machinery

from .shardkit_reader import TORCH, _Reader, build

__all__ = ["TORCH", "build", "open_reader"]


class _Files(_Reader):
    def epoch(self) -> Any:
        opened = None if self.loader is None else self.loader.machinery
        if opened is not None:  # as if other blocks had needed the room since; what is read ahead stays
            room, opened.window.budget = opened.window.budget, 0
            opened.window.budget = room
        return super().epoch()


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    """The reader of a workload that was built; it sees a machine without memory for copies."""
    vars(machinery)["available_memory"] = lambda: 0
    return _Files(shardkit.open(directory), workload, workers)
