"""The learning rate as a pure function of the step, and the optimizer over what a rank owns (SPEC.md §3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .configuration import OptimizerConfig, ScheduleConfig, expect

ALIGNMENT = 64
"""Elements. Vectorised kernels treat a tail differently: cuts at multiples leave no new tails."""


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter lies on the line.

    Attributes:
        offsets: first element of each parameter; multiples of `ALIGNMENT`.
        lengths: elements of each parameter.
        share: elements per rank; a multiple of `ALIGNMENT`.
        shards: ranks that share the line; its length is share · shards.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    share: int
    shards: int

    @classmethod
    def of(cls, parameters: Sequence[Tensor], shards: int) -> FlatLayout:
        """The layout of ``parameters`` in their order, cut into ``shards`` equal slices."""
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
        """The part of ``line`` that is each parameter's, flat."""
        return [line[o : o + n] for o, n in zip(self.offsets, self.lengths, strict=True)]

    def owned(self, shard: int) -> list[tuple[int, int, int]]:
        """(parameter, first, last + 1 element of it) that ``shard`` owns, where that is not empty."""
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
    """The rate of ``step`` (from 0) of ``steps``: warm-up, then constant, linear, cosine or wsd decay.

    Warm-up is linear and reaches the peak at step ``warmup``; the decay reaches ``final`` · peak at the last step.
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
    """What this rank optimises of one parameter: all of it, a flat slice of it, or its DTensor."""

    name: str
    tensor: Tensor
    decays: bool


class LocalOptimizer:
    """AdamW or SGD over owned tensors, its state made at once so that a checkpoint can be loaded into it.

    The update is elementwise, so slices give the bits that the whole tensor gives, as long as they are cut at multiples
    of the vector width (`slices.ALIGNMENT`).
    """

    def __init__(self, owned: Sequence[OwnedTensor], config: OptimizerConfig, *, fused: bool):
        self.owned = owned
        self.updates = 0
        adam, settings = config.name == "adamw", dict[str, Any](lr=config.lr, foreach=False)
        momentum = ("momentum_buffer",) if config.beta1 else ()
        self.moment_names = ("exp_avg", "exp_avg_sq") if adam else momentum
        self._optimizer: torch.optim.Optimizer | None = None
        if not owned:
            return  # fewer elements than ranks: this one owns nothing
        decaying = {"params": [o.tensor for o in owned if o.decays], "weight_decay": config.weight_decay}
        others = {"params": [o.tensor for o in owned if not o.decays], "weight_decay": 0.0}
        groups = [group for group in (decaying, others) if group["params"]]
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
        """One update; gradients are in ``.grad`` of the owned tensors."""
        self.updates += 1
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """{parameter name: {moment: tensor like the owned one}}: the tensors themselves, to be saved or loaded into."""
        state: Any = self._optimizer.state if self._optimizer is not None else {}
        return {o.name: {moment: state[o.tensor][moment] for moment in self.moment_names} for o in self.owned}

    def resume(self, updates: int) -> None:
        """Continue after ``updates`` updates (Adam's bias correction counts them)."""
        self.updates = updates
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(float(updates))


def check_floating(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters that the flat layout cannot hold.

    Raises:
        ConfigurationError: a trainable parameter is not float32.
    """
    for name, parameter in parameters:
        advice = "expected float32 (parallel.precision lowers the computation)"
        expect((parameter.dtype == torch.float32, f"parameter {name} is {parameter.dtype}; {advice}"))
