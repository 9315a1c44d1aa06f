"""What several property tests share."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import shardkit


@pytest.fixture(scope="session", params=["tar", "arrow"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,200 rows, numbered in both fields, in small blocks of either format; not to be written to."""
    target: Path = tmp_path_factory.mktemp("root") / request.param
    schema = {"x": "int32[64]", "blob": "bytes"}
    with shardkit.create(
        str(target), schema=schema, format=request.param, shard_size="64KiB", block_size="8KiB"
    ) as writer:
        for number in range(1200):
            writer.add({"x": np.full(64, number, np.int32), "blob": number.to_bytes(2, "little")})
    return target


@pytest.fixture
def own_root(root: Path, tmp_path: Path) -> Path:
    """The same dataset, which may be damaged."""
    shutil.copytree(root, tmp_path / "own")
    return tmp_path / "own"
