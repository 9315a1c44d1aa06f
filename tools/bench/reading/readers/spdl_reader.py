"""SPDL over a memory map: indices, a batched gather on two threads, three batches ahead; no resume."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any

from .memmap import Rows, build

__all__ = ["build", "open_reader"]


class _Reader:
    def __init__(self, workload: Any, directory: str) -> None:
        self.rows, self.epochs = Rows(workload, directory), 0

    def epoch(self) -> Any:
        from spdl.pipeline import PipelineBuilder

        self.epochs += 1
        pipeline = (
            PipelineBuilder()
            .add_source(self.rows.batches(self.epochs))
            .pipe(self.rows.__getitems__, concurrency=2, output_order="input")
            .add_sink(3)
            .build(num_threads=2)
        )
        with pipeline.auto_stop():
            yield from (values for values, _ in pipeline)


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(workload, directory)
