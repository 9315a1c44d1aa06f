"""LitData: optimize() into 64 MB chunks, StreamingDataset and StreamingDataLoader, shuffle on."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

import os
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


class _Bytes:
    """Collates samples of bytes, which LitData delivers as views that torch's collation takes for sequences."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, list[bytes]]:
        return {self.field: [bytes(row[self.field]) for row in rows]}


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int, cache: str | None) -> None:
        from litdata import StreamingDataLoader, StreamingDataset
        from litdata.streaming import downloader

        self.field = workload.field
        remote: dict[str, Any] = {}
        if cache:
            remote = {"cache_dir": cache, "storage_options": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}
            # its faster client refuses plain HTTP, and no public option allows it
            downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001
        data = StreamingDataset(directory, shuffle=True, **remote)
        collate = {"collate_fn": _Bytes(workload.field)} if workload.dtype == "" else {}
        self.loader = StreamingDataLoader(data, batch_size=workload.batch, num_workers=workers, **collate)

    def epoch(self) -> Any:
        return (batch[self.field] for batch in self.loader)


def open_reader(
    workload: Any, scale: float, directory: str, workers: int, cache: str | None = None
) -> _Reader:
    return _Reader(workload, directory, workers, cache)
