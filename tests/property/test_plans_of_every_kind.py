"""Natural, weighted and mixed plans, with costs and without: any cell is had alone, and `locate` is its inverse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardkit.errors import PlanError
from shardkit.plan import Plan, Population, cell_digest, make_plan
from tests.property.populations import grids, populations, strata_of
from tests.property.test_plan_costs import balances, costs_of
from tests.property.test_plan_mixed import decided, mixed, shares

WEIGHTS = st.lists(st.sampled_from([0, 1, 1, 2, 3, 10]), min_size=1, max_size=7)


@dataclass
class Planned:
    """A plan that can be made again, with empty caches, and some of its steps."""

    make: Callable[[], Plan]
    first: int
    """First of the steps that are looked at."""
    passes: tuple[int, ...] | None
    """Passes that are these steps; None if a stratum's passes end where its weights say."""

    def __post_init__(self) -> None:
        self.plan = self.make()
        some = min(6_000, 12 * self.plan.population.rows) // self.plan.global_batch + 2  # a dozen passes
        num = 2 * (self.plan.steps_per_epoch or 0) if self.passes else min(some, 110)
        self.last = self.first + num if self.plan.decided is None else self.plan.decided
        self.steps = self.plan.steps(self.first, self.last)  # (steps, lanes, samples of a cell)


def by_name(draw: st.DrawFn, population: Population) -> dict[str, int]:
    """Weights of all strata, of which one that has rows is not 0."""
    weights, rows = draw(WEIGHTS), np.bincount(strata_of(population), minlength=len(population.strata))
    found = {name: weights[s % len(weights)] for s, name in enumerate(population.strata)}
    assume(any(found[name] and rows[s] for s, name in enumerate(population.strata)))
    return found


@st.composite
def natural(draw: st.DrawFn) -> Planned:
    people, (lanes, size), costs = draw(populations(max_rows=1500)), draw(grids(24, 12)), draw(st.booleans())
    remainder, epoch = (
        draw(st.sampled_from(["drop", "short"])),
        draw(st.integers(0, 3) | st.integers(0, 2**31 - 2)),
    )
    assume(lanes * size <= people.rows * (50 if remainder == "short" else 1))
    more: dict[str, Any] = {"seed": draw(st.integers(0, 99)), "window_blocks": draw(st.integers(1, 40))}
    if costs:
        more |= {"cost": costs_of(people.rows, 3), "balance": draw(balances)}
    else:
        more |= {"shuffle": draw(st.sampled_from(["window", "full", "none"]))}

    def make() -> Plan:
        return make_plan(people, global_batch=lanes * size, lanes=lanes, remainder=remainder, **more)

    return Planned(make, epoch * (make().steps_per_epoch or 0), (epoch, epoch + 1))


@st.composite
def weighted(draw: st.DrawFn) -> Planned:
    people, (lanes, size) = draw(populations(max_shards=12, max_strata=6, max_rows=600)), draw(grids(8, 9))
    more: dict[str, Any] = {"seed": draw(st.integers(0, 99)), "weights": by_name(draw, people)}
    if draw(st.booleans()):
        more["stages"] = [(draw(st.integers(1, 60)), draw(st.none() | st.just(by_name(draw, people))))]
    if draw(st.booleans()):
        more |= {"cost": costs_of(people.rows, 3), "balance": draw(balances)}
    else:
        more |= {"shuffle": draw(st.sampled_from(["window", "full", "none"]))}
    return Planned(lambda: make_plan(people, global_batch=lanes * size, lanes=lanes, **more), 0, None)


@st.composite
def decided_so_far(draw: st.DrawFn) -> Planned:
    people, shape, turns = (
        draw(populations(max_rows=1200, max_strata=12)),
        draw(grids(8, 8)),
        draw(st.integers(1, 3)),
    )
    each, seed = draw(st.lists(shares, max_size=4)), draw(st.integers(0, 9))
    assume(turns * shape[0] ** 2 * shape[1] >= len(people.strata))  # a stage has a sample of each
    return Planned(lambda: decided(mixed(people, shape, turns, seed=seed), each), 0, None)


PLANS = [natural(), weighted(), decided_so_far()]


@pytest.mark.slow
@pytest.mark.parametrize("plans", PLANS, ids=["natural", "weighted", "mixed"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_cell_is_had_alone(plans: st.SearchStrategy[Planned], data: st.DataObject) -> None:
    """Neither the step where a loop begins, nor the rank, nor the chunk in which cells are drawn decides."""
    one = data.draw(plans)
    step = data.draw(st.integers(one.first, one.last - 1))
    lane, expected = data.draw(st.integers(0, one.plan.lanes - 1)), one.steps[step - one.first]
    cold = one.make()
    assert cold.digest == one.plan.digest
    assert np.array_equal(cold.cell(step, lane), expected[lane])
    assert cold.cell_digest(step, lane) == cell_digest(expected[lane])
    begin = max(0, step - 3)  # before it, over the border of an epoch or a stage
    around = one.make().cells(begin, min(step + 4, one.last), lane)
    assert np.array_equal(around[step - begin], expected[lane])
    some = data.draw(st.lists(st.integers(0, one.plan.lanes - 1), unique=True, min_size=1))
    assert np.array_equal(one.make().steps(step, one.last, some), one.steps[step - one.first :, some])
    if one.plan.decided is None:
        past = data.draw(st.integers(1, 7))
        skipped = one.plan.amend(skip=(step, step + past))
        assert np.array_equal(skipped.step(step), one.plan.step(step + past))


@pytest.mark.parametrize("plans", PLANS, ids=["natural", "weighted", "mixed"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_locate_is_the_inverse(plans: st.SearchStrategy[Planned], data: st.DataObject) -> None:
    """Over the passes of a row it gives each of its places once."""
    one = data.draw(plans)
    rows, cold = one.plan.population.rows, one.make()
    for sample in data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=6, unique=True)):
        places = {
            (one.first + step, lane, slot) for step, lane, slot in np.argwhere(one.steps == sample).tolist()
        }
        few = min(len(places), 12)
        found = [cold.locate(sample, number) for number in one.passes or range(few + 3)]
        there = [place for place in found if place is not None and place[0] < one.last]
        assert len(there) == len(set(there))
        assert places >= set(there)
        assert few < len(places) or places == set(there)
    with pytest.raises(PlanError):
        cold.locate(rows)


@pytest.mark.parametrize("plans", PLANS[1:], ids=["weighted", "mixed"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_passes_of_a_stratum_stay_together(plans: st.SearchStrategy[Planned], data: st.DataObject) -> None:
    """Rows of a stratum are never more than two passes apart."""
    one = data.draw(plans)
    stratum, seen = strata_of(one.plan.population), np.zeros(one.plan.population.rows, dtype=np.int64)
    for begin in range(0, len(one.steps), 20):
        seen += np.bincount(one.steps[begin : begin + 20].ravel(), minlength=len(seen))
        for s in np.unique(stratum):
            assert np.ptp(seen[stratum == s]) <= 2
