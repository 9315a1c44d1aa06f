"""Loaders of several processes find each other's blocks, and nobody's memory is written to while it is referred to."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from ctypes import string_at
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.formats import xxh3
from shardkit.loader.block_loading import SharedSlots

block_rows: Any = pytest.importorskip("shardkit.loader.block_rows")

BLOCKS, SIZE = 60, 5000


@pytest.fixture(scope="module")
def contents() -> list[bytes]:
    chance = random.Random(3)
    return [chance.randbytes(SIZE) for _ in range(BLOCKS)]


@pytest.fixture
def file(tmp_path: Path, contents: list[bytes]) -> Path:
    path = tmp_path / "blocks"
    path.write_bytes(b"".join(contents))
    return path


class Reader:
    """A window of some slots over the blocks, one step a block, as `BlockWindow` drives it."""

    def __init__(self, shared: SharedSlots, file: Path, contents: list[bytes], slots: int) -> None:
        self.loads = block_rows.Loads(5)
        self.joined = self.loads.share(shared.file)
        self.loads.set_table(np.zeros((slots, 5), np.int64))
        self.loads.add_file(str(file), BLOCKS * SIZE)
        self._hashes = [xxh3(one) for one in contents]
        self._own = np.zeros((slots, SIZE), np.uint8)
        self._facts = np.zeros((slots, 5), np.int64)
        self.loads.set_table(self._facts)
        self._thread = threading.Thread(target=self.loads.work)
        self._thread.start()

    def read(self, blocks: list[int], seen_as: int = 2) -> Iterator[bytes]:
        """What each step sees; `seen_as`: facts are those of values (0) or of data that has ends (2)."""
        jobs, slots = [], len(self._own)
        for n, block in enumerate(blocks):
            address = self._own[n % slots].ctypes.data
            facts = [1, address, 0, 0, 8] if seen_as == 0 else [1, 17, 17, address, 8]
            signed = self._hashes[block] - (self._hashes[block] >> 63 << 64)
            jobs.append(
                [
                    0,
                    block * SIZE,
                    SIZE,
                    address,
                    signed,
                    max(0, n - slots + 1),
                    n % slots,
                    block,
                    0,
                    0,
                    0,
                    *facts,
                ]
            )
        base = self.loads.add(np.array(jobs))
        assert base == 0
        for n in range(len(blocks)):
            assert self.loads.wait(n + 1, 60) > n
            yield string_at(int(self._facts[n % slots, 1 + seen_as]), SIZE)
            self.loads.advance(n + 1)

    def close(self) -> None:
        self.loads.close()
        self._thread.join()
        self.loads.leave()


@pytest.mark.parametrize("shared_slots", [3, 12, 100])
@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("seen_as", [0, 2])
def test_each_sees_what_was_written_whoever_has_loaded_it(
    file: Path, contents: list[bytes], shared_slots: int, readers: int, seen_as: int
) -> None:
    """More blocks than slots, in orders that differ a little; with too few slots some are read by each."""
    shared, wrong = SharedSlots(shared_slots, SIZE), []
    all_readers = [Reader(shared, file, contents, 4) for _ in range(readers)]

    def run(number: int) -> None:
        chance = random.Random(number)
        order = sorted(range(BLOCKS * 3), key=lambda n: n + chance.uniform(0, 4))
        blocks = [n % BLOCKS for n in order]
        for block, found in zip(blocks, all_readers[number].read(blocks, seen_as), strict=True):
            if found != contents[block]:
                wrong.append((number, block))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in all_readers:
        one.close()
    assert not wrong
    loaded = sum(one.loads.counts()[1] for one in all_readers)
    if shared_slots == 100:
        assert loaded == BLOCKS, "each block once, whoever needs it how often"
    else:
        assert BLOCKS <= loaded <= 3 * BLOCKS * readers


def test_a_block_that_one_refers_to_is_not_written_over(file: Path, contents: list[bytes]) -> None:
    shared = SharedSlots(2, SIZE)
    one, other = (Reader(shared, file, contents, 2) for _ in range(2))
    steps = one.read([0, 1, 0, 1])
    assert next(steps) == contents[0]
    assert [*other.read([*range(2, 30)])] == contents[2:30]  # it finds no room, and reads for itself
    assert next(steps) == contents[1]
    assert [*steps] == contents[:2]
    one.close()
    other.close()
    third = Reader(shared, file, contents, 2)
    assert [*third.read([*range(2, 30)])] == contents[2:30]  # there is room again
    third.close()


def test_what_is_wrong_is_nobodys(file: Path, contents: list[bytes]) -> None:
    shared = SharedSlots(8, SIZE)
    one = block_rows.Loads(5)
    assert one.share(shared.file)
    one.set_table(np.zeros((1, 5), np.int64))
    one.add_file(str(file), BLOCKS * SIZE)
    own = np.zeros(SIZE, np.uint8)
    one.add(np.array([[0, 0, SIZE, own.ctypes.data, 1, 0, 0, 0, 0, 0, 0, *[0] * 5]]))
    assert one.work() == (0, 0, 0)
    one.leave()
    other = Reader(shared, file, contents, 2)
    assert [*other.read([0])] == contents[:1]
    other.close()


def test_users_that_were_killed_make_room(file: Path, contents: list[bytes]) -> None:
    shared = SharedSlots(4, SIZE)
    child = os.fork()
    if not child:
        own = Reader(shared, file, contents, 4)
        for _ in own.read([0, 1, 2, 3]):
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    for _ in range(70):  # more than there are places
        one = Reader(shared, file, contents, 2)
        assert one.joined
        one.close()
    last = Reader(shared, file, contents, 4)
    assert [*last.read([0, 1, 2, 3, 10, 11, 12, 13] * 2, 2)] == [
        contents[n] for n in [0, 1, 2, 3, 10, 11, 12, 13] * 2
    ]
    last.close()


def test_there_are_places_for_so_many(file: Path, contents: list[bytes]) -> None:
    shared = SharedSlots(4, SIZE)
    users = [Reader(shared, file, contents, 2) for _ in range(65)]
    assert [one.joined for one in users] == [True] * 64 + [False]
    assert [*users[64].read([5, 6])] == contents[5:7]  # alone
    for one in users:
        one.close()


def test_what_is_no_shared_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="whole pages"):
        block_rows.prepare_shared(0, 4, 5000)
    with pytest.raises(ValueError, match="whole pages"):
        block_rows.prepare_shared(0, 0, 4096)
    loads = block_rows.Loads(1)
    with pytest.raises(ValueError, match="file of shared memory"):
        loads.share(10_000)
