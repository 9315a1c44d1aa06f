"""Batches share no memory, and are pinned where a device is in use."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardkit

# ---- A batch that is kept keeps itself in memory, and no other


def _memory_of(part: Any) -> set[tuple[int, int]]:
    """The allocations that a part of a batch keeps: (address, bytes)."""
    if isinstance(part, (list, tuple)):
        return set().union(*map(_memory_of, part)) if not isinstance(part, list) else set()
    array = np.asarray(part)
    while isinstance(array.base, np.ndarray):
        array = array.base
    return {(array.__array_interface__["data"][0], array.nbytes)} if array.nbytes else set()


@pytest.mark.parametrize("by_cell", [False, True])
@pytest.mark.parametrize("prefetch", [0, 4])
def test_batches_share_no_memory(root: Path, by_cell: bool, prefetch: int) -> None:
    ds = shardkit.open(str(root))
    plan = ds.plan(global_batch=30, lanes=3, seed=5)
    with ds.loader(plan, tensors=False, by_cell=by_cell, prefetch=prefetch) as loader:
        steps: list[Any] = list(loader)
    kept = [one for step in steps for one in (step if by_cell else [step])]
    seen: set[tuple[int, int]] = set()
    for batch in kept:
        parts = [batch["x"], batch.samples, batch.slots]
        own = set().union(*map(_memory_of, parts))
        assert not own & seen
        assert sum(size for _, size in own) <= 1.5 * sum(np.asarray(part).nbytes for part in parts)
        seen |= own


def test_twenty_kept_batches_hold_little_more_than_they_are(tmp_path: Path) -> None:
    root = str(tmp_path / "data")
    with shardkit.create(root, schema={"x": "int32[16]"}, format="arrow") as writer:
        for number in range(64 * 4_000):
            if number % 10 == 0:
                writer.add({"x": np.full(16, number, np.int32)})
    ds = shardkit.open(root)
    plan = ds.plan(global_batch=64, lanes=8)
    tracemalloc.start()
    try:
        loader = ds.loader(plan, tensors=False)
        kept = [batch for batch in loader if batch.step % 20 == 0]  # 4 KB of rows each
        loader.close()
        del loader
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        assert len(kept) == 20
        kept.clear()
        gc.collect()
        assert held - tracemalloc.get_traced_memory()[0] < 20 * 3 * 4096
    finally:
        tracemalloc.stop()


# ---- Pinned memory, where a process uses CUDA: pinning is torch's, and stands in as a copy that is noted


ROWS = 1200  # of `root`


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Tensors that were pinned; copies, as torch's own are."""
    found: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        found.append(tensor.clone())
        return found[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return found


def _batches(root: Path) -> tuple[list[Any], int | None]:
    ds = shardkit.open(str(root))
    with ds.loader(ds.plan(global_batch=30, lanes=3, seed=5), tensors=True) as loader:
        batches = list(loader)
        assert loader.resources is not None
        return batches, loader.resources.prefetch


def test_batches_are_pinned_ahead_of_the_trainer_where_cuda_is_in_use(
    root: Path, pinned: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ahead = _batches(root)
    assert not pinned
    assert ahead is None  # gathered when asked for
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    batches, ahead = _batches(root)
    assert ahead == 4  # so that the copy to the device has something to overlap with
    assert len(batches) == len(plain)
    more = len(pinned) - 2 * len(batches)  # the field, and the samples' numbers
    assert 0 <= more <= 2 * (ahead + 2)  # of the next epoch
    addresses = {tensor.data_ptr() for tensor in pinned}
    for batch, expected in zip(batches, plain, strict=True):
        assert batch["x"].data_ptr() in addresses
        assert torch.equal(batch["x"], expected["x"])
        assert batch["blob"] == expected["blob"]
    assert sorted(int(row) for batch in batches for row in batch["x"][:, 0]) == list(range(ROWS))


def test_a_batch_moves_without_blocking_where_that_is_asked_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, bool]] = []

    def to(tensor: torch.Tensor, device: Any, *, non_blocking: bool = False) -> torch.Tensor:
        asked.append((device, non_blocking))
        return tensor

    batch = _batches(root)[0][0]
    monkeypatch.setattr(torch.Tensor, "to", to)
    moved = batch.to("cuda:0", non_blocking=True)
    assert asked == [("cuda:0", True)] * 2  # the field, and the samples' numbers
    assert moved.step == batch.step
    assert moved["blob"] == batch["blob"]
