"""Resuming in the middle of an epoch: what a rank computes before its first batch, and what peers' planners do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import RunError
from shardkit.plan import Population, make_plan
from shardkit_tools.benchmarks.rounds import Contest, Entry, Round, timed

__all__ = ["PLANNERS", "peer_resume", "plan_contest", "resume", "spread"]

PLANNERS = ("mosaicml", "litdata")
"""Peers whose planner is measured."""

_NAMES = {"mosaicml": "MosaicML Streaming", "litdata": "LitData"}
_ROWS, _BATCH, _SHARD_ROWS = 10**7, 4096, 5000
_PATIENCE_S = 120.0


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


def plan_contest(scale: float, peers_python: str | None) -> Contest:
    """A rank (1 lane of 64) resumes at 90 % of an epoch.

    The limit is one uniform permutation of all rows, which a loader with a full shuffle makes at every start.

    Args:
        scale: share of 10⁷ rows.
        peers_python: interpreter that has the peers, or None.
    """
    rows = max(100_000, int(_ROWS * scale))
    shards = max(20, rows // _SHARD_ROWS)
    population = spread(np.array([rows]), shards, 64)

    def permute() -> Round:
        return timed(1, lambda: np.random.default_rng(0).permutation(rows))

    def peer(kind: str) -> Round:
        answer = peer_resume(str(peers_python), kind, rows=rows, shards=shards)
        if "failed" in answer:
            raise RunError(f"{_NAMES[kind]} failed: {answer['failed']}")
        return Round(1, float(answer["seconds"]), float(answer["cpu_s"]))

    entries = [
        Entry("numpy permutation", "limit", permute),
        Entry("shardkit", "shardkit", lambda: resume(population, _BATCH, 1)),
    ]
    if peers_python is not None:
        entries += [
            Entry(_NAMES["mosaicml"], "peer", lambda: peer("mosaicml")),
            Entry(_NAMES["litdata"], "peer", lambda: peer("litdata")),
        ]
    return Contest("plan resume", {"rows": rows, "batch": _BATCH}, entries)


def peer_resume(python: str, kind: str, *, rows: int, shards: int) -> dict[str, Any]:
    """What a peer's planner needs for the same; {"failed": …} where it did not work."""
    script = str(Path(__file__).with_name("plan_peers.py"))
    try:
        done = subprocess.run(
            [python, script, kind, str(rows), str(shards)],
            capture_output=True, text=True, check=False, timeout=_PATIENCE_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"planner": kind, "failed": str(error)}
    text = done.stdout.strip().splitlines()
    if done.returncode == 0 and text:
        return dict(json.loads(text[-1]))
    return {"planner": kind, "failed": done.stderr[-300:]}
