"""A batch that is kept keeps itself in memory, and no other."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit


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
