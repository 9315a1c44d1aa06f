"""Lanes that nobody chose: most world sizes share them, and a run keeps those that it began with."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import StateError
from shardkit.loader.live import STATE_VERSION, check_state
from shardkit.plan import Plan, Population, make_plan

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


def earlier(batch: int, lanes: int) -> Plan:
    """As 0.1 made a plan where nobody chose lanes and windows."""
    return make_plan(LARGE, global_batch=batch, lanes=lanes, window_blocks=16)


@pytest.mark.parametrize(("batch", "lanes"), [(192, 64), (480, 60), (1000, 50), (96, 48), (254, 2)])
def test_a_state_of_the_defaults_of_0_1_is_refused_with_what_to_pass(batch: int, lanes: int) -> None:
    old, new = earlier(batch, lanes), make_plan(LARGE, global_batch=batch)
    state: dict[str, Any] = {"version": STATE_VERSION, "step": 3, "plan": old.digest, "manifest": "large"}
    assert new.digest != old.digest
    with pytest.raises(StateError, match=f"lanes={lanes}, window_blocks=16"):
        check_state(state, new, "large")
    assert check_state(state, earlier(batch, lanes), "large") == 3
