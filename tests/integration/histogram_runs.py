"""Runs of the model in trainer_histogram: their settings, and what their final parameters must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_state

import shardkit
from shardkit.telemetry.records import read_documents
from shardkit.torch import CheckpointReader

__all__ = ["BATCH", "STEPS", "check_histogram", "histogram_settings", "starts"]

STEPS, BATCH, LANES = 30, 24, 6


def histogram_settings(directory: Path, dataset: str, **more: Any) -> dict[str, Any]:
    """Settings of a run of `STEPS` steps; `more` replaces or adds some."""
    return {
        "run.directory": directory, "run.steps": STEPS, "data.dataset": dataset, "data.global_batch": BATCH,
        "data.lanes": LANES, "model.kind": "trainer_histogram:make", "optimizer.name": "sgd", "optimizer.lr": 1.0,
        "optimizer.beta1": 0.0, "optimizer.weight_decay": 0.0, "optimizer.clip": 0.0, "schedule.kind": "linear",
        "schedule.final": 0.5, "checkpoint.every": 10, "log.every": 1, "parallel.timeout_s": 300.0,
        "parallel.exact": "int64", **more,
    }  # fmt: skip


def check_histogram(directory: Path, dataset: str, steps: int = STEPS) -> None:
    """Check that a finished run has consumed the cells of its plan, each once: from the plan alone."""
    opened = shardkit.open(dataset)
    plan = opened.plan(global_batch=BATCH, lanes=LANES, seed=0)
    expected = np.zeros(len(opened))
    for step in range(steps):
        np.add.at(expected, plan.step(step).ravel(), -(1.0 - 0.5 * step / (steps - 1)) / BATCH)
    state, reader = {"model": {"seen": torch.zeros(len(opened))}}, CheckpointReader(directory)
    load_state(state, storage_reader=reader)
    assert reader.meta["step"] == steps
    np.testing.assert_allclose(state["model"]["seen"].numpy(), expected, rtol=0, atol=1e-6)


def starts(directory: Path) -> list[tuple[int, int]]:
    """(step, ranks) of every start of a run."""
    return [
        (e["step"], e["ranks"]) for e in read_documents(directory / "events.jsonl") if e["event"] == "start"
    ]
