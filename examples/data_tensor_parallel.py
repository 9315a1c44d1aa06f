"""Data × tensor parallel with torch's own parts: fully_shard over "dp", colwise and rowwise layers over "tp".

torchrun --nproc-per-node 4 examples/data_tensor_parallel.py [DATA] --steps 40

DATA has fields x (float32[8]) and y (int64); without it points are made.
Ranks of one "tp" group share a data-parallel coordinate: `mesh=` gives
them the same cells.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as all of torch's own documentation has it
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from points import open_points


class Feed(nn.Module):
    """A residual feed-forward block: `up` is cut by columns, `down` by rows, so that only its sum travels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.down(F.gelu(self.up(x)))
        return hidden


def make_model() -> nn.Sequential:
    """The same parameters on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Feed(16), Feed(16), nn.Linear(16, 2))


def train(data: str | None, steps: int, tensor_parallel: int = 2) -> nn.Sequential:
    """Train for some steps; the parameters are DTensors."""
    shape = (dist.get_world_size() // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = make_model()
    cut = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in (model[1], model[2]):
        parallelize_module(block, mesh["tp"], cut)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    ds = open_points(data)
    with ds.loader(ds.plan(global_batch=32, lanes=8, seed=1), mesh=mesh) as loader:
        for batch in loader:
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if batch.step + 1 == steps:
                break
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options.data, options.steps)
    if dist.get_rank() == 0:
        print(f"trained {options.steps} steps on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
