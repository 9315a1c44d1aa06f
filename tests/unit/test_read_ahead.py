"""Reading ahead joins what lies near, within bounds, and gives every block once, verified."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.errors import IntegrityError
from shardkit.reading.cache.block_cache import BlockCache
from shardkit.reading.cache.supply import (
    GRAIN_BYTES,
    MAX_GAP_BYTES,
    MAX_JOINED_BYTES,
    BlockFetcher,
    Wanted,
    join,
    neighbours,
)
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import BlockRequest, Location
from shardkit.reading.read_path import ReadSettings
from shardkit.stores.store import object_name
from shardkit.testing.memory_store import MemoryStore

KIB = 1024
BLOCK = 8 * KIB
BLOCKS = 512
SETTINGS = ReadSettings(deadline_s=30, attempt_s=30, hedge=False)


class Shard(MemoryStore):
    """One shard of 512 blocks of 8 KiB; remembers which ranges were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.data = random.Random(1).randbytes(BLOCKS * BLOCK)
        self.name = object_name(f"sha256:{hashlib.sha256(self.data).hexdigest()}", "tar")
        self.put_new(self.name, self.data)
        self.ranges: list[tuple[int, int]] = []
        self.damaged = -1
        """Block that always comes wrong."""
        self.open_to = threading.Event()
        self.open_to.set()

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        self.ranges.append((offset, length))
        assert self.open_to.wait(60)
        found = super().get_range(name, offset, length)
        at = self.damaged * BLOCK - offset
        return found if not 0 <= at < length else found[:at] + b"bad" + found[at + 3 :]

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


def wanted(shard: Shard, store: LocatedStore, *blocks: int) -> list[Wanted]:
    """Needed in the order in which they are given."""
    return [Wanted(step, block, store, shard.request(block)) for step, block in enumerate(blocks)]


def numbers(groups: list[list[Wanted]]) -> list[list[int]]:
    return [[one.block for one in group] for group in groups]


class TestJoin:
    def test_neighbours_come_together_in_any_order(self, shard: Shard, store: LocatedStore) -> None:
        assert numbers(join(wanted(shard, store, 9, 3, 100, 4, 8, 5), spare=0)) == [[8, 9], [3, 4, 5], [100]]

    def test_gaps_are_closed_as_far_as_there_is_to_spare_smallest_first(
        self, shard: Shard, store: LocatedStore
    ) -> None:
        blocks = wanted(shard, store, 0, 3, 5, 6, 16)
        assert numbers(join(blocks, spare=BLOCK)) == [[0], [3, 5, 6], [16]]
        assert numbers(join(blocks, spare=2 * BLOCK)) == [[0], [3, 5, 6], [16]]
        assert numbers(join(blocks, spare=3 * BLOCK)) == [[0, 3, 5, 6], [16]]
        assert numbers(join(wanted(shard, store, 0, MAX_GAP_BYTES // BLOCK + 2), spare=2**30)) == [[0], [10]]

    def test_groups_are_bounded(self, shard: Shard, store: LocatedStore) -> None:
        groups = join(wanted(shard, store, *range(BLOCKS)), spare=0)
        assert [one.block for group in groups for one in group] == list(range(BLOCKS))
        assert {len(group) * BLOCK for group in groups} <= {MAX_JOINED_BYTES}
        assert len(groups) > 0

    def test_the_first_needed_comes_first(self, shard: Shard, store: LocatedStore) -> None:
        assert numbers(join(wanted(shard, store, 200, 1, 201, 0), spare=0)) == [[200, 201], [0, 1]]


class TestNeighbours:
    def test_an_aligned_stretch_is_filled(self, shard: Shard, store: LocatedStore) -> None:
        grain = GRAIN_BYTES // BLOCK
        found = neighbours(
            wanted(shard, store, grain + 3),
            lambda block: range(BLOCKS),
            lambda block: Wanted(-1, block, store, shard.request(block)),
        )
        assert sorted(one.block for one in found) == sorted({*range(grain, 2 * grain)} - {grain + 3})

    def test_it_ends_where_a_block_is_not_needed_and_at_the_shard(
        self, shard: Shard, store: LocatedStore
    ) -> None:
        asked: list[int] = []

        def may_come(block: int) -> Wanted | None:
            asked.append(block)
            return None if block == 7 else Wanted(-1, block, store, shard.request(block))

        found = neighbours(wanted(shard, store, 3, 4), lambda block: range(2, BLOCKS), may_come)
        assert sorted(one.block for one in found) == [2, 5, 6]
        assert min(asked) == 2


class TestSupply:
    def read_all(self, supply: BlockFetcher, shard: Shard, store: LocatedStore, order: list[int]) -> None:
        for step, block in enumerate(order):
            assert bytes(supply.read(store, shard.request(block))) == shard.bytes_of(block)
            supply.advance(step + 1)

    def follow(
        self, supply: BlockFetcher, shard: Shard, store: LocatedStore, order: list[int], *, fill: bool = False
    ) -> None:
        def uses(first: int) -> Iterator[tuple[Any, Any]]:
            yield np.arange(first, len(order)), np.array(order[first:], dtype=np.int64)

        supply.follow(
            uses,
            lambda block: (store, shard.request(block)),
            lambda blocks: blocks.astype(np.uint64),
            step=0,
            horizon=len(order) + 1,
            beside=(lambda block: range(BLOCKS)) if fill else None,
        )

    def test_streamed(self, shard: Shard, store: LocatedStore) -> None:
        """With room for all of the shard, its blocks come by a small part of as many requests."""
        order = random.Random(2).sample(range(BLOCKS), BLOCKS)
        supply = BlockFetcher(None, ahead_bytes=64 << 20)
        self.follow(supply, shard, store, order)
        while len(supply._waiting) < BLOCKS:  # nobody consumes meanwhile, so this comes about
            threading.Event().wait(0.01)
        self.read_all(supply, shard, store, order)
        supply.close()
        assert len(shard.ranges) < 0.7 * BLOCKS
        assert sum(length for _, length in shard.ranges) <= len(shard.data) * (1 + 1 / 8)

    def test_filled_up_for_the_cache(
        self, shard: Shard, store: LocatedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What lies around a block is needed later: it comes along, once, and stays."""
        after_look(monkeypatch)
        order = random.Random(3).sample(range(BLOCKS), BLOCKS)
        with contextlib.closing(BlockCache(tmp_path / "cache", limit=1 << 30)) as cache:
            supply = BlockFetcher(cache, ahead_bytes=1 << 20)
            self.follow(supply, shard, store, order, fill=True)
            while len(supply._waiting) < 16:  # the first stretches are on their way
                threading.Event().wait(0.01)
            self.read_all(supply, shard, store, order)
            supply.close()
        assert len(shard.ranges) <= 2 * BLOCKS * BLOCK // GRAIN_BYTES
        assert sum(length for _, length in shard.ranges) <= 1.1 * len(shard.data)
        with contextlib.closing(BlockCache(tmp_path / "cache", limit=1 << 30)) as cache:
            assert all(cache.holds(shard.request(block)) for block in range(BLOCKS))

    def test_what_is_not_needed_does_not_come_along(
        self, shard: Shard, store: LocatedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        after_look(monkeypatch)
        order = [5, 37, 38, 200]
        with contextlib.closing(BlockCache(tmp_path / "cache", limit=1 << 30)) as cache:
            supply = BlockFetcher(cache)
            self.follow(supply, shard, store, order, fill=True)
            while len(supply._waiting) < len(order):
                threading.Event().wait(0.01)
            self.read_all(supply, shard, store, order)
            supply.close()
        assert sorted(shard.ranges) == [(5 * BLOCK, BLOCK), (37 * BLOCK, 2 * BLOCK), (200 * BLOCK, BLOCK)]

    def test_who_wants_what_is_on_its_way_waits_for_it(
        self, shard: Shard, store: LocatedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        after_look(monkeypatch)
        shard.open_to.clear()
        order = [0, *range(100, 164), 1]  # 1 comes along with 0, long before its step
        with contextlib.closing(BlockCache(tmp_path / "cache", limit=1 << 30)) as cache:
            supply = BlockFetcher(cache)
            self.follow(supply, shard, store, order, fill=True)
            while 1 not in supply._along:
                threading.Event().wait(0.01)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(supply.read, store, shard.request(1))
                shard.open_to.set()
                assert bytes(waiting.result(60)) == shard.bytes_of(1)
            supply.close()
        assert [one for one in shard.ranges if one[0] <= BLOCK] == [(0, 2 * BLOCK)]

    def test_a_group_that_comes_wrong_is_read_one_by_one(
        self, shard: Shard, store: LocatedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        after_look(monkeypatch)
        order = [0, 1, 2, 3]
        shard.damaged = 2
        with contextlib.closing(BlockCache(tmp_path / "cache", limit=1 << 30)) as cache:
            supply = BlockFetcher(cache)
            self.follow(supply, shard, store, order, fill=True)
            self.read_all(supply, shard, store, [0, 1, 3])
            with pytest.raises(IntegrityError):
                supply.read(store, shard.request(2))
            supply.close()
            assert not cache.holds(shard.request(2))

    def test_who_waits_for_what_never_begins_reads_it_himself(
        self, shard: Shard, store: LocatedStore
    ) -> None:
        """It is closed while one group is read, others wait for the thread, and somebody waits for each of them."""
        order = [0, 100, 200, 300]
        shard.open_to.clear()
        supply = BlockFetcher(None, threads=1)
        self.follow(supply, shard, store, order)
        while len(supply._waiting) < len(order):
            threading.Event().wait(0.01)
        with ThreadPoolExecutor(len(order) + 1) as pool:
            waiting = {block: pool.submit(supply.read, store, shard.request(block)) for block in order}
            while len(supply._reading) < len(order):
                threading.Event().wait(0.01)
            closing = pool.submit(supply.close)
            while not supply._closed:
                threading.Event().wait(0.01)
            shard.open_to.set()
            closing.result(60)
            for block, answer in waiting.items():
                assert bytes(answer.result(60)) == shard.bytes_of(block)

    @pytest.mark.parametrize("fill", [False, True])
    def test_an_error_that_nobody_foresaw_leaves_no_one_waiting(
        self, shard: Shard, store: LocatedStore, tmp_path: Path, fill: bool
    ) -> None:
        order = [0, 1, 2, 3]
        alone = shard.get_range

        def without_memory(name: str, offset: int, length: int) -> bytes:
            if length > BLOCK:
                raise MemoryError("no memory for what is read together")
            return alone(name, offset, length)

        shard.get_range = without_memory  # type: ignore[method-assign]
        cache = BlockCache(tmp_path / "cache", limit=1 << 30) if fill else None
        supply = BlockFetcher(cache)
        self.follow(supply, shard, store, order, fill=fill)
        while len(supply._waiting) < len(order):
            threading.Event().wait(0.01)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.read_all, supply, shard, store, order).result(60)
        supply.close()


def after_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reading ahead begin when it is known what is needed later; until then nothing comes along."""
    walk = BlockFetcher._walk

    def patient(self: BlockFetcher, *args: Any) -> None:
        while not len(self._needed) and not self._closed:
            threading.Event().wait(0.01)
        walk(self, *args)

    monkeypatch.setattr(BlockFetcher, "_walk", patient)
