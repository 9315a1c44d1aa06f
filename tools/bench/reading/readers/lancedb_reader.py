"""LanceDB: its StreamingDataset of a table in its StreamingDataLoader, shuffled, and spawned workers; resumes."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any

from .lance_reader import batches, schema


def build(workload: Any, scale: float, directory: str) -> None:
    import lancedb

    kinds = schema(workload)
    lancedb.connect(directory).create_table("rows", batches(workload, scale, kinds), schema=kinds)


class _Collate:
    """Turns the rows of a batch into its values; workers receive it by pickling."""

    def __init__(self, workload: Any) -> None:
        self.field, self.arrays = workload.field, bool(workload.shape)

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        import numpy as np

        values = [row[self.field] for row in rows]
        return np.stack(values) if self.arrays else values


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int) -> None:
        import lancedb
        from lancedb.streaming import StreamingDataLoader, StreamingDataset

        table = lancedb.connect(directory).open_table("rows")
        self.number, context = 0, "spawn" if workers else None

        def make(epoch: int) -> Any:
            data = StreamingDataset(table, num_splits=max(1, workers), epoch=epoch, columns=[workload.field])
            return StreamingDataLoader(
                data, batch_size=workload.batch, num_workers=workers, collate_fn=_Collate(workload),
                multiprocessing_context=context,
            )  # fmt: skip

        self.make = make

    def epoch(self) -> Any:
        self.number += 1
        return iter(self.make(self.number - 1))


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    """Open the reader of a built workload."""
    return _Reader(workload, directory, workers)
