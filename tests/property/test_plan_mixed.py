"""Plans with a mixer: decisions as stages of the closed form; passes, seek, `locate` and rounding."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import PlanError
from shardkit.plan import Plan, Population, make_plan
from shardkit.plan.mixed import MixedGrid, weight_total, whole_weights
from shardkit.plan.population import stratum_rows
from shardkit.plan.stage import Stage
from tests.property.populations import grids, populations

few = settings(max_examples=8, deadline=None)
shares = st.lists(st.sampled_from([0.0, 1e-9, 0.01, 0.3, 1.0, 7.5, 100.0]), min_size=1, max_size=6)


def mixed(population: Population, shape: tuple[int, int], turns: int, **more: object) -> Plan:
    lanes, cell = shape
    plan = make_plan(population, global_batch=lanes * cell, lanes=lanes, remainder="short", **more)  # type: ignore[arg-type]
    return plan.mixed("test", every=turns * lanes)


def end_of(plan: Plan) -> int:
    assert plan.decided is not None
    return plan.decided


def decided(plan: Plan, each: list[list[float]]) -> Plan:
    rows = stratum_rows(plan.population)
    for weights in each:
        shares = [weights[s % len(weights)] for s in range(len(rows))]
        if not any(one for one, some in zip(shares, rows, strict=True) if some):
            shares = [1.0] * len(rows)
        total = weight_total(plan.mixture.every, plan.global_batch)
        plan.decide(whole_weights(shares, [one > 0 for one in rows], max(total, len(rows))))
    return plan


@few
@given(
    populations(max_rows=800, max_strata=12),
    grids(8, 12),
    st.integers(1, 2),
    st.lists(shares, min_size=1, max_size=4),
)
def test_a_stage_draws_its_weights(population, shape, turns, each):  # type: ignore[no-untyped-def]
    plan = decided(mixed(population, shape, turns), each)
    every, stratum = plan.mixture.every, np.repeat(population.segment_stratum, population.segment_rows)
    for number in range(plan.mixture.decided):
        masses = plan.mixture.masses(number)
        drawn = np.bincount(
            stratum[plan.steps(number * every, (number + 1) * every).ravel()], minlength=len(masses)
        )
        for s, mass in enumerate(masses):
            exact = Fraction(mass * every * plan.global_batch, sum(masses))
            assert abs(int(drawn[s]) - exact) <= 2 * plan.lanes, (s, drawn, masses)
            assert mass or not drawn[s]


@few
@given(
    populations(max_rows=400, max_strata=10), grids(6, 8), st.lists(shares, min_size=2, max_size=5), st.data()
)
def test_later_decisions_change_no_earlier_cell(population, shape, each, data):  # type: ignore[no-untyped-def]
    short = data.draw(st.integers(0, len(each) - 1))
    long, cut = decided(mixed(population, shape, 1), each), decided(mixed(population, shape, 1), each[:short])
    assert long.digest == cut.digest
    assert (long.steps(0, end_of(cut)) == cut.steps(0, end_of(cut))).all()
    with pytest.raises(PlanError, match=f"step {end_of(cut)} is not decided"):
        cut.step(end_of(cut))
    cut.mixture.undecide(2)
    decided(cut, each)
    assert (long.steps(0, end_of(cut)) == cut.steps(0, end_of(cut))).all()


@given(
    st.lists(st.floats(0, 1e12) | st.just(0.0), min_size=1, max_size=40).filter(any), st.integers(6, 29), st.data()
)  # fmt: skip
def test_whole_weights_are_shares_by_largest_remainder(shares, bits, data):  # type: ignore[no-untyped-def]
    total = 1 << bits
    found = whole_weights(shares, [True] * len(shares), total)
    assert sum(found) == total
    whole = sum(map(Fraction, shares))
    raised = sum(0 < Fraction(one) * total < whole for one in shares)
    for one, mass in zip(shares, found, strict=True):
        assert (mass > 0) == (one > 0)
        assert abs(mass - Fraction(one) * total / whole) < 1 + raised
    order = data.draw(st.permutations(range(len(shares))))
    if len(set(shares)) == len(shares):
        turned = whole_weights([shares[i] for i in order], [True] * len(shares), total)
        assert raised or [found[i] for i in order] == list(turned)


@pytest.mark.parametrize("shares", [[-1.0], [float("nan")], [float("inf")], [0.0], [1.0, 2.0], []])
def test_wrong_weights_are_refused(shares: list[float]) -> None:
    with pytest.raises(PlanError, match="mixer"):
        whole_weights(shares, [True], 64)


def test_ten_thousand_decisions_cost_a_seek_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seek makes a stage or two, after 10 decisions as after 10,000."""
    triples = [[shard, stratum, 40 + stratum] for shard in range(8) for stratum in range(4)]
    population = Population.of("sha256:" + "0" * 64, list("abcd"), np.array(triples), np.full(8, 10))
    rng = np.random.default_rng(0)
    each = np.tile(rng.integers(1, 100, (40, 4)).astype(float), (250, 1)).tolist()
    made: list[int] = []
    original = Stage.__init__

    def counted(self: Stage, start: int, *arguments: object) -> None:
        made.append(start)
        original(self, start, *arguments)  # type: ignore[arg-type]

    plans = {count: decided(mixed(population, (4, 4), 2), each[:count]) for count in (10, 10_000)}
    monkeypatch.setattr(Stage, "__init__", counted)
    costs = {}
    for count, plan in plans.items():
        made.clear()
        plan.cell(end_of(plan) - 1, lane=3)
        plan.cell(end_of(plan) // 2, lane=0)
        costs[count] = len(made)
    assert max(costs.values()) <= 4  # a stage, and one more where its drift is counted
    late = plans[10_000]
    sample = int(late.cell(end_of(late) - 5, lane=2)[1])
    stratum = int(late.grid.order.strata_of(np.array([sample]))[0])
    drawn = int(late.mixture.drawn(end_of(late) - 5)[0][:, stratum].sum())
    passes = drawn // int(late.mixture.rows[stratum])
    made.clear()
    places = [late.locate(sample, number) for number in range(passes - 3, passes + 4)]
    assert any(place is not None and place[0] == end_of(late) - 5 for place in places)
    assert len(made) <= len(places)
    made.clear()
    again = mixed(population, (4, 4), 2)
    for stage in range(2, late.mixture.decided):  # as a start does with recorded decisions
        again.decide(late.mixture.masses(stage), drawn=late.mixture.drawn_in(stage))
    assert not made
    assert (again.step(end_of(late) - 1) == late.step(end_of(late) - 1)).all()


def test_unfit_plans_are_refused() -> None:
    population = Population.of("sha256:" + "0" * 64, ["a"], np.array([[0, 0, 400]]), np.array([10]))
    plan = make_plan(population, global_batch=16, lanes=8)
    with pytest.raises(
        PlanError, match="every 12 steps, expected a multiple of the 8 lanes, such as 8 or 16"
    ):
        plan.mixed("test", every=12)
    with pytest.raises(PlanError, match="a mixer is for a new plan"):
        plan.amend(skip=(3, 5)).mixed("test", every=8)
    ready = plan.mixed("test", every=8)
    assert isinstance(ready.grid, MixedGrid)
    with pytest.raises(PlanError, match="a plan with a mixer is not amended"):
        ready.amend(skip=(3, 5))
    with pytest.raises(PlanError, match="2 weights for 1 strata"):
        ready.decide((1, 2))
    assert ready.digest != plan.mixed("other", every=8).digest


def test_a_stage_with_fewer_samples_than_strata_is_refused_before_the_run() -> None:
    """Otherwise the first decision would end the run."""
    names = [f"s{n}" for n in range(40)]
    segments = np.array([[0, n, 10] for n in range(40)])
    plan = make_plan(
        Population.of("sha256:" + "0" * 64, names, segments, np.array([10])), global_batch=4, lanes=4
    )
    with pytest.raises(PlanError, match="a stage of 8 steps has 32 samples, too few for the 40 strata"):
        plan.mixed("temperature", 8)
    mixed = plan.mixed("temperature", 12)
    mixed.decide(whole_weights([1.0] * 40, [True] * 40, weight_total(12, 4)))
    assert mixed.decided == 36
