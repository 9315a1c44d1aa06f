"""Loaders under a device mesh: tensor, pipeline and hybrid parallel examples on four ranks equal one process."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import shardkit
from tests.integration import forked

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """1,024 points of two classes."""
    root = tmp_path_factory.mktemp("mesh") / "data"
    numbers = np.random.Generator(np.random.PCG64(4))
    with shardkit.create(
        str(root),
        schema={"x": "float32[8]", "y": "int64"},
        stratify="y",
        shard_size="16KiB",
        block_size="1KiB",
    ) as writer:
        for number in range(1024):
            x = numbers.standard_normal(8).astype(np.float32)
            writer.add({"x": x + number % 2, "y": number % 2})
    return str(root)


def ranks_of(work: str, folder: Path, *arguments: str) -> tuple[list[int | None], str]:
    """Exit codes of four ranks that do this, and all that they print."""
    environment = {**os.environ, forked.OUTPUT: str(folder / "said")}
    codes = forked.side_by_side(
        4, getattr(import_module("mesh_ranks"), work), list(arguments), environment=environment
    )
    return codes, "".join((folder / f"said.{kind}").read_text() for kind in ("out", "err"))


def test_mesh_examples_equal_one_process(tmp_path: Path, data: str) -> None:
    codes, said = ranks_of("become_rank", tmp_path, str(tmp_path / "result.json"), data)
    assert codes == [0] * 4, said
    found = json.loads((tmp_path / "result.json").read_text())
    assert set(found["errors"]) == {"tensor 2", "tensor 4", "pipeline 2", "hybrid 2"}
    assert max(found["errors"].values()) < 1e-6, found
    assert found["share"] == 0.5, "sharded over two ranks, replicated over the two pairs"
    assert found["moved"] > 0.05, "the parameters have moved"


def test_a_mesh_example_runs_as_it_says(tmp_path: Path, data: str) -> None:
    """Its ranks have the environment that torchrun gives them; its agent starts those of the trainer's tests."""
    program = str(ROOT / "examples" / "device_mesh.py")
    codes, said = ranks_of("become_program", tmp_path, program, "pipeline", data, "--steps", "3")
    assert codes == [0] * 4, said
    assert "trained 3 steps on 4 ranks" in said
