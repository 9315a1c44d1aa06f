"""`ds.plan(sequence=…)` finds the length of a row in the schema."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.errors import PlanError


def _dataset(root: Path, schema: dict[str, str]) -> shardkit.Dataset:
    with shardkit.create(str(root), schema, format="arrow", block_size="1KiB") as writer:
        for number in range(64):
            writer.add({name: np.full(8, number, dtype=np.int32) for name in schema})
    return shardkit.open(str(root))


def test_sequences_join_whole_rows_and_lose_none(tmp_path: Path) -> None:
    ds = _dataset(tmp_path / "data", {"tokens": "int32[8]"})
    plan = ds.plan(global_batch=4, lanes=2, sequence=16, remainder="short")
    assert (
        plan.digest == ds.plan(global_batch=4, lanes=2, sequence=16, row_tokens=8, remainder="short").digest
    )
    steps = plan.steps_per_epoch
    assert steps is not None
    rows = np.concatenate([plan.step(step).ravel() for step in range(steps)])
    assert sorted(rows[rows >= 0].tolist()) == list(range(64))


def test_two_rows_of_numbers_need_to_be_told_apart(tmp_path: Path) -> None:
    ds = _dataset(tmp_path / "data", {"tokens": "int32[8]", "types": "int32[8]"})
    with pytest.raises(PlanError, match="row_tokens"):
        ds.plan(global_batch=4, lanes=2, sequence=16)
    assert ds.plan(global_batch=4, lanes=2, sequence=16, row_tokens=8).lanes == 2
