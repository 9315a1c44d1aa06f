"""Measure the cost of telemetry: its CPU time per step, relative to a step of 10 ms.

::

    python tools/bench/telemetry.py            # prints Markdown

The parts are the trainer's work per step, a record (one every two seconds), and the loader's bookkeeping for a loaded
block. The total is also measured from outside: the CPU time of an epoch with records every 50 ms, less the CPU time of
an epoch without telemetry. Figures are CPU time, because wall time varies on a shared machine. Rounds take turns, and
the round with the least CPU time of each kind counts.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import shardkit
from shardkit.telemetry import TelemetrySettings
from shardkit.telemetry.recorder import BlockTimes, Recorder
from shardkit_trainer.reporting import StageMeter

STEP_S = 0.010
LANES = 64
DENSE_S = 0.05


def cpu_of(work: Callable[[], object], times: int) -> float:
    """Return the mean CPU seconds of a call."""
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def make_dataset(folder: Path, rows: int) -> Any:
    """Write a dataset of 1 KiB rows in blocks of 16 KiB."""
    with shardkit.create(folder, {"x": "int64[128]"}, shard_size="1MiB", block_size="16KiB") as writer:
        for number in range(rows):
            writer.add({"x": np.full(128, number)})
    return shardkit.open(str(folder))


def parts(dataset: Any, folder: Path) -> tuple[float, float, float]:
    """Return the CPU seconds of a trainer step, of a record, and of noting a block."""
    plan = dataset.plan(global_batch=LANES * 4, lanes=LANES)
    loader = dataset.loader(plan, run=folder / "run", tensors=False)
    for _ in loader:
        pass
    world: Any = SimpleNamespace(stage="compute")
    meter = StageMeter(100, world)
    taken = dict.fromkeys(("data", "prepare", "exchange", "compute", "reduce", "update"), 0.001)

    def step() -> None:
        meter.seconds |= taken
        meter.step(computed_s=0.001, cells=4, loss=1.0, moved_bytes=1.0)

    loader.telemetry.add_source("trainer", meter.numbers)
    recorder = Recorder(loader.telemetry, folder / "records", TelemetrySettings(interval_s=1000))
    step_s = cpu_of(step, 20_000)
    record_s = cpu_of(lambda: recorder._record("running"), 300)  # noqa: SLF001 (what its thread does)
    times = BlockTimes(str, lambda _: True)

    def note() -> None:
        times.expect((1,), (1,))
        times.note(0, 1, 0.001, 16_384, number=1)

    block_s = cpu_of(note, 20_000)
    recorder.close()
    loader.close()
    return step_s, record_s, block_s


def epoch_s(dataset: Any, run: Path, telemetry: TelemetrySettings | None) -> float:
    """Return the CPU seconds of an epoch."""
    plan = dataset.plan(global_batch=LANES * 4, lanes=LANES)
    with dataset.loader(plan, run=run, tensors=False, telemetry=telemetry) as loader:
        began = time.process_time()
        for _ in loader:
            pass
        return time.process_time() - began


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=40_000)
    arguments.add_argument("--rounds", type=int, default=7)
    chosen = arguments.parse_args()
    rounds = max(2, chosen.rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = make_dataset(folder / "data", chosen.rows)
        step_s, record_s, block_s = parts(dataset, folder)
        pairs = [
            (epoch_s(dataset, folder / f"with-{n}", TelemetrySettings(interval_s=DENSE_S)),
             epoch_s(dataset, folder / f"without-{n}", None))
            for n in range(rounds)
        ]  # fmt: skip
    steps = chosen.rows // (LANES * 4)
    added_s = (min(a for a, _ in pairs) - min(b for _, b in pairs)) / steps
    spread_s = statistics.stdev(b for _, b in pairs) / steps
    share = step_s / STEP_S + record_s / TelemetrySettings().interval_s
    load = os.getloadavg()[0]
    print(f"# What telemetry costs, {dt.datetime.now(dt.UTC).date()}\n")
    print(f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}, "
          f"shardkit {shardkit.__version__}; load average {load:.1f}.\n")  # fmt: skip
    print("| part | CPU time | of a step of 10 ms |\n|---|---|---|")
    print(f"| the trainer, each step | {1e6 * step_s:.1f} µs | {step_s / STEP_S:.3%} |")
    print(
        f"| a record, every 2 s ({LANES} lanes, all tables) | {1e3 * record_s:.2f} ms | {record_s / 2.0:.3%} |"
    )
    print(f"| a block that is loaded | {1e6 * block_s:.2f} µs | |")
    print(f"| **in all** | | **{share:.2%}** (bound: 1 %) |\n")
    print(
        f"From outside, records every {1e3 * DENSE_S:.0f} ms instead of 2 s: {1e6 * added_s:.0f} µs more a step of "
        f"{LANES * 4} samples; epochs without it differ by {1e6 * spread_s:.0f} µs a step (standard deviation of "
        f"{rounds})."
    )


if __name__ == "__main__":
    main()
