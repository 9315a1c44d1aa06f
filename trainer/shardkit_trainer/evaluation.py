"""One pass over a dataset for a number: every sample exactly once, on any world size."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

import shardkit
from shardkit.errors import PlanError

from .configuration import Configuration
from .distributed import World
from .strategies import Strategy, autocast
from .tasks import Task

__all__ = ["evaluate"]

LOSS_BITS = 20


def evaluate(config: Configuration, world: World, task: Task, strategy: Strategy) -> dict[str, Any]:
    """Mean loss per valid target (and accuracy) over all samples of ``evaluation.dataset``; collective.

    The last step of the pass is short, so nothing is dropped or repeated; sums are integers, so the result does not
    depend on who computed what.
    """
    dataset = shardkit.open(config.evaluation.dataset)
    batch = min(config.evaluation.global_batch or config.data.global_batch, len(dataset))
    try:
        plan = dataset.plan(global_batch=batch, seed=0, remainder="short", shuffle="none")
        if plan.lanes < world.size:
            plan = dataset.plan(
                global_batch=world.size, seed=0, remainder="short", shuffle="none", lanes=world.size
            )
    except PlanError as error:
        raise PlanError(f"evaluation.dataset = {config.evaluation.dataset!r}: {error}") from error
    totals = torch.zeros(4, dtype=torch.int64)  # loss in fixed point, right answers, valid targets, samples
    strategy.module.eval()
    with (
        torch.no_grad(),
        dataset.loader(plan, rank=world.rank, world=world.size, by_cell=True, uneven=True) as loader,
    ):
        for cells in loader:
            totals += _one_step(cells, plan.cell_size, config, world, task, strategy)
    strategy.module.train()
    for module in strategy.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # without a backward pass nothing else drops the gathered parameters
    loss, right, valid, samples = world.all_reduce(totals.to(world.device)).tolist()
    result: dict[str, Any] = {
        "loss": loss / 2**LOSS_BITS / max(1, valid),
        "targets": valid,
        "samples": samples,
    }
    if task.unit == "sample":
        result["accuracy"] = right / max(1, valid)
    return result


def _one_step(
    cells: list[Any], cell_size: int, config: Configuration, world: World, task: Task, strategy: Strategy
) -> torch.Tensor:
    inputs = [task.prepare(cell, config.run.seed) for cell in cells if len(cell.samples)]
    counts = [row[0] for row in world.gather_integers([len(inputs)])]
    totals = torch.zeros(4, dtype=torch.int64)
    for one in strategy.passes(inputs, counts, cell_size):
        tensors = {name: tensor.to(world.device) for name, tensor in one.tensors.items()}
        with autocast(config, world.device):
            loss, right = task.loss(strategy.module, tensors)
        totals += torch.tensor([round(float(loss) * 2**LOSS_BITS), int(right), one.valid, one.samples])
    return totals
