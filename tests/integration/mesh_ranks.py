"""The mesh examples on every rank of one torchrun launch, each beside one process; run by test_mesh_examples.py."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as all of torch's own documentation has it
from torch import Tensor, nn

import shardkit

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

data_pipeline_parallel = import_module("data_pipeline_parallel")
data_tensor_parallel = import_module("data_tensor_parallel")
hybrid_sharding = import_module("hybrid_sharding")

STEPS = 12


def alone(model: nn.Module, data: str) -> dict[str, Tensor]:
    """The same steps in this process alone: no mesh, no collective."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dataset = shardkit.open(data)
    plan = dataset.plan(global_batch=32, lanes=8, seed=1)
    with dataset.loader(plan, rank=0, world=1) as loader:
        for batch in loader:
            torch.autograd.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
            optimizer.step()
            optimizer.zero_grad()
            if batch.step + 1 == STEPS:
                break
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def farthest(found: nn.Module, expected: dict[str, Tensor], prefix: str = "") -> float:
    """The largest difference of any parameter on any rank."""
    worst = 0.0
    for name, parameter in found.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        worst = max(worst, float((whole.detach() - expected[prefix + name]).abs().max()))
    everywhere = torch.tensor(worst)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
    return float(everywhere)


def main() -> None:
    result, data = sys.argv[1:]
    dist.init_process_group("gloo")
    errors = {}
    for cut in (2, 4):
        expected = alone(data_tensor_parallel.make_model(), data)
        errors[f"tensor {cut}"] = farthest(data_tensor_parallel.train(data, STEPS, cut), expected)
    expected = alone(nn.Sequential(*data_pipeline_parallel.make_stages()), data)
    number, stage = data_pipeline_parallel.train(data, STEPS)
    errors["pipeline 2"] = farthest(stage, expected, f"{number}.")
    expected = alone(hybrid_sharding.make_model(), data)
    model = hybrid_sharding.train(data, STEPS, 2)
    errors["hybrid 2"] = farthest(model, expected)
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    moved = max(
        float((e - s).abs().max())
        for e, s in zip(expected.values(), hybrid_sharding.make_model().parameters(), strict=True)
    )
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps({"errors": errors, "share": local / whole, "moved": moved}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
