"""An FSDP2 loop similar to torchtitan's: device mesh, fully_shard, and DCP checkpoints in the run directory.

torchrun --nproc-per-node 2 examples/fsdp2.py [DATA] RUN --steps 40
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from points import open_points, parse_arguments
from shardkit.torch import CheckpointReader, CheckpointWriter, checkpoint_names


class Trainer:
    """Model, optimizer and loader with one state, which DCP saves and loads."""

    def __init__(self, data: str | None, run: Path) -> None:
        self.run = run
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        ds = open_points(data)
        self.loader = ds.loader(ds.plan(global_batch=32, lanes=8, seed=1), mesh=mesh, run=run)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "step": torch.tensor(self.loader.state_dict()["step"]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.loader.load_state_dict({**self.loader.state_dict(), "step": int(state["step"])})

    def train(self, steps: int) -> None:
        if checkpoint_names(self.run):
            state = self.state_dict()
            load(state, storage_reader=CheckpointReader(self.run))
            self.load_state_dict(state)
        step = self.loader.state_dict()["step"]
        while step < steps:
            for batch in self.loader:
                loss = torch.nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])
                torch.autograd.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                step = batch.step + 1
                if step % 5 == 0:
                    save(self.state_dict(), storage_writer=CheckpointWriter(self.run, f"step-{step:012d}"))
                if step == steps:
                    break
        self.loader.close()


def main() -> None:
    options = parse_arguments()
    dist.init_process_group("gloo")
    Trainer(options.data, options.run).train(options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
