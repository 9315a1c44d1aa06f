"""Hugging Face Trainer over shardkit: its step counter is the loader's position, so nothing is replayed on resume.

torchrun --nproc-per-node 2 examples/hf_trainer.py [DATA] RUN --steps 40
"""

# mypy: ignore-errors
# the framework is optional
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from points import open_points, parse_arguments


class PlanTrainer(Trainer):
    """Takes its batches from a plan; one optimizer step is one step of the plan."""

    def __init__(self, data: str | None, run: Path, **settings: Any) -> None:
        ds = open_points(data)
        self.plan_loader = ds.loader(ds.plan(global_batch=32, lanes=8, seed=1), run=run)
        super().__init__(train_dataset=ds, **settings)

    def get_train_dataloader(self) -> Any:
        return self.plan_loader

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(inputs["x"])
        loss = torch.nn.functional.cross_entropy(outputs, inputs["y"])
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(options.run / "hf"), max_steps=options.steps, save_steps=5, use_cpu=True, report_to=[],
        disable_tqdm=True, ignore_data_skip=True, ddp_backend="gloo", save_total_limit=2,
    )  # fmt: skip
    trainer = PlanTrainer(options.data, options.run, model=torch.nn.Linear(8, 2), args=arguments)
    # the state is written last: a checkpoint without it was not finished when the job was killed
    steps = [
        int(state.parent.name.rpartition("-")[2])
        for state in options.run.glob("hf/checkpoint-*/trainer_state.json")
    ]
    if steps:
        trainer.plan_loader.seek(max(steps))
    trainer.train(resume_from_checkpoint=f"{arguments.output_dir}/checkpoint-{max(steps)}" if steps else None)
    trainer.plan_loader.close()


if __name__ == "__main__":
    main()
