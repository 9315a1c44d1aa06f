"""Rebalancers that talk through a store: every rank applies the same moves at the same step, whoever is ahead."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from shardkit.errors import ConfigurationError, RunError
from shardkit.loader import LoaderConfig
from shardkit.loader.agreement import Exchange
from shardkit.loader.ranks import LaneShares
from shardkit.loader.rebalancing import Rebalancer, Rebalancing, make_rebalancer
from shardkit.plan import assign
from shardkit.plan.assignment import Rules

dist = pytest.importorskip("torch.distributed")

RULES = Rules(lead=3, settle=8, backoff=64)


class Group:
    """Ranks of one process that take the same steps; `seconds(rank, lanes, step)` is what a cell costs there."""

    def __init__(self, ranks: int, lanes: int, rules: Rules = RULES) -> None:
        self.records: list[dict[str, Any]] = []
        self.seeks = 0
        store = dist.HashStore()
        settings = Rebalancing(every=4, rules=rules)

        def record(step: int, **details: Any) -> None:
            assert not store.check([f"{self.seeks}/decision/{step}"]), "journaled before it is published"
            self.records.append({"step": step, **details})

        self.ranks = [
            Rebalancer(
                settings,
                Exchange(store, r, ranks, patience_s=0.05),
                rank=r,
                dealt=LaneShares(assign(lanes, ranks)),
                record=record,
            )
            for r in range(ranks)
        ]

    def step(self, number: int, seconds: Any) -> list[list[int]]:
        owned = []
        for rank, one in enumerate(self.ranks):
            lanes = one.lanes_at(number)
            one.handed_out(len(lanes), 0.0)
            one.computed(len(lanes) * seconds(rank, len(lanes), number))
            one.came_back()
            owned.append(lanes)
        assert sorted(chain.from_iterable(owned)) == list(range(sum(map(len, owned)))), (
            "every lane is worked once"
        )
        return owned


def half_speed(rank: int, _lanes: int, _step: int) -> float:
    return 2.0 if rank == 2 else 1.0


def test_a_slow_rank_gives_lanes_away_at_the_named_step() -> None:
    group = Group(4, 16)
    owned = [group.step(number, half_speed) for number in range(40)]
    assert [len(lanes) for lanes in owned[0]] == [4, 4, 4, 4]
    assert max(len(lanes) * half_speed(rank, 0, 0) for rank, lanes in enumerate(owned[-1])) == 5.0
    (decision,) = group.records
    assert decision["step"] == 8, "at 4 the leader, first in this loop, has heard of nobody"
    assert decision["from_step"] == 11
    assert [number for number in range(1, 40) if owned[number] != owned[number - 1]] == [11]
    assert decision["before_us"] == 8_000_000
    assert decision["expected_us"] == 5_000_000
    assert decision["moved"] == 2


def test_a_move_that_made_it_worse_is_taken_back_on_all_ranks() -> None:
    group = Group(4, 16)

    def crowded(rank: int, lanes: int, _step: int) -> float:
        return half_speed(rank, 0, 0) * (3.0 if lanes > 4 else 1.0)

    owned = [group.step(number, crowded) for number in range(40)]
    assert [decision["undoes"] for decision in group.records] == [0, 1]
    assert owned[-1] == owned[0] != owned[12]


def test_equal_ranks_keep_their_lanes() -> None:
    group = Group(3, 12)
    owned = [group.step(number, lambda *_: 1.0) for number in range(40)]
    assert all(one == owned[0] for one in owned)
    assert group.records == []


def test_a_seek_deals_evenly_again_and_going_on_does_not() -> None:
    group = Group(4, 16)
    for number in range(20):
        before = group.step(number, half_speed)
    for one in group.ranks:
        one.seek(20)
    assert group.step(20, half_speed) == before
    for one in group.ranks:
        one.seek(12)
    group.seeks += 1
    assert [len(lanes) for lanes in group.step(12, half_speed)] == [4, 4, 4, 4]
    owned = [group.step(number, half_speed) for number in range(13, 30)]
    assert len(owned[-1][2]) < 4


def test_a_rank_that_runs_ahead_of_the_leader_is_stopped_not_guessing() -> None:
    group = Group(2, 4)
    ahead = group.ranks[1]
    for number in range(RULES.lead):
        ahead.lanes_at(number)
    with pytest.raises(RunError, match="rank 0 of 2 has not come to step 0"):
        ahead.lanes_at(RULES.lead)


def test_a_loop_that_says_nothing_is_told() -> None:
    group = Group(2, 4)

    def silent(steps: range) -> None:
        for number in steps:
            for one in group.ranks:
                one.handed_out(len(one.lanes_at(number)), 0.0)
                one.came_back()

    with pytest.warns(RuntimeWarning, match=r"loader\.watch\(model\)"):
        silent(range(4))
    silent(range(4, 12))  # and once is enough
    assert group.records == []


def test_impossible_settings() -> None:
    with pytest.raises(ConfigurationError, match="every = 0: expected a whole number from 1"):
        Rebalancing(every=0)
    with pytest.raises(ConfigurationError, match=r"needs torch\.distributed to be initialised"):
        make_rebalancer(Rebalancing(), rank=0, dealt=LaneShares(assign(4, 2)), record=lambda *_a, **_k: None)
    assert (
        make_rebalancer(Rebalancing(), rank=0, dealt=LaneShares(assign(4, 1)), record=lambda *_a, **_k: None)
        is None
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "uneven=True and multiply the loss by batch.weight"),
        ({"uneven": True, "lanes": [0]}, "leave out lanes="),
        ({"uneven": True, "stride": 2}, "leave out lanes= and stride="),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LoaderConfig(rebalance=Rebalancing(), **settings)
