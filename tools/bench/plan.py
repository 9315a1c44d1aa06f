"""Measure the planner at 10⁹ rows: throughput, locality, and the cost of resuming in peers' planners.

    python tools/bench/plan.py [--peers PYTHON] [--out FILE]

PYTHON is an interpreter that has mosaicml-streaming and litdata. Every figure comes from its own process, so that peak
memory is the planner's. Imports, and the population's columns (from a manifest's pages), are listed separately.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.contests import Round, time_round
from shardkit.plan import Plan, Population, make_plan
from shardkit.plan.report import lane_shards, mixing, node_reads
from shardkit_tools.simulation.reading import spread_population

ROWS, SHARDS, STRATA, BATCH = 10**9, 10**5, 50, 4096
PLANNERS = ("mosaicml", "litdata")
PEER_PATIENCE_S = 120.0


def resume(population: Population, batch: int, lanes: int) -> Round:
    """Make a plan, and draw the cells of a step at 90 % of the epoch for the first ``lanes`` lanes."""

    def work() -> None:
        plan = make_plan(population, global_batch=batch)
        step = int(plan.loop_steps * 0.9)
        plan.steps(step, step + 1, range(lanes))

    return time_round(1, work)


def heavy(strata: int, rows: int) -> np.ndarray:
    share = 1.0 / np.arange(1, strata + 1)
    counts: np.ndarray = (share / share.sum() * rows).astype(np.int64) + 1
    return counts


def big() -> Population:
    return spread_population(heavy(STRATA, ROWS), SHARDS, block_rows=100)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cold() -> dict[str, Any]:
    bare = peak_mib()
    population = big()
    before = peak_mib()
    begun, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(population, global_batch=BATCH)
    planned = time.perf_counter()
    plan.cell(int(plan.loop_steps * 0.9), 17)
    done, cpu = time.perf_counter(), time.process_time() - cpu
    place = plan.locate(123_456_789)
    located = time.perf_counter()
    assert place is not None
    plan.locate(123_456_790)
    return {
        "rows": population.rows,
        "segments": len(population.segment_rows),
        "plan_s": planned - begun,
        "plan_and_cell_s": done - begun,
        "plan_and_cell_cpu_s": cpu,
        "locate_cold_s": located - done,
        "locate_warm_s": time.perf_counter() - located,
        "process_peak_mib": peak_mib(),
        "of_it_interpreter_mib": bare,
        "of_it_columns_mib": before - bare,
    }


def warm() -> dict[str, Any]:
    plan = make_plan(big(), global_batch=BATCH)
    start = int(plan.loop_steps * 0.5)
    first = time.perf_counter()
    plan.step(start)
    first = time.perf_counter() - first
    times, cpu = [], time.process_time()
    for k in range(start + 1, start + 1025):  # four chunks of every lane, so that filling them counts
        begun = time.perf_counter()
        plan.step(k)
        times.append(time.perf_counter() - begun)
    cpu = time.process_time() - cpu
    state = {"version": 1, "step": start, "plan": plan.digest, "manifest": plan.population.identity}
    begun = time.perf_counter()
    for _ in range(1000):
        text = json.dumps({**state, "plan": plan.digest})
    taken = (time.perf_counter() - begun) / 1000
    return {
        "first_step_s": first,
        "step_mean_ms": float(np.mean(times) * 1e3),
        "step_mean_cpu_ms": cpu / 1024 * 1e3,
        "step_median_ms": float(np.median(times) * 1e3),
        "step_p99_ms": float(np.quantile(times, 0.99) * 1e3),
        "state_bytes": len(text),
        "state_us": taken * 1e6,
    }


def _replay(part: tuple[int, int, int]) -> tuple[float, float, int]:
    lane0, lane1, steps = part
    plan = make_plan(big(), global_batch=BATCH)
    begun, cpu = time.perf_counter(), time.process_time()
    total = 0
    for lane in range(lane0, lane1):
        for first in range(0, steps, 8192):
            total += plan.cells(first, min(steps, first + 8192), lane).size
    return time.perf_counter() - begun, time.process_time() - cpu, total


def replay() -> dict[str, Any]:
    steps = ROWS // BATCH // 4  # a quarter of the epoch of 16 lanes is 62 million samples
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        parts = pool.map(_replay, [(0, 8, steps), (32, 40, steps)])
    samples, seconds = sum(n for _, _, n in parts), max(wall for wall, _, _ in parts)
    cpu = sum(cpu for _, cpu, _ in parts)
    return {"processes": 2, "samples": samples, "seconds": seconds, "samples_per_s": samples / seconds,
            "samples_per_cpu_second": samples / cpu, "two_whole_cores_would_do": 2 * samples / cpu}  # fmt: skip


SHAPES: dict[str, Callable[[], tuple[Population, int]]] = {
    "ImageNet, B = 512": lambda: (
        spread_population(1300 - np.arange(1000) * 7919 % 40, 512, block_rows=9),
        528,
    ),
    "ImageNet, B = 4,096": lambda: (
        spread_population(1300 - np.arange(1000) * 7919 % 40, 512, block_rows=9),
        4128,
    ),
    "10 strata": lambda: (spread_population(np.full(10, 200_000), 512, block_rows=64), 528),
    "50 heavy-tailed strata": lambda: (spread_population(heavy(50, 2_000_000), 512, block_rows=64), 528),
}


def locality() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, make in SHAPES.items():
        population, batch = make()
        plan = make_plan(population, global_batch=batch, lanes=48)
        shards = [lane_shards(plan, lane) for lane in range(plan.lanes)]
        mine, full = mixing(plan, 50)
        out[name] = {
            "reads_per_shard": {
                n: round(node_reads(plan, n, shards).per_shard, 3) for n in (1, 2, 4, 5, 7, 8, 24)
            },
            "full_shuffle_reads_per_shard": {n: full_reads(plan, n) for n in (2, 8, 24)},
            "mixing": {"plan": vars(mine), "full_shuffle": vars(full)},
        }
    return out


def full_reads(plan: Plan, nodes: int) -> float:
    """Return the mean number of nodes that read a shard if each draws 1/nodes of all rows at random."""
    each = np.bincount(plan.population.segment_shard, plan.population.segment_rows)
    return round(float(nodes * (1 - (1 - 1 / nodes) ** each).mean()), 3)


def ten_million() -> dict[str, Any]:
    """Measure resuming at 90 % of 10⁷ rows on 64 ranks, for one rank (its lane) and for a node of 8 ranks."""
    population = spread_population(np.array([10**7]), 2000, block_rows=64)
    out: dict[str, Any] = {}
    for name, lanes in (("rank", 1), ("node", 8)):
        rounds = [resume(population, BATCH, lanes) for _ in range(7)]
        out[name] = {"seconds": min(r.seconds for r in rounds), "cpu_s": min(r.cpu_s for r in rounds)}
    return {**out, "peak_mib": peak_mib()}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "cold": cold, "warm": warm, "replay": replay, "locality": locality, "ten_million": ten_million,
}  # fmt: skip


def alone(part: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--part", part], capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def peer_resume(python: str, kind: str, *, rows: int, shards: int) -> dict[str, Any]:
    """Measure the same resume in a peer's planner; return {"failed": …} if it fails."""
    script = str(Path(__file__).with_name("plan_peers.py"))
    try:
        done = subprocess.run(
            [python, script, kind, str(rows), str(shards)],
            capture_output=True, text=True, check=False, timeout=PEER_PATIENCE_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"planner": kind, "failed": str(error)}
    text = done.stdout.strip().splitlines()
    if done.returncode == 0 and text:
        return dict(json.loads(text[-1]))
    return {"planner": kind, "failed": done.stderr[-300:]}


def peers(python: str) -> list[dict[str, Any]]:
    return [peer_resume(python, kind, rows=10**7, shards=2000) for kind in PLANNERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--peers")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.part:
        print(json.dumps(PARTS[given.part]()))
        return
    result: dict[str, Any] = {part: alone(part) for part in PARTS}
    if given.peers:
        result["peers"] = peers(given.peers)
        for peer in result["peers"]:
            if "cpu_s" in peer:  # CPU seconds, so that other load does not count
                peer["times_a_rank"] = round(peer["cpu_s"] / result["ten_million"]["rank"]["cpu_s"], 1)
                peer["times_a_node"] = round(peer["cpu_s"] / result["ten_million"]["node"]["cpu_s"], 1)
    result["machine"] = {
        "cpus": multiprocessing.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "processor": platform.processor() or platform.machine(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
