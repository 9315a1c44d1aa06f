"""Compare the proposals of `shardkit tune` with a grid search on the four read workloads.

::

    python tools/bench/tune.py --scale 0.05            # prints Markdown

Every grid point builds the workload with its block size and reads epochs with its window. The points take turns, so
that other load on the machine affects all equally. The figure is the processor time per sample of the best round; wall
time is reported as well.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import itertools
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import shardkit
from bench.datasets import write_dataset
from bench.reading.workloads import WORKLOADS, Workload, touch
from shardkit_tools.tuning.measuring import measure_machine
from shardkit_tools.tuning.proposing import Machine, Needs, propose

KIB = 1 << 10
BLOCKS = (128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB, 4096 * KIB)
WINDOWS = (4, 16, 32)
DEFAULT = (1024 * KIB, 16)

Point = tuple[int, int]  # block size, window_blocks


def build(workload: Workload, scale: float, block: int, folder: Path) -> shardkit.Dataset:
    path = folder / f"{workload.name}-{block}"
    if not path.exists():
        write_dataset(workload, scale, path, block_size=block)
    return shardkit.open(path)


def epoch(loader: Any, field: str) -> tuple[int, float, float]:
    """Return the samples, wall seconds and processor seconds of one epoch."""
    wall, cpu = time.perf_counter(), time.process_time()
    count = sum(touch(batch[field]) for batch in loader)
    return count, time.perf_counter() - wall, time.process_time() - cpu


def proposed(machine: Machine, dataset: shardkit.Dataset, lanes: int) -> Point:
    needs = Needs(int(dataset.table.size.sum()), lanes, 1, 1, 0.02, 1)
    found = {name: one.value for name, one in propose(machine, None, None, needs).items()}
    return found["block_size"], found["window_blocks"]


def search(
    workload: Workload, scale: float, machine: Machine, folder: Path, repeats: int
) -> dict[Point, tuple[float, float]]:
    """Return point → (processor µs, wall µs) per sample; the first point is the proposal."""
    first = build(workload, scale, DEFAULT[0], folder)
    ours = proposed(machine, first, first.plan(workload.batch).lanes)
    points = [ours, *(p for p in [DEFAULT, *itertools.product(BLOCKS, WINDOWS)] if p != ours)]
    points = list(dict.fromkeys(points))
    best = dict.fromkeys(points, (float("inf"), float("inf")))
    with contextlib.ExitStack() as closing:
        loaders = {}
        for block, window in points:
            dataset = build(workload, scale, block, folder)
            plan = dataset.plan(workload.batch, window_blocks=window)
            loaders[block, window] = closing.enter_context(dataset.loader(plan, tensors=False))
        for _ in range(repeats):
            for point, loader in loaders.items():
                count, wall, cpu = epoch(loader, workload.field)
                best[point] = min(best[point][0], cpu / count * 1e6), min(best[point][1], wall / count * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"# Proposed settings compared with a grid search, {dt.datetime.now(dt.UTC):%Y-%m-%d}\n")
        print(
            f"{platform.machine()}, {os.cpu_count()} shared processors, Python {platform.python_version()}; load "
            f"average {os.getloadavg()[0]:.1f} at the start; scale {given.scale:g}, least disturbed of "
            f"{given.repeats} rounds taken in turn, warm page cache. "
            "Processor µs per sample; wall µs in brackets. Grid: blocks of "
            f"{', '.join(f'{b // KIB}' for b in BLOCKS)} KiB × windows of {', '.join(map(str, WINDOWS))}.\n"
        )
        machine = measure_machine(folder, seconds=1.0, tell=lambda _: None)
        print(
            "| workload | proposed | default (1 MiB, 16) | best of the grid | worst of the grid | proposed over best |"
        )
        print("|---|---|---|---|---|---|", flush=True)
        for workload in WORKLOADS.values():
            found = search(workload, given.scale, machine, folder, given.repeats)
            ours = next(iter(found))
            best, worst = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
            cells = [f"{b // KIB} KiB × {w}: {found[b, w][0]:.2f} ({found[b, w][1]:.2f})"
                     for b, w in (ours, DEFAULT, best, worst)]  # fmt: skip
            print(
                f"| {workload.name} | {' | '.join(cells)} | {found[ours][0] / found[best][0]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
