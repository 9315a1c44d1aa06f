"""Lightning's Trainer with shardkit: mid-epoch checkpoints, sanity validation, and any world size on resume.

torchrun --nproc-per-node 2 examples/lightning_trainer.py [DATA] RUN --steps 40
"""

# mypy: ignore-errors
# the framework is optional
from __future__ import annotations

import os
from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from points import open_points, parse_arguments
from shardkit.integrations.lightning import PlanDataModule


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(batch["x"]), batch["y"])

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("accuracy", (self.layer(batch["x"]).argmax(1) == batch["y"]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    options = parse_arguments()
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "example")  # ranks are started externally, as by torchrun
    lightning.seed_everything(0)
    ds = open_points(options.data)
    data = PlanDataModule(
        lambda: ds.loader(ds.plan(global_batch=32, lanes=8, seed=1), run=options.run),
        lambda: ds.loader(ds.plan(global_batch=200, lanes=8, shuffle="none"), restart=True),
    )
    checkpoints = ModelCheckpoint(
        options.run / "lightning", every_n_train_steps=5, save_last=True, save_top_k=0
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy="ddp",
        max_steps=options.steps, callbacks=[checkpoints], num_sanity_val_steps=2, use_distributed_sampler=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=options.run,
    )  # fmt: skip
    last = options.run / "lightning" / "last.ckpt"
    trainer.fit(Model(), datamodule=data, ckpt_path=str(last) if last.exists() else None, weights_only=False)


if __name__ == "__main__":
    main()
