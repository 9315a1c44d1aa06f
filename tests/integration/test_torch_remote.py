"""DataLoader workers that stream from a bucket fetch its bytes once, not once each."""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

import shardkit  # noqa: E402
import shardkit.torch  # noqa: E402
from tests.servers.fault_proxy import Fault, FaultProxy, Request  # noqa: E402
from tests.servers.object_stores import s3_environment  # noqa: E402

BUCKETS = ("shards",)
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.skipif(
        not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_OFD_SETLK"), reason="needs Linux"
    ),
]


@pytest.fixture(scope="module")
def root(server: str) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(server).items():
            patch.setenv(name, value)
        url = f"s3://{BUCKETS[0]}/{uuid.uuid4().hex}"
        with shardkit.create(url, {"x": "int64[1024]"}, shard_size="1MiB", block_size="64KiB") as writer:
            for number in range(960):
                writer.add({"x": [number] * 1024})
        yield url


def _epoch(root: str, proxy: FaultProxy, workers: int, method: str) -> tuple[list[Any], int]:
    """Batches, and the bytes of ranges that were asked for."""
    asked: list[int] = []

    def note(request: Request) -> Fault | None:
        bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if request.method == "GET" and bounds:
            asked.append(int(bounds[2]) + 1 - int(bounds[1]))
        return None

    proxy.faults = note
    ds = shardkit.open(root)
    plan = ds.plan(global_batch=16, seed=1, lanes=4, window_blocks=4)
    data = shardkit.torch.dataset(ds, plan)
    batches = DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=method)
    got = [(batch.step, np.asarray(batch["x"])[:, 0].tolist()) for batch in batches]
    return got, sum(asked)


@pytest.mark.parametrize(("workers", "method"), [(4, "fork"), (2, "spawn")])
def test_workers_fetch_each_byte_once(root: str, proxy: FaultProxy, workers: int, method: str) -> None:
    alone, once = _epoch(root, proxy, 1, "fork")
    together, several = _epoch(root, proxy, workers, method)
    assert together == alone
    assert several < 1.2 * once  # what lies between joined blocks differs a little
