"""FFCV: one .beton file, random order, kept in the page cache, as many threads as processors; no checks, no resume.

Building it requires numba, opencv-python-headless and Debian's libopencv-dev, libturbojpeg0-dev and pkg-config.
"""

# mypy: ignore-errors
# the package is optional
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np


def _file(directory: str) -> str:
    return f"{directory}/rows.beton"


class _Samples:
    def __init__(self, workload: Any, scale: float) -> None:
        self.samples, self.workload = list(workload.samples(scale)), workload

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        sample = self.samples[number]
        value = sample[self.workload.field]
        value = value if self.workload.shape else np.frombuffer(value, np.uint8)
        return (value, sample["label"]) if self.workload.label else (value,)


def build(workload: Any, scale: float, directory: str) -> None:
    from ffcv.fields import BytesField, IntField, NDArrayField
    from ffcv.writer import DatasetWriter

    if workload.dtype == "str":
        raise NotImplementedError("FFCV has no field of text")
    Path(directory).mkdir(parents=True)
    kind = NDArrayField(np.dtype(workload.dtype), workload.shape) if workload.shape else BytesField()
    fields = {workload.field: kind} | ({"label": IntField()} if workload.label else {})
    DatasetWriter(_file(directory), fields, num_workers=1).from_indexed_dataset(_Samples(workload, scale))


class _Reader:
    def __init__(self, workload: Any, directory: str) -> None:
        from ffcv.fields.decoders import BytesDecoder, IntDecoder, NDArrayDecoder
        from ffcv.loader import Loader, OrderOption

        pipelines = {workload.field: [NDArrayDecoder() if workload.shape else BytesDecoder()]}
        if workload.label:
            pipelines["label"] = [IntDecoder()]
        self.loader = Loader(
            _file(directory), batch_size=workload.batch, num_workers=os.cpu_count(), order=OrderOption.RANDOM,
            os_cache=True, drop_last=True, pipelines=pipelines,
        )  # fmt: skip

    def epoch(self) -> Any:
        return (batch[0] for batch in self.loader)


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    """Open the reader of a built workload."""
    return _Reader(workload, directory)
