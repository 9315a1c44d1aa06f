"""A typical hand-written loader: memory-mapped array, random permutation, one gather per batch, DataLoader.

Rows of variable size are one file and an array of offsets. It neither verifies nor resumes.
"""

from __future__ import annotations

from typing import Any

from bench.reading.workloads import Rows as _Rows
from bench.reading.workloads import write_rows as build

__all__ = ["Rows", "build", "open_reader"]


class Rows(_Rows):
    """A map-style dataset over the rows of the file, with their labels if the workload has labels."""

    def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
        labels = self.labels[indices] if self.workload.label else None
        if self.workload.shape:
            return self.table[indices], labels
        parts = (self.value(index) for index in indices)
        return [str(part, "utf-8") for part in parts] if self.workload.dtype == "str" else list(
            map(bytes, parts)
        ), labels


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int) -> None:
        from torch.utils.data import DataLoader

        rows: Any = Rows(workload, directory)
        self.epoch = lambda: (
            values
            for values, _ in DataLoader(
                rows, batch_size=workload.batch, shuffle=True, num_workers=workers, collate_fn=_same
            )
        )


def _same(batch: Any) -> Any:
    return batch


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(workload, directory, workers)
