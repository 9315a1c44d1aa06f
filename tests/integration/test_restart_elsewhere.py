"""A job restarts on permuted hosts, one of them new: only what the lost one alone had is fetched again."""

from __future__ import annotations

import multiprocessing
import uuid
from pathlib import Path
from typing import Any

import pytest

import shardkit
from tests.drills import DRILLS
from tests.servers.object_stores import s3_environment

torch = pytest.importorskip("torch")

BUCKETS = ("shards",)
NODES, ROWS, LANES = 8, 2_048, 32


def _rank(rank: int, root: str, job: dict[str, Any], out: Any) -> None:
    torch.set_num_threads(1)
    store = f"file://{job['store']}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=NODES)
    try:
        ds = shardkit.open(root)
        plan = ds.plan(global_batch=64, seed=1, lanes=LANES)
        rows = 0
        with ds.loader(
            plan, cache=job["caches"][rank], run=job["run"], assignment=job["assignment"]
        ) as loader:
            for batch in loader:
                rows += len(batch["x"])
            out.put((rank, rows, loader.stats()["bytes_from_root"]))
    except BaseException as error:
        out.put((rank, error, 0))
        raise
    torch.distributed.destroy_process_group()


def _epoch(root: str, where: Path, hosts: list[str], assignment: str = "near") -> int:
    """Bytes that all ranks together fetch from the bucket, in an epoch that begins on these hosts."""
    where.mkdir()
    caches = [str(where.parent / host) for host in hosts]
    job = {"store": where / "store", "caches": caches, "run": where / "run", "assignment": assignment}
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, root, job, out)) for rank in range(NODES)]
    for process in ranks:
        process.start()
    told = [out.get(timeout=240) for _ in ranks]
    for process in ranks:
        process.join(60)
    assert sum(rows for _, rows, _ in told) == ROWS, told
    return sum(fetched for _, _, fetched in told)


@pytest.mark.drill
def test_eight_nodes(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_environment(server).items():
        monkeypatch.setenv(name, value)
    root = f"s3://shards/{uuid.uuid4().hex}"
    with shardkit.create(root, {"x": "int64[512]"}, shard_size="1MiB", block_size="16KiB") as writer:
        for number in range(ROWS):
            writer.add({"x": [number] * 512})
    everything = _epoch(root, tmp_path / "first", [f"node-{n}" for n in range(NODES)])
    assert everything > ROWS * 512 * 8
    again = [f"node-{n}" for n in (5, 2, 7, 0, 3, 6, 1)]  # node 4 is lost
    near = _epoch(root, tmp_path / "near", [*again, "new"])
    assert near <= (1 / NODES + 0.02) * everything
    if DRILLS:
        fixed = _epoch(root, tmp_path / "fixed", [*again, "newer"], "fixed")
        print(f"fetched again: {near / everything:.3f} near, {fixed / everything:.3f} with fixed shares")
        assert fixed >= 0.75 * everything
