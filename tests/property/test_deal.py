"""The deal's closed form against slots dealt one by one, for masses of any size."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.plan.deal import Deal, floor_sum, golden_step


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 50), st.integers(1, 10**15)), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 90),
    st.integers(0, 10**20),
)
def test_counts_are_those_of_slots_dealt_by_hand(masses, lanes, cell, steps, dither):  # type: ignore[no-untyped-def]
    batch, total = lanes * cell, sum(masses)
    masses = sorted(masses, reverse=True)
    common = [m for m in masses if batch * m >= total]
    masses = common + ([sum(masses[len(common) :])] if len(common) < len(masses) else [])
    cumulative = [sum(masses[: g + 1]) for g in range(len(masses))]
    dither %= total
    deal = Deal(cumulative, batch, lanes, steps, dither)
    drawn = np.zeros((lanes, len(masses)), dtype=np.int64)
    before = [0] * len(masses)
    for step in range(steps + 1):
        got = np.concatenate([deal.lane_prefix(np.array([step]), lane) for lane in range(lanes)])
        assert (got == np.cumsum(drawn, axis=1)).all()
        assert (deal.prefix(np.array([step]))[0] == np.cumsum(before)).all()
        if step == steps:
            break
        sums = [floor(Fraction((step + 1) * batch * c + dither, total)) for c in [0, *cumulative]]
        counts = [sums[g + 1] - sums[g] - before[g] for g in range(len(masses))]
        before = [sums[g + 1] - sums[g] for g in range(len(masses))]
        assert min(counts) >= 0
        slots = [g for g, count in enumerate(counts) for _ in range(count)]
        assert len(slots) == batch
        for slot, group in enumerate(slots):
            drawn[(slot + step * lanes // steps) % lanes, group] += 1


@given(st.integers(0, 60), st.integers(1, 50), st.integers(-200, 200), st.integers(-200, 200))
def test_floor_sum_is_the_sum(n, m, a, b):  # type: ignore[no-untyped-def]
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@given(st.integers(1, 10**30))
def test_golden_step_visits_everything(n):  # type: ignore[no-untyped-def]
    step = golden_step(n)
    assert np.gcd(step, n) == 1 if n < 2**60 else pow(step, -1, n)
    assert 1 <= step <= max(1, n)
