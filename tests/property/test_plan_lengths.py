"""Grouping by length and joined sequences: exactly once, seek, balance within a group, and what padding is saved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import PlanError
from shardkit.plan import Plan, Population, make_plan
from shardkit.plan.report import describe_plan
from tests.property.populations import populations

few = settings(max_examples=30, deadline=None)


def strata_of(population: Population) -> np.ndarray:
    return np.repeat(population.segment_stratum, population.segment_rows)


def epoch(plan: Plan, number: int) -> np.ndarray:
    assert plan.steps_per_epoch is not None
    return plan.steps(number * plan.steps_per_epoch, (number + 1) * plan.steps_per_epoch)


@few
@given(populations(max_rows=2500), st.sampled_from([1, 2, 3, 8]), st.integers(1, 6), st.sampled_from(["drop", "short"]),
       st.integers(0, 3), st.data())  # fmt: skip
def test_groups_by_length(population, lanes, cell, remainder, number, data):  # type: ignore[no-untyped-def]
    lengths = {"s0*[05]": 100, "s0*[16]": 260, "*": 512}
    longest = np.array(
        [{"0": 100, "5": 100, "1": 260, "6": 260}.get(name[-1], 512) for name in population.strata]
    )
    top = int(longest.max())
    size = {n: cell * top // n for n in (100, 260, 512)}
    rows = {n: int((longest[strata_of(population)] == n).sum()) for n in size}

    def make() -> Plan:
        return make_plan(
            population, global_batch=lanes * cell, lanes=lanes, group_by=lengths, remainder=remainder
        )

    if remainder == "drop" and any(0 < rows[n] < size[n] * lanes for n in size):
        with pytest.raises(PlanError, match="its step takes"):
            make()
        return
    plan = make()
    stratum = strata_of(population)
    present = sorted({int(longest[s]) for s in np.unique(stratum)}, reverse=True)
    budget = cell * top
    steps = epoch(plan, number)
    seen = steps[steps >= 0]
    assert len(np.unique(seen)) == len(seen)
    left = 0
    for n in present:
        left += int((longest[stratum] == n).sum()) % (size[n] * lanes) if remainder == "drop" else 0
    assert len(seen) == population.rows - left
    kinds = []
    for step in steps:
        kind = np.unique(longest[stratum[step[step >= 0]]])
        assert len(kind) == 1  # one length per step
        kinds.append(int(kind[0]))
        assert (step >= 0).sum(axis=1).max() * kinds[-1] <= budget
    for n in present:  # steps of a group are spread over the epoch
        mine = np.cumsum(np.array(kinds) == n)
        share = mine[-1] / len(kinds)
        assert np.abs(mine - share * np.arange(1, len(kinds) + 1)).max() < 2
    cold = make()
    at = data.draw(st.integers(0, len(steps) - 1))
    assert (cold.step(number * len(steps) + at) == steps[at]).all()
    sample = data.draw(st.integers(0, population.rows - 1))
    found = cold.locate(sample, number)
    assert (found is not None) == (sample in seen)
    if found is not None:
        assert plan.step(found[0])[found[1], found[2]] == sample


@few
@given(populations(max_rows=2500), st.sampled_from([1, 2, 3, 8]), st.integers(1, 6), st.integers(1, 7),
       st.booleans(), st.data())  # fmt: skip
def test_joined_rows_are_neighbours_and_come_once(population, lanes, cell, join, weighted, data):  # type: ignore[no-untyped-def]
    weights = {"*": 1} if weighted else None

    def make() -> Plan:
        return make_plan(population, global_batch=lanes * cell, lanes=lanes, remainder="short",
                         sequence=join * 32, row_tokens=32, weights=weights)  # fmt: skip

    plan = make()
    steps = plan.steps(0, min(plan.loop_steps, 60) if weighted else plan.loop_steps)
    sequences = steps.reshape(-1, join)
    segment = np.repeat(np.arange(len(population.segment_rows)), population.segment_rows)
    for rows in sequences:
        real = rows[rows >= 0]
        assert (rows[: len(real)] == real).all()  # -1 only behind
        assert (np.diff(real) == 1).all()
        assert len(np.unique(segment[real])) <= 1
    seen = steps[steps >= 0]
    if not weighted:
        assert sorted(seen.tolist()) == list(range(population.rows))
    at = data.draw(st.integers(0, len(steps) - 1))
    cold = make()
    assert (cold.step(at) == steps[at]).all()
    if not weighted:
        sample = data.draw(st.integers(0, population.rows - 1))
        found = cold.locate(sample)
        assert found is not None
        assert steps[found[0], found[1], found[2]] == sample


def test_padding_saved_is_reported_and_mistakes_are_named() -> None:
    population = Population.of("p", ["short", "long"], [(s, t, 100) for s in range(4) for t in (0, 1)], 8)
    plan = make_plan(population, global_batch=32, lanes=4, group_by={"short": 128, "long": 512})
    report = describe_plan(plan, steps=8)
    assert report["lengths"]["saved"] == pytest.approx(1 - (400 * 128 + 400 * 512) / (800 * 512))  # type: ignore[index]
    assert [g["cell_size"] for g in report["lengths"]["groups"]] == [8, 32]  # type: ignore[index]
    joined = make_plan(population, global_batch=8, lanes=4, sequence=96, row_tokens=32)
    assert describe_plan(joined, steps=8)["lengths"] == {
        "rows_per_sequence": 3,
        "filled": pytest.approx(100 / 102),
    }
    skipped = joined.amend(skip=(3, 5))
    assert (skipped.step(3) == joined.step(5)).all()
    for settings_, message in [
        ({"group_by": {"short": 128}}, "'long' is in no group"),
        ({"group_by": {"*": 0}}, "greatest length"),
        ({"group_by": {"*": 9}, "weights": {"*": 1}}, "leave one out"),
        ({"sequence": 100, "row_tokens": 32}, "multiple of the 32"),
        ({"sequence": 96}, "no fixed length"),
    ]:
        with pytest.raises(PlanError, match=message):
            make_plan(population, global_batch=32, lanes=4, **settings_)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="skip only"):
        plan.amend(from_step=3, global_batch=64)
