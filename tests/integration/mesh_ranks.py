"""The mesh examples on every rank of one launch, each beside one process; run by test_loader_ranks.py."""

from __future__ import annotations

import json
import runpy
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as all of torch's own documentation has it
from torch import Tensor, nn

import shardkit

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

device_mesh = import_module("device_mesh")

STEPS = 5


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


def farthest(found: nn.Module, expected: dict[str, Tensor], layers: set[str] | None) -> float:
    """The largest difference of any parameter on any rank, of some layers or of all."""
    worst = 0.0
    for name, parameter in found.named_parameters():
        if layers is not None and name.partition(".")[0] not in layers:
            continue
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        worst = max(worst, float((whole.detach() - expected[name]).abs().max()))
    everywhere = torch.tensor(worst)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
    return float(everywhere)


def main() -> None:
    result, data = sys.argv[1:]
    dist.init_process_group("gloo")
    expected = alone(device_mesh.make_model(), data)
    trained = {
        f"{way} {inner}": device_mesh.train(way, data, STEPS, inner)
        for way, inner in (("tensor", 2), ("tensor", 4), ("pipeline", 2), ("hybrid", 2))
    }
    stage = dist.get_rank() % 2 * 2  # of two layers, which alone are trained here
    own = {f"{stage + place}" for place in range(2)}
    errors = {
        name: farthest(model, expected, own if name == "pipeline 2" else None)
        for name, model in trained.items()
    }
    hybrid = list(trained["hybrid 2"].parameters())
    local = sum(parameter.to_local().numel() for parameter in hybrid)
    whole = sum(parameter.numel() for parameter in hybrid)
    moved = max(
        float((e - s).abs().max())
        for e, s in zip(expected.values(), device_mesh.make_model().parameters(), strict=True)
    )
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps({"errors": errors, "share": local / whole, "moved": moved}))
    dist.destroy_process_group()


def become_rank(arguments: list[str]) -> None:
    """In a forked process."""
    sys.argv[1:] = arguments
    main()


def become_program(arguments: list[str]) -> None:
    """``python PROGRAM …``, in a forked process."""
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
