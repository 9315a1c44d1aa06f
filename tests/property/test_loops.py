"""Loops that follow each other give what each would give alone, and what they give was verified when it was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.formats import reading
from shardkit.loader import resources
from shardkit.loader.load_queue import BLOCK, FILE, LoadQueue

ROWS, STEPS = 1200, 40  # of `root`


def _loader(root: Path, **options: Any) -> Any:
    ds = shardkit.open(str(root))
    loader = ds.loader(ds.plan(global_batch=30, lanes=3, seed=5), tensors=False, **options)
    loader.reads_on = False  # what is loaded once a loop is over is looked at here
    return loader


def _rows(loop: Any) -> list[tuple[int, list[int]]]:
    return [(batch.step, batch["x"][:, 0].tolist()) for batch in loop]


def _flip_everywhere(root: Path) -> None:
    """One bit in the middle of every shard, in place."""
    shards = [path for path in (root / "objects").rglob("*.*") if path.suffix != ".index"]
    assert shards
    for path in shards:
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))


def test_what_is_handed_out_was_verified_when_it_was_loaded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[bytes] = []

    def verify(stored: Any, index: Any, block: int, **how: Any) -> None:
        verified.append(index.block_sha256[block].tobytes())
        verify_block(stored, index, block, **how)

    class Queue(LoadQueue):
        def add(self, jobs: Any) -> Any:
            verified.extend(one.tobytes() for one in jobs[jobs[:, FILE] >= 0, BLOCK])
            return super().add(jobs)

    verify_block = reading.verify_block
    monkeypatch.setattr(reading, "verify_block", verify)
    monkeypatch.setattr(resources, "LoadQueue", Queue)
    with _loader(root) as loader:
        for _ in range(3):
            _rows(loader)
            assert len(verified) == loader.stats()["block_loads"]
        assert len(set(verified)) > 30


def test_files_that_change_after_they_were_read_change_nothing(own_root: Path) -> None:
    with _loader(own_root) as loader:
        expected = [_rows(loader) for _ in range(4)]
    with _loader(own_root) as loader:
        found = [_rows(loader)]
        loader.resources.memory.pool.limit = 64 << 20
        found += [_rows(loader), _rows(loader)]  # slots of the first may have been given to others before
        _flip_everywhere(own_root)
        found += [_rows(loader)]  # all of it is in memory by now
    assert found == expected
