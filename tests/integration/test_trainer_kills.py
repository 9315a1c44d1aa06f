"""SIGKILL at random steps and inside checkpoints, on changing worlds: the consumed samples are exactly the plan's."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardkit.telemetry.records import read_documents
from shardkit.torch import checkpoint_names
from tests.integration.histogram_runs import check_histogram, histogram_settings

STEPS, EVERY = 40, 3
SETTINGS = {"run.steps": STEPS, "checkpoint.every": EVERY, "checkpoint.keep": 2, "log.telemetry_s": 0.0}


def random_fault(random: np.random.Generator, rank: int, start: int) -> str:
    """A kill at one of the steps from ``start`` on, or inside the writing, publishing or pruning of a checkpoint."""
    kind = str(random.choice(["kill", "kill", "kill", "put", "finish", "prune"]))
    return f"{kind}:{rank}:{random.integers(start, STEPS) if kind == 'kill' else random.integers(1, 5)}"


def killed(result: Any) -> int:
    """How many ranks of a launch were killed: what started them says so; one rank alone is the launch itself."""
    return int(result.returncode == -9) or result.stderr.count("was killed by signal 9")


@pytest.mark.drill(only=True)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_killed_at_random_and_resumed_elsewhere(
    tmp_path: Path, numbers: str, launch_trainer: Any, fork_trainer: Any
) -> None:
    """In each launch one rank dies, and torchrun stops all; in some it restarts them once."""
    random = np.random.Generator(np.random.PCG64(9))
    started, kills, runs, launches, hashes = time.monotonic(), 0, 0, 0, set()
    while kills < 50:
        run = tmp_path / f"run{runs}"
        runs += 1
        result = None
        while result is None or result.returncode:
            nproc = int(random.integers(1, 4))
            restarts = int(random.integers(2)) if nproc > 1 else 0
            doomed = 1
            saved = (
                [int(name.removeprefix("step-")) for name in checkpoint_names(run)] if run.exists() else []
            )
            start = max([0, *saved])
            if start >= STEPS - EVERY:
                doomed = 0  # little is left to be killed in
            ranks = random.permutation(nproc)[:doomed]
            faults = ",".join(random_fault(random, int(rank), start) for rank in ranks)
            if nproc > 1:
                result = launch_trainer(
                    nproc, histogram_settings(run, numbers, **SETTINGS), fault=faults, restarts=restarts
                )
            else:
                result = fork_trainer(nproc, histogram_settings(run, numbers, **SETTINGS), fault=faults)
            launches += 1
            kills += killed(result)
            assert "Traceback" not in result.stderr, result.stderr
            assert result.returncode == 0 or killed(result), result.stderr
        check_histogram(run, numbers, STEPS)
        ends = [event for event in read_documents(run / "events.jsonl") if event["event"] == "end"]
        hashes.add(ends[-1]["parameters_sha256"])
    assert len(hashes) == 1, "exact mode: every run ends with the same bits, wherever it was killed"
    record({"kills": kills, "launches": launches, "runs": runs, "seconds": round(time.monotonic() - started)})


def record(found: dict[str, object]) -> None:
    folder = Path(__file__).parents[2] / "tools" / "bench" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "drill": "trainer kills",
        **found,
        "lost or repeated samples": 0,
        "distinct final parameters": 1,
    }
    path = folder / f"{datetime.now(UTC).date()}-trainer-kills.json"
    path.write_text(json.dumps(result | {"torch": torch.__version__}, indent=1) + "\n")
