"""Explicit weights and stages: balance, drift, passes, seek, and streams that go on across stages."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardkit.plan import Plan, Population, make_plan
from tests.property.populations import grids, populations

few = settings(max_examples=15, deadline=None)

weight_lists = st.lists(st.sampled_from([0, 1, 1, 2, 3, 10, 100]), min_size=1, max_size=7)


def planned(population: Population, shape: tuple[int, int], weights: list[int], **more: object) -> Plan:
    lanes, cell = shape
    names = {name: weights[s % len(weights)] for s, name in enumerate(population.strata)}
    rows = np.bincount(population.segment_stratum, population.segment_rows, len(population.strata))
    assume(any(names[name] and rows[s] for s, name in enumerate(population.strata)))
    return make_plan(population, global_batch=lanes * cell, lanes=lanes, weights=names, **more)  # type: ignore[arg-type]


def strata_of(population: Population) -> np.ndarray:
    return np.repeat(population.segment_stratum, population.segment_rows)


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


@pytest.mark.slow
@few
@given(
    populations(max_rows=2000),
    grids(16, 12),
    weight_lists,
    weight_lists,
    st.integers(1, 60),
    st.integers(0, 9),
)
def test_passes_of_a_stratum_stay_together(population, shape, weights, then, at, seed):  # type: ignore[no-untyped-def]
    rows = np.bincount(population.segment_stratum, population.segment_rows, len(population.strata))
    later = {name: then[s % len(then)] for s, name in enumerate(population.strata)}
    assume(any(later[name] and rows[s] for s, name in enumerate(population.strata)))
    plan = planned(population, shape, weights, seed=seed, stages=[(at, later)])
    stratum = strata_of(population)
    seen = np.zeros(population.rows, dtype=np.int64)
    for start in range(0, 160, 40):
        seen += np.bincount(plan.steps(start, start + 40).ravel(), minlength=population.rows)
        for s in np.unique(stratum):
            times = seen[stratum == s]
            assert times.max() - times.min() <= 2


@few
@given(populations(max_rows=1200, max_strata=10), grids(8, 12), weight_lists, st.integers(0, 150), st.data())
def test_cold_cells_and_locate(population, shape, weights, step, data):  # type: ignore[no-untyped-def]
    plan = planned(population, shape, weights, stages=[(90, None)])
    cells = plan.steps(0, step + 1)
    lane = data.draw(st.integers(0, plan.lanes - 1))
    slot = data.draw(st.integers(0, plan.cell_size - 1))
    cold = planned(population, shape, weights, stages=[(90, None)])
    assert (cold.cell(step, lane) == cells[step, lane]).all()
    sample = int(cells[step, lane, slot])
    times = int((cells == sample).sum())
    # passes of a row are numbered from 0; earlier and later rows may be up to two passes apart
    found = [plan.locate(sample, epoch) for epoch in range(max(0, times - 12), times + 2)]
    if times <= 12:
        assert (step, lane, slot) in found
    places = [f for f in found if f is not None]
    assert len(set(places)) == len(places)
    for k, lane_, slot_ in places:
        assert plan.cell(k, lane_)[slot_] == sample
