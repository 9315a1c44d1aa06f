"""SPDL over a memory map: indices, a batched gather on two threads, three batches ahead; no resume."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any

import numpy as np

from .memmap import Rows, build

__all__ = ["TORCH", "build", "open_reader"]
TORCH = False
"""Whether it hands out tensors."""


class _Reader:
    def __init__(self, workload: Any, directory: str) -> None:
        self.rows, self.batch = Rows(workload, directory), workload.batch
        self.epochs = 0

    def epoch(self) -> Any:
        from spdl.pipeline import PipelineBuilder

        order = np.random.default_rng(self.epochs).permutation(len(self.rows))
        self.epochs += 1
        steps = range(0, len(order) - self.batch + 1, self.batch)
        pipeline = (
            PipelineBuilder()
            .add_source(order[first : first + self.batch] for first in steps)
            .pipe(self.rows.__getitems__, concurrency=2, output_order="input")
            .add_sink(3)
            .build(num_threads=2)
        )
        with pipeline.auto_stop():
            yield from pipeline


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    """The reader of a workload that was built."""
    return _Reader(workload, directory)
