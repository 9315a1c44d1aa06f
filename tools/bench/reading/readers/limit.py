"""The limit of a workload: the same samples, nothing checked."""

from __future__ import annotations

import itertools
from typing import Any

from bench.reading.workloads import open_limit
from bench.reading.workloads import write_rows as build

__all__ = ["build", "open_reader"]


class _Reader:
    def __init__(self, workload: Any, directory: str) -> None:
        self.make, self.epochs = open_limit(workload, directory), itertools.count()

    def epoch(self) -> Any:
        return self.make(next(self.epochs))


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(workload, directory)
