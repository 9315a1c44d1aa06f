"""Batches follow explicit weights, and nothing drifts."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardkit.plan import Plan, Population, make_plan
from shardkit.plan.weighted import WeightedGrid
from tests.property.populations import grids, populations, strata_of

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


def weighted(plan: Plan) -> WeightedGrid:
    assert isinstance(plan.grid, WeightedGrid)
    return plan.grid
