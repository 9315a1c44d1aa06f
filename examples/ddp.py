"""Plain DistributedDataParallel with shardkit: killed at any step, resumed at any world size, on the same samples.

torchrun --nproc-per-node 2 examples/ddp.py [DATA] RUN --steps 40
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from points import open_points, parse_arguments


def main() -> None:
    options = parse_arguments()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ds = open_points(options.data)
    plan = ds.plan(global_batch=32, lanes=8, seed=1)
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = ds.loader(plan, run=options.run)  # rank and world come from the process group

    checkpoint = options.run / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # fits any rank of any world size
        step = saved["loader"]["step"]

    while step < options.steps:
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            step = batch.step + 1
            if step % 5 == 0 and dist.get_rank() == 0:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(after=batch),
                }
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
            if step == options.steps:
                break
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
