"""MosaicML Streaming, local directory or bucket, py1e shuffle (its default), StreamingDataLoader."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any


def build(workload: Any, scale: float, directory: str) -> None:
    from streaming import MDSWriter

    kind = {"": "bytes", "str": "str"}.get(
        workload.dtype
    ) or f"ndarray:{workload.dtype}:{','.join(map(str, workload.shape))}"
    columns = {workload.field: kind} | ({"label": "int"} if workload.label else {})
    with MDSWriter(
        out=directory, columns=columns, compression="zstd" if workload.compressed else None
    ) as writer:
        for sample in workload.samples(scale):
            writer.write(sample)


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int, cache: str | None) -> None:
        from streaming import StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        where = {"local": cache, "remote": directory} if cache else {"local": directory}
        data = StreamingDataset(**where, shuffle=True, batch_size=workload.batch)
        for stream in data.streams if cache else []:
            # forked workers would share the connection of its S3 client, and mix their answers
            stream._downloader.clean_up()  # noqa: SLF001
        self.loader = StreamingDataLoader(data, batch_size=workload.batch, num_workers=workers)
        self.field = workload.field

    def epoch(self) -> Any:
        return (batch[self.field] for batch in self.loader)


def open_reader(
    workload: Any, scale: float, directory: str, workers: int, cache: str | None = None
) -> _Reader:
    return _Reader(workload, directory, workers, cache)
