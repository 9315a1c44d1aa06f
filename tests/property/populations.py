"""Hypothesis strategies for populations and plan shapes: heavy tails, empty segments, odd factors."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from shardkit.plan import Plan, Population

__all__ = ["epoch_steps", "grids", "populations", "strata_of"]


def strata_of(population: Population) -> np.ndarray:
    """Return the stratum of each row."""
    return np.repeat(population.segment_stratum, population.segment_rows)


def epoch_steps(plan: Plan, epoch: int) -> np.ndarray:
    """Return the steps of an epoch."""
    assert plan.steps_per_epoch is not None
    return plan.steps(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)


@st.composite
def populations(
    draw: st.DrawFn, max_shards: int = 60, max_strata: int = 40, max_rows: int = 4000
) -> Population:
    """Random manifests: evenly spread, ragged, sorted by stratum, or with a random selection; never empty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shards = draw(st.one_of(st.integers(1, 4), st.integers(1, max_shards)))
    strata = draw(st.one_of(st.integers(1, 3), st.integers(1, max_strata)))
    tail = draw(st.sampled_from([0.0, 1.0, 2.5]))  # exponent of the stratum sizes: 0 is even
    rows = draw(st.integers(1, max_rows))
    layout = draw(st.sampled_from(["even", "ragged", "sorted"]))
    share = (1.0 + np.arange(strata)) ** -tail
    counts = np.maximum(rng.multinomial(rows, share / share.sum()), 0)
    table = np.zeros((shards, strata), dtype=np.int64)
    for stratum, count in enumerate(counts):
        if layout == "even":
            table[:, stratum] = np.diff(np.arange(shards + 1) * count // shards)
        elif layout == "ragged":
            table[:, stratum] = rng.multinomial(count, rng.dirichlet(np.full(shards, 0.3)))
        else:
            table[stratum * shards // strata, stratum] = count
    if draw(st.booleans()):  # a selection keeps some rows of each segment, often none
        table = rng.binomial(table, rng.choice([0.0, 0.1, 0.9, 1.0], size=table.shape))
    kept = rng.random(table.shape) < draw(st.sampled_from([0.0, 1.0]))  # with or without segments of no row
    shard_of, stratum_of = np.nonzero((table > 0) | kept)
    triples = np.stack([shard_of, stratum_of, table[shard_of, stratum_of]], axis=1)
    if not table.sum():
        triples = np.array([[0, 0, 1]])
    names = [f"s{i:04d}" for i in rng.permutation(strata)]
    block_rows = rng.integers(1, draw(st.sampled_from([2, 8, 200])), size=int(triples[:, 0].max()) + 1)
    return Population.of("sha256:" + "0" * 64, names, triples, block_rows)


@st.composite
def grids(draw: st.DrawFn, max_lanes: int = 64, max_cell: int = 32) -> tuple[int, int]:
    """(lanes, cell size): with and without common factors with anything."""
    lanes = draw(st.one_of(st.sampled_from([1, 2, 3, 7, 48, 64, 960]), st.integers(1, max_lanes)))
    cell = draw(st.one_of(st.sampled_from([1, 2, 512]), st.integers(1, max_cell)))
    return min(lanes, max_lanes), min(cell, max_cell)
