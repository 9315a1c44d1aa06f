"""SIGKILL at random steps and inside checkpoints, on changing worlds: the consumed samples are exactly the plan's."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_state

import shardkit
from shardkit.testing.drills import drill_count
from shardkit.torch import CheckpointReader
from shardkit_trainer.run_directory import read_lines

STEPS, BATCH, LANES, EVERY = 40, 24, 6, 3


def settings(directory: Path, dataset: str) -> dict[str, Any]:
    return {
        "run.directory": directory, "run.steps": STEPS, "data.dataset": dataset, "data.global_batch": BATCH,
        "data.lanes": LANES, "model.kind": "trainer_histogram:make", "optimizer.name": "sgd", "optimizer.lr": 1.0,
        "optimizer.beta1": 0.0, "optimizer.weight_decay": 0.0, "optimizer.clip": 0.0, "schedule.kind": "linear",
        "schedule.final": 0.5, "checkpoint.every": EVERY, "checkpoint.keep": 2, "parallel.exact": "int64",
        "parallel.timeout_s": 300.0,
    }  # fmt: skip


def histogram(directory: Path) -> torch.Tensor:
    state = {"model": {"seen": torch.zeros(403)}}
    load_state(state, storage_reader=CheckpointReader(directory))
    return state["model"]["seen"]


def random_fault(random: np.random.Generator, nproc: int) -> str:
    """A kill at a step, or inside the writing, publishing or pruning of a checkpoint."""
    kind = str(random.choice(["kill", "kill", "kill", "put", "finish", "prune"]))
    if kind == "kill":
        return f"kill:{random.integers(nproc)}:{random.integers(1, STEPS)}"
    # one rank publishes and prunes; objects are written by whoever owns them
    rank = random.integers(nproc) if kind == "put" else 0
    return f"{kind}:{rank}:{random.integers(1, 5)}"


@pytest.mark.drill
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_killed_at_random_and_resumed_elsewhere(
    tmp_path: Path, numbers: str, launch_trainer: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random = np.random.Generator(np.random.PCG64(9))
    kills, wanted, runs = 0, drill_count(50), 0
    opened = shardkit.open(numbers)
    plan = opened.plan(global_batch=BATCH, lanes=LANES, seed=0)
    expected = np.zeros(len(opened))
    for step in range(STEPS):
        np.add.at(expected, plan.step(step).ravel(), -(1.0 - 0.5 * step / (STEPS - 1)) / BATCH)
    hashes = set()
    while kills < wanted:
        run = tmp_path / f"run{runs}"
        runs += 1
        for _ in range(min(5, wanted - kills)):
            nproc = int(random.integers(1, 4))
            result = launch_trainer(nproc, settings(run, numbers), fault=random_fault(random, nproc))
            if result.returncode == 0:
                break  # the fault lay before the checkpoint that it resumed from
            assert "Traceback" not in result.stderr, result.stderr
            kills += 1
        else:
            result = launch_trainer(int(random.integers(1, 3)), settings(run, numbers))
        assert result.returncode == 0, result.stderr
        np.testing.assert_allclose(histogram(run).numpy(), expected, rtol=0, atol=1e-6)
        ends = [event for event in read_lines(run / "events.jsonl") if event["event"] == "end"]
        hashes.add(ends[-1]["parameters_sha256"])
    assert len(hashes) == 1, "exact mode: every run ends with the same bits, wherever it was killed"
    record(kills, runs)


def record(kills: int, runs: int) -> None:
    """Keep the result of the full drill."""
    if drill_count(20) == 20:
        folder = Path(__file__).parents[2] / "tools" / "bench" / "results"
        folder.mkdir(parents=True, exist_ok=True)
        result = {"drill": "trainer kills", "kills": kills, "runs": runs, "lost or repeated samples": 0,
                  "distinct final parameters": 1, "torch": torch.__version__}  # fmt: skip
        (folder / f"{datetime.now(UTC).date()}-trainer-kills.json").write_text(
            json.dumps(result, indent=1) + "\n"
        )
