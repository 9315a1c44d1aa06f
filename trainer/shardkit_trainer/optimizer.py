"""The parts of parameters that a rank updates (SPEC.md §3), their optimizer, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .configuration import OptimizerConfig, ScheduleConfig

ALIGNMENT = 64
"""Number of elements. Vectorised kernels treat tails differently, and cuts at multiples of this make no new tails."""


@dataclass(frozen=True)
class FlatLayout:
    """Layout of parameters, end to end, in a flat tensor (the *line*)."""

    offsets: tuple[int, ...]  # first element of each parameter; multiples of `ALIGNMENT`
    lengths: tuple[int, ...]  # number of elements of each parameter
    share: int  # number of elements per rank; a multiple of `ALIGNMENT`
    shards: int  # number of ranks that share the line; its length is share · shards

    @classmethod
    def of(cls, parameters: Sequence[Tensor], shards: int) -> FlatLayout:
        """Return the layout of ``parameters`` in their order, cut into ``shards`` equal slices."""
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        share = -(-end // (shards * ALIGNMENT)) * ALIGNMENT
        return cls(tuple(offsets), tuple(p.numel() for p in parameters), share, shards)

    @property
    def total(self) -> int:
        return self.share * self.shards

    def views(self, line: Tensor) -> list[Tensor]:
        """Return one flat view of ``line`` for each parameter."""
        return [line[o : o + n] for o, n in zip(self.offsets, self.lengths, strict=True)]

    def owned(self, shard: int) -> list[tuple[int, int, int]]:
        """Return the non-empty ranges that ``shard`` owns: (parameter index, first element, last element + 1)."""
        start, end = shard * self.share, (shard + 1) * self.share
        cuts = []
        for index, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            low, high = max(0, start - offset), min(length, end - offset)
            if low < high:
                cuts.append((index, low, high))
        return cuts


def learning_rate(
    optimizer: OptimizerConfig, schedule: ScheduleConfig, *, step: int, steps: int, global_batch: int
) -> float:
    """Return the learning rate of ``step`` (from 0) of ``steps``: warm-up, then constant, linear, cosine or wsd decay.

    Warm-up is linear and reaches the peak at step ``warmup``. The decay reaches ``final`` · peak at the last step.
    """
    peak = optimizer.lr
    if optimizer.scaling != "none":
        ratio = global_batch / optimizer.reference_batch
        peak *= ratio if optimizer.scaling == "linear" else math.sqrt(ratio)
    if step < schedule.warmup:
        return peak * (step + 1) / (schedule.warmup + 1)
    if schedule.kind == "constant":
        return peak
    start = schedule.warmup
    if schedule.kind == "wsd":
        start = max(start, steps - (schedule.decay or max(1, steps // 10)))
    share = min(1.0, max(0.0, (step - start) / max(1, steps - 1 - start)))
    if schedule.kind == "cosine":
        share = 0.5 * (1.0 - math.cos(math.pi * share))
    return peak * (1.0 - (1.0 - schedule.final) * share)


@dataclass
class OwnedTensor:
    """The part of one parameter that this rank updates: the whole parameter, a flat slice, or a DTensor."""

    name: str
    tensor: Tensor
    decays: bool


class LocalOptimizer:
    """AdamW or SGD over owned tensors. Its state exists from the start, so a checkpoint can be loaded into it.

    The update is elementwise: slices cut at multiples of the vector width (`ALIGNMENT`) give the same bits as the whole
    tensor.
    """

    def __init__(self, owned: Sequence[OwnedTensor], config: OptimizerConfig, *, fused: bool):
        self.owned = owned
        self.updates = 0
        adam, settings = config.name == "adamw", dict[str, Any](lr=config.lr, foreach=False)
        momentum = ("momentum_buffer",) if config.beta1 else ()
        self.moment_names = ("exp_avg", "exp_avg_sq") if adam else momentum
        decaying = {"params": [o.tensor for o in owned if o.decays], "weight_decay": config.weight_decay}
        others = {"params": [o.tensor for o in owned if not o.decays], "weight_decay": 0.0}
        groups = [group for group in (decaying, others) if group["params"]]
        groups = groups or [{"params": [torch.empty(0)]}]  # fewer elements than ranks: this rank owns none
        self._optimizer: torch.optim.Optimizer
        if adam:
            settings |= {"betas": (config.beta1, config.beta2), "eps": config.epsilon, "fused": fused}
            self._optimizer = torch.optim.AdamW(groups, **settings)
        else:
            self._optimizer = torch.optim.SGD(groups, momentum=config.beta1, **settings)
        for item in owned:
            state = self._optimizer.state[item.tensor]
            if adam:
                state["step"] = torch.zeros((), device=item.tensor.device if fused else "cpu")
            state.update({moment: torch.zeros_like(item.tensor) for moment in self.moment_names})

    def step(self, rate: float) -> None:
        """Apply one update with the gradients in ``.grad`` of the owned tensors."""
        self.updates += 1
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return {parameter name: {moment name: tensor}}, not copied, to be saved or loaded into."""
        state = self._optimizer.state
        return {o.name: {moment: state[o.tensor][moment] for moment in self.moment_names} for o in self.owned}

    def resume(self, updates: int) -> None:
        """Continue after ``updates`` updates (Adam's bias correction counts them)."""
        self.updates = updates
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(float(updates))
