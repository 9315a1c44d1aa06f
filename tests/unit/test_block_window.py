"""The window holds what it counts, has what each step needs when it is its turn, and keeps to its budget."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import IntegrityError, UsageError
from shardkit.loader.block_memory import BlockMemory
from shardkit.loader.block_window import BlockSource, BlockWindow
from shardkit.loader.gather import GatherColumns
from shardkit.loader.schedule import StepGroup, group_rows, steps_that_fit


class LoadedBlock(GatherColumns):
    """Stands for a block that was loaded: says which, and can be asked whether it is still there."""

    def __init__(self, block: int) -> None:
        self.block = block


def block_source(**chosen: Any) -> BlockSource:
    """Blocks of one byte, of this machine, unless `chosen` otherwise."""
    facts: dict[str, Any] = {
        "load": lambda blocks: [LoadedBlock(block) for block in blocks],
        "size_of": lambda block: 1,
        "loaded_size_of": lambda block: 1,
        "near": lambda block: True,
    }
    return BlockSource(**(facts | chosen))


def group_of(steps: Sequence[Sequence[int]], first: int = 0) -> StepGroup:
    """Steps that need one row of each of these blocks."""
    rows = np.array([block for step in steps for block in step], np.int64)
    counts = np.array([[len(step)] for step in steps], np.int64)
    return group_rows(range(first, first + len(steps)), rows, rows, counts, rows, np.zeros_like(rows))


def work(window: BlockWindow, steps: Sequence[Sequence[int]]) -> Iterator[set[int]]:
    """What is there for each of some steps, planned at once, when it is its turn."""
    left: StepGroup | None = group_of(steps)
    while left is not None:
        sizes, held = window.sizes(left.blocks)
        fitting, _ = steps_that_fit(left, sizes, held, window.budget)
        group, left = left.split(fitting)
        admitted = window.admit(group, window.sizes(group.blocks)[0])
        loading = threading.Thread(target=window.load, args=(admitted,))
        loading.start()
        there: dict[int, GatherColumns] = {}
        for step in range(len(group.numbers)):
            _, first, blocks = admitted.wait(step, 1, 60, lambda waited: None)
            there |= dict(enumerate(blocks, first))
            yield {one.block for one in there.values() if isinstance(one, LoadedBlock)}
            for place in admitted.done(range(step, step + 1)):
                del there[place]
        loading.join()


STEPS = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=6), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, room=st.integers(0, 30), threads=st.integers(1, 3), near=st.booleans())
def test_every_step_finds_its_blocks_within_the_budget(
    steps: list[list[int]], room: int, threads: int, near: bool
) -> None:
    most = 1 if near else 3  # bytes that a block may have, for all that is known before it is loaded
    source = block_source(near=lambda block: near, size_of=lambda block: most)
    budget = max(len(set(step)) for step in steps) * most + room
    window = BlockWindow(source, budget, threads)
    for _ in range(2):
        loop = window.begin_loop()
        for step, there in zip(steps, work(window, steps), strict=True):
            assert set(step) <= there
            assert len(there) <= budget
        window.end_loop(loop)
    assert window.counts.peak_bytes <= budget
    assert window.counts.block_loads >= len({block for step in steps for block in step})
    window.close()
    assert window.nbytes == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_dropped_blocks_are_gone(threads: int) -> None:
    there: weakref.WeakSet[LoadedBlock] = weakref.WeakSet()

    def load(blocks: Sequence[int]) -> list[GatherColumns]:
        loaded = [LoadedBlock(block) for block in blocks]
        there.update(loaded)
        return [*loaded]

    window = BlockWindow(block_source(load=load), budget=16, threads=threads)
    for first in range(0, 60, 5):  # borders of groups and of what one task loads do not fall together
        wanted = set(range(first, first + 11))
        assert [found >= wanted for found in work(window, [sorted(wanted)])] == [True]
        assert len(there) == window.nbytes <= 16
    window.close()
    assert not there


def test_a_step_above_the_budget_is_loaded_alone() -> None:
    window = BlockWindow(block_source(), budget=4, threads=2)
    steps = [[1, 2], [3], list(range(10, 20)), [4, 5]]
    assert all(set(step) <= there for step, there in zip(steps, work(window, steps), strict=True))
    assert window.counts.peak_bytes == 10
    window.close()


def test_a_failed_block_is_raised_at_its_step_and_tried_again_in_the_next_loop() -> None:
    fails = [True]

    def load(blocks: Sequence[int]) -> list[GatherColumns]:
        if 7 in blocks and fails[0]:
            raise IntegrityError("block 7")
        return [LoadedBlock(block) for block in blocks]

    window = BlockWindow(block_source(load=load, near=lambda block: False), budget=100, threads=2)
    steps = work(window, [[1], [2, 3], [7], [8]])
    assert [sorted(next(steps)) for _ in range(2)] == [[1], [2, 3]]
    with pytest.raises(IntegrityError, match="block 7"):
        next(steps)
    window.end_loop(0)
    fails[0] = False
    assert {7} <= next(work(window, [[7]]))
    window.close()


def test_a_loop_that_ends_late_takes_nothing_from_the_one_that_was_begun_since() -> None:
    window = BlockWindow(block_source(), budget=100, threads=2)
    late = window.begin_loop()
    window.begin_loop()
    group = group_of([[1], [2, 3]])
    admitted = window.admit(group, window.sizes(group.blocks)[0])
    window.end_loop(late)
    window.load(admitted)
    window.end_loop(late)
    assert [len(admitted.wait(step, 1, 60, lambda waited: None)[2]) for step in range(2)] == [
        1,
        2,
    ]
    window.close()


def test_who_waits_for_a_block_is_told_that_the_loop_is_stopped() -> None:
    window, stopped = BlockWindow(block_source(), budget=100, threads=2), threading.Event()
    window.begin_loop()
    group = group_of([[1], [2, 3]])
    admitted = window.admit(group, window.sizes(group.blocks)[0], stopped.is_set)

    def stop() -> None:
        stopped.set()
        window.wake()

    threading.Timer(0.2, stop).start()
    with pytest.raises(UsageError, match="closed while this loop waited"):
        admitted.wait(0, 1, 5, lambda waited: pytest.fail("nobody says that the loop has stopped"))
    window.load(admitted)
    assert not window.is_loaded(1), "nothing is loaded for it"
    window.close()


def test_a_loaded_block_takes_what_it_is_and_not_what_it_could_have_been() -> None:
    source = block_source(
        near=lambda block: False, size_of=lambda block: 10, loaded_size_of=lambda block: 1 + block % 3
    )
    window = BlockWindow(source, budget=40, threads=2)
    sizes = {}
    for block in range(60):
        assert [*work(window, [[block]])] == [{block}]
        sizes = {one: 1 + one % 3 for one in range(60) if window.is_loaded(one)}
        assert window.nbytes == sum(sizes.values()) <= 40
    assert len(sizes) >= 14  # beside one that is on its way, and counts 10, thirty bytes of them stay
    assert window.counts.peak_bytes <= 40
    window.close()


def test_only_what_the_same_loop_had_is_counted_as_loaded_again() -> None:
    window = BlockWindow(block_source(), budget=10, threads=1)

    def use(blocks: range) -> tuple[int, int]:
        for block in blocks:
            assert [*work(window, [[block]])] == [{block}]
        return window.loop_loads, window.loop_reloads

    window.begin_loop()
    assert use(range(20)) == (20, 0)
    assert use(range(10)) == (30, 10)
    assert use(range(4, 10)) == (30, 10)  # these are there
    window.begin_loop()
    assert use(range(10, 20)) == (10, 0)  # it was the loop before that had dropped them
    assert use(range(4)) == (14, 0)
    assert use(range(10, 20)) == (24, 10)  # each takes the place of the next
    assert window.counts.block_reloads == 20
    window.close()


def test_memory_of_longer_blocks_is_lent_for_shorter_ones() -> None:
    memory = BlockMemory(1 << 21)
    lent = memory.lend([1 << 18] * 8)
    places = {one.address for one in lent}
    del lent
    for size in (1 << 18, (1 << 18) - 5, 200_000, 1 << 17):
        again = memory.lend([size] * 8)
        assert {one.address for one in again} == places
        del again
        assert memory.nbytes == 1 << 21
    small = memory.lend([1 << 16])[0]  # below half: the rest would lie idle
    assert small.address not in places
    memory.close()
