"""Reading ahead gives every block once, verified, and leaves nobody waiting."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.errors import IntegrityError
from shardkit.reading.cache.block_cache import BlockCache
from shardkit.reading.cache.supply import BlockFetcher
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import BlockRequest, Location
from shardkit.reading.read_path import ReadSettings
from shardkit.stores.store import object_name
from shardkit.testing.memory_store import MemoryStore

BLOCK = 8 * 1024
BLOCKS = 256
SETTINGS = ReadSettings(deadline_s=30, attempt_s=30, hedge=False)


class Shard(MemoryStore):
    """One shard of blocks of 8 KiB; remembers which blocks were requested."""

    def __init__(self) -> None:
        super().__init__()
        self.data = random.Random(1).randbytes(BLOCKS * BLOCK)
        self.name = object_name(f"sha256:{hashlib.sha256(self.data).hexdigest()}", "tar")
        self.put_new(self.name, self.data)
        self.requests: Counter[int] = Counter()
        self.damaged = -1
        self.is_short = False  # the first request for each block runs out of memory
        self.is_open = threading.Event()
        self.is_open.set()

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        self.requests[offset // BLOCK] += 1
        assert length == BLOCK
        assert self.is_open.wait(60)
        if self.is_short and self.requests[offset // BLOCK] == 1:
            raise MemoryError
        found = super().get_range(name, offset, length)
        return found if offset // BLOCK != self.damaged else b"bad" + found[3:]

    def bytes_of(self, block: int) -> bytes:
        return self.data[block * BLOCK : (block + 1) * BLOCK]

    def request(self, block: int) -> BlockRequest:
        digest = hashlib.sha256(self.bytes_of(block)).digest()
        return BlockRequest(self.name, block * BLOCK, BLOCK, digest, place=block)


@pytest.fixture
def shard() -> Shard:
    return Shard()


@pytest.fixture
def store(shard: Shard) -> LocatedStore:
    return LocatedStore([Location(name="root", store=shard)], settings=SETTINGS)


def follow(supply: BlockFetcher, shard: Shard, store: LocatedStore, order: list[int], step: int = 0) -> None:
    def uses(first: int) -> Iterator[tuple[Any, Any]]:
        yield np.arange(first, len(order)), np.array(order[first:], dtype=np.int64)

    supply.follow(
        uses,
        lambda block: (store, shard.request(block)),
        lambda blocks: blocks.astype(np.uint64),
        step=step,
        horizon=len(order) + 1,
    )


def read_all(supply: BlockFetcher, shard: Shard, store: LocatedStore, order: list[int]) -> None:
    for step, block in enumerate(order):
        assert bytes(supply.read(store, shard.request(block))) == shard.bytes_of(block)
        supply.advance(step + 1)


def wait_for_ahead(supply: BlockFetcher, blocks: int) -> None:
    """Nobody consumes meanwhile, so this comes about."""
    while len(supply._ahead) < blocks:
        threading.Event().wait(0.01)


@pytest.mark.parametrize("is_cached", [False, True])
def test_every_block_is_requested_once(
    shard: Shard, store: LocatedStore, tmp_path: Path, is_cached: bool
) -> None:
    order = random.Random(2).sample(range(BLOCKS), BLOCKS)
    supply = BlockFetcher(BlockCache(tmp_path / "cache", limit=1 << 30) if is_cached else None)
    follow(supply, shard, store, order)
    wait_for_ahead(supply, BLOCKS)
    read_all(supply, shard, store, order)
    supply.close()
    assert shard.requests == Counter(range(BLOCKS))
    if is_cached:
        with contextlib.closing(BlockFetcher(BlockCache(tmp_path / "cache", limit=1 << 30))) as again:
            read_all(again, shard, store, order)
        assert shard.requests == Counter(range(BLOCKS)), "everything came from the cache"


def test_memory_bounds_what_is_read_ahead(shard: Shard, store: LocatedStore) -> None:
    order = [*range(BLOCKS)]
    supply = BlockFetcher(None, ahead_bytes=4 * BLOCK)
    follow(supply, shard, store, order)
    for step, block in enumerate(order):
        with supply._changed:
            assert supply._ahead_size == len(supply._ahead) * BLOCK <= 4 * BLOCK
        assert bytes(supply.read(store, shard.request(block))) == shard.bytes_of(block)
        supply.advance(step + 1)
    supply.close()


def test_a_loop_that_begins_elsewhere_keeps_what_it_still_needs(shard: Shard, store: LocatedStore) -> None:
    order = [*range(40)]
    supply = BlockFetcher(None)
    follow(supply, shard, store, order)
    wait_for_ahead(supply, 40)
    follow(supply, shard, store, order, step=30)
    for thread in threading.enumerate():
        if thread.name == "shardkit-ahead":  # has seen the whole order, so that nothing below races it
            thread.join()
    assert set(supply._ahead) == {*range(30, 40)}
    for block in order[30:]:
        assert bytes(supply.read(store, shard.request(block))) == shard.bytes_of(block)
    supply.close()
    assert max(shard.requests.values()) == 1


def test_a_failure_is_raised_where_the_block_is_read(
    shard: Shard, store: LocatedStore, tmp_path: Path
) -> None:
    shard.damaged = 2
    cache = BlockCache(tmp_path / "cache", limit=1 << 30)
    supply = BlockFetcher(cache)
    follow(supply, shard, store, [0, 1, 2, 3])
    wait_for_ahead(supply, 4)
    for block in (0, 1, 3):
        assert bytes(supply.read(store, shard.request(block))) == shard.bytes_of(block)
    with pytest.raises(IntegrityError):
        supply.read(store, shard.request(2))
    assert cache.get(shard.request(2)) is None
    supply.close()


def test_a_block_that_failed_ahead_is_read_again(shard: Shard, store: LocatedStore) -> None:
    """Also for errors that no store raises, such as a lack of memory."""
    order = [*range(8)]
    shard.is_short = True
    supply = BlockFetcher(None)
    follow(supply, shard, store, order)
    while len(shard.requests) < len(order):
        threading.Event().wait(0.01)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(read_all, supply, shard, store, order).result(60)
    supply.close()


def test_readers_go_on_when_it_is_closed(shard: Shard, store: LocatedStore) -> None:
    """One block is read, others wait for the thread, somebody waits for each, and it is closed."""
    order = [0, 100, 150, 200]
    shard.is_open.clear()
    supply = BlockFetcher(None, threads=1)
    follow(supply, shard, store, order)
    wait_for_ahead(supply, len(order))
    with ThreadPoolExecutor(len(order) + 1) as pool:
        answers = {block: pool.submit(supply.read, store, shard.request(block)) for block in order}
        while len(supply._reading) < len(order):
            threading.Event().wait(0.01)
        closing = pool.submit(supply.close)
        while not supply._stopped.is_set():
            threading.Event().wait(0.01)
        shard.is_open.set()
        closing.result(60)
        for block, answer in answers.items():
            assert bytes(answer.result(60)) == shard.bytes_of(block)
