"""Write the workloads of the reading benchmark as shardkit datasets."""

from __future__ import annotations

import os
from typing import Any

import shardkit
from bench.reading.workloads import Workload


def write_dataset(
    workload: Workload, scale: float, root: str | os.PathLike[str], **settings: Any
) -> shardkit.Dataset:
    """Write a workload: Arrow shards, tar for blobs, zstd for text; pass ``settings`` to `shardkit.create`."""
    kind = {"": "bytes", "str": "str"}.get(workload.dtype)
    kind = kind or f"{workload.dtype}[{','.join(map(str, workload.shape))}]"
    schema = {workload.field: kind} | ({"label": "int64"} if workload.label else {})
    form: Any = "arrow" if workload.shape or workload.compressed else "tar"
    with shardkit.create(root, schema, format=form, compression="zstd" if workload.compressed else "none",
                         **settings) as writer:  # fmt: skip
        for sample in workload.samples(scale):
            writer.add(sample)
    return shardkit.open(root)
