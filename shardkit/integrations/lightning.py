"""Adapter of loaders for Lightning.

Example::

    trainer.fit(model, datamodule=PlanDataModule(lambda: ds.loader(plan)), ckpt_path=…)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

if "lightning.pytorch" in sys.modules:  # the same library under its other name
    from lightning.pytorch import LightningDataModule
else:
    from pytorch_lightning import LightningDataModule

__all__ = ["PlanDataModule"]


class PlanDataModule(LightningDataModule):  # type: ignore[misc]
    """Loaders of a rank, made after Lightning has started the process group.

    Lightning's checkpoints hold the loader's state, so ``trainer.fit(…, ckpt_path=…)`` continues with the next batch,
    on any number of ranks. Pass ``use_distributed_sampler=False`` to the Trainer: each rank has its own lanes.

    Args:
        train: returns the training loader: ``ds.loader(plan)`` or `shardkit.torch.DataLoader`.
        validate: returns the validation loader; make it with ``restart=True``.
    """

    def __init__(self, train: Callable[[], Any], validate: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._train = train
        if validate is not None:  # Lightning validates if there is such a method
            self.val_dataloader = validate

    def train_dataloader(self) -> Any:
        """Return the training loader."""
        return self._train()
