"""Hybrid sharding (HSDP): parameters are sharded inside a node, replicated between nodes; only gradients cross over.

torchrun --nnodes 2 --nproc-per-node 2 examples/hybrid_sharding.py [DATA] --steps 40

DATA has fields x (float32[8]) and y (int64); without it points are made.
Both dimensions of the mesh deal data. Contiguous lanes go to the ranks of
one node, so what they read lies close together.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as all of torch's own documentation has it
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from points import open_points


def make_model() -> nn.Sequential:
    """The same parameters on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 2))


def train(data: str | None, steps: int, ranks_per_node: int) -> nn.Sequential:
    """Train for some steps; the parameters are DTensors, sharded over a node."""
    shape = (dist.get_world_size() // ranks_per_node, ranks_per_node)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
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
    train(options.data, options.steps, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if dist.get_rank() == 0:
        print(f"trained {options.steps} steps on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
