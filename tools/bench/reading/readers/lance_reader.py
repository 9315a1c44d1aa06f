"""Lance: map-style with batched random take under DataLoader, fixed-size lists for arrays; no resume of its own."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any

import numpy as np


def schema(workload: Any) -> Any:
    """Return the Arrow schema of a workload: fixed-size lists for arrays."""
    import pyarrow as pa

    kinds = {"": pa.large_binary(), "str": pa.large_string()}
    kind = kinds.get(workload.dtype) or pa.list_(
        pa.from_numpy_dtype(np.dtype(workload.dtype)), workload.shape[0]
    )
    return pa.schema([(workload.field, kind)] + ([("label", pa.int64())] if workload.label else []))


def batches(workload: Any, scale: float, kinds: Any) -> Any:
    """Yield the samples in record batches of 1,000."""
    import pyarrow as pa

    rows: list[Any] = []
    for sample in workload.samples(scale):
        rows.append(sample)
        if len(rows) == 1000:
            yield pa.RecordBatch.from_pylist(rows, kinds)
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, kinds)


def build(workload: Any, scale: float, directory: str) -> None:
    import lance

    kinds = schema(workload)
    lance.write_dataset(batches(workload, scale, kinds), directory, schema=kinds)


class _Rows:
    def __init__(self, workload: Any, directory: str) -> None:
        import lance

        self.data, self.workload = lance.dataset(directory), workload
        self.count = self.data.count_rows()

    def __len__(self) -> int:
        return int(self.count)

    def __getitems__(self, indices: list[int]) -> Any:
        column = self.data.take(indices, columns=[self.workload.field]).column(0).combine_chunks()
        if self.workload.shape:
            return column.flatten().to_numpy().reshape(len(indices), -1)
        return column.to_pylist()


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int) -> None:
        from torch.utils.data import DataLoader

        rows: Any = _Rows(workload, directory)
        context = "spawn" if workers else None
        self.epoch = lambda: iter(DataLoader(rows, batch_size=workload.batch, shuffle=True, num_workers=workers,
                                             collate_fn=_same, multiprocessing_context=context))  # fmt: skip


def _same(batch: Any) -> Any:
    return batch


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(workload, directory, workers)
