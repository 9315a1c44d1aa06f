"""The natural-weights grid against a model that deals card by card, and the deal's closed form."""

from __future__ import annotations

import collections
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardkit.plan import Plan, Population, make_plan
from shardkit.plan.deal import floor_sum, golden_step
from tests.property.plan_model import NaturalModel
from tests.property.populations import epoch_steps, grids, populations, strata_of

# ---- Every promise of the natural-weights grid, and the closed form against a model that deals card by card


few = settings(max_examples=40, deadline=None)
many = settings(max_examples=80, deadline=None)

remainders = st.sampled_from(["drop", "short"])
shuffles = st.sampled_from(["window", "full", "none"])


def planned(population: Population, shape: tuple[int, int], remainder: str, **more: object) -> Plan:
    lanes, cell = shape
    assume(remainder == "short" or population.rows >= lanes * cell)
    assume(lanes * cell <= 50 * population.rows)
    return make_plan(population, global_batch=lanes * cell, lanes=lanes, remainder=remainder, **more)  # type: ignore[arg-type]


@few
@given(populations(max_rows=1500), grids(16, 12), remainders, st.sampled_from(["window", "none"]), st.integers(1, 40),
       st.integers(0, 2**63 - 1))  # fmt: skip
def test_closed_form_is_the_dealt_game(population, shape, remainder, shuffle, window_blocks, seed):  # type: ignore[no-untyped-def]
    plan = planned(population, shape, remainder, shuffle=shuffle, window_blocks=window_blocks, seed=seed)
    model = NaturalModel(population, plan.global_batch, plan.lanes, seed, remainder, window_blocks, shuffle)
    for epoch in range(3):
        expected = [[[-1 if s is None else s for s in c] for c in step] for step in model.epoch(epoch)]
        assert epoch_steps(plan, epoch).tolist() == expected


@many
@given(populations(), grids(), remainders, shuffles, st.integers(0, 5), st.integers(0, 2**40))
def test_every_row_exactly_once(population, shape, remainder, shuffle, seed, epoch):  # type: ignore[no-untyped-def]
    plan = planned(population, shape, remainder, shuffle=shuffle, seed=seed)
    steps = epoch_steps(plan, epoch)
    seen = steps[steps >= 0]
    left = population.rows % plan.global_batch
    assert len(np.unique(seen)) == len(seen)
    assert seen.max() < population.rows
    assert len(seen) == population.rows - (left if remainder == "drop" else 0)
    full = population.rows // plan.global_batch
    assert (steps[:full] >= 0).all()
    if remainder == "short" and left:
        assert len(steps) == full + 1
        filled = (steps[full] >= 0).sum(axis=1)
        assert filled.sum() == left
        assert filled.max() - filled.min() <= 1
        assert all((row[:n] >= 0).all() for row, n in zip(steps[full], filled, strict=True))


@many
@given(populations(), grids(), remainders, st.integers(0, 2**40))
def test_batches_and_cells_are_balanced(population, shape, remainder, epoch):  # type: ignore[no-untyped-def]
    check_balance(population, planned(population, shape, remainder), epoch)


def check_balance(population: Population, plan: Plan, epoch: int) -> None:
    steps = epoch_steps(plan, epoch)[: population.rows // plan.global_batch]
    stratum = strata_of(population)
    rows = np.bincount(stratum, minlength=len(population.strata))
    expected = [Fraction(plan.global_batch * int(n), population.rows) for n in rows]
    rare = [s for s, e in enumerate(expected) if e < 1]
    kinds = [([s], e) for s, e in enumerate(expected) if e >= 1]
    pool = sum((expected[s] for s in rare), Fraction(0))
    if pool >= 1:
        kinds.append((rare, pool))
    drawn = stratum[steps]
    for members, e in kinds:
        cells = (drawn == members[0] if len(members) == 1 else np.isin(drawn, members)).sum(
            axis=2
        )  # (steps, lanes)
        batches = cells.sum(axis=1)
        assert (batches > e - 2).all()
        assert (batches < e + 2).all()
        for count in np.unique(cells).tolist():
            assert abs(count - e / plan.lanes) < 1 + Fraction(2, plan.lanes)


@settings(max_examples=8, deadline=None)
@given(populations(10_000, 1_000, 60_000), grids(960, 512), remainders, st.integers(0, 9))
def test_large_shapes_keep_every_promise(population, shape, remainder, epoch):  # type: ignore[no-untyped-def]
    plan = planned(population, shape, remainder)
    check_balance(population, plan, epoch)
    seen = epoch_steps(plan, epoch)
    seen = seen[seen >= 0]
    assert len(np.unique(seen)) == len(seen)
    assert len(seen) == population.rows - (population.rows % plan.global_batch if remainder == "drop" else 0)
    found = plan.locate(population.rows // 2, epoch)
    assert found is None or plan.cell(found[0], found[1])[found[2]] == population.rows // 2


@settings(max_examples=20, deadline=None)
@given(populations(max_rows=300), grids(12, 8), st.integers(0, 3), st.integers(2, 40))
def test_no_row_is_dropped_more_often_than_its_share(population, shape, seed, epochs):  # type: ignore[no-untyped-def]
    plan = planned(population, shape, "drop", seed=seed, shuffle="none")
    left = population.rows % plan.global_batch
    dropped = np.full(population.rows, epochs)
    for epoch in range(epochs):
        dropped[epoch_steps(plan, epoch).ravel()] -= 1
    stratum = strata_of(population)
    # rows of a stratum, and of the pool, take turns: nobody is dropped twice before all others were once
    rows = np.bincount(stratum, minlength=len(population.strata))
    pooled = np.where(rows[stratum] * plan.global_batch < population.rows, -1, stratum)
    for kind in np.unique(pooled):
        times = dropped[pooled == kind]
        assert times.max() - times.min() <= 1
        # and a stratum gives up its share of the remainder, up to the discrepancy of a golden sequence
        share = epochs * left * len(times) / population.rows
        assert abs(times.sum() - share) < 3 + np.log2(epochs + 1)


@few
@given(populations(), grids(), st.integers(1, 64), st.integers(0, 3))
def test_open_blocks_stay_within_the_window(population, shape, window_blocks, epoch):  # type: ignore[no-untyped-def]
    plan = planned(population, shape, "short", window_blocks=window_blocks)
    block_of = block_numbers(population)
    stratum = strata_of(population)
    rows = np.bincount(stratum, minlength=len(population.strata))
    steps = epoch_steps(plan, epoch)
    for lane in range(plan.lanes):
        spans: dict[int, list[int]] = {}
        kinds: dict[int, set[int]] = collections.defaultdict(set)
        for step, cell in enumerate(steps[:, lane]):
            for sample in cell[cell >= 0].tolist():
                spans.setdefault(block_of[sample], [step, step])[1] = step
                pooled = rows[stratum[sample]] * plan.global_batch < population.rows
                kinds[-1 if pooled else int(stratum[sample])].add(block_of[sample])
        for step in range(1, len(steps)):
            held = {b for b, (first, last) in spans.items() if first < step <= last}
            # at least one block for every stratum that is in the middle of a block
            busy = sum(1 for blocks in kinds.values() if blocks & held)
            assert len(held) <= window_blocks + busy
            assert busy <= 3 * plan.cell_size + 2


def block_numbers(population: Population) -> list[int]:
    out, block = [], 0
    for shard, rows in zip(population.segment_shard.tolist(), population.segment_rows.tolist(), strict=True):
        size = int(population.shard_block_rows[shard])
        out += [block + row // size for row in range(rows)]
        block += -(-rows // size)
    return out


@pytest.mark.parametrize("lanes", [1, 4])
def test_no_caller_can_change_cells_that_are_kept(lanes: int) -> None:
    """Those of the short last step are made in a way of their own."""
    population = Population(
        "short", ("a",), np.array([0], dtype=np.int32), np.array([0], dtype=np.int32), np.array([103]),
        np.array([7], dtype=np.int32),
    )  # fmt: skip
    plan = make_plan(population, global_batch=20, lanes=lanes, remainder="short")
    for step in range(6):
        plan.steps(step, step + 1)
        for lane in range(lanes):
            assert not plan.cell(step, lane).flags.writeable


def test_what_a_plan_keeps_does_not_grow_with_the_epochs() -> None:
    population = Population(
        "small", ("a",), np.zeros(10, dtype=np.int32), np.zeros(10, dtype=np.int32), np.full(10, 512),
        np.array([16], dtype=np.int32),
    )  # fmt: skip
    plan = make_plan(population, global_batch=64, lanes=64)
    assert plan.steps_per_epoch == 80
    tracemalloc.start()
    try:
        held = []
        for epoch in range(110):
            plan.steps(epoch * 80, (epoch + 1) * 80)
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] - held[9] < 10 * 8 * population.rows  # the cells of ten epochs, where a hundred went by


# ---- The deal's closed form against slots dealt one by one, for masses of any size


@given(st.integers(0, 60), st.integers(1, 50), st.integers(-200, 200), st.integers(-200, 200))
def test_floor_sum_is_the_sum(n, m, a, b):  # type: ignore[no-untyped-def]
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@given(st.integers(1, 10**30))
def test_golden_step_visits_everything(n):  # type: ignore[no-untyped-def]
    step = golden_step(n)
    assert np.gcd(step, n) == 1 if n < 2**60 else pow(step, -1, n)
    assert 1 <= step <= max(1, n)
