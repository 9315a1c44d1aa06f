"""Measure the cost of audits: replay, proofs, the ledger's size, the training loop, traces.

    python tools/bench/audit.py [--steps 20000] [--jobs 2] [--out FILE]

Prints a table in Markdown. `--steps` is the number of replayed steps of 4,096 samples. All other parts run at full
scale: a tree of 10^6 steps, a plan over 10^9 rows.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.audit.plans import RunPlan
from shardkit.audit.replay import replay
from shardkit.audit.run_record import RunRecord
from shardkit.audit.trace import uses_of_many
from shardkit.ledger import Journal, ledger_head
from shardkit.ledger.ledger import RECORD, Tree, leaf_hash, parse_records
from shardkit.plan import Population, make_plan

BATCH, LANES = 4096, 64
STEPS = 1_000_000
MANIFEST = "sha256:" + "ab" * 32


def population(shards: int, rows_per_shard: int, strata: int) -> Population:
    """Return a population of equal shards, with evenly spread strata and 100 rows per block."""
    return Population(
        identity=MANIFEST,
        strata=tuple(f"s{number:02d}" for number in range(strata)),
        segment_shard=np.repeat(np.arange(shards, dtype=np.int32), strata),
        segment_stratum=np.tile(np.arange(strata, dtype=np.int32), shards),
        segment_rows=np.full(shards * strata, rows_per_shard // strata, dtype=np.int64),
        shard_block_rows=np.full(shards, 100, dtype=np.int32),
        shard_bytes=np.full(shards, 1 << 28, dtype=np.int64),
    )


def bench_replay(steps: int, jobs: int) -> list[tuple[str, str, str]]:
    plan = make_plan(population(40_000, 5_000, 10), global_batch=BATCH, lanes=LANES)
    coverage: list[Any] = []
    cpu, wall, samples = processor_time(), time.perf_counter(), 0
    for chunk in replay(plan, 0, steps, jobs=jobs, coverage=coverage):
        samples += int(chunk.rows.sum())
    wall, cpu = time.perf_counter() - wall, processor_time() - cpu
    exact = all(one.is_exact for one in coverage)
    what = f"replay of {steps:,} steps, {samples / 1e6:,.0f} M samples, coverage exact: {exact}; {jobs} processes"
    rates = (
        f"{samples / wall / 1e6:.1f} M samples/s; {samples / cpu / 1e6:.1f} M per second of processor time"
    )
    return [(what, rates, "≥ 15 M/s on two cores")]


def processor_time() -> float:
    """Return the CPU seconds of this process and its ended children."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)


def bench_tree() -> list[tuple[str, str, str]]:
    digests = [number.to_bytes(32, "little") for number in range(STEPS)]
    started = time.perf_counter()
    Tree(map(leaf_hash, digests))
    return [("tree of 10⁶ steps built", f"{time.perf_counter() - started:.2f} s", "")]


def bench_ledger() -> list[tuple[str, str, str]]:
    steps, every, ranks = 20_000, 100, 2
    rows = np.arange(BATCH, dtype=np.int64)
    lanes = [list(range(r * LANES // ranks, (r + 1) * LANES // ranks)) for r in range(ranks)]
    counts = [BATCH // LANES] * (LANES // ranks)
    half, record_s, merge_s = rows[: BATCH // ranks], 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        journals = [
            Journal(run / "journal", manifest=MANIFEST, plan="cd" * 32, rank=r, world=ranks, lanes=LANES)
            for r in range(ranks)
        ]
        for step in range(steps):
            started = time.perf_counter()
            journals[0].record_step(step, lanes[0], counts, half)
            record_s += time.perf_counter() - started
            journals[1].record_step(step, lanes[1], counts, half)
            if step % every == every - 1:
                started = time.perf_counter()
                ledger_head(run, step + 1)
                merge_s.append(time.perf_counter() - started)
        alone = Journal(run / "alone", manifest=MANIFEST, plan="cd" * 32, rank=0, world=1, lanes=LANES)
        whole, all_lanes = [BATCH // LANES] * LANES, list(range(LANES))
        alone_s = best(lambda: alone.record_step(7, all_lanes, whole, rows), 300)
        size = {
            name: sum(path.stat().st_size for path in (run / name).iterdir())
            for name in ("ledger", "journal")
        }
    merged = size["ledger"] / steps
    return [
        (f"ledger of {steps:,} steps, a head every {every}",
         f"{merged:.1f} bytes per step; and journals not removed yet: {size['journal'] / 2**20:.1f} MiB, bounded",
         "< 200 bytes per step"),
        ("cost in the loop, one of two ranks: 32 of 64 cells, 2,048 samples", f"{record_s / steps * 1e6:.0f} µs a step",
         "< 100 µs (0.1 % of 100 ms)"),
        ("the same, one rank alone: 64 cells, 4,096 samples", f"{alone_s * 1e6:.0f} µs a step", "< 100 µs"),
        (f"merge of {every} steps at a checkpoint, with its fsyncs", f"{statistics.median(merge_s) * 1e3:.1f} ms", ""),
    ]  # fmt: skip


def bench_trace() -> list[tuple[str, str, str]]:
    rows = population(100_000, 10_000, 50)
    started = time.perf_counter()
    plan = make_plan(rows, global_batch=BATCH, lanes=LANES)
    made = time.perf_counter() - started
    record = RunRecord(Path("run"))
    steps = 3 * int(plan.steps_per_epoch or 0)
    branch = np.zeros(steps, dtype=RECORD)
    branch["step"] = np.arange(steps)
    record.records = record.branch = branch if steps else parse_records(b"")
    plans = {0: RunPlan(0, None, plan)}  # type: ignore[arg-type]
    times = []
    for sample in (123_456_789, 999_999_999, 5, 654_321_098, 777_777_777):
        started = time.perf_counter()
        uses = uses_of_many(record, plans, {0: [sample]})
        times.append(time.perf_counter() - started)
        assert all(plan.cell(use.step, use.lane)[use.slot] == sample for use in uses)
        assert 2 <= len(uses) <= 3
    return [
        (f"plan of {plan.population.rows:,} rows, 50 strata, 100,000 shards, made", f"{made:.2f} s", ""),
        ("trace --sample over it and 3 epochs: first, then median of the next four",
         f"{times[0]:.2f} s, {statistics.median(times[1:]):.2f} s", "< 1 s"),
    ]  # fmt: skip


def best(call: Callable[[], object], times: int = 200) -> float:
    found = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        call()
        found = min(found, time.perf_counter() - started)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = [*bench_tree(), *bench_ledger(), *bench_trace(), *bench_replay(given.steps, given.jobs)]
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    text = (
        f"{os.cpu_count()} processors, load {load}, Python {platform.python_version()}, numpy {np.__version__}\n\n"
        "| what | measured | asked for |\n|---|---|---|\n"
        + "".join(f"| {what} | {measured} | {asked} |\n" for what, measured, asked in rows)
    )
    sys.stdout.write(text)
    if given.out is not None:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
