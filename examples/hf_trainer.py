"""Hugging Face Trainer with shardkit: the loader's state is part of the Trainer's checkpoints.

torchrun --nproc-per-node 2 examples/hf_trainer.py [DATA] RUN --steps 40
"""

# mypy: ignore-errors
# the framework is optional
from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from points import open_points, parse_arguments
from shardkit.integrations.transformers import use_loader


class PointTrainer(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(inputs["x"])
        loss = torch.nn.functional.cross_entropy(outputs, inputs["y"])
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(options.run / "hf"), max_steps=options.steps, save_steps=5, use_cpu=True, report_to=[],
        disable_tqdm=True, ddp_backend="gloo", save_total_limit=2,
    )  # fmt: skip
    # the state is written last, so a checkpoint without it is incomplete
    saved = sorted(
        options.run.glob("hf/checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime_ns
    )
    ds = open_points(options.data)
    with ds.loader(ds.plan(global_batch=32, lanes=8, seed=1), run=options.run) as loader:
        trainer = PointTrainer(model=torch.nn.Linear(8, 2), args=arguments)
        use_loader(trainer, loader)
        trainer.train(resume_from_checkpoint=str(saved[-1].parent) if saved else None)


if __name__ == "__main__":
    main()
