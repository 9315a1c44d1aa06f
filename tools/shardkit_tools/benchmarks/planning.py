"""Resuming in the middle of an epoch: what a rank computes before its first batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardkit.plan import Population, make_plan
from shardkit_tools.benchmarks.rounds import Contest, Entry, Round, timed

__all__ = ["plan_contest", "resume", "spread"]

_ROWS, _BATCH, _SHARD_ROWS = 10**7, 4096, 5000


def spread(counts: NDArray[np.int64], shards: int, block_rows: int) -> Population:
    """Strata of these sizes spread evenly over shards, as the build writes them."""
    strata = len(counts)
    at = np.arange(shards + 1, dtype=np.int64)
    rows = np.empty((shards, strata), dtype=np.int64)
    for s, n in enumerate(counts.tolist()):
        rows[:, s] = np.diff(at * n // shards)
    return Population("bench", tuple(f"s{s:04d}" for s in range(strata)),
                      np.repeat(np.arange(shards, dtype=np.int32), strata),
                      np.tile(np.arange(strata, dtype=np.int32), shards), rows.ravel(),
                      np.full(shards, block_rows, dtype=np.int32))  # fmt: skip


def resume(population: Population, batch: int, lanes: int) -> Round:
    """Plan, and draw the cells of a step at 90 % of the epoch for the first ``lanes`` lanes."""

    def work() -> None:
        plan = make_plan(population, global_batch=batch)
        step = int(plan.loop_steps * 0.9)
        plan.steps(step, step + 1, range(lanes))

    return timed(1, work)


def plan_contest(scale: float) -> Contest:
    """A rank (1 lane of 64) resumes at 90 % of an epoch.

    The limit is one uniform permutation of all rows, which a loader with a full shuffle makes at every start.

    Args:
        scale: share of 10⁷ rows.
    """
    rows = max(100_000, int(_ROWS * scale))
    shards = max(20, rows // _SHARD_ROWS)
    population = spread(np.array([rows]), shards, 64)

    def permute() -> Round:
        return timed(1, lambda: np.random.default_rng(0).permutation(rows))

    entries = [
        Entry("numpy permutation", "limit", permute),
        Entry("shardkit", "shardkit", lambda: resume(population, _BATCH, 1)),
    ]
    return Contest("plan resume", {"rows": rows, "batch": _BATCH}, entries)
