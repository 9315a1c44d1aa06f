"""The window holds what it counts: a block that was dropped is gone, whatever it was loaded together with."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from shardkit.loader.block_window import BlockSource, BlockWindow
from shardkit.loader.gather import GatherColumns


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


@pytest.mark.parametrize("threads", [1, 3])
def test_dropped_blocks_are_gone(threads: int) -> None:
    there: weakref.WeakSet[LoadedBlock] = weakref.WeakSet()

    def load(blocks: Sequence[int]) -> list[GatherColumns]:
        loaded = [LoadedBlock(block) for block in blocks]
        there.update(loaded)
        return [*loaded]

    source = block_source(load=load)
    window = BlockWindow(source, budget=16, threads=threads)
    for first in range(0, 60, 5):  # borders of leases and of what one task loads do not fall together
        lease = window.lease(list(range(first, first + 11)), lambda: False)
        blocks = lease.wait(60, lambda waited: None)
        assert [block.block for block in blocks if isinstance(block, LoadedBlock)] == list(
            range(first, first + 11)
        )
        lease.release()
        del blocks, lease
        assert len(there) == window.nbytes <= 16
    window.close()
    assert not there


def test_a_loaded_block_takes_what_it_is_and_not_what_it_could_have_been() -> None:
    source = block_source(size_of=lambda block: 10, loaded_size_of=lambda block: 1 + block % 3)
    window = BlockWindow(source, budget=40, threads=2)
    sizes = {}
    for block in range(60):
        lease = window.lease([block], lambda: False)
        assert window.nbytes <= 40
        lease.wait(60, lambda waited: None)
        lease.release()
        sizes = {one: 1 + one % 3 for one in range(60) if window.is_loaded(one)}
        assert window.nbytes == sum(sizes.values())
    assert len(sizes) >= 14  # beside one that is on its way, and counts 10, thirty bytes of them stay
    assert window.counts.peak_bytes <= 40
    window.close()


def test_only_what_the_same_loop_had_is_counted_as_loaded_again() -> None:
    window = BlockWindow(block_source(), budget=10, threads=1)

    def use(blocks: range) -> tuple[int, int]:
        for block in blocks:
            lease = window.lease([block], lambda: False)
            lease.wait(60, lambda waited: None)
            lease.release()
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
