"""Batch statistics: over all ranks where torch can, else refused with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.errors import ConfigurationError
from shardkit_trainer import load_configuration
from shardkit_trainer.strategy import synchronise_norms


def synchronised(ranks: int, device: str, cells: int = 6, norm: str = "batch", *settings: str) -> nn.Module:
    from shardkit_trainer.tasks import ResidualNetwork

    needed = ["run.directory=x", "data.dataset=x", "model.kind=classifier", "model.width=8", "model.stages=1"]
    config = load_configuration(None, [*needed, f"model.norm={norm}", *settings])
    task: Any = SimpleNamespace(model=ResidualNetwork(config.model, 1, 10))
    world: Any = SimpleNamespace(size=ranks, device=torch.device(device))
    synchronise_norms(task, config, world, cells)
    model: nn.Module = task.model
    return model


def kinds(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()} & {
        "BatchNorm2d",
        "SyncBatchNorm",
        "GroupNorm",
    }


def test_ranks_on_gpus_share_their_statistics() -> None:
    assert kinds(synchronised(2, "cuda")) == {"SyncBatchNorm"}
    assert kinds(synchronised(1, "cuda")) == {"BatchNorm2d"}
    assert kinds(synchronised(1, "cpu")) == {"BatchNorm2d"}


@pytest.mark.parametrize(
    ("ranks", "device", "cells", "settings", "words"),
    [
        (2, "cpu", 6, [], "does not work on the CPU, and there are 2 ranks"),
        (4, "cuda", 6, [], "4 ranks share 6 lanes"),
        (2, "cuda", 6, ["parallel.rebalance=true"], "samples that do not depend on their neighbours"),
        (1, "cpu", 6, ["parallel.exact=int64"], "samples that do not depend on their neighbours"),
    ],
)
def test_what_cannot_be_had_is_refused(
    ranks: int, device: str, cells: int, settings: list[str], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        synchronised(ranks, device, cells, "batch", *settings)
    assert kinds(synchronised(ranks, device, cells, "group", *settings)) == {"GroupNorm"}
