"""Loaders under a device mesh: tensor, pipeline and hybrid parallel examples on four ranks equal one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def torchrun(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        str(script),
    ]
    return subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_mesh_examples_equal_one_process(tmp_path: Path, data: str) -> None:
    become_rank = import_module("mesh_ranks").become_rank
    environment = {**os.environ, forked.OUTPUT: str(tmp_path / "said")}
    codes = forked.side_by_side(
        4, become_rank, [str(tmp_path / "result.json"), data], environment=environment
    )
    assert codes == [0] * 4, (tmp_path / "said.err").read_text()
    found = json.loads((tmp_path / "result.json").read_text())
    assert set(found["errors"]) == {"tensor 2", "tensor 4", "pipeline 2", "hybrid 2"}
    assert max(found["errors"].values()) < 1e-6, found
    assert found["share"] == 0.5, "sharded over two ranks, replicated over the two pairs"
    assert found["moved"] > 0.05, "the parameters have moved"


def test_a_mesh_example_runs_as_it_says(data: str) -> None:
    done = torchrun(ROOT / "examples" / "device_mesh.py", "pipeline", data, "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained 3 steps on 4 ranks" in done.stdout
