"""Measure the trainer's step time if compute time follows cost: random order, spread, align, and an oracle.

    python tools/bench/trainer_costs.py --out tools/bench/results/costs.md

Documents are as in costs.py (lognormal, median 600 tokens, log sd 1.2, at most 8,192), about 50 rows a block. A pass
sleeps in proportion to the sum of n² over its samples, 50 ms a step on the mean rank: ranks that share cores do not
slow each other down by sleeping. Batches have 512 samples with the plan's own lanes and windows. torchrun starts the
ranks, and the trainer assigns the lanes (`assignment = "near"`). The *oracle* trains in random order, and each rank
sleeps for the cost that longest-first over the whole batch assigns to it. The time of a step is the longest planned
sleep of a rank, noted by the ranks during training, so other load on the machine does not affect it. *Saved* is the
share of the oracle's saving over the step time of the random order.
"""

from __future__ import annotations

import argparse
import heapq
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import shardkit
from bench.machine import machine_facts
from shardkit_trainer.configuration import ModelConfig
from shardkit_trainer.tasks import Inputs

BATCH, STEPS, MEAN_S = 512, 400, 0.05
ORDERS: dict[str, dict[str, Any]] = {
    "random": {},
    "spread": {"data.cost": "n**2", "data.balance": "spread"},
    "align": {"data.cost": "n**2", "data.balance": "align"},
    "oracle": {},
}


class Sleeper:
    """A task whose cells sleep in proportion to their cost."""

    unit = "sample"

    def __init__(self, config: ModelConfig, dataset: Any):
        self.model: nn.Module = nn.Linear(1, 1)
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.costs = dataset.to_arrow()["n"].to_numpy().astype(np.float64) ** 2
        self.second = self.costs.mean() * BATCH / self.ranks / MEAN_S  # cost per second of sleep
        self.plan = dataset.plan(global_batch=BATCH, seed=0) if config.arguments["oracle"] else None
        self.slept = -1
        self.notes = Path(config.arguments["notes"]) / str(self.rank)

    def prepare(self, cell: Any, seed: int) -> Inputs:
        cost = self.costs[cell.samples]
        if self.plan is not None:
            batch = self.costs[self.plan.step(cell.step).ravel()]
            cost = np.zeros_like(cost)
            cost[0] = longest_first(batch, self.ranks)[self.rank] if self.slept != cell.step else 0.0
            self.slept = cell.step
        with self.notes.open("a", encoding="ascii") as file:
            file.write(f"{cell.step} {cost.sum() / self.second}\n")
        return Inputs({"seconds": torch.from_numpy(cost / self.second)[:, None]}, len(cost), len(cost))

    def empty(self) -> Inputs:
        return Inputs({"seconds": torch.zeros(1, 1)}, 0, 0)

    def loss(self, forward: Callable[..., Any], tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        time.sleep(float(tensors["seconds"].sum()))
        return forward(torch.ones(1, 1)).square().sum(), torch.zeros((), dtype=torch.int64)

    def blocks(self) -> Sequence[nn.Module]:
        return []


def make(config: ModelConfig, dataset: Any) -> Sleeper:
    return Sleeper(config, dataset)


def lengths(rows: int, seed: int) -> NDArray[np.float64]:
    drawn = np.exp(np.log(600) + 1.2 * np.random.default_rng(seed).standard_normal(rows))
    clipped: NDArray[np.float64] = np.clip(drawn, 1, 8192)
    return clipped


def longest_first(costs: NDArray[np.float64], ranks: int) -> list[float]:
    """Assign each row, dearest first, to the rank with the lowest cost; return the cost of each rank."""
    heap = [(0.0, rank) for rank in range(ranks)]
    for cost in -np.sort(-costs):
        least, rank = heap[0]
        heapq.heapreplace(heap, (least + float(cost), rank))
    return [cost for cost, _ in sorted(heap, key=lambda one: one[1])]


def step_seconds(dataset: Path, run: Path, ranks: int, order: str) -> float:
    """Return the mean step time of one epoch; all orders train on the same rows."""
    notes = run.with_name(f"{run.name}-notes")
    notes.mkdir()
    settings = {
        "run.directory": run, "run.steps": STEPS, "data.dataset": dataset, "data.global_batch": BATCH,
        "model.kind": "trainer_costs:make", "checkpoint.every": STEPS, "log.every": STEPS, "log.telemetry_s": 0.0,
        "log.peak_flops": 1.0, "parallel.pass_samples": BATCH, **ORDERS[order],
        "model.arguments": f"{{notes = '{notes}', oracle = {str(order == 'oracle').lower()}}}",
    }  # fmt: skip
    program = (
        "import sys, shardkit_trainer as t; sys.exit(t.launch(None, sys.argv[2:], nproc=int(sys.argv[1])))"
    )
    given = [f"{key}={value}" for key, value in settings.items()]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", program, str(ranks), *given], env=environment, check=True)
    slept = np.zeros((ranks, STEPS))
    for rank in range(ranks):
        noted = np.loadtxt(notes / str(rank))
        np.add.at(slept[rank], noted[:, 0].astype(np.int64), noted[:, 1])
    assert np.allclose(slept.sum(axis=0).mean(), MEAN_S * ranks), "all cells were trained, once"
    return float(slept.max(axis=0).mean())


def write(folder: Path, steps: int, seed: int) -> Path:
    with shardkit.create(
        folder, schema={"n": "int32", "pad": "uint8[16]"}, block_size="3KiB", shard_size="1MiB", format="arrow",
        cost="n**2",
    ) as writer:  # fmt: skip
        for n in lengths(BATCH * steps, seed):
            writer.add({"n": int(n), "pad": np.zeros(16, dtype=np.uint8)})
    return folder


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--out", help="page that gets the table")
    options.add_argument("--seeds", type=int, default=2)
    given = options.parse_args()
    lines = [
        "", "## The trainer's step time", "",
        (__doc__ or "").strip().split("\n\n")[-1].replace("\n", " "), "",
        f"`python tools/bench/trainer_costs.py`, {machine_facts()['date']}; an epoch of {STEPS} steps.", "",
        "| ranks | seed | random, ms | spread | align | oracle | spread saves | align saves |", "|---" * 8 + "|",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(given.seeds):
            data = write(folder / f"data-{seed}", STEPS, seed)
            for ranks in (2, 4):
                found = {
                    order: step_seconds(data, folder / f"{seed}-{ranks}-{order}", ranks, order)
                    for order in ORDERS
                }
                gain = found["random"] - found["oracle"]
                saved = [f"{(found['random'] - found[one]) / gain:.2f}" for one in ("spread", "align")]
                times = [f"{1000 * seconds:.1f}" for seconds in found.values()]
                lines.append(f"| {ranks} | {seed} | {' | '.join([*times, *saved])} |")
                print(lines[-1], flush=True)
    if given.out:
        with Path(given.out).open("a", encoding="utf-8") as page:
            page.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
