"""Hugging Face Accelerate with shardkit: the loader's state is part of Accelerate's checkpoints.

accelerate launch --num_processes 2 examples/accelerate_loop.py [DATA] RUN --steps 40
"""

# mypy: ignore-errors
# the framework is optional
from __future__ import annotations

import torch
from accelerate import Accelerator

from points import open_points, parse_arguments


def main() -> None:
    options = parse_arguments()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    ds = open_points(options.data)
    loader = ds.loader(ds.plan(global_batch=32, lanes=8, seed=1), run=options.run)
    model = torch.nn.Linear(8, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.register_for_checkpointing(loader)  # not prepared: each rank has its own lanes already
    saved = sorted((options.run / "accelerate").glob("step-*/done"))
    if saved:
        accelerator.load_state(str(saved[-1].parent))

    step = loader.state_dict()["step"]
    while step < options.steps:
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step = batch.step + 1
            if step % 5 == 0:
                folder = options.run / "accelerate" / f"step-{step:08d}"
                accelerator.save_state(str(folder))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    (folder / "done").touch()  # marks a complete checkpoint
            if step == options.steps:
                break
    loader.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
