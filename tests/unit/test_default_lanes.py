"""Lanes that nobody chose: most world sizes share them, and a dataset of few blocks has few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.plan import Population, make_plan

LARGE = Population.of("large", ["a"], [(shard, 0, 4096) for shard in range(4)], 2)
SMALL = Population.of("small", ["a"], [(0, 0, 4096)], 32)
COMMON = (96, 192, 256, 384, 480, 512, 768, 1000, 1024, 1536, 2048, 4096)


def lanes_of(batch: int, population: Population = LARGE) -> int:
    return make_plan(population, global_batch=batch).lanes


def worlds(number: int) -> set[int]:
    return {world for world in range(1, 65) if number % world == 0}


@pytest.mark.parametrize("batch", COMMON)
def test_nearly_all_worlds_that_divide_a_common_batch_work(batch: int) -> None:
    assert worlds(batch) - worlds(lanes_of(batch)) <= ({32} if batch == 480 else set())
    assert lanes_of(batch) <= 256


@given(st.integers(1, 4096))
def test_lanes_are_many_where_the_batch_allows_it(batch: int) -> None:
    lanes = lanes_of(batch)
    assert batch % lanes == 0
    if any(batch % d == 0 for d in range(32, 257)):
        assert 32 <= lanes <= 512
    assert (lanes % 2 == 0) == (batch % 2 == 0), "two ranks share what they could share"
    if batch >= 8:
        assert lanes_of(batch, SMALL) <= 32, "a dataset of few blocks has few lanes"
