"""Blocks that processes share: fetched once, checked by digest, lost with nobody's lock held."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from shardkit.formats.canonical_json import xxh3
from shardkit.reading.cache.shared_blocks import SharedBlocks
from shardkit.reading.objects import BlockRequest

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_OFD_SETLK"), reason="needs Linux"
)
SIZE = 10_000


def _block(number: int) -> tuple[BlockRequest, bytes]:
    data = number.to_bytes(4, "little") * (SIZE // 4)
    place = (1 << 63) + (number << 20)  # all in one set of the table
    return BlockRequest("shard", 0, SIZE, hashlib.sha256(data).digest(), xxh3(data), place), data


def _fetch(asked: list[int], number: int) -> Callable[[], bytes]:
    def fetch() -> bytes:
        asked.append(number)
        return _block(number)[1]

    return fetch


def test_what_one_process_fetched_the_others_copy_as_long_as_there_is_room() -> None:
    shared = SharedBlocks(4 * SIZE)
    first, second, asked = shared.open(), shared.open(), list[int]()
    for number in range(40):
        request, data = _block(number)
        assert first.fetch(request, _fetch(asked, number)) == data
        for recent in range(max(0, number - 2), number + 1):
            assert second.fetch(_block(recent)[0], _fetch(asked, -1)) == _block(recent)[1]
    assert asked == list(range(40))
    assert second.fetch(_block(0)[0], _fetch(asked, 0)) == _block(0)[1]
    assert asked[-1] == 0  # its room went to others
    assert not second.holds(_block(30)[0])


def test_bytes_that_are_not_what_was_asked_for_are_fetched_again() -> None:
    shared, asked = SharedBlocks(4 * SIZE), list[int]()
    request, data = _block(1)
    shared.keep(request, bytes(SIZE))
    assert shared.fetch(request, _fetch(asked, 1)) == data
    assert asked == [1]
    assert shared.open().fetch(request, _fetch(asked, 1)) == data
    assert asked == [1]
    assert shared.keep(request, bytes(5 * SIZE)) == bytes(5 * SIZE)  # larger than all of it: not kept


def test_of_processes_that_ask_at_once_one_fetches() -> None:
    shared, asked = SharedBlocks(4 * SIZE), list[int]()
    request, data = _block(1)

    def slow() -> bytes:
        time.sleep(0.3)
        return _fetch(asked, 1)()

    threads = [
        threading.Thread(target=one.fetch, args=(request, slow)) for one in [shared.open() for _ in range(5)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [1]
    assert shared.fetch(request, _fetch(asked, 1)) == data


def test_a_process_that_is_killed_while_it_fetches_holds_nobody_up() -> None:
    shared, asked = SharedBlocks(4 * SIZE), list[int]()
    request, data = _block(1)
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        with shared.open().claimed([request]):
            os.write(writes, b"!")
            time.sleep(600)
        os._exit(0)
    assert os.read(reads, 1) == b"!"
    with shared.open().claimed([request]) as mine:
        assert mine == [False]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    started = time.monotonic()
    assert shared.open().fetch(request, _fetch(asked, 1)) == data
    assert time.monotonic() - started < 5
    os.close(reads)
    os.close(writes)
