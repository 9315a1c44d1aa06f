"""Time from `shardkit audit spikes RUN` to the first sample.

    python tools/bench/spikes.py --steps 1000000

A run of a million steps of 16 samples with a falling loss and 50 spikes is simulated: its ledger and its losses.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import shardkit
from shardkit.ledger import Ledger, Merge
from shardkit_tools.main import run as shardkit_command

BATCH, LANES = 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        spikes = simulate(Path(folder) / "data", run, steps)
        took = []
        for _ in range(3):
            wall, cpu = time.perf_counter(), time.process_time()
            found = command("audit", "spikes", str(run), "--json")
            took.append((time.perf_counter() - wall, time.process_time() - cpu))
        right = {one["step"] for one in found["spikes"]} <= set(spikes)
        wall, cpu = time.perf_counter(), time.process_time()
        ranked = command("audit", "spikes", str(run), "--samples", "--top", "10", "--json")
        samples = time.perf_counter() - wall, time.process_time() - cpu
        wall, cpu = min(took)
        print(f"{steps:,} steps: {found['found']} spikes of 50; the first are simulated ones: {right}")
        print(
            f"to the samples of the largest spike, best of 3: {wall:.2f} s, of these {cpu:.2f} s of processor time"
        )
        print(
            f"to the {len(ranked['samples'])} most abnormal samples of {steps * BATCH:,}: {samples[0]:.2f} s, of these "
            f"{samples[1]:.2f} s of processor time"
        )


def command(*arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        shardkit_command(arguments)
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def simulate(data: Path, run: Path, steps: int) -> list[int]:
    """Write the dataset, and the ledger and losses of a run; return the steps of its spikes."""
    with shardkit.create(str(data), schema={"x": "int64", "source": "str"}, stratify="source") as writer:
        for n in range(4000):
            writer.add({"x": n, "source": f"s{n % 4}"}, key=f"k{n}")
    dataset = shardkit.open(str(data))
    plan = dataset.plan(global_batch=BATCH, lanes=LANES)
    with dataset.loader(plan, run=run) as loader:  # the first step, with the facts of the plan
        next(iter(loader))
    draw = np.random.default_rng(1)
    spikes = np.sort(draw.choice(np.arange(1000, steps), 50, replace=False))
    levels = 2 + 8 / (1 + np.arange(steps) / 5000)
    levels[spikes] *= 2
    with Ledger(run, writing=True) as ledger:
        Merge(ledger)
        first = ledger.next_step
        for step in range(steps):
            if step >= first:
                ledger.append(step, BATCH, 0, step.to_bytes(32, "little"))
            losses = (levels[step] * (1 + 0.05 * draw.standard_normal(BATCH))).astype("<f4")
            ledger.add_losses(step, 0, 0, losses.tobytes())
        ledger.commit()
    return [int(one) for one in spikes]


if __name__ == "__main__":
    main()
