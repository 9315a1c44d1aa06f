"""Amended plans: skips, states, other manifests and removed samples; chains of changes are in test_plan_chains."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardkit.errors import PlanError
from shardkit.plan import Plan, Population, make_plan
from tests.property.populations import populations

few = settings(max_examples=15, deadline=None)
shapes = st.tuples(st.sampled_from([1, 2, 3, 6, 12]), st.integers(1, 9))


def natural(population: Population, shape: tuple[int, int], remainder: str = "drop", **more: object) -> Plan:
    lanes, cell = shape
    assume(remainder == "short" or population.rows >= lanes * cell)
    return make_plan(population, global_batch=lanes * cell, lanes=lanes, remainder=remainder, **more)  # type: ignore[arg-type]


def samples(plan: Plan, start: int, stop: int) -> np.ndarray:
    parts = [plan.step(k).ravel() for k in range(start, stop)]
    got = np.concatenate([np.empty(0, dtype=np.int64), *parts])
    return got[got >= 0]


@few
@given(populations(max_rows=500), shapes, st.integers(1, 40), st.integers(1, 30), st.booleans())
def test_skipped_steps_and_states(population, shape, at, gap, weighted):  # type: ignore[no-untyped-def]
    parent = natural(population, shape, weights={"*": 1} if weighted else None)
    child = parent.amend(skip=(at, at + gap))
    for k in (0, at - 1, at, at + 1, at + 50):
        assert (child.step(k) == parent.step(k if k < at else k + gap)).all()
    assert child.accepts(child.digest, 10**9)
    assert child.accepts(parent.digest, at)
    assert not child.accepts(parent.digest, at + 1)
    assert not parent.accepts(child.digest, 0)
    grandchild = child.amend(skip=(at + 2, at + 3))
    assert (grandchild.step(at + 2) == parent.step(at + gap + 3)).all()
    assert grandchild.accepts(parent.digest, at)


def test_another_manifest_begins_afresh_and_mistakes_are_named():  # type: ignore[no-untyped-def]
    population = Population.of("one", ["a", "b"], [(0, 0, 40), (0, 1, 24)], 4)
    more = dataclasses.replace(population, identity="two", segment_rows=population.segment_rows * 2)
    parent = make_plan(population, global_batch=8, lanes=4)
    child = parent.amend(from_step=5, manifest=more)
    assert (child.step(4) == parent.step(4)).all()
    assert len(np.unique(samples(child, 5, 5 + 16))) == 128
    assert child.epoch_bounds(5) == (5, 21)
    for wrong, message in [
        ({}, "from_step"),
        ({"from_step": 4}, "changes nothing"),
        ({"skip": (5, 5)}, "later step"),
        ({"from_step": 3, "weights": {"c*": 1}}, "matches no stratum"),
        ({"from_step": 3, "lanes": 3}, "divisor"),
    ]:
        with pytest.raises(PlanError, match=message):
            parent.amend(**wrong)  # type: ignore[arg-type]
    wider = parent.amend(from_step=3, global_batch=16)
    with pytest.raises(PlanError, match="cells change from 2 to 4"):
        wider.cells(0, 6, 0)
    narrower = wider.amend(from_step=4, global_batch=8)
    seen = np.concatenate([samples(parent, 0, 3), samples(wider, 3, 4), samples(narrower, 4, 6)])
    assert len(np.unique(seen)) == len(seen) == 24 + 16 + 16
    assert narrower.epoch_bounds(0) == narrower.epoch_bounds(5) == (0, 6)


def without(population: Population, removed: np.ndarray) -> Population:
    segment = np.repeat(np.arange(len(population.segment_rows)), population.segment_rows)
    gone = np.bincount(segment[removed], minlength=len(population.segment_rows))
    return dataclasses.replace(
        population, identity="sha256:without", segment_rows=population.segment_rows - gone
    )


@few
@given(populations(max_rows=400), shapes, st.integers(1, 60), st.data())
def test_samples_are_removed_under_weights(population, shape, at, data):  # type: ignore[no-untyped-def]
    parent = natural(population, shape, weights={"*": 1})
    removed = np.array(
        sorted(data.draw(st.sets(st.integers(0, population.rows - 1), min_size=1))), dtype=np.int64
    )
    assume(len(removed) < population.rows)
    child = parent.amend(from_step=at, manifest=without(population, removed), removed=removed)
    kept = np.delete(np.arange(population.rows), removed)
    drawn = kept[samples(child, at, at + 40)]
    seen = np.bincount(np.concatenate([samples(parent, 0, at), drawn]), minlength=population.rows)
    stratum = np.repeat(population.segment_stratum, population.segment_rows)
    for s in np.unique(stratum[kept]):
        assert np.ptp(seen[kept][stratum[kept] == s]) <= 2
    assert not np.isin(drawn, removed).any()
    assert (child.step(at + 7) >= 0).all()


def test_removals_that_contradict_the_version_are_named() -> None:
    population = Population.of("one", ["a", "b"], [(0, 0, 40), (0, 1, 24)], 4)
    parent, fewer = make_plan(population, global_batch=8, lanes=4), without(population, np.array([3, 50]))
    for wrong, message in [
        ({"removed": [3, 50]}, "needs manifest="),
        (
            {"manifest": fewer, "removed": [3]},
            "has 62 samples, expected the 64 samples of this plan without 1",
        ),
        ({"manifest": fewer, "removed": [50, 3]}, "ascending"),
        ({"manifest": fewer, "removed": [3, 64]}, "below 64"),
    ]:
        with pytest.raises(PlanError, match=message):
            parent.amend(from_step=3, **wrong)  # type: ignore[arg-type]
