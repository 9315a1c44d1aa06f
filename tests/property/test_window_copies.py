"""Whatever is leased in whatever loop: no view of a file outlives its loop, copies keep to their room and the bound."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from shardkit.loader.block_window import BlockWindow
from shardkit.loader.gather import GatherColumns
from shardkit.testing.block_sources import LoadedBlock, block_source

BLOCKS = 40
SIZES = [1 + 7 * block % 5 for block in range(BLOCKS)]


def _is_file(block: int) -> bool:
    return block % 4 > 0


LEASE = st.tuples(
    st.just("lease"), st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=12, unique=True)
)
STEP = st.one_of(
    LEASE, LEASE, LEASE, st.tuples(st.just("loop"), st.booleans()), st.tuples(st.just("bound"), st.integers(60, 200))
)  # fmt: skip


def _use(
    window: BlockWindow, blocks: list[int], there: weakref.WeakSet[LoadedBlock], loop: int, keeps: bool
) -> None:
    """Lease some blocks and let go of them: each is what was asked for and may be used in this loop."""
    before = {one.block: one for one in there}
    lease = window.lease(blocks, lambda: False)
    found = [one for one in lease.wait(60, lambda waited: None) if isinstance(one, LoadedBlock)]
    lease.release()
    assert [one.block for one in found] == blocks
    for one in found:
        assert one.copied or not _is_file(one.block) or one.loop == loop
        earlier = before.get(one.block)
        if earlier is not one:
            assert keeps or not one.copied
            # what may stay is not loaded again
            assert earlier is None or (_is_file(one.block) and not earlier.copied)


@given(st.lists(STEP, max_size=60), st.integers(0, 120), st.integers(60, 200), st.integers(1, 3))
def test_views_last_for_a_loop_and_copies_for_as_long_as_there_is_room(
    steps: list[tuple[str, object]], room: int, budget: int, threads: int
) -> None:
    loop = 0
    there: weakref.WeakSet[LoadedBlock] = weakref.WeakSet()

    def load(blocks: Sequence[int], own_memory: bool) -> list[GatherColumns]:
        assert not own_memory or all(map(_is_file, blocks))
        loaded = [LoadedBlock(block, own_memory, loop) for block in blocks]
        there.update(loaded)
        return [*loaded]

    source = block_source(
        load=load,
        size_of=lambda block: SIZES[block] + block % 2,
        loaded_size_of=SIZES.__getitem__,
        mapped=_is_file,
        room=lambda: room,
    )
    window = BlockWindow(source, budget, threads)
    keeps = False
    for what, value in steps:
        if what == "loop":
            assert isinstance(value, bool)
            loop, keeps = loop + 1, value
            window.begin_loop(value)
        elif what == "bound":
            assert isinstance(value, int)
            window.budget = value
        else:
            assert isinstance(value, list)
            _use(window, value, there, loop, keeps)
        assert window.nbytes <= window.budget
        assert sum(SIZES[one.block] for one in there) == window.nbytes
        assert sum(SIZES[one.block] for one in there if one.copied) <= room
        assert set(window.views(range(BLOCKS))) == {
            one.block for one in there if _is_file(one.block) and not one.copied
        }
    window.close()
    assert not there


def test_copying_ends_once_something_is_dropped_that_was_of_use() -> None:
    copied: list[int] = []

    def load(blocks: Sequence[int], own_memory: bool) -> list[GatherColumns]:
        copied.extend(blocks if own_memory else [])
        return [LoadedBlock(block, own_memory) for block in blocks]

    source = block_source(load=load, mapped=lambda block: True, room=lambda: 15)

    def use(window: BlockWindow, blocks: range) -> None:
        for block in blocks:
            lease = window.lease([block], lambda: False)
            lease.wait(60, lambda waited: None)
            lease.release()

    window = BlockWindow(source, budget=10, threads=2)
    window.begin_loop(False)
    use(window, range(10))
    window.begin_loop(True)
    use(window, range(5, 15))  # views of the loop before give way: they are of no use any more
    assert sorted(copied) == list(range(5, 15))
    use(window, range(15, 18))  # the first finds out that there is not room for all
    use(window, range(18, 40))
    assert sorted(copied) == [*range(5, 15)]
    window.budget = 100
    use(window, range(40, 60))
    assert sorted(copied) == [*range(5, 15), *range(40, 55)]  # of the first ten none was left
    window.budget = 1
    window.budget = 100
    use(window, range(60, 80))
    assert copied[25:] == [*range(60, 75)]
    window.close()
