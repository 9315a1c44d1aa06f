"""Device meshes with shardkit and torch's own parts: hybrid sharding, data × tensor and data × pipeline parallel.

torchrun --nnodes 2 --nproc-per-node 2 examples/device_mesh.py hybrid [DATA] --steps 40
torchrun --nproc-per-node 4 examples/device_mesh.py tensor [DATA] --steps 40
torchrun --nproc-per-node 4 examples/device_mesh.py pipeline [DATA] --steps 40

DATA has fields x (float32[8]) and y (int64); without DATA, points are generated.
With `mesh=`, a loader reads the cells of its data-parallel coordinate: with hybrid
sharding every rank has different cells; all ranks of a "tp" or "pp" group have the same.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as all of torch's own documentation has it
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from points import open_points

MICROBATCHES = 4
NAMES = {"hybrid": ("dp_replicate", "dp_shard"), "tensor": ("dp", "tp"), "pipeline": ("dp", "pp")}


class Feed(nn.Module):
    """A residual feed-forward block: `up` is cut by columns and `down` by rows, so ranks exchange only the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.down(F.gelu(self.up(x)))
        return hidden


def make_model() -> nn.Sequential:
    """Make a model with the same parameters on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Feed(16), Feed(16), nn.Linear(16, 2))


def hybrid(model: nn.Sequential, mesh: DeviceMesh) -> Callable[[Tensor, Tensor], None]:
    """Shard parameters inside a node and replicate them between nodes; only gradients are sent between nodes.

    The ranks of a node have contiguous lanes, so they read nearby parts of the dataset.
    """
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return lambda x, y: torch.autograd.backward(F.cross_entropy(model(x), y))


def tensor(model: nn.Sequential, mesh: DeviceMesh) -> Callable[[Tensor, Tensor], None]:
    """Cut layers by columns and rows over "tp", then shard them over "dp"."""
    for block in (model[1], model[2]):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return lambda x, y: torch.autograd.backward(F.cross_entropy(model(x), y))


def pipeline(model: nn.Sequential, mesh: DeviceMesh) -> Callable[[Tensor, Tensor], None]:
    """Run microbatches through one stage per "pp" coordinate, and average gradients over "dp".

    All stages of a pipeline have the same cells. The first stage uses the inputs, the last stage the targets.
    """
    number, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    size = len(model) // stages
    own = model[number * size : (number + 1) * size]
    stage = PipelineStage(own, number, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.cross_entropy)

    def backward(x: Tensor, y: Tensor) -> None:
        if number == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        for parameter in own.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))

    return backward


WAYS = {"hybrid": hybrid, "tensor": tensor, "pipeline": pipeline}


def train(way: str, data: str | None, steps: int, inner: int = 2) -> nn.Sequential:
    """Train for ``steps`` steps on a mesh with rows of ``inner`` ranks; return the model, sharded as DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // inner, inner), mesh_dim_names=NAMES[way])
    model = make_model()
    backward = WAYS[way](model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ds = open_points(data)
    with ds.loader(ds.plan(global_batch=32, lanes=8, seed=1), mesh=mesh) as loader:
        for batch in loader:
            backward(batch["x"], batch["y"])
            optimizer.step()
            optimizer.zero_grad()
            if batch.step + 1 == steps:
                break
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("data", nargs="?")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    inner = int(os.environ["LOCAL_WORLD_SIZE"]) if options.way == "hybrid" else 2  # ranks per node
    train(options.way, options.data, options.steps, inner)
    if dist.get_rank() == 0:
        print(f"trained {options.steps} steps on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
