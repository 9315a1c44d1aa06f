"""Processor time of noting losses and of a mixer, against a training step.

    python tools/bench/mixers.py

The share is a share of a step of 100 ms, such as a step of a language model on one accelerator.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardkit.ledger import Journal
from shardkit.ledger.decisions import LossSums, MixHistory
from shardkit.plan import ADO, Mixer, Population, Temperature, make_plan

STEP_S = 0.1
LANES = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4096, help="losses that a rank notes in a step")
    parser.add_argument("--strata", type=int, default=20)
    parser.add_argument("--every", type=int, default=512, help="steps between decisions")
    chosen = parser.parse_args()
    noted = note_s(chosen.batch)
    show("note, whole cells", noted)
    summed = sums_s(chosen.batch, chosen.strata)
    show("sums of a mixer", summed)
    for name, mixer in (("ADO", ADO(every=chosen.every)), ("Temperature", Temperature(every=chosen.every))):
        for count in (10, 1000, 10_000):
            took = decision_s(mixer, chosen.batch, chosen.strata, count)
            show(f"{name}: decision {count:,}, a step's part", took / chosen.every)
            if mixer.needs_losses:
                show("all of it", noted + summed + took / chosen.every)


def show(name: str, seconds: float) -> None:
    print(f"{name:44} {1e6 * seconds:9.1f} µs  {100 * seconds / STEP_S:6.3f} % of a step")


def processor_time(work: Callable[[int], object], count: int) -> float:
    """Return the processor seconds of a call, the median of ``count`` calls."""
    took = []
    for number in range(count):
        start = time.thread_time()
        work(number)
        took.append(time.thread_time() - start)
    return float(np.median(took))


def note_s(batch: int) -> float:
    slots, losses = np.arange(batch, dtype=np.int64), np.ones(batch, dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(
            Path(folder), manifest=f"sha256:{'0' * 64}", plan="0" * 64, rank=0, world=1, lanes=LANES
        )
        found = processor_time(lambda step: journal.record_losses(step, slots, losses), 2000)
        journal.close()
    return found


def population(strata: int) -> Population:
    triples = np.array([[shard, s, 2000] for shard in range(100) for s in range(strata)])
    return Population.of("sha256:" + "0" * 64, [f"s{s:02}" for s in range(strata)], triples, np.full(100, 64))


def sums_s(batch: int, strata: int) -> float:
    rows = population(strata)
    plan = make_plan(rows, global_batch=batch, lanes=LANES)
    samples = plan.step(3).ravel()
    losses = np.random.default_rng(0).random(batch, dtype=np.float32)
    order = plan.grid.order
    return processor_time(lambda _: LossSums.of(order.strata_of(samples), losses, strata), 500)


def decision_s(mixer: Mixer, batch: int, strata: int, count: int) -> float:
    """Return the processor seconds of a decision after ``count`` others."""
    plan = make_plan(population(strata), global_batch=batch, lanes=LANES).mixed(mixer.text, mixer.every)
    history, draw = MixHistory(mixer, plan), np.random.default_rng(0)

    def losses(stage: int) -> LossSums:
        counts = np.full(strata, 100, dtype=np.int64)
        pace = (stage + 2.0) ** -np.linspace(0.1, 0.6, strata)
        return LossSums(((1 + pace + 0.01 * draw.random(strata)) * 100 * (1 << 20)).astype(np.int64), counts)

    known = plan.mixture.masses(0)
    plan.decide(known)
    drawn = plan.mixture.drawn_in(2)
    for stage in range(count):
        history.add(losses(stage))
        plan.decide(known, drawn=drawn)
    plan.mixture.undecide(count + 1)
    return processor_time(lambda number: history.decide(losses(count + number)), 5)


if __name__ == "__main__":
    main()
