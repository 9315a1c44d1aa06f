"""Where a process uses CUDA, batches come in pinned memory, made ahead of the trainer; elsewhere nothing asks for it.

No device is needed: pinning itself is torch's, and stands in as a copy that is noted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit

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
        return batches, loader.live.prefetch


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
