"""The window holds what it counts, has what each step needs when it is its turn, and keeps to its budget."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import UsageError
from shardkit.loader.block_memory import BlockMemory
from shardkit.loader.block_window import BlockWindow, GroupBlocks
from shardkit.loader.gather import GatherColumns, RowAddresses, StepGroup, group_rows
from shardkit.loader.load_queue import BLOCK, FILE, JOB, LoadQueue

pytestmark = pytest.mark.usefixtures("copies")


class LoadedBlock(GatherColumns):
    """Stands for a block that was loaded: its facts say which, and it can be asked whether it is still there."""

    __slots__ = ("__weakref__",)

    def __init__(self, block: int) -> None:
        self.facts = np.array([block]).tobytes()


class Blocks:
    """Blocks of one byte, by way of Python, unless told otherwise.

    Args:
        most: bytes that a block may have, for all that is known before it is loaded.
        size: that it has.
    """

    def __init__(
        self,
        read: Callable[[int], GatherColumns] = LoadedBlock,
        most: int = 1,
        size: Callable[[int], int] = lambda block: 1,
    ) -> None:
        self._read, self._most, self._size = read, most, size

    def sizes(self, blocks: Any, until: int, now: int) -> Any:
        return np.full(len(blocks), self._most), np.zeros(len(blocks), np.int64)

    def jobs(self, blocks: Any, own: Any) -> Any:
        jobs = np.zeros((len(blocks), JOB + 1), np.int64)
        jobs[:, FILE], jobs[:, BLOCK] = -1, blocks
        return jobs

    def read(self, block: int) -> tuple[GatherColumns, int, int]:
        return self._read(block), self._size(block), self._size(block)


def window_of(source: Blocks, budget: int, threads: int) -> BlockWindow:
    memory = BlockMemory(budget)
    return BlockWindow(cast(Any, source), LoadQueue(1, threads, memory), memory)


class _Facts(RowAddresses):
    """Which blocks the rows of steps are taken from."""

    def __init__(self, which: Any) -> None:
        self._which = which

    def take(self, facts: Any, borders: Sequence[int]) -> list[dict[str, Any]]:
        return [{"blocks": set(facts[self._which[a:b], 0].tolist())} for a, b in pairwise(borders)]


def group_of(steps: Sequence[Sequence[int]], first: int = 0) -> StepGroup:
    """Steps that need one row of each of these blocks."""
    rows = np.array([block for step in steps for block in step], np.int64)
    counts = np.array([[len(step)] for step in steps], np.int64)
    return group_rows(range(first, first + len(steps)), rows, rows, counts, rows, np.zeros_like(rows))


def admitted(window: BlockWindow, steps: Sequence[Sequence[int]]) -> GroupBlocks:
    blocks, rest = window.admit(window.loop, group_of(steps), lambda step, needed: None)
    assert rest is None
    return blocks


def work(window: BlockWindow, steps: Sequence[Sequence[int]], rows_of: Any = _Facts) -> Iterator[set[Any]]:
    """What the rows of each of some steps are taken from when it is its turn; groups are planned one ahead."""
    left: StepGroup | None = group_of(steps)
    waiting: deque[GroupBlocks] = deque()
    while left is not None or waiting:
        while left is not None and len(waiting) < 2:
            blocks, left = window.admit(window.loop, left, lambda step, needed: None)
            waiting.append(blocks)
        one = waiting.popleft()
        rows = rows_of(one.which)
        for step in range(len(one.group.numbers)):
            assert one.wait(step, 1, 60, lambda waited: None) == range(step, step + 1)
            (found,) = one.take(range(step, step + 1), one.group.borders[step : step + 2].tolist(), rows)
            yield found["blocks"]


STEPS = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=6), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, room=st.integers(0, 30), threads=st.integers(1, 3), most=st.sampled_from([1, 3]))
def test_every_step_finds_its_blocks_within_the_budget(
    steps: list[list[int]], room: int, threads: int, most: int
) -> None:
    budget = max(len(set(step)) for step in steps) * most + room
    window = window_of(Blocks(most=most), budget, threads)
    for _ in range(2):
        loop = window.loop
        for step, there in zip(steps, work(window, steps), strict=True):
            assert set(step) == there
            assert window.nbytes <= budget
        window.end_loop(loop)
    assert window.counts.peak_bytes <= budget
    assert window.counts.block_loads >= len({block for step in steps for block in step})
    window.close()
    assert window.nbytes == 0


def test_who_waits_for_a_block_is_told_that_the_loop_is_stopped() -> None:
    begun, go = threading.Event(), threading.Event()

    def load(block: int) -> GatherColumns:
        begun.set()
        assert go.wait(60)
        return LoadedBlock(block)

    window = window_of(Blocks(load), budget=100, threads=1)
    loop = window.loop
    one = admitted(window, [[1], [2, 3]])
    assert begun.wait(60)
    threading.Timer(0.2, lambda: window.end_loop(loop)).start()
    with pytest.raises(UsageError, match="closed while this loop waited"):
        one.wait(0, 1, 60, lambda waited: pytest.fail("nobody says that the loop has stopped"))
    window.end_loop(loop)
    assert not window.is_loaded(1)
    go.set()
    assert [*work(window, [[2], [1]])] == [{2}, {1}]
    assert window.counts.block_loads == 3, "what had begun, and what was asked for since"
    window.close()


def test_a_block_that_comes_after_its_job_was_dropped_changes_nothing() -> None:
    begun, go = threading.Event(), threading.Event()
    kept: dict[int, weakref.ref[GatherColumns]] = {}

    def load(block: int) -> GatherColumns:
        columns = LoadedBlock(block)
        if block == 2:
            begun.set()
            assert go.wait(60)
        kept[block] = weakref.ref(columns)
        return columns

    class Sized(Blocks):
        def sizes(self, blocks: Any, until: int, now: int) -> Any:
            return np.where(blocks == 3, 2, 1), np.zeros(len(blocks), np.int64)

    window = window_of(Sized(load), budget=2, threads=2)
    loop = window.loop
    admitted(window, [[1], [2], [3]])  # both slots are given up for the third block, which takes one
    assert begun.wait(60)
    window.end_loop(loop)
    one = admitted(window, [[4]])
    assert one.wait(0, 1, 60, lambda waited: None) == range(1)
    go.set()
    deadline = time.monotonic() + 60
    while 2 not in kept or kept[2]() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert kept[4]() is not None, "its memory is in use"
    assert one.take(range(1), [0, 1], _Facts(one.which)) == [{"blocks": {4}}]
    assert [*work(window, [[5], [6], [7]])] == [{5}, {6}, {7}]
    window.close()


def test_steps_end_while_other_blocks_are_admitted() -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow(Blocks):
        def jobs(self, blocks: Any, own: Any) -> Any:
            if 9 in blocks:
                begun.set()
                assert go.wait(60), "steps wait for it"
            return super().jobs(blocks, own)

    window = window_of(Slow(), budget=4, threads=1)
    window.end_loop(window.loop)
    one = admitted(window, [[0], [1], [2], [3]])
    one.wait(3, 1, 60, lambda waited: None)
    groups: list[GroupBlocks] = []
    other = threading.Thread(target=lambda: groups.append(admitted(window, [[9]])))
    other.start()
    assert begun.wait(60)
    rows = _Facts(one.which)
    for step in range(4):
        assert one.wait(step, 1, 60, lambda waited: None) == range(step, step + 1)
        assert one.take(range(step, step + 1), [step, step + 1], rows) == [{"blocks": {step}}]
    go.set()
    other.join()
    assert groups[0].wait(0, 1, 60, lambda waited: None) == range(1)
    assert groups[0].take(range(1), [0, 1], _Facts(groups[0].which)) == [{"blocks": {9}}]
    assert window.nbytes <= 4, "one of them has left"
    window.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
def test_threads_that_load_go_behind_those_of_the_program() -> None:
    seen: list[int] = []

    def load(block: int) -> GatherColumns:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return LoadedBlock(block)

    own = os.getpriority(os.PRIO_PROCESS, 0)
    window = window_of(Blocks(load), budget=4, threads=2)
    assert [*work(window, [[0], [1]])] == [{0}, {1}]
    window.close()
    assert min(seen) > own or own == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) == own, "the program stays as it is"


def test_a_loaded_block_takes_what_it_is_and_not_what_it_could_have_been() -> None:
    window = window_of(Blocks(most=10, size=lambda block: 1 + block % 3), budget=40, threads=2)
    sizes = {}
    for block in range(60):
        assert [*work(window, [[block]])] == [{block}]
        sizes = {one: 1 + one % 3 for one in range(60) if window.is_loaded(one)}
        assert window.nbytes == sum(sizes.values()) <= 40
    assert len(sizes) >= 14  # beside one that is on its way, and counts 10, thirty bytes of them stay
    assert window.counts.peak_bytes <= 40
    window.close()


def test_a_block_stays_loaded_until_its_last_step_though_its_slot_is_planned_for_another() -> None:
    window = window_of(Blocks(), budget=2, threads=1)
    try:
        admitted(window, [[1], [2]])  # steps 0 and 1
        assert window.wait_for(2, 60, lambda waited: None) == 2
        admitted(window, [[3], [4]])  # steps 2 and 3
        assert [window.is_loaded(block) for block in (1, 2, 3, 4)] == [True, True, False, False]
        window.advance(1)
        assert [window.is_loaded(block) for block in (1, 2)] == [False, True]
        window.advance(3)
        assert window.wait_for(4, 60, lambda waited: None) == 4
        admitted(window, [[5], [6], [7], [8]])  # blocks of one group replace each other before they have jobs
        assert [window.is_loaded(block) for block in (3, 4, 5, 6)] == [False, True, False, False]
    finally:
        window.close()


def test_memory_of_longer_blocks_is_lent_for_shorter_ones() -> None:
    memory = BlockMemory(1 << 21)
    lent = [memory.lend(1 << 18) for _ in range(8)]
    places = {one.address for one in lent}
    lent.clear()
    for size in (1 << 18, (1 << 18) - 5, 200_000, 1 << 17):
        lent = [memory.lend(size) for _ in range(8)]
        assert {one.address for one in lent} == places
        lent.clear()
        assert memory.nbytes == 1 << 21
    small = memory.lend(1 << 16)  # below half: the rest would lie idle
    assert small.address not in places
    memory.close()
