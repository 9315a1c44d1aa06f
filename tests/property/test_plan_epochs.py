"""Epochs of a chosen length are a division of the same stream, and are counted the same way in every plan."""

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
