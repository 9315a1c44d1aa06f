"""Jobs that are dropped are nobody's, and nothing is written to a slot after its job was cancelled."""

from __future__ import annotations

import sys
import threading
import time
from ctypes import string_at
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from shardkit.loader import gather, plain_rows
from shardkit.loader.block_memory import BlockMemory
from shardkit.loader.load_queue import (
    AFTER,
    BLOCK,
    FILE,
    HASH,
    JOB,
    OFFSET,
    ROOM,
    SIZE,
    SLOT,
    LoadQueue,
    TakenJobs,
)

BYTES = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
compiled = pytest.mark.skipif(gather.block_rows is plain_rows, reason="the module is not compiled here")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that holds BYTES."""
    path = tmp_path / "bytes"
    path.write_bytes(BYTES.tobytes())
    return path


def _queue(slots: int, threads: int = 1, *, width: int = 1) -> LoadQueue:
    queue = LoadQueue(width, threads, BlockMemory(1 << 20))
    queue.grow(slots)
    return queue


def _own_jobs(blocks: list[int]) -> Any:
    """Jobs that the caller reads, each into the slot of its number."""
    jobs = np.zeros((len(blocks), JOB + 1), np.int64)
    jobs[:, FILE], jobs[:, BLOCK], jobs[:, SLOT] = -1, blocks, np.arange(len(blocks))
    return jobs


def _file_job(offset: int, size: int, slot: int, after: int = 0) -> Any:
    """A job of a block of one row, which is all of it."""
    job = np.zeros(JOB + 5, np.int64)
    expected = np.array([xxhash.xxh3_64_intdigest(BYTES[offset : offset + size].data)], np.uint64)
    job[[OFFSET, SIZE, ROOM, AFTER, SLOT]] = offset, size, size, after, slot
    job[[HASH, JOB, JOB + 4]] = expected.view(np.int64)[0], 1, size
    return job


def _block(queue: LoadQueue, slot: int) -> bytes:
    """The bytes of the block in a slot."""
    _, address, _, _, size = queue.facts[slot].tolist()
    return string_at(address, size)


def _work(queue: LoadQueue) -> None:
    """Run a thread of local files."""
    while (jobs := queue.take()) is not None:
        assert not len(queue.load(jobs).rows)


def _take(queue: LoadQueue) -> TakenJobs:
    jobs = queue.take()
    assert jobs is not None
    return jobs


def test_jobs_that_are_dropped_are_nobodys() -> None:
    queue = _queue(8, threads=2)
    jobs = _own_jobs([10, 11, 12, 13, 14])
    assert queue.add(jobs) == 0
    begun = [_take(queue), _take(queue)]
    assert [(one.first, one.rows[0, [SLOT, BLOCK]].tolist()) for one in begun] == [(0, [0, 10]), (1, [1, 11])]
    assert (queue.longest() or (-1, 0))[0] == 10
    assert queue.wait(1, 0.01) == -1
    assert queue.drop() == {0, 1, 2, 3, 4}
    assert queue.is_cancelled(begun[0])
    assert queue.longest() is None
    assert queue.add(jobs[3:]) == 5
    queue.finish(begun[0], np.array([42]).tobytes(), None, 1, 0.0)
    assert not queue.facts.any(), "what came too late has no facts"
    mine = _take(queue)
    assert (mine.first, mine.rows[0, BLOCK]) == (5, 13)
    assert queue.wait(5, 0.01) == 5  # those before are nobody's
    queue.finish(mine, np.array([42]).tobytes(), None, 1, 0.0)
    assert queue.wait(6, 1) == 6
    assert queue.facts[3, 0] == 42
    waiting = threading.Timer(0.1, queue.drop)
    waiting.start()
    assert queue.wait(7, 60) == -2  # who waits is told
    waiting.join()
    queue.close()
    assert queue.take() is None
    assert queue.wait(0, 0) == -2


@compiled
def test_dropping_waits_for_what_is_being_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    load_blocks = gather.block_rows.load_blocks

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return load_blocks(*arguments)

    monkeypatch.setattr(gather.block_rows, "load_blocks", slow)
    queue = _queue(2, width=5)
    queue.add_file(str(file), len(BYTES))
    queue.add(np.array([_file_job(100, 500, 0), _file_job(200, 500, 1)]))
    thread = threading.Thread(target=_work, args=(queue,))
    thread.start()
    assert begun.wait(60)
    lost: list[set[int]] = []
    dropping = threading.Thread(target=lambda: lost.append(queue.drop()))
    dropping.start()
    time.sleep(0.05)
    assert dropping.is_alive()
    go.set()
    dropping.join(60)
    assert lost in ([{1}], [set()]), "a block that was loaded meanwhile stays"
    assert _block(queue, 0) == BYTES[100:600].tobytes()
    queue.close()
    thread.join(60)


@compiled
def test_objects_are_held_until_their_slot_is_taken_or_released(file: Path) -> None:
    spans = np.array([[10, 2100], [2000, 4000]])  # where rows begin and end
    queue = _queue(2, width=5)
    queue.add_file(str(file), len(BYTES))
    jobs = np.zeros((4, JOB + 5), np.int64)
    for n, job in enumerate(jobs):
        job[:] = _file_job(100 * n, 5000, n % 2, n - n % 2)
        job[JOB:] = 2, spans[0].ctypes.data, spans[1].ctypes.data, 0, gather.OBJECTS
    queue.add(jobs)
    thread = threading.Thread(target=_work, args=(queue,))
    thread.start()
    which, row = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    for step in (0, 2):
        queue.advance(step)
        assert queue.wait(step + 2, 60) == step + 2
        found = gather.block_rows.objects_of(queue.facts, which, row, 0, False)
        starts = [100 * (step + n) + spans[0, r] for n in (0, 1) for r in (0, 1)]
        ends = [100 * (step + n) + spans[1, r] for n in (0, 1) for r in (0, 1)]
        assert found == [BYTES[a:b].tobytes() for a, b in zip(starts, ends, strict=True)]

    def held() -> int:
        own = min(map(sys.getrefcount, [bytes(1000)]))
        return sum(references > own for references in map(sys.getrefcount, found))

    assert held() == 4
    queue.release(1)
    assert held() == 2
    queue.close()
    queue.clear()
    assert held() == 0
