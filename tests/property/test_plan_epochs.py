"""Epochs of a chosen length, groups by length and joined sequences."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import PlanError
from shardkit.plan import Plan, Population, make_plan
from shardkit.plan.report import describe_plan
from tests.property.populations import epoch_steps, populations, strata_of

# ---- Epochs of a chosen length are a division of the same stream, and are counted the same way in every plan


POPULATION = Population(
    identity="m",
    strata=("a", "b", "c"),
    segment_shard=np.arange(3, dtype=np.int32),
    segment_stratum=np.arange(3, dtype=np.int32),
    segment_rows=np.array([57, 31, 5], dtype=np.int64),
    shard_block_rows=np.full(3, 4, dtype=np.int32),
)


def _plan(**options: Any) -> Plan:
    return make_plan(POPULATION, global_batch=8, lanes=4, **options)


@given(length=st.integers(1, 40), weighted=st.booleans(), start=st.integers(0, 60))
def test_epoch_steps_divides_the_stream_and_changes_no_cell(length: int, weighted: bool, start: int) -> None:
    more: dict[str, Any] = {"weights": {"a": 2}} if weighted else {}
    whole, cut = _plan(**more), _plan(epoch_steps=length, **more)
    assert cut.loop_steps == cut.steps_per_epoch == length
    assert (whole.steps(start, start + 9) == cut.steps(start, start + 9)).all()
    assert cut.epoch_bounds(start) == (start // length * length, (start // length + 1) * length)
    if not weighted:
        assert cut.bounds(start, passes=True) == whole.epoch_bounds(start)
    assert cut.locate(3, 2) == whole.locate(3, 2)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), length=st.none() | st.integers(1, 20))
def test_epochs_are_numbered_without_a_gap_after_any_amendment(
    data: st.DataObject, length: int | None
) -> None:
    plan, start = _plan(epoch_steps=length, remainder="short"), 0
    for _ in range(data.draw(st.integers(0, 3))):
        start += data.draw(st.integers(0, 25))
        change: dict[str, Any] = data.draw(
            st.sampled_from([{"skip": (start, start + 3)}, {"global_batch": 16}, {"weights": {"b": 3}}])
        )
        try:
            plan = plan.amend(from_step=start, **change)
        except PlanError:
            continue
    step, number = 0, 0
    while step < 90:
        first, last = plan.epoch_bounds(step)
        assert first == step < last
        assert {plan.epoch_of(at) for at in range(first, last)} == {number}
        step, number = last, number + 1


def _weights(weights: Any) -> tuple[int, ...]:
    return _plan(weights=weights).settings.stages[0][1]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"a": 0.7, "b": 0.3, "c": 0}, (7, 3, 0)),
        ({"a": 0.5, "b": 1.25}, (2, 5, 4)),
        ({"a": Fraction(1, 3), "b": Fraction(1, 6), "c": np.float32(0.5)}, (2, 1, 3)),
        ({"a": Decimal("0.1"), "b": np.int64(1), "c": 1.0}, (1, 10, 10)),
        ({"a": 1e-3, "b": 1, "c": 1}, (1, 1000, 1000)),
    ],
)
def test_fractional_weights_are_scaled_exactly(weights: Any, expected: tuple[int, ...]) -> None:
    assert _weights(weights) == expected
    assert _plan(weights=weights).digest == _plan(weights=dict(zip("abc", expected, strict=True))).digest


@pytest.mark.parametrize(
    "weights",
    [{"a": -0.5}, {"a": float("nan")}, {"a": float("inf")}, {"a": True}, {"a": "1"}, {"a": 1 / 3}, {"a": 1e300},
     {"a": None}, {"*": 0.0}, {3: 1}, 5],
)  # fmt: skip
def test_weights_that_are_no_weights_are_refused(weights: Any) -> None:
    with pytest.raises(PlanError, match="weight"):
        _plan(weights=weights)


def test_integers_of_every_library_are_integers() -> None:
    class Eight:
        def __index__(self) -> int:
            return 8

    named: dict[str, Any] = {"lanes": 4, "seed": 3, "window_blocks": 5, "epoch_steps": 6}
    eight: Any = Eight()
    plain = make_plan(POPULATION, global_batch=8, **named)
    for kind in (np.int64, np.uint8, np.int32):
        theirs: dict[str, Any] = {name: kind(value) for name, value in named.items()}
        made = make_plan(POPULATION, global_batch=eight, **theirs)
        assert made.digest == plain.digest
        assert made.history() == plain.history()
        numbers: dict[str, Any] = {"from_step": kind(3), "lanes": kind(2), "global_batch": kind(8)}
        assert made.amend(**numbers).digest == plain.amend(from_step=3, lanes=2, global_batch=8).digest


@pytest.mark.parametrize(
    "options",
    [{"global_batch": 2**62}, {"global_batch": 2**31}, {"global_batch": 8.0}, {"global_batch": True},
     {"lanes": 2**62}, {"lanes": 2.0}, {"seed": "1"}, {"seed": None}, {"epoch_steps": 0}, {"epoch_steps": 1.5},
     {"group_by": 5}, {"group_by": {}}, {"group_by": {"*": 1.5}}, {"sequence": 0, "row_tokens": 4},
     {"window_blocks": 1.0}],
)  # fmt: skip
def test_numbers_that_are_out_of_range_are_refused_in_words(options: Any) -> None:
    with pytest.raises(PlanError, match="expected"):
        make_plan(POPULATION, **{"global_batch": 8, **options})


def test_an_amendment_without_a_first_step_says_what_to_pass() -> None:
    with pytest.raises(PlanError, match="pass from_step="):
        _plan().amend(weights={"a": 2})


# ---- Grouping by length and joined sequences: exactly once, seek, balance within a group, and what padding is saved


few = settings(max_examples=30, deadline=None)


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
    steps = epoch_steps(plan, number)
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
