"""Learning rates as pure functions of the step, and the optimizer over whatever tensors a strategy owns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardkit.errors import ConfigurationError

from .configuration import OptimizerConfig, ScheduleConfig

__all__ = ["LocalOptimizer", "OwnedTensor", "learning_rate"]


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
        groups = [
            {"params": [o.tensor for o in owned if o.decays], "weight_decay": config.weight_decay},
            {"params": [o.tensor for o in owned if not o.decays], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._optimizer: torch.optim.Optimizer | None = None
        self._moments: tuple[str, ...] = (
            ("exp_avg", "exp_avg_sq") if config.name == "adamw" else ("momentum_buffer",)
        )
        if not groups:
            return  # fewer elements than ranks: this one owns nothing
        if config.name == "adamw":
            betas = (config.beta1, config.beta2)
            self._optimizer = torch.optim.AdamW(
                groups, lr=config.lr, betas=betas, eps=config.epsilon, fused=fused, foreach=False
            )
        else:
            self._optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.beta1, foreach=False)
            self._moments = self._moments if config.beta1 else ()
        for item in owned:
            state = self._optimizer.state[item.tensor]
            if config.name == "adamw":
                where = item.tensor.device if fused else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=where)
            for moment in self._moments:
                state[moment] = torch.zeros_like(item.tensor)

    def step(self, rate: float) -> None:
        """One update; gradients are in ``.grad`` of the owned tensors."""
        self.updates += 1
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """{parameter name: {moment: tensor like the owned one}}: the tensors themselves, to be saved or loaded into."""
        if self._optimizer is None:
            return {}
        state = self._optimizer.state
        return {
            item.name: {moment: state[item.tensor][moment] for moment in self._moments} for item in self.owned
        }

    def moment_names(self) -> tuple[str, ...]:
        """What the optimizer keeps per element."""
        return self._moments

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
        if parameter.dtype != torch.float32:
            raise ConfigurationError(
                f"parameter {name} is {parameter.dtype}; expected float32 (parallel.precision lowers the computation)"
            )
