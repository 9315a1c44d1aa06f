"""DataLoader workers of a rank read each block of a local dataset once, whoever of them needs it."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.loader import gather

pytest.importorskip("torch")
from torch.utils.data import DataLoader

import shardkit.torch

block_rows: Any = pytest.importorskip("shardkit.loader.block_rows")
ROWS = 12_000


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = str(tmp_path_factory.mktemp("data") / "root")
    schema = {"x": "int32[64]", "label": "int64"}
    with shardkit.create(root, schema=schema, format="arrow", block_size="16KiB") as writer:
        for number in range(ROWS):
            writer.add({"x": np.full(64, number, np.int32), "label": number})
    return shardkit.open(root)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [2, 4])
def test_blocks_are_read_once_for_all_workers(
    ds: shardkit.Dataset, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = multiprocessing.get_context("fork").Value("q", 0)

    class Counting(block_rows.Loads):  # type: ignore[misc]  # compiled
        def leave(self) -> None:
            if not getattr(self, "left", False):  # it may be closed twice
                with read.get_lock():
                    read.value += self.counts()[1]
            self.left = True
            super().leave()

    monkeypatch.setattr(gather.block_rows, "Loads", Counting)
    plan = ds.plan(global_batch=60, lanes=4)
    with ds.loader(plan, tensors=False) as loader:
        expected = [(batch.step, batch["x"][:, 0].tolist()) for batch in loader]
        alone = loader.stats()["block_loads"]
    read.value = 0
    data = DataLoader(
        shardkit.torch.dataset(ds, plan), batch_size=None, num_workers=workers, multiprocessing_context="fork"
    )
    found = [(batch.step, batch["x"][:, 0].tolist()) for batch in data]
    assert found == expected
    assert sorted(row for _, rows in found for row in rows) == list(range(ROWS))
    blocks = sum(len(ds.reader.index(shard).spans) for shard in range(ds.manifest.shards))
    assert alone >= blocks > 100
    assert blocks <= read.value <= 1.3 * blocks, "late workers may find that one has made room of a block"
