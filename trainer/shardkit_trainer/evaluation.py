"""One pass over a dataset for a number: every sample exactly once, on any world size."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

import shardkit
from shardkit.errors import NotFoundError, PlanError

from .configuration import Configuration
from .strategy import LOSS_BITS, Strategy

__all__ = ["evaluate"]


def evaluate(config: Configuration, strategy: Strategy) -> dict[str, Any]:
    """Mean loss per valid target (and accuracy) over all samples of ``evaluation.dataset``; collective.

    The last step of the pass is short, so nothing is dropped or repeated; sums are integers, so the result does not
    depend on who computed what.
    """
    world = strategy.world
    order: dict[str, Any] = {"seed": 0, "remainder": "short", "shuffle": "none"}
    try:
        dataset = shardkit.open(config.evaluation.dataset)
        batch = min(config.evaluation.global_batch or config.data.global_batch, len(dataset))
        plan = dataset.plan(global_batch=batch, **order)
        if plan.lanes < world.size:
            plan = dataset.plan(global_batch=world.size, lanes=world.size, **order)
    except (NotFoundError, PlanError) as error:
        raise type(error)(f"evaluation.dataset = {config.evaluation.dataset!r}: {error}") from error
    totals = torch.zeros(4, dtype=torch.int64)  # loss in fixed point, right answers, valid targets, samples
    strategy.module.eval()
    loader = dataset.loader(plan, rank=world.rank, world=world.size, by_cell=True, uneven=True)
    with torch.no_grad(), loader:
        for cells in loader:
            totals += _one_step(cells, plan.cell_size, config.run.seed, strategy)
    strategy.module.train()
    for module in strategy.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # without a backward pass nothing else drops the gathered parameters
    loss, right, valid, samples = world.all_reduce(totals.to(world.device)).tolist()
    targets = max(1, valid)
    accuracy = {"accuracy": right / targets} if strategy.task.unit == "sample" else {}
    return {"loss": loss / 2**LOSS_BITS / targets, "targets": valid, "samples": samples, **accuracy}


def _one_step(cells: list[Any], cell_size: int, seed: int, strategy: Strategy) -> torch.Tensor:
    inputs = [strategy.task.prepare(cell, seed) for cell in cells if len(cell.samples)]
    counts = [row[0] for row in strategy.world.gather_integers([len(inputs)])]
    totals = torch.zeros(4, dtype=torch.int64)
    for one in strategy.passes(inputs, counts, cell_size):
        loss, right = strategy.loss(one, evaluating=True)
        totals += torch.tensor([round(float(loss) * 2**LOSS_BITS), int(right), one.valid, one.samples])
    return totals
