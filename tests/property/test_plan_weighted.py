"""Explicit weights, stages and costs: balance, drift, passes, seek and waits."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardkit.plan import Plan, Population, make_plan
from shardkit.plan.weighted import WeightedGrid
from tests.property.populations import grids, populations, strata_of
from tests.property.test_plan_costs import balances, costs_of, population

# ---- Explicit weights and stages: balance, drift, passes, seek, and streams that go on across stages


few = settings(max_examples=15, deadline=None)

weight_lists = st.lists(st.sampled_from([0, 1, 1, 2, 3, 10, 100]), min_size=1, max_size=7)


def planned(population: Population, shape: tuple[int, int], weights: list[int], **more: object) -> Plan:
    lanes, cell = shape
    names = {name: weights[s % len(weights)] for s, name in enumerate(population.strata)}
    rows = np.bincount(population.segment_stratum, population.segment_rows, len(population.strata))
    assume(any(names[name] and rows[s] for s, name in enumerate(population.strata)))
    return make_plan(population, global_batch=lanes * cell, lanes=lanes, weights=names, **more)  # type: ignore[arg-type]


@few
@given(populations(max_rows=3000), grids(24, 16), weight_lists, st.sampled_from(["window", "full", "none"]))
def test_batches_follow_the_weights_and_nothing_drifts(population, shape, weights, shuffle):  # type: ignore[no-untyped-def]
    plan = planned(population, shape, weights, shuffle=shuffle)
    stratum = strata_of(population)
    rows = np.bincount(stratum, minlength=len(population.strata))
    masses = [weights[s % len(weights)] if rows[s] else 0 for s in range(len(rows))]
    num = min(150, 40_000 // plan.global_batch + 2)
    drawn = stratum[plan.steps(0, num)]
    per_step = np.stack([np.bincount(step.ravel(), minlength=len(rows)) for step in drawn])
    so_far = np.cumsum(per_step, axis=0)
    for s, mass in enumerate(masses):
        e = Fraction(plan.global_batch * mass, sum(masses))
        if not mass:
            assert not per_step[:, s].any()
        elif e >= 1:
            assert all(e - 2 < int(n) < e + 2 for n in np.unique(per_step[:, s]))
            cells = (drawn == s).sum(axis=2)
            assert all(abs(int(c) - e / plan.lanes) < 1 + Fraction(2, plan.lanes) for c in np.unique(cells))
        else:
            held = plan.lanes if rows[s] >= plan.lanes else max(1, int(rows[s]))
            drift = max(abs(int(n) - e * (k + 1)) for k, n in enumerate(so_far[:, s]))
            assert drift < 2 * held


# ---- Costs with explicit weights: passes, seek, look-ups and waits are those of the property tests of either alone


short_weight_lists = st.lists(st.sampled_from([0, 1, 1, 2, 3, 10]), min_size=1, max_size=4)


@st.composite
def plans(draw: st.DrawFn, longest: int = 300) -> tuple[Plan, Plan]:
    """A plan with weights, stages and costs, and the same one without costs."""
    rows = draw(st.lists(st.integers(1, longest), min_size=1, max_size=8))
    strata = draw(st.integers(1, 4))
    lanes, size = draw(st.sampled_from([1, 2, 3, 8])), draw(st.integers(1, 9))
    people = population(rows, draw(st.integers(1, 40)), strata)
    given_: dict[str, Any] = {
        "global_batch": lanes * size, "lanes": lanes, "seed": draw(st.integers(0, 99)),
        "window_blocks": draw(st.integers(1, 9)),
    }  # fmt: skip
    there = np.bincount(people.segment_stratum, people.segment_rows, len(people.strata)) > 0

    def weights() -> dict[str, int]:
        drawn = draw(short_weight_lists)
        found = {name: drawn[s % len(drawn)] for s, name in enumerate(people.strata)}
        assume(any(found[name] and there[s] for s, name in enumerate(people.strata)))
        return found

    given_["weights"] = weights()
    if draw(st.booleans()):
        given_["stages"] = [(draw(st.integers(1, 60)), weights())]
    costs, how = costs_of(people.rows, draw(st.integers(0, 9))), draw(balances)
    return make_plan(people, cost=costs, balance=how, **given_), make_plan(people, **given_)


def weighted(plan: Plan) -> WeightedGrid:
    assert isinstance(plan.grid, WeightedGrid)
    return plan.grid


@few
@given(plans(), st.integers(1, 120))
def test_passes_hold_the_rows_that_they_hold_without_costs(both: tuple[Plan, Plan], steps: int) -> None:
    """Strata have the same counts in every cell, passes of two rows differ by at most 2, and no row comes early."""
    costed, plain = (plan.steps(0, steps) for plan in both)
    people = both[0].population
    stratum = np.repeat(people.segment_stratum, people.segment_rows)
    names = range(len(people.strata))
    for s in names:
        assert np.array_equal((stratum[costed] == s).sum(axis=2), (stratum[plain] == s).sum(axis=2))
    seen = np.bincount(costed.ravel(), minlength=people.rows)
    for s in names:
        times = seen[stratum == s]
        assert not len(times) or times.max() - times.min() <= 2
    grid = weighted(both[0])
    for lane in range(both[0].lanes):
        for s in np.flatnonzero(~grid.shared).tolist():
            low, high = grid.tapes.hands(lane, np.array([s]), np.array([0]))
            ends = np.cumsum((stratum[costed[:, lane]] == s).sum(axis=1))
            inside = int((ends <= high[0] - low[0]).sum())  # steps that are in the first pass as a whole
            first, first_plain = (
                [n for n in cells[:inside, lane].ravel().tolist() if stratum[n] == s]
                for cells in (costed, plain)
            )
            assert len(set(first)) == len(first)
            if len(first) == high[0] - low[0]:
                assert sorted(first) == sorted(first_plain)
