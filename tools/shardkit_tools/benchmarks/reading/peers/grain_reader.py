"""Grain: ArrayRecord (group_size 1), global shuffle, parse, batch, 16 read threads; checkpointable iterators."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any

import numpy as np

TORCH = False


def build(workload: Any, scale: float, directory: str) -> None:
    from pathlib import Path

    from array_record.python.array_record_module import ArrayRecordWriter

    Path(directory).mkdir(parents=True)
    writer = ArrayRecordWriter(
        f"{directory}/data.array_record",
        "group_size:1,zstd:3" if workload.compressed else "group_size:1,uncompressed",
    )
    for sample in workload.samples(scale):
        value = sample[workload.field]
        data = (
            value.encode()
            if isinstance(value, str)
            else value
            if isinstance(value, bytes)
            else value.tobytes()
        )
        writer.write((sample["label"].to_bytes(4, "little") if workload.label else b"") + data)
    writer.close()


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int) -> None:
        import grain.python as grain

        head = 4 if workload.label else 0

        def parse(data: bytes) -> Any:
            if workload.shape:
                return np.frombuffer(data, workload.dtype, offset=head)
            return data[head:].decode() if workload.dtype == "str" else data[head:]

        source: Any = grain.ArrayRecordDataSource(f"{directory}/data.array_record")
        stack = np.stack if workload.shape else list
        data = (
            grain.MapDataset.source(source).shuffle(seed=0).map(parse).batch(workload.batch, batch_fn=stack)
        )
        data = data.to_iter_dataset(grain.ReadOptions(num_threads=16, prefetch_buffer_size=16))
        if workers:
            data = data.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        self.data = data

    def epoch(self) -> Any:
        return iter(self.data)

    def position(self, steps: Any) -> Any:
        batches = iter(self.data)
        for _ in steps:
            next(batches)
        return batches.get_state()

    def resume(self, position: Any) -> Any:
        batches = iter(self.data)
        batches.set_state(position)
        return batches


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(workload, directory, workers)
