"""Data × pipeline parallel with torch's own parts: a schedule of microbatches over "pp", averaged gradients over "dp".

torchrun --nproc-per-node 4 examples/data_pipeline_parallel.py [DATA] --steps 40

DATA has fields x (float32[8]) and y (int64); without it points are made.
The stages of one pipeline share a data-parallel coordinate: `mesh=` gives
them the same cells, of which the first uses the inputs and the last the targets.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as all of torch's own documentation has it
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from points import open_points


def make_stages() -> list[nn.Sequential]:
    """The same parameters on every rank."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16)),
        nn.Sequential(nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 2)),
    ]


def train(data: str | None, steps: int, microbatches: int = 4) -> tuple[int, nn.Sequential]:
    """Train for some steps; returns this rank's stage and its number."""
    stages = make_stages()
    shape = (dist.get_world_size() // len(stages), len(stages))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    number = mesh.get_local_rank("pp")
    model = stages[number]
    stage = PipelineStage(model, number, len(stages), torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    ds = open_points(data)
    with ds.loader(ds.plan(global_batch=32, lanes=8, seed=1), mesh=mesh) as loader:
        for batch in loader:
            if number == 0:
                schedule.step(batch["x"])
            else:
                schedule.step(target=batch["y"])
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
            optimizer.step()
            optimizer.zero_grad()
            if batch.step + 1 == steps:
                break
    return number, model


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
