"""LitData: optimize() into 64 MB chunks, StreamingDataset and StreamingDataLoader, shuffle on."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any


def build(workload: Any, scale: float, directory: str) -> None:
    from pathlib import Path

    from litdata.streaming.writer import BinaryWriter

    Path(directory).mkdir(parents=True)
    writer = BinaryWriter(directory, chunk_bytes="64MB", compression="zstd" if workload.compressed else None)
    for number, sample in enumerate(workload.samples(scale)):
        writer.add_item(number, sample)
    writer.done()
    writer.merge()


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int) -> None:
        from litdata import StreamingDataLoader, StreamingDataset

        self.field = workload.field
        self.loader = StreamingDataLoader(
            StreamingDataset(directory, shuffle=True), batch_size=workload.batch, num_workers=workers
        )

    def epoch(self) -> Any:
        return (batch[self.field] for batch in self.loader)


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(workload, directory, workers)
