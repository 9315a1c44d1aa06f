"""Plans with costs: what holds of every plan holds of them, windows are even, and ranks wait less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardkit.errors import PlanError
from shardkit.plan import Costs, Plan, Population, encode_costs, make_plan

few = settings(max_examples=40, deadline=None)
balances = st.sampled_from(["spread", "align"])


def population(rows: list[int], block_rows: int = 16, strata: int = 1) -> Population:
    names = [f"s{number}" for number in range(strata)] if strata > 1 else ["all"]
    segments = [(shard, (shard * shard) % strata, n) for shard, n in enumerate(rows)]
    return Population.of(f"sha256:{strata} strata", names, segments, block_rows)


def costs_of(rows: int, seed: int) -> Costs:
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(1000), 1.5, rows)).astype(np.int64)
    return Costs("drawn", encode_costs(np.clip(drawn, 1, 32_000)))


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """A plan with costs, and the same one without."""
    rows = draw(st.lists(st.integers(1, 300), min_size=1, max_size=8))
    strata = draw(st.integers(1, 4))
    lanes, size = draw(st.sampled_from([1, 2, 3, 8])), draw(st.integers(1, 9))
    assume(sum(rows) >= lanes * size)
    people = population(rows, draw(st.integers(1, 40)), strata)
    given_ = {
        "global_batch": lanes * size, "lanes": lanes, "seed": draw(st.integers(0, 99)),
        "remainder": draw(st.sampled_from(["drop", "short"])), "window_blocks": draw(st.integers(1, 9)),
    }  # fmt: skip
    cost = costs_of(people.rows, draw(st.integers(0, 9)))
    more = {"balance": draw(balances)}
    return make_plan(people, cost=cost, **more, **given_), make_plan(people, **given_)  # type: ignore[arg-type]


@few
@given(plans(), st.integers(0, 3))
def test_lanes_hold_what_they_hold_without_costs(both: tuple[Plan, Plan], epoch: int) -> None:
    first = epoch * (both[0].steps_per_epoch or 0)
    last = first + (both[0].steps_per_epoch or 0)
    full = both[0].population.rows // both[0].global_batch
    costed, plain = (plan.steps(first, last) for plan in both)
    for lane in range(both[0].lanes):
        assert sorted(costed[:, lane].ravel().tolist()) == sorted(plain[:, lane].ravel().tolist())
    assert (costed[:full] >= 0).all()
    assert np.array_equal((costed >= 0).sum(axis=2), (plain >= 0).sum(axis=2))


@given(st.lists(st.integers(1, 2**32 - 1), min_size=2))
def test_codes_are_monotone_and_within_an_eighth(numbers: list[int]) -> None:
    costs = np.array(sorted(numbers))
    codes = encode_costs(costs).astype(np.int64)
    assert (np.diff(codes) >= 0).all()
    for a, b in zip(costs.tolist(), codes.tolist(), strict=True):
        low = (8 + b % 8) * 2 ** (b // 8)
        assert low <= 8 * a < low + 2 ** (b // 8)


@pytest.mark.parametrize("number", [0, -3, 2**32])
def test_a_cost_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(PlanError, match="expected 1 to"):
        encode_costs(np.array([5, number]))


def test_what_cost_does_not_go_with_is_refused_by_name() -> None:
    people, cost = population([64, 64]), costs_of(128, 0)
    two = population([64, 64], strata=2)
    for rows, more, named in (
        (people, {"shuffle": "full"}, "shuffle='full'"),
        (people, {"group_by": {"all": 8}}, "group_by"),
        (people, {"sequence": 8, "row_tokens": 4}, "sequence"),
        (people, {"balance": "even"}, "one of spread, align"),
        (population([64]), {}, "128 samples, expected 64"),
    ):
        with pytest.raises(PlanError, match=named):
            make_plan(rows, global_batch=16, lanes=4, cost=cost, **more)
    with pytest.raises(PlanError, match="only with cost"):
        make_plan(people, global_batch=16, lanes=4, balance="spread")
    plan = make_plan(people, global_batch=16, lanes=4, cost=cost)
    for change in ({"weights": {"all": 3}}, {"lanes": 8}, {"global_batch": 32}):
        with pytest.raises(PlanError, match="skip only"):
            plan.amend(from_step=2, **change)
    with pytest.raises(PlanError, match="make a new plan"):
        plan.amend(from_step=2, manifest=two)


# ---- statistics, of fixed seeds


def waits(plan: Plan, numbers: np.ndarray, ranks: int) -> float:
    """Sum over steps of the slowest rank's cost, over that of the mean rank's."""
    cells = numbers[plan.steps(0, plan.steps_per_epoch or 0)].sum(axis=2)
    shares = cells.reshape(len(cells), ranks, -1).sum(axis=2)
    return float(shares.max(axis=1).sum() / shares.mean(axis=1).sum())


@pytest.mark.parametrize(
    ("size", "ranks", "spread", "align"), [(8, 64, 1.7, 1.2), (8, 8, 1.08, 1.07), (32, 64, 1.15, 1.15)]
)
def test_ranks_wait_less(size: int, ranks: int, spread: float, align: float) -> None:
    """On lognormal costs (1,000, 1.5, cut at 32,000), 64 lanes, windows of 2,048 rows."""
    rows = 64 * 2048 * 3
    drawn = np.exp(np.random.default_rng(7).normal(np.log(1000), 1.5, rows)).astype(np.int64)
    numbers = np.clip(drawn, 1, 32_000)
    people, cost = population([rows // 64] * 64, 128), Costs("drawn", encode_costs(numbers))
    chosen = {"global_batch": 64 * size, "lanes": 64, "window_blocks": 16}
    plain = waits(make_plan(people, **chosen), numbers, ranks)  # type: ignore[arg-type]
    found = [
        waits(make_plan(people, cost=cost, balance=balance, **chosen), numbers, ranks)  # type: ignore[arg-type]
        for balance in ("spread", "align")
    ]
    assert found[0] < spread < plain
    assert found[1] < align < plain


def test_strata_are_balanced_each_within_its_share() -> None:
    """Two strata, of which the rarer is dearer: ranks wait less than without costs."""
    rows = np.array([3000, 1000] * 32)
    of_stratum = np.repeat(np.arange(64) % 2, rows)
    drawn = np.exp(np.random.default_rng(5).normal(6 + of_stratum, 1.2)).astype(np.int64) + 1
    people = Population.of(
        "sha256:two", ["a", "b"], [(i, i % 2, n) for i, n in enumerate(rows.tolist())], 100
    )
    cost, chosen = (
        Costs("drawn", encode_costs(drawn)),
        {"global_batch": 512, "lanes": 64, "window_blocks": 16},
    )
    plain, spread, align = (
        waits(make_plan(people, **chosen, **more), drawn, 8)  # type: ignore[arg-type]
        for more in ({}, {"cost": cost}, {"cost": cost, "balance": "align"})
    )
    assert spread < plain - (plain - 1) / 3
    assert align < plain - (plain - 1) / 3
