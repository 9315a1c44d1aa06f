"""shardkit, defaults: arrow shards, tar for blobs, zstd for text; one process, or a DataLoader with workers."""

from __future__ import annotations

from typing import Any

import numpy as np

import shardkit
from shardkit.formats import reading
from shardkit.loader import block_loading
from shardkit.storage.open_files import open_files

TORCH = False
_verify_block, _read_together = reading.verify_block, block_loading.read_together


class _Reader:
    def __init__(self, ds: Any, workload: Any, workers: int, **plan: Any) -> None:
        self.plan = ds.plan(global_batch=workload.batch, **plan)
        self.ds, self.field, self.workers = ds, workload.field, workers
        self.loader = None if workers else ds.loader(self.plan, tensors=False)

    def epoch(self) -> Any:
        return (
            batch[self.field] for batch in (self.loader if self.loader is not None else self._workers(None))
        )

    def position(self, steps: Any) -> int:
        return int(self.plan.loop_steps // 2)

    def resume(self, position: int) -> Any:
        if self.workers:
            return (batch[self.field] for batch in self._workers(position))
        loader = self.ds.loader(self.plan, tensors=False)
        loader.seek(position)
        return (batch[self.field] for batch in loader)

    def verify(self, on: bool) -> None:
        """Read without verifying: in this process, for this comparison. The product has no such switch."""
        reading.verify_block = _verify_block if on else _trust
        block_loading.read_together = _read_together if on else _read_trustingly
        if self.loader is not None:
            self.loader.seek(self.loader.handed_out)  # nor was anything of the next epoch read the other way

    def _workers(self, step: int | None) -> Any:
        from torch.utils.data import DataLoader

        import shardkit.torch

        data = shardkit.torch.dataset(self.ds, self.plan)
        if step is not None:
            data.load_state_dict({**data.state_dict(), "step": step})
        return DataLoader(data, batch_size=None, num_workers=self.workers)


def _trust(stored: Any, index: Any, block: int, *, verify: Any = "fast") -> None:
    """Stands in for `verify_block` where its cost is measured."""


def _read_trustingly(blocks: Any, memory: Any) -> list[Any]:
    """Stands in for `read_together`."""
    found: list[np.ndarray[Any, Any]] = [memory.take(block.size) for block in blocks]
    for block, into in zip(blocks, found, strict=True):
        open_files.read(block.path, block.file_size, block.offset, into.data)
    return [*found]


def build(workload: Any, scale: float, directory: str) -> None:
    kind = {"": "bytes", "str": "str"}.get(
        workload.dtype
    ) or f"{workload.dtype}[{','.join(map(str, workload.shape))}]"
    schema = {workload.field: kind} | ({"label": "int64"} if workload.label else {})
    with shardkit.create(directory, schema=schema, format="tar" if workload.name == "blobs" else "arrow",
                         compression="zstd" if workload.compressed else "none") as writer:  # fmt: skip
        for sample in workload.samples(scale):
            writer.add(sample)


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(shardkit.open(directory), workload, workers)
