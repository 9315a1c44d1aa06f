"""Reading, shuffled, every sample touched: shardkit beside the limit. Peers: tools/bench/read.py."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import shardkit
from shardkit_tools.benchmarks.limits import LIMIT_NAMES, open_limit, write_rows
from shardkit_tools.benchmarks.rounds import Contest, Entry, Round, timed
from shardkit_tools.benchmarks.workloads import Workload, touch

__all__ = ["read_contest", "write_dataset"]


@contextlib.contextmanager
def read_contest(workload: Workload, scale: float, scratch: Path) -> Iterator[Contest]:
    """A contest over one workload; the loader is open while the context lasts.

    Args:
        workload: what is read.
        scale: share of its stated rows.
        scratch: the data lie below it; the caller removes it.
    """
    write_rows(workload, scale, str(scratch / "rows"))
    write_dataset(workload, scale, scratch / "shardkit")
    rows, limit, epochs = workload.rows(scale), open_limit(workload, str(scratch / "rows")), itertools.count()
    ds = shardkit.open(scratch / "shardkit")
    with ds.loader(ds.plan(global_batch=workload.batch), tensors=False) as loader:
        yield Contest(
            f"read {workload.name}",
            {"rows": rows, "batch": workload.batch},
            [
                Entry(LIMIT_NAMES[workload.name], "limit", lambda: _epoch(rows, limit(next(epochs)))),
                Entry("shardkit", "shardkit", lambda: _epoch(rows, (b[workload.field] for b in loader))),
            ],
        )


def _epoch(rows: int, values: Iterable[Any]) -> Round:
    def work() -> None:
        for value in values:
            touch(value)

    return timed(rows, work)


def write_dataset(
    workload: Workload, scale: float, root: str | os.PathLike[str], **settings: Any
) -> shardkit.Dataset:
    """Write a workload: Arrow shards, tar for blobs, zstd for text; ``settings`` are those of `shardkit.create`."""
    kind = {"": "bytes", "str": "str"}.get(workload.dtype)
    kind = kind or f"{workload.dtype}[{','.join(map(str, workload.shape))}]"
    schema = {workload.field: kind} | ({"label": "int64"} if workload.label else {})
    form: Any = "arrow" if workload.shape or workload.compressed else "tar"
    with shardkit.create(root, schema, format=form, compression="zstd" if workload.compressed else "none",
                         **settings) as writer:  # fmt: skip
        for sample in workload.samples(scale):
            writer.add(sample)
    return shardkit.open(root)
