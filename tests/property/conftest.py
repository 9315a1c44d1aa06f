"""What several property tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.loader import gather, plain_rows


@pytest.fixture(scope="module", params=["compiled", "in Python"])
def copies(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of a file, with the compiled copies and without them."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in Python":
            patch.setattr(gather, "block_rows", plain_rows)
        elif gather.block_rows is plain_rows:
            pytest.skip("the module is not compiled here")
        yield


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
