"""What a full cache drops: the rule on arrays, the same rule in a heap, and the optimum that both follow."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.reading.cache.eviction import choose_victims
from shardkit_tools.simulation.eviction import FurthestFirst

traces = st.lists(st.integers(0, 12), min_size=1, max_size=60)


def next_uses(trace: list[int], *, known: int) -> list[float]:
    """Place of the next read of the same block, inf where there is none within `known` reads."""
    upcoming: dict[int, int] = {}
    found = [math.inf] * len(trace)
    for i in reversed(range(len(trace))):
        after = upcoming.get(trace[i], math.inf)
        found[i] = after if after - i <= known else math.inf
        upcoming[trace[i]] = i
    return found


def play(trace: list[int], sizes: list[int], limit: int, known: int = 10**9) -> tuple[int, int]:
    """Hits and bytes fetched."""
    cache, hits, fetched = FurthestFirst(limit), 0, 0
    for block, after in zip(trace, next_uses(trace, known=known), strict=True):
        if cache.use(block, after):
            hits += 1
        else:
            fetched += sizes[block]
            cache.add(block, sizes[block], after)
        assert cache.held <= limit
    return hits, fetched


def most_hits(trace: list[int], capacity: int) -> int:
    """By trying all there is: a block is kept or not after each read, any other may go for it."""
    states = {frozenset[int](): 0}
    for block in trace:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            hits += block in held
            options = [held]
            if block not in held:
                options += [frozenset({*rest, block}) for size in range(capacity)
                            for rest in itertools.combinations(held, size)]  # fmt: skip
            for option in options:
                after[option] = max(after.get(option, -1), hits)
        states = after
    return max(states.values())


@settings(max_examples=150, deadline=None)
@given(traces, st.lists(st.integers(1, 9), min_size=13, max_size=13), st.integers(5, 60), st.integers(1, 40))
def test_heap_and_arrays_decide_alike(trace: list[int], sizes: list[int], limit: int, known: int) -> None:
    cache = FurthestFirst(limit)
    model: dict[int, tuple[int, float, int]] = {}  # size, next use, when added
    for now, (block, after) in enumerate(zip(trace, next_uses(trace, known=known), strict=True)):
        if cache.use(block, after):
            assert block in model
            model[block] = (model[block][0], after, model[block][2])
            continue
        assert block not in model
        table = list(model.items())
        victims = choose_victims(
            np.array([size for _, (size, _, _) in table], dtype=np.int64),
            np.array([use - now for _, (_, use, _) in table], dtype=np.float64),
            np.array([added for _, (_, _, added) in table], dtype=np.float64),
            held=sum(size for size, _, _ in model.values()),
            limit=limit,
            new_size=sizes[block],
            new_distance=after - now,
        )
        for victim in [] if victims is None else victims.tolist():
            del model[table[victim][0]]
        held = sum(size for size, _, _ in model.values())
        is_kept = victims is not None and held + sizes[block] <= limit
        if is_kept:
            model[block] = (sizes[block], after, now)
        assert cache.add(block, sizes[block], after) == is_kept
        assert set(cache) == set(model)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=14), st.integers(1, 3))
def test_no_schedule_hits_more_often(trace: list[int], capacity: int) -> None:
    """Limits below 50 blocks: the slack is less than a block."""
    assert play(trace, [1] * 6, capacity)[0] == most_hits(trace, capacity)


@settings(max_examples=60, deadline=None)
@given(traces)
def test_more_room_never_fetches_more(trace: list[int]) -> None:
    fetched = [play(trace, [1] * 13, limit)[1] for limit in range(1, 15)]
    assert fetched == sorted(fetched, reverse=True)
    assert fetched[-1] == len(set(trace))
