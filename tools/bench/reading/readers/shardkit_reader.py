"""shardkit with default settings or a memory bound, in one process or in a DataLoader with workers."""

from __future__ import annotations

from typing import Any

import shardkit
from shardkit.errors import ConfigurationError

__all__ = ["build", "open_reader"]

_SMALLER: tuple[dict[str, int], ...] = ({}, {"window_blocks": 8}, {"window_blocks": 4},
                                        *({"window_blocks": 4, "lanes": lanes} for lanes in (16, 4, 1)),
                                        {"window_blocks": 1, "lanes": 1})  # fmt: skip
"""Settings of plans whose windows need less and less, for data that are too few for the default ones."""


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int, memory: int | None) -> None:
        self.ds, self.field = shardkit.open(directory), workload.field
        for settings in _SMALLER:
            self.plan = self.ds.plan(global_batch=workload.batch, **settings)
            try:
                self.loader = self.ds.loader(self.plan, memory=memory, tensors=False)
                break
            except ConfigurationError:  # the bound is below what these windows need
                if settings == _SMALLER[-1]:
                    raise
        self.facts = {"lanes": self.plan.lanes, "smaller": settings, "memory": memory}

        self.batches: Any = self._workers(workers) if workers else self.loader

    def epoch(self) -> Any:
        return (batch[self.field] for batch in self.batches)

    def _workers(self, count: int) -> Any:
        import shardkit.torch

        return shardkit.torch.DataLoader(shardkit.torch.dataset(self.ds, self.plan), num_workers=count)


def build(workload: Any, scale: float, directory: str) -> None:
    """Write the dataset; import the writing code here, so that reading processes do not load it."""
    from bench.datasets import write_dataset

    write_dataset(workload, scale, directory)


def open_reader(
    workload: Any, scale: float, directory: str, workers: int, memory: int | None = None
) -> _Reader:
    return _Reader(workload, directory, workers, memory)
