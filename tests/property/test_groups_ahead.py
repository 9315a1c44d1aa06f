"""Where the next group's rows lie is found while one is gathered: batches are the same, and nothing stays behind."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.loader.assembly import Assembler

ROWS = 1200  # of `root`


def _loader(root: Path) -> Any:
    ds = shardkit.open(str(root))
    return ds.loader(ds.plan(global_batch=30, lanes=3, seed=5), tensors=False)


def _rows(loop: Any) -> list[tuple[int, list[int], list[bytes]]]:
    return [(batch.step, batch["x"][:, 0].tolist(), batch["blob"]) for batch in loop]


def _prepare(loader: Any) -> Any:
    """Find the group after the one under way by hand, as a gathering thread does; its StepGroup."""
    pipeline, deadline = loader._pipeline, time.monotonic() + 60
    while pipeline._prepared is None:
        assert time.monotonic() < deadline
        pipeline._prepare_next()
        time.sleep(0.001)
    return pipeline._prepared[0]


def test_a_group_found_ahead_is_gathered_once_and_alike(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Counter[int] = Counter()
    gather = Assembler.gather

    def counted(self: Assembler, group: Any, *rest: Any) -> Any:
        found[group.numbers.start] += 1
        return gather(self, group, *rest)

    with _loader(root) as loader:
        expected = _rows(loader)
    monkeypatch.setattr(Assembler, "gather", counted)
    with _loader(root) as loader:
        loop = iter(loader)
        first = next(loop)
        ahead = _prepare(loader)
        assert ahead.numbers.start > first.step
        assert found[ahead.numbers.start] == 1
        assert _rows([first]) + _rows(loop) == expected
        assert loader._pipeline._prepared is None
    assert set(found.values()) == {1}
    assert sorted(row for _, rows, _ in expected for row in rows) == list(range(ROWS))


def test_a_loop_that_is_left_drops_what_was_found_ahead(root: Path) -> None:
    with _loader(root) as loader:
        loop = iter(loader)
        next(loop)
        _prepare(loader)
        pipeline, window = loader._pipeline, loader._machinery.window
        assert window._leases > 0
        loop.close()
        pipeline.close()
        assert window._leases == 0
        assert not any(entry.pins for entry in window._entries.values())
        pipeline._prepare_next()
        assert pipeline._prepared is None
        assert sorted(row for _, rows, _ in _rows(loader) for row in rows) == list(range(ROWS))
