"""Lanes begin where their bytes are: what a node's cache has decides, the ledger keeps it, equal starts repeat it."""

from __future__ import annotations

import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.errors import ConfigurationError, StoreError
from shardkit.ledger import Ledger
from shardkit.loader import Loader, Rebalancing
from shardkit.loader.lanes import bytes_nearby
from shardkit.loader.sharing import find_address
from shardkit.plan import Assignment, Plan, assign
from shardkit.reading.cache.block_cache import BlockCache
from shardkit.reading.objects import Location
from shardkit.stores.local import LocalStore
from shardkit.stores.remote.cache_client import CacheClient

dist = pytest.importorskip("torch.distributed")

LANES = 16


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    path = tmp_path_factory.mktemp("data") / "numbers"
    values = np.arange(16 * 512, dtype=np.int64)
    with shardkit.create(path, schema={"x": "int64[16]"}, format="arrow", block_size="1KiB") as writer:
        for row in values.reshape(512, 16):
            writer.add({"x": row})
    return shardkit.open(path)


@pytest.fixture(scope="module")
def plan(ds: shardkit.Dataset) -> Plan:
    return ds.plan(global_batch=LANES, lanes=LANES, seed=3)


def _fill(cache: Path, ds: shardkit.Dataset, plan: Plan, lanes: list[int]) -> None:
    """Into a node's cache what its lanes read in an epoch."""
    assert plan.steps_per_epoch is not None
    samples = plan.steps(0, plan.steps_per_epoch, lanes).ravel()
    held = BlockCache(cache, limit=1 << 26)
    for block in np.unique(ds.rows.locate(samples).block).tolist():
        shard, inside = ds.rows.shard_of_block(block)
        request = ds.reader.request(shard, inside)
        name = ds.reader.shard_name(shard)
        data = ds.repository.store.get(name, max_bytes=1 << 24)[request.offset :][: request.length]
        held.fetch(request, partial(bytes, data))
    held.close()


def _start(ds: shardkit.Dataset, plan: Plan, caches: list[Path], **more: Any) -> list[Loader]:
    """One loader per node, all beginning together."""
    store = dist.HashStore()

    def begin(rank: int) -> Loader:
        return ds.loader(plan, rank=rank, world=len(caches), store=store, cache=caches[rank], **more)

    with ThreadPoolExecutor(len(caches)) as pool:
        return list(pool.map(begin, range(len(caches))))


def test_the_same_ranks_on_the_same_nodes_go_on_with_what_the_ledger_has(
    ds: shardkit.Dataset, plan: Plan, tmp_path: Path
) -> None:
    caches, run = [tmp_path / "a", tmp_path / "b"], tmp_path / "run"
    _fill(caches[0], ds, plan, list(range(8, 16)))
    first = [one.lanes for one in _start(ds, plan, caches, run=run)]
    assert first == [list(range(8, 16)), list(range(8))]
    (dealt,) = [one for one in Ledger(run).event_documents() if one["kind"] == "dealt"]
    assert dealt["owners"] == [1] * 8 + [0] * 8
    _fill(caches[1], ds, plan, list(range(8, 16)))
    _fill(caches[1], ds, plan, list(range(8)))
    assert [one.lanes for one in _start(ds, plan, caches, run=run)] == first
    assert len(Ledger(run).event_documents()) == 1, "what is recorded already is not recorded again"
    assert [one.lanes for one in _start(ds, plan, caches[::-1], run=run)] == first[::-1], (
        "the hosts are others"
    )
    assert [one.lanes for one in _start(ds, plan, caches, run=run, assignment="fixed")] == first[::-1]
    assert [one.lanes for one in _start(ds, plan, caches, run=run)] == first


def test_copies_on_this_host_count_as_bytes_that_are_near(plan: Plan, tmp_path: Path) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    with shardkit.create(root, schema={"x": "int64[16]"}, shard_size="16KiB", block_size="1KiB") as writer:
        for row in np.arange(16 * 512, dtype=np.int64).reshape(512, 16):
            writer.add({"x": row})
    shutil.copytree(root, copy)
    alone = shardkit.open(root)
    count = len(alone.rows.shard_first_block) - 1
    assert count >= 4
    for shard in range(count // 2, count):
        (copy / alone.reader.shard_name(shard)).unlink()

    def near(domain: str, rank: int, *, cache: Path | None = None) -> Any:
        there = Location(name="here", store=LocalStore(copy), domain=domain, rank=rank)
        ds = shardkit.open(root, locations=[there])
        plan = ds.plan(global_batch=LANES, lanes=LANES, seed=3)
        return bytes_nearby(plan, ds.loader(plan)._setup.sources, cache)

    found = near(platform.node(), -1)
    half = alone.reader.stored_bytes / 2
    assert 0.8 * half < found.sum() < 1.2 * half
    assert found[: LANES // 2 - 1].all()
    assert not found[LANES // 2 + 1 :].any()
    assert not near("elsewhere", -1).any()
    assert not near(platform.node(), 1).any(), "the root is read first"
    _fill(tmp_path / "cache", alone, alone.plan(global_batch=LANES, lanes=LANES, seed=3), [LANES - 1])
    assert near(platform.node(), -1, cache=tmp_path / "cache")[LANES - 1] > 0


def test_whoever_has_most_of_a_lane_is_asked_first_and_nobody_asks_itself(
    ds: shardkit.Dataset, plan: Plan, tmp_path: Path
) -> None:
    caches = [tmp_path / name for name in "abc"]
    _fill(caches[0], ds, plan, list(range(8)))
    _fill(caches[1], ds, plan, [0, 15])
    loaders = _start(ds, plan, caches, share="127.0.0.1:0", assignment="fixed", uneven=True)
    a, b, c = (loader._setup.holders for loader in loaders)
    assert a is not None
    assert b is not None
    assert c is not None
    assert [holders.lanes[0] for holders in (a, b, c)] == [[1], [0], [0, 1]] or c.lanes[0] == [1, 0]
    assert (a.lanes[4], b.lanes[4], c.lanes[4]) == ([], [0], [0])
    assert (a.lanes[15], b.lanes[15], c.lanes[15]) == ([1, 2], [2], [1]), "its worker is asked last"
    assert len(set(c.urls)) == 3
    for loader in loaders:
        loader.close()
    for url in c.urls:
        with pytest.raises(StoreError):
            CacheClient(url).get("blocks/x", max_bytes=1)
    without = _start(ds, plan, caches, uneven=True)
    assert [loader._setup.holders for loader in without] == [None] * 3
    with pytest.raises(ConfigurationError, match="pass cache= with it"):
        ds.loader(plan, share=True)
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
        find_address(True, dist.HashStore())
    assert find_address(True, dist.PrefixStore("x", dist.TCPStore("127.0.0.1", 0, is_master=True))) == (
        "127.0.0.1", 0
    )  # fmt: skip


def test_what_was_dealt_elsewhere_is_taken_as_it_is(ds: shardkit.Dataset, plan: Plan) -> None:
    dealt = Assignment((1,) * 8 + (0,) * 8, (0, 0))
    assert ds.loader(plan, rank=0, world=2, assignment=dealt).lanes == list(range(8, 16))
    with pytest.raises(ConfigurationError, match="16 lanes to 2 ranks"):
        ds.loader(plan, rank=0, world=4, assignment=dealt)
    with pytest.raises(ConfigurationError, match="'near', 'fixed'"):
        ds.loader(plan, assignment="far")  # type: ignore[arg-type]


def test_the_parent_of_dataloader_workers_decides(ds: shardkit.Dataset, plan: Plan, tmp_path: Path) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    from shardkit.torch import dataset

    caches, store = [tmp_path / "a", tmp_path / "b"], dist.HashStore()
    _fill(caches[0], ds, plan, list(range(8, 16)))

    def begin(rank: int) -> Any:
        return dataset(ds, plan, rank=rank, world=2, store=store, cache=caches[rank])

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(begin, range(2)))
    for data, lanes in zip(parts, (range(8, 16), range(8)), strict=True):
        for workers in (0, 2):
            batches = list(torch_data.DataLoader(data, batch_size=None, num_workers=workers))
            assert [batch.samples.tolist() for batch in batches] == [
                plan.step(step)[lanes].ravel().tolist() for step in range(plan.loop_steps)
            ]
            data.set_epoch(0)


def test_lanes_of_a_slow_rank_go_to_who_has_their_bytes(
    ds: shardkit.Dataset, plan: Plan, tmp_path: Path
) -> None:
    caches = [tmp_path / f"node-{n}" for n in range(4)]
    for node in range(4):
        _fill(caches[node], ds, plan, assign(LANES, 4).shares()[node])
    _fill(caches[3], ds, plan, [0, 1, 2, 3])  # of the slow rank
    loaders = _start(
        ds, plan, caches, uneven=True, rebalance=Rebalancing(every=4, store=dist.HashStore(), timeout_s=5)
    )
    rebalancers: Any = [one._rebalancer for one in loaders]
    for step in range(24):
        for rank, one in enumerate(rebalancers):
            lanes = one.lanes_at(step)
            one.finished(len(lanes), len(lanes) * (2.0, 1.0, 0.999, 1.001)[rank], 0.0)
    assert len(rebalancers[0].lanes_now()) < 4
    taken = [{lane for lane in one.lanes_now() if lane < 4} for one in rebalancers]
    assert taken[3], "its bytes are there"
    assert not (taken[1] and taken[2]), "the other goes to one of them, who have none of its bytes"
    assert max(len(one.lanes_now()) * (2, 1, 1, 1)[rank] for rank, one in enumerate(rebalancers)) == 5
