"""A job restarts on other hosts: what a node has, it reads there; what neighbours have, it reads from them."""

from __future__ import annotations

import multiprocessing
import uuid
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.reading.cache import supply
from shardkit.reading.read_path import ReadSettings
from tests.drills import DRILLS
from tests.servers.object_stores import s3_environment

torch = pytest.importorskip("torch")

BUCKETS = ("shards",)
NODES, ROWS, LANES = 8 if DRILLS else 4, 2_048, 32


def _rank(rank: int, root: str, job: dict[str, Any], out: Any) -> None:
    torch.set_num_threads(1)
    store = f"file://{job['store']}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=len(job["caches"]))
    try:
        ds = shardkit.open(
            root, settings=ReadSettings(hedge=False)
        )  # a hedge is fetched twice: up to 3 % of reads
        plan = ds.plan(global_batch=64, seed=1, lanes=LANES)
        rows = 0
        with ds.loader(
            plan, cache=job["caches"][rank], run=job["run"], assignment=job["assignment"],
            share=job["share"] and "127.0.0.1:0", uneven=True,
        ) as loader:  # fmt: skip
            for _ in range(job["epochs"]):
                for batch in loader:
                    rows += len(batch["x"])
            stats = loader.stats()
            torch.distributed.barrier()  # as a trainer's ranks end together: neighbours are there until then
        near = sum(value for name, value in stats.items() if name.startswith("bytes_from_neighbour"))
        out.put((rank, rows, stats.get("bytes_from_root", 0), near))
    except BaseException as error:
        out.put((rank, error, 0, 0))
        raise
    torch.distributed.destroy_process_group()


def _epochs(
    root: str,
    where: Path,
    hosts: list[str],
    assignment: str = "near",
    *,
    share: bool = False,
    epochs: int = 1,
) -> tuple[int, int]:
    """Bytes that all ranks together fetch from the bucket, and from each other, when a job begins on these hosts."""
    where.mkdir()
    caches = [str(where.parent / host) for host in hosts]
    job = {"store": where / "store", "caches": caches, "run": where / "run", "assignment": assignment,
           "share": share, "epochs": epochs}  # fmt: skip
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, root, job, out)) for rank in range(len(hosts))]
    for process in ranks:
        process.start()
    told = [out.get(timeout=240) for _ in ranks]
    for process in ranks:
        process.join(60)
    assert sum(rows for _, rows, _, _ in told) == epochs * ROWS, told
    return sum(fetched for _, _, fetched, _ in told), sum(near for _, _, _, near in told)


def _dataset(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3_environment(server).items():
        monkeypatch.setenv(name, value)
    root = f"s3://shards/{uuid.uuid4().hex}"
    with shardkit.create(root, {"x": "int64[1024]"}, shard_size="1MiB", block_size="32KiB") as writer:
        for number in range(ROWS):
            writer.add({"x": [number] * 1_024})
    return root


def test_four_nodes_share(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # on a busy machine neighbours are slow and not gone: nobody is to give them up after two seconds
    patient = ReadSettings(deadline_s=60, attempt_s=60, hedge=False)
    monkeypatch.setattr(supply, "_SETTINGS", patient)
    root = _dataset(server, monkeypatch)
    dataset = shardkit.open(root).reader.stored_bytes
    starts = [  # hosts, how lanes are dealt, epochs
        ("abcd", "near", 2),  # the first start
        ("cadb", "fixed", 1),  # permuted hosts, lanes where they are not cached
        ("dbacef", "near", 1),  # two nodes more
    ][: 3 if DRILLS else 2]
    egress = {}
    for share in (True, False) if DRILLS else (True,):
        kind = tmp_path / f"share-{share}"
        kind.mkdir()
        egress[share] = [
            _epochs(
                root,
                kind / f"start-{n}",
                [f"host-{host}" for host in hosts],
                dealt,
                share=share,
                epochs=epochs,
            )
            for n, (hosts, dealt, epochs) in enumerate(starts)
        ]
    copies = {
        share: [(round(bucket / dataset, 3), round(near / dataset, 3)) for bucket, near in found]
        for share, found in egress.items()
    }
    print(f"bucket alone, with and without: {[sum(one[0] for one in found) for found in copies.values()]}")
    print(f"(bucket, neighbours) / dataset, by start: {copies}")
    assert egress[True][1][0] <= 0.002 * dataset, (
        "all blocks and indexes are there: a start reads the manifest"
    )
    assert sum(bucket for bucket, _ in egress[True]) <= 1.05 * dataset, copies
    assert egress[True][1][1] > 0.5 * dataset, "lanes moved, and neighbours had them"


@pytest.mark.drill
def test_a_lost_node_is_replaced(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _dataset(server, monkeypatch)
    everything, _ = _epochs(root, tmp_path / "first", [f"node-{n}" for n in range(NODES)])
    assert everything > ROWS * 1_024 * 8
    again = [f"node-{n}" for n in (5, 2, 7, 0, 3, 6, 1, 4) if n < NODES and n != NODES // 2]  # one is lost
    near, _ = _epochs(root, tmp_path / "near", [*again, "new"])
    assert near <= (1 / NODES + 0.02) * everything
    if DRILLS:
        fixed, _ = _epochs(root, tmp_path / "fixed", [*again, "newer"], "fixed")
        print(f"fetched again: {near / everything:.3f} near, {fixed / everything:.3f} with fixed shares")
        assert fixed >= 0.75 * everything
