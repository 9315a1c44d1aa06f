"""What several property tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardkit


@pytest.fixture(params=["tar", "arrow"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """1,200 rows, numbered in both fields, in small blocks of either format."""
    target = tmp_path / "data"
    schema = {"x": "int32[64]", "blob": "bytes"}
    with shardkit.create(
        str(target), schema=schema, format=request.param, shard_size="64KiB", block_size="8KiB"
    ) as writer:
        for number in range(1200):
            writer.add({"x": np.full(64, number, np.int32), "blob": number.to_bytes(2, "little")})
    return target
