"""Ranks that die while the others go on: in process under the supervisor, by torchrun's restart otherwise."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_state

import shardkit
from shardkit.telemetry.records import read_documents
from shardkit.torch import CheckpointReader, checkpoint_names, read_checkpoint_manifest
from tests.drills import drill_cases

STEPS, BATCH = 30, 24


def settings(directory: Path, dataset: str, **more: Any) -> dict[str, Any]:
    return {
        "run.directory": directory, "run.steps": STEPS, "data.dataset": dataset, "data.global_batch": BATCH,
        "data.lanes": 6, "model.kind": "trainer_histogram:make", "optimizer.name": "sgd", "optimizer.lr": 1.0,
        "optimizer.beta1": 0.0, "optimizer.weight_decay": 0.0, "optimizer.clip": 0.0, "schedule.kind": "linear",
        "schedule.final": 0.5, "checkpoint.every": 10, "log.every": 1, "parallel.timeout_s": 300.0,
        "parallel.recovery": "in-process", "parallel.exact": "int64", **more,
    }  # fmt: skip


def histogram(directory: Path) -> np.ndarray:
    state = {"model": {"seen": torch.zeros(403)}}
    load_state(state, storage_reader=CheckpointReader(directory))
    found: np.ndarray = state["model"]["seen"].numpy()
    return found


def expected(dataset: str) -> np.ndarray:
    opened = shardkit.open(dataset)
    plan = opened.plan(global_batch=BATCH, lanes=6, seed=0)
    seen = np.zeros(len(opened))
    for step in range(STEPS):
        np.add.at(seen, plan.step(step).ravel(), -(1.0 - 0.5 * step / (STEPS - 1)) / BATCH)
    return seen


def starts(directory: Path) -> list[tuple[int, int]]:
    """(step, ranks) of every group that has formed."""
    return [
        (e["step"], e["ranks"]) for e in read_documents(directory / "events.jsonl") if e["event"] == "start"
    ]


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def test_survivors_go_on_in_process_and_a_new_rank_joins(
    tmp_path: Path, numbers: str, launch_trainer: Any
) -> None:
    """Rank 0, which leads, and rank 2 die at different steps; a replacement joins; nothing is lost or repeated."""
    run = tmp_path / "run"
    result = launch_trainer(3, settings(run, numbers), fault="kill:0:7,group2:1:10,kill:2:12", restarts=1)
    assert result.returncode == 0, result.stdout + result.stderr
    # no step is lost: survivors go on where they were, the replacement gets their state, after step 10 at the latest
    groups = starts(run)
    joined = groups[2][0]
    assert 8 <= joined <= 11
    assert groups == [(0, 3), (7, 2), (joined, 3), (12, 2)]
    np.testing.assert_allclose(histogram(run), expected(numbers), rtol=0, atol=1e-6)


def test_a_rank_that_dies_inside_a_checkpoint_is_survived(
    tmp_path: Path, numbers: str, fork_trainer: Any
) -> None:
    """The publisher dies in its second publishing; the replacement joins, or is dismissed where it comes too late."""
    run = tmp_path / "run"
    every = {"checkpoint.every": 3}
    result = fork_trainer(3, settings(run, numbers, **every), fault="finish:0:2", restarts=1)
    assert result.returncode == 0, result.stdout + result.stderr
    groups = starts(run)
    assert groups[0] == (0, 3)
    assert groups[1][0] in range(6, 10)
    assert groups[1][1] in {2, 3}, (
        "a forked replacement may be there before the others have formed their group"
    )
    np.testing.assert_allclose(histogram(run), expected(numbers), rtol=0, atol=1e-6)


def test_sharded_state_goes_on_from_the_newest_checkpoint_without_new_processes(
    tmp_path: Path, numbers: str, fork_trainer: Any
) -> None:
    run = tmp_path / "run"
    zero = {"parallel.strategy": "zero3", "parallel.exact": "off", "checkpoint.asynchronous": False}
    result = fork_trainer(2, settings(run, numbers, **zero), fault="kill:1:14")
    assert result.returncode == 0, result.stdout + result.stderr
    assert starts(run) == [(0, 2), (10, 1)]
    np.testing.assert_allclose(histogram(run), expected(numbers), rtol=0, atol=1e-6)


def test_a_frozen_rank_is_killed_and_the_others_go_on(
    tmp_path: Path, numbers: str, fork_trainer: Any
) -> None:
    run = tmp_path / "run"
    short = {"parallel.timeout_s": 15.0}  # others are late where a machine stands still for so long
    result = fork_trainer(2, settings(run, numbers, **short), fault="freeze:1:5")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "process-1 does not answer and is killed" in result.stderr
    assert starts(run) == [(0, 2), (5, 1)]
    np.testing.assert_allclose(histogram(run), expected(numbers), rtol=0, atol=1e-6)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("nproc", "recovery", "asked"),
    drill_cases(
        [(1, "restart", signal.SIGINT), (2, "restart", signal.SIGINT), (2, "in-process", signal.SIGTERM)],
        [2],
    ),
)
def test_the_command_hands_a_signal_on_and_all_ranks_save_and_end(
    tmp_path: Path, numbers: str, launch_trainer: Any, nproc: int, recovery: str, asked: signal.Signals
) -> None:
    run = tmp_path / "run"
    endless = {"run.steps": 1_000_000, "checkpoint.every": 1_000_000, "parallel.recovery": recovery}
    result = launch_trainer(nproc, settings(run, numbers, **endless), until="step 3/", asked=asked)
    assert result.returncode == 130, result.stdout
    assert "Traceback" not in result.stdout
    stops = [event for event in read_documents(run / "events.jsonl") if event["event"] in {"stop", "end"}]
    assert [event["event"] for event in stops] == ["stop"]
    assert checkpoint_names(run) == [f"step-{stops[0]['step']:012d}"]
    assert stops[0]["step"] >= 3


def test_torchrun_restarts_all_ranks(tmp_path: Path, numbers: str, launch_trainer: Any) -> None:
    """The publisher of checkpoints dies in the eighth save of each attempt: a restart takes seven further steps."""
    run = tmp_path / "run"
    synchronous = {"parallel.recovery": "restart", "checkpoint.asynchronous": False, "checkpoint.every": 1}
    result = launch_trainer(2, settings(run, numbers, **synchronous), fault="finish:0:8", restarts=1)
    assert result.returncode == 1
    assert "rank 0" in result.stderr
    assert starts(run) == [(0, 2), (7, 2)]
    assert checkpoint_names(run)[-1] == "step-000000000014"


def test_ranks_end_when_their_supervisor_is_killed(tmp_path: Path, numbers: str, launch_trainer: Any) -> None:
    """At once, with a line each: neither what a rank waits for nor a new group would ever come."""
    run = tmp_path / "run"
    endless = {"run.steps": 1_000_000, "checkpoint.every": 1_000_000, "parallel.timeout_s": 10.0}
    # it returns when nobody is left who could write
    result = launch_trainer(3, settings(run, numbers, **endless), until="step 3/", asked=signal.SIGKILL)
    seconds = time.time() - (run / "metrics" / "train.jsonl").stat().st_mtime
    assert seconds < 10.0, f"ranks stayed for {seconds:.1f} s"
    lines = [line for line in result.stdout.splitlines() if not line.startswith("step ")]
    assert sorted(line.partition(":")[0] for line in lines) == ["process-0", "process-1", "process-2"], lines
    # a rank that asks before its watch has looked hears from its connection
    gone = re.compile("the supervisor (has died|does not answer any more).*start the run again")
    assert all(gone.search(line) for line in lines), lines


@pytest.mark.drill
@pytest.mark.parametrize("harm", drill_cases(["ref", "manifest", "tensor"], [2]))
def test_a_damaged_checkpoint_is_passed_over_and_the_console_says_why(
    tmp_path: Path, numbers: str, fork_trainer: Any, harm: str
) -> None:
    run = tmp_path / "run"
    few = {**settings(run, numbers), "parallel.recovery": "restart", "checkpoint.keep": 0}
    assert fork_trainer(1, few).returncode == 0
    name = checkpoint_names(run)[-1]
    ref = run / "checkpoints" / f"{name}.json"
    digest = json.loads(ref.read_text())["checkpoint"].removeprefix("sha256:")
    if harm == "tensor":
        digest = read_checkpoint_manifest(run)["tensors"]["model.seen"]["chunks"][0][2][0][0]
    kind = {"tensor": "tensor", "manifest": "checkpoint"}.get(harm)
    torn = run / "objects" / "sha256" / digest[:2] / f"{digest}.{kind}" if kind else ref
    torn.write_bytes(torn.read_bytes()[:40])
    result = fork_trainer(2, few)
    assert result.returncode == 0, result.stderr
    assert f"checkpoint {name} is damaged and passed over" in result.stdout
    assert torn.name in result.stdout, "it is said what is damaged"
    assert "resumed at step 20 of 30 on 2 ranks" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    assert "Error" not in result.stderr
    np.testing.assert_allclose(histogram(run), expected(numbers), rtol=0, atol=1e-6)
