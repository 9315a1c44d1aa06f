"""Measure how MosaicML Streaming and LitData resume in the middle of an epoch; runs in their environment.

    python plan_peers.py ROWS SHARDS NODES

Prints one JSON line per planner: seconds, peak memory, and (MosaicML) shards touched per node count.
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
import time
from typing import Any

import numpy as np


def peak_mib() -> float:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def mosaicml(rows: int, shards: int, batch: int, locality_rows: int) -> dict[str, Any]:
    """Measure MosaicML Streaming: order and partition, resumed at 90 %, and shards read per node count."""
    from streaming.base.partition import get_partitions
    from streaming.base.shuffle import get_shuffle

    sizes = np.full(shards, rows // shards, dtype=np.int64)
    begun, cpu = time.perf_counter(), time.process_time()
    order = get_shuffle("py1e", sizes, 8, 7, 3, 1 << 18)
    # the plan of one epoch, resumed at 90 %, on 8 nodes of 8 ranks
    ids = get_partitions("relaxed", rows, 8, 8, 8, 1, batch // 64, int(rows * 0.9) // batch * batch, 8)
    np.where(ids == -1, -1, order[ids])
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    out: dict[str, Any] = {"planner": "mosaicml-streaming", "version": importlib.metadata.version("mosaicml-streaming"),
                           "seconds": seconds, "cpu_s": cpu, "peak_mib": peak_mib()}  # fmt: skip
    # locality on a smaller set: canonical nodes stay at 48, physical nodes vary
    sizes = np.full(480, locality_rows // 480, dtype=np.int64)
    order = get_shuffle("py1e", sizes, 48, 7, 0, 1 << 18)
    reads: dict[int, float | str] = {}
    for nodes in (1, 2, 4, 5, 8, 24):
        try:
            ids = get_partitions(
                "relaxed", int(sizes.sum()), 48, nodes, 1, 1, 480 // nodes, 0, 48 if 48 % nodes else nodes
            )
            mine = [order[part[part >= 0]] // sizes[0] for part in ids.reshape(nodes, -1)]
            reads[nodes] = sum(len(np.unique(m)) for m in mine) / 480
        except (ValueError, AssertionError) as error:
            reads[nodes] = f"refused: {error}"[:120]
    out["reads_per_shard"] = reads
    return out


def litdata(rows: int, shards: int, batch: int) -> dict[str, Any]:
    """Measure LitData: the canonical stream, restriped at 90 %."""
    from litdata.streaming.elastic import canonical_item_stream, restripe_items
    from litdata.streaming.item_loader import Interval

    each = rows // shards
    chunks = [Interval(i * each, i * each, (i + 1) * each, (i + 1) * each) for i in range(shards)]
    begun, cpu = time.perf_counter(), time.process_time()
    stream = canonical_item_stream(chunks, seed=7, epoch=3, shuffle=True)
    restripe_items(
        stream,
        world_size=64,
        num_workers=1,
        batch_size=batch // 64,
        drop_first=int(rows * 0.9) // batch * batch,
    )
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return {"planner": "litdata", "version": importlib.metadata.version("litdata"), "seconds": seconds, "cpu_s": cpu,
            "peak_mib": peak_mib()}  # fmt: skip


if __name__ == "__main__":
    kind, rows, shards = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(
        json.dumps(
            mosaicml(rows, shards, 4096, 480_000) if kind == "mosaicml" else litdata(rows, shards, 4096)
        )
    )
