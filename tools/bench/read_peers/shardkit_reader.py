"""shardkit, defaults: arrow shards, tar for blobs, zstd for text; one process, or a DataLoader with workers."""

from __future__ import annotations

from typing import Any

import shardkit


class _Reader:
    def __init__(self, ds: Any, workload: Any, workers: int, **plan: Any) -> None:
        self.plan = ds.plan(global_batch=workload.batch, **plan)
        self.ds, self.field, self.workers = ds, workload.field, workers
        self.loader = None if workers else ds.loader(self.plan, tensors=False)

    def epoch(self) -> Any:
        return (
            batch[self.field] for batch in (self.loader if self.loader is not None else self._workers(None))
        )

    def resume(self) -> Any:
        step = self.plan.loop_steps // 2
        if self.workers:
            return (batch[self.field] for batch in self._workers(step))
        loader = self.ds.loader(self.plan, tensors=False)
        loader.seek(step)
        return (batch[self.field] for batch in loader)

    def _workers(self, step: int | None) -> Any:
        from torch.utils.data import DataLoader

        import shardkit.torch

        data = shardkit.torch.dataset(self.ds, self.plan)
        if step is not None:
            data.load_state_dict({**data.state_dict(), "step": step})
        return DataLoader(data, batch_size=None, num_workers=self.workers)


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
