"""Hugging Face Accelerate over shardkit: the loader is used as it is, its position is registered for checkpoints.

accelerate launch --num_processes 2 examples/accelerate_loop.py [DATA] RUN --steps 40
"""

# mypy: ignore-errors
# the framework is optional
from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from points import open_points, parse_arguments


class Position:
    """The loader's state after the batch that was trained on last."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.state = loader, loader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self.state = state


def main() -> None:
    options = parse_arguments()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    ds = open_points(options.data)
    loader = ds.loader(
        ds.plan(global_batch=32, lanes=8, seed=1), run=options.run
    )  # not prepared: ranks are dealt by lanes
    model = torch.nn.Linear(8, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    position = Position(loader)
    accelerator.register_for_checkpointing(position)
    saved = sorted((options.run / "accelerate").glob("step-*/done"))
    if saved:
        accelerator.load_state(str(saved[-1].parent))

    step = position.state["step"]
    while step < options.steps:
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step = batch.step + 1
            position.state = loader.state_dict(after=batch)
            if step % 5 == 0:
                folder = options.run / "accelerate" / f"step-{step:08d}"
                accelerator.save_state(str(folder))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    (folder / "done").touch()  # a folder that a kill has torn does not count
            if step == options.steps:
                break
    loader.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
