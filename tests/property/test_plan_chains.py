"""Random chains of amendments: no row recurs before its pass ends, and `locate` is the inverse of `cell`.

The walk below counts how often every row came, skipped and dropped rows included, and knows nothing of tapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardkit.dataset.run_plans import made_again
from shardkit.errors import PlanError
from shardkit.plan import Plan, Population, make_plan
from shardkit.plan.deck import WindowDeck
from tests.property.populations import populations

some = settings(max_examples=60, deadline=None)
shapes = st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 8))
weight_lists = st.lists(st.sampled_from([0, 1, 1, 2, 5, 30, 300, 5000]), min_size=1, max_size=6)


@dataclass
class Walk:
    """Goes through a chain of plans, step by step."""

    plan: Plan
    at: int = 0
    position: int = 0
    times: np.ndarray = field(init=False)
    came: dict[int, set[tuple[int, int, int]]] = field(init=False)
    seen: set[int] = field(default_factory=set)
    batches: int = 0  # samples of one step of each plan that the present epoch had

    def __post_init__(self) -> None:
        self.begin(self.plan)

    def begin(self, plan: Plan) -> None:
        """Another manifest: counts begin afresh."""
        population = plan.population
        self.stratum = np.repeat(population.segment_stratum, population.segment_rows)
        self.rows = np.bincount(self.stratum, minlength=len(population.strata))
        self.times = np.zeros(population.rows, dtype=np.int64)
        self.came = defaultdict(set)
        self.seen, self.batches = set(), plan.global_batch

    def walk(self, plan: Plan, start: int, stop: int, *, skipped: bool = False) -> None:
        for k, cells in enumerate(plan.steps(start, stop), start):
            lanes, slots = np.nonzero(cells >= 0)
            drawn = cells[lanes, slots]
            if not skipped:
                for place in zip(drawn.tolist(), lanes.tolist(), slots.tolist(), strict=True):
                    self.came[place[0]].add((k, *place[1:]))
            if plan.settings.stages:
                self.passes_hold(plan, drawn)
                continue
            came = set(drawn.tolist())
            assert len(came) == len(drawn)
            assert not self.seen & came
            self.seen |= came
            self.times[drawn] += 1
            if plan.epoch_bounds(k)[1] == k + 1:
                self.end_epoch(plan)

    def passes_hold(self, plan: Plan, drawn: np.ndarray) -> None:
        total = np.bincount(self.stratum, self.times, len(self.rows))
        before = self.times[drawn]
        np.add.at(self.times, drawn, 1)
        stratum = self.stratum[drawn]
        # lanes are within half a hand of each other: no row comes much before its pass, in no stratum
        slack = plan.lanes + plan.global_batch
        assert (2 * total[stratum] > (2 * before - 1) * self.rows[stratum] - 2 * slack).all()
        for s in np.unique(stratum).tolist():
            assert np.ptp(self.times[self.stratum == s]) <= 2, plan.population.strata[s]

    def end_epoch(self, plan: Plan) -> None:
        """What did not come was dropped."""
        lost = np.array(sorted(set(range(len(self.times))) - self.seen), dtype=np.int64)
        assert len(lost) == 0 if plan.settings.remainder == "short" else len(lost) < self.batches
        self.times[lost] += 1
        self.seen, self.batches = set(), plan.global_batch

    def until(self, step: int) -> None:
        self.walk(self.plan, self.at, step)
        self.at = max(self.at, step)

    def amend(self, **change: object) -> bool:
        """False where the plan says that it cannot go on so."""
        start = self.at
        child: Plan | None = None
        with contextlib.suppress(PlanError):
            child = self.plan.amend(from_step=start, **change)  # type: ignore[arg-type]
        if child is None:  # each reason has a test of its own
            with pytest.raises(PlanError, match=r"largest batch|no stratum with rows"):
                self.plan.amend(from_step=start, **change)  # type: ignore[arg-type]
            return False
        skip: tuple[int, int] = change.get("skip", (start, start))  # type: ignore[assignment]
        self.walk(self.plan, *skip, skipped=True)
        if child.population is not self.plan.population:
            self.begin(child)
        elif not self.plan.settings.stages and (child.settings != self.plan.settings):
            self.leave_natural(child, skip[1])
        for k in {max(0, start - 2), max(0, start - 1)} - {start}:
            assert (child.step(k) == self.plan.step(k)).all()
        self.plan = child
        return True

    def leave_natural(self, child: Plan, position: int) -> None:
        end = self.plan.epoch_bounds(position)[1]
        self.batches += child.global_batch
        if not self.seen:
            return
        if child.settings.stages:
            rest = np.concatenate([self.plan.step(k).ravel() for k in range(position, end)])
            kept = self.seen | set(rest[rest >= 0].tolist())
            lost = np.array(sorted(set(range(len(self.times))) - kept), dtype=np.int64)
            self.times[lost] += 1
            self.seen = set()
        elif not getattr(child.grid, "steps", 1):
            self.end_epoch(child)

    def check_inverse(self, sample: int) -> None:
        times = int(self.times[sample])
        numbers = range(min(times, 20) + 4)  # of a row that comes oftener, the first passes
        found = [self.plan.locate(sample, n) for n in numbers]
        places = [f for f in found if f is not None]
        assert len(set(places)) == len(places)
        here = {f for f in places if f[0] < self.at}
        assert here == self.came[sample] if times <= 20 else here <= self.came[sample]
        for k, lane, slot in places:
            assert self.plan.cell(k, lane)[slot] == sample


def no_costs(_: str) -> Any:
    raise AssertionError("these plans have no costs")


def no_removal(_: str, __: str) -> Any:
    raise AssertionError("these plans lose no samples")


def by_name(population: Population, weights: list[int]) -> dict[str, int]:
    return {name: weights[s % len(weights)] for s, name in enumerate(population.strata)}


@st.composite
def changes(draw: st.DrawFn, population: Population, at: int) -> dict[str, object]:
    kinds = draw(
        st.sets(
            st.sampled_from(["weights", "global_batch", "lanes", "skip", "manifest"]), min_size=1, max_size=2
        )
    )
    change: dict[str, object] = {}
    if "weights" in kinds:
        change["weights"] = by_name(population, draw(weight_lists))
    lanes, cell = draw(shapes)
    if "global_batch" in kinds:
        change["global_batch"] = lanes * cell
        if "lanes" not in kinds and draw(st.booleans()):
            change["lanes"] = lanes
    if "lanes" in kinds:
        change["lanes"] = lanes
        change["global_batch"] = lanes * cell
    if "manifest" in kinds:
        rows = population.segment_rows + draw(st.integers(1, 3))
        change["manifest"] = dataclasses.replace(population, identity=f"sha256:{at}", segment_rows=rows)
    if "skip" in kinds:
        change["skip"] = (at, at + draw(st.integers(1, 12)))
    return change


@pytest.mark.slow
@some
@given(populations(max_rows=600, max_strata=8, max_shards=20), shapes, st.data())
def test_chains_of_amendments(population, shape, data):  # type: ignore[no-untyped-def]
    lanes, cell = shape
    more: dict[str, object] = {"remainder": data.draw(st.sampled_from(["drop", "short"]))}
    if data.draw(st.booleans()):
        more["weights"] = by_name(population, data.draw(weight_lists))
        if data.draw(st.booleans()):
            more["stages"] = [(data.draw(st.integers(1, 30)), by_name(population, data.draw(weight_lists)))]
    more["shuffle"] = data.draw(st.sampled_from(["window", "window", "full", "none"]))
    try:
        plan = make_plan(population, global_batch=lanes * cell, lanes=lanes, **more)  # type: ignore[arg-type]
    except PlanError:
        assume(False)
    walk, versions = Walk(plan), {population.identity: population}
    for _ in range(data.draw(st.integers(1, 4))):
        walk.until(walk.at + data.draw(st.integers(0, 25)))
        walk.amend(**data.draw(changes(walk.plan.population, walk.at)))
        versions[walk.plan.population.identity] = walk.plan.population
    begin = walk.at
    walk.until(begin + data.draw(st.integers(10, 60)))
    cold = made_again(json.loads(json.dumps(walk.plan.history())), versions.__getitem__, no_costs, no_removal)
    assert cold.digest == walk.plan.digest
    for step in (begin, walk.at - 1):
        assert np.array_equal(cold.step(step), walk.plan.step(step))
    for sample in data.draw(st.lists(st.integers(0, walk.plan.population.rows - 1), min_size=1, max_size=6)):
        walk.check_inverse(sample)


def rare_after(change: dict[str, object]) -> tuple[Plan, Plan]:
    """A plan, and its amendment from step 700: a large stratum, half through its pass, joins a tiny one's pool."""
    population = Population.of(
        "sha256:rare", ["main", "large", "tiny"],
        [(s, t, n) for s in range(20) for t, n in enumerate((1000, 100, 0 if s else 5))], 16,
    )  # fmt: skip
    weights = {"main": 900, "large": 5, "tiny": 1}
    plan = make_plan(population, global_batch=256, lanes=4, weights=weights)
    return plan, plan.amend(from_step=700, **change)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"global_batch": 64}, {"weights": {"main": 4500, "large": 5, "tiny": 1}}])
def test_a_large_stratum_that_becomes_rare_goes_on_with_its_pass(change: dict[str, object]) -> None:
    plan, child = rare_after(change)
    stratum = np.repeat(plan.population.segment_stratum, plan.population.segment_rows)
    large = stratum == 1
    rows = int(large.sum())
    before = plan.steps(0, 700).ravel()
    seen = before[large[before]]
    assert rows // 3 < len(seen) < rows * 2 // 3
    after = np.concatenate([child.steps(k, k + 100).ravel() for k in range(700, 8700, 100)])
    after = after[large[after]]
    drawn = np.concatenate((seen, after))
    assert len(after) > rows
    for end in range(rows // 4, len(drawn), rows // 4):  # a tape begun again would draw rows twice
        assert np.ptp(np.bincount(drawn[:end], minlength=len(stratum))[large]) <= 1 + (
            end % rows > rows * 15 // 16
        )
    first = drawn[: rows - plan.lanes]
    assert len(first) - len(np.unique(first)) <= 2 * plan.lanes
    for step in (700, 701, 2345, 6789):
        cells = child.step(step)
        for lane, slot in np.argwhere(large[cells]).tolist():
            sample = int(cells[lane, slot])
            assert (step, lane, slot) in [child.locate(sample, number) for number in range(5)]


def test_locate_in_a_rest_costs_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    population = Population.of("sha256:rest", ["a"], [(s, 0, 20_000) for s in range(50)], 100)
    plan = make_plan(population, global_batch=64, lanes=8)
    child = plan.amend(from_step=200, global_batch=128)
    drawn: list[int] = []
    take = WindowDeck.take

    def counted(self: WindowDeck, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
        drawn.append(int((hi - lo).sum()))
        return take(self, lo, hi)

    monkeypatch.setattr(WindowDeck, "take", counted)
    for sample in (17, 123_456, 999_999):
        drawn.clear()
        found = child.locate(sample, 0)
        assert found is not None
        assert sum(drawn) < 40_000  # of a million rows
        assert child.cell(found[0], found[1])[found[2]] == sample


def test_a_skip_to_the_next_epoch_ends_the_loop() -> None:
    population = Population.of("sha256:skip", ["a"], [(0, 0, 80)], 4)
    plan = make_plan(population, global_batch=8, lanes=4)
    child = plan.amend(skip=(5, 10))
    assert child.epoch_bounds(3) == (0, 5)
    assert child.epoch_bounds(5) == (5, 15)
    assert sorted(child.steps(5, 15).ravel().tolist()) == list(range(80))
    assert plan.amend(skip=(5, 7)).epoch_bounds(3) == plan.amend(skip=(5, 7)).epoch_bounds(6) == (0, 8)
