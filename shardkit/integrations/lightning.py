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

    Lightning's checkpoints hold the state of the training loader, so ``trainer.fit(…, ckpt_path=…)`` continues with the
    next batch, on any number of ranks. Given a loader alone, Lightning does not load its state if the checkpoint was
    saved at the end of an epoch, and training repeats the first epoch. With ``reload_dataloaders_every_n_epochs`` the
    new loader continues after the previous one. Pass ``use_distributed_sampler=False`` to the Trainer: each rank has
    its own lanes.

    Args:
        train: returns the training loader: ``ds.loader(plan)`` or `shardkit.torch.DataLoader`.
        validate: returns the validation loader; make it with ``restart=True``.
    """

    def __init__(self, train: Callable[[], Any], validate: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._train = train
        self._loader: Any = None  # the last training loader
        self._saved: dict[str, Any] | None = None  # state of a checkpoint, for the next training loader
        if validate is not None:  # Lightning validates if there is such a method
            self.val_dataloader = validate

    def train_dataloader(self) -> Any:
        """Return a training loader that continues where the checkpoint, or this trainer's last loader, ended."""
        loader = self._train()
        saved = self._saved or self.state_dict().get("loader")
        if saved is not None and self.trainer.global_step:  # 0 for another trainer
            loader.load_state_dict(saved)
        self._loader, self._saved = loader, None
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training loader, which Lightning saves; empty if there is none."""
        return {"loader": self._loader.state_dict()} if hasattr(self._loader, "state_dict") else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint for the training loader."""
        self._saved = state_dict.get("loader")
