"""Locality, mixing and working set on realistic shapes, with the promised bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardkit.plan import Population, make_plan
from shardkit.plan.report import (
    describe_plan,
    efficiency,
    full_shuffle,
    lane_shards,
    measure,
    mixing,
    node_reads,
)


def spread(counts: list[int], shards: int, block_rows: int) -> Population:
    """Every stratum spread evenly over the shards, rows of a shard in stratum order: what the build writes."""
    at = np.arange(shards + 1)
    table = np.stack([np.diff(at * n // shards) for n in counts], axis=1)
    shard, stratum = np.divmod(np.arange(table.size), len(counts))
    segments = np.stack([shard, stratum, table.ravel()], axis=1)
    return Population.of("spread", [f"s{s:04d}" for s in range(len(counts))], segments, block_rows,
                         shard_bytes=table.sum(axis=1) * 1000)  # fmt: skip


def heavy_tail(strata: int, rows: int) -> list[int]:
    share = 1.0 / np.arange(1, strata + 1)
    return [int(n) + 1 for n in share / share.sum() * rows]


IMAGENET = spread([1300 - (s * 7919) % 500 for s in range(1000)], 500, 9)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(300, 4000), min_size=6, max_size=40),
    st.integers(60, 300),
    st.sampled_from([(48, 384), (64, 512), (60, 480), (16, 64), (7, 140)]),
    st.integers(0, 3),
)
def test_nodes_read_few_shards_twice(counts, shards, shape, epoch):  # type: ignore[no-untyped-def]
    lanes, batch = shape
    assume(sum(counts) >= lanes * batch)  # the table makes a whole turn: at least L steps (SPEC.md §8)
    plan = make_plan(spread(counts, shards, 16), global_batch=batch, lanes=lanes)
    each = [lane_shards(plan, lane, epoch) for lane in range(lanes)]
    for nodes in {n for n in (1, 2, 3, 4, 5, 7, 8, 16, 24) if n <= lanes}:
        reads = node_reads(plan, nodes, each)
        # where a stratum has few rows per shard, a border that is a few rows off is a shard off
        rows = min(counts) // shards
        assert sum(reads.shards) - shards <= (4 if rows >= 8 else 4 + 8 // rows) * (nodes - 1)
        if shards >= 80 * nodes and rows >= 8:
            assert reads.per_shard <= 1.05


def test_what_lanes_hold_is_what_they_draw() -> None:
    plan = make_plan(spread([500, 300, 40], 30, 8), global_batch=32, lanes=8)
    assert plan.steps_per_epoch is not None
    segment = plan.grid.order.segments_of
    for lane in range(8):
        drawn = plan.cells(0, plan.steps_per_epoch, lane).ravel()
        assert set(plan.population.segment_shard[segment(drawn)].tolist()) == set(
            lane_shards(plan, lane).tolist()
        )
        blocks = plan.blocks(0, plan.steps_per_epoch, [lane])
        assert set(blocks[:, 0].tolist()) == set(lane_shards(plan, lane).tolist())


SHAPES = {
    "ten strata": (spread([4000] * 10, 200, 20), 512),
    "fifty heavy-tailed strata": (spread(heavy_tail(50, 60_000), 200, 20), 512),
    "imagenet": (IMAGENET, 512),
}


@pytest.mark.parametrize("name", SHAPES)
def test_batches_mix_like_a_full_shuffle(name: str) -> None:
    population, batch = SHAPES[name]
    mine, full = mixing(make_plan(population, global_batch=batch, lanes=64), steps=60)
    # stated margins: a batch meets nearly as many shards, labels run on as long, neighbours are as unlike
    assert mine.shards_per_batch >= 0.8 * full.shards_per_batch
    assert mine.distance_bits >= 0.75 * full.distance_bits
    sorted_runs = population.rows / len(population.segment_rows)
    assert mine.label_run <= max(1.6 * full.label_run, 2.5) < 2 * sorted_runs + 2.5


def test_the_measures_tell_sorted_from_shuffled() -> None:
    population, batch = SHAPES["ten strata"]
    order = make_plan(population, global_batch=batch, lanes=64).grid.order
    rows = np.arange(60 * batch).reshape(-1, batch)
    sequential, full = measure(order, rows), measure(order, full_shuffle(population.rows, 60, batch))
    assert sequential.shards_per_batch < 0.2 * full.shards_per_batch
    assert sequential.distance_bits < 0.1 * full.distance_bits
    assert sequential.label_run > 10 * full.label_run


def test_the_report_is_plain_and_complete() -> None:
    plan = make_plan(SHAPES["ten strata"][0], global_batch=512)
    report = describe_plan(plan, steps=40)
    assert report["balance"]["batch"] < 2  # type: ignore[index]
    assert report["balance"]["cell"] < 1 + 2 / 64  # type: ignore[index]
    assert [w["efficiency"] for w in report["worlds"]][47] == 64 / (48 * 2)  # type: ignore[attr-defined]
    assert efficiency(64)[63] == 1.0
    weighted = describe_plan(
        make_plan(SHAPES["ten strata"][0], global_batch=512, weights={"s0003": 4}), steps=20
    )
    passes = {s["name"]: s["passes"] for s in weighted["strata"]}  # type: ignore[attr-defined]
    assert passes["s0003"] == pytest.approx(4 * passes["s0001"], rel=0.01)
