"""The interface of a strategy: what a step, a checkpoint and a report ask of it."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from .configuration import Configuration, expect
from .distributed import World
from .optimizers import LocalOptimizer, OwnedTensor, check_floating
from .tasks import Inputs, Task, concatenate

LOSS_BITS = 20
"""Losses are summed as integers of this many fraction bits: the same sum in any order."""


class Strategy:
    """One model on one rank of one strategy.

    A step is: ``for inputs in passes(cells): with accumulate(last): backward`` → ``reduce`` → ``scale_gradients`` →
    ``update``. Losses are sums divided by the step's count of valid targets, times `loss_scale`.

    Attributes:
        forward: what the task calls.
        before_update: called before parameters change; a checkpoint that is being copied makes the update wait.
        loss_scale: what the reduction of this strategy divides by.
        equal_passes: every rank must run the same number of passes.
        torn: something that changes the state has begun and not ended: what this rank holds is of no step.
    """

    loss_scale: float = 1.0
    equal_passes = False
    torn = False

    def __init__(self, task: Task, config: Configuration, world: World, cells: int):
        self.task, self.config, self.world = task, config, world
        synchronise_norms(task, config, world, cells)
        self.module = task.model.to(world.device)
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        check_floating(named.items())
        self.names, self.parameters = list(named), list(named.values())
        # matrices decay; biases, norms and other vectors do not
        self.decays = {name: parameter.dim() >= 2 for name, parameter in named.items()}
        self.shapes = {name: parameter.shape for name, parameter in named.items()}
        _wrap_blocks(task, config)
        self.forward: Any = self.module
        self.before_update: Callable[[], object] = lambda: None
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.optimizer: LocalOptimizer

    # --- one step ----------------------------------------------------------------------------------------------------

    def passes(self, cells: Sequence[Inputs], cells_of_ranks: Sequence[int], cell_size: int) -> list[Inputs]:
        """Cells joined into forward passes of at most ``pass_samples`` samples (one cell each in exact mode).

        Args:
            cells: of this rank.
            cells_of_ranks: how many cells each rank has in this step; they may differ.
            cell_size: samples of a full cell in the plan, so that all ranks join equally many.
        """
        per_pass = 1
        if self.config.parallel.exact == "off":
            per_pass = max(1, self.config.parallel.pass_samples // cell_size)
        joined = [concatenate(cells[at : at + per_pass]) for at in range(0, len(cells), per_pass)]
        if self.equal_passes:
            most = -(-max(cells_of_ranks) // per_pass)
            joined += [self.task.empty() for _ in range(most - len(joined))]
        # torch's reductions are collective: a rank without cells takes part with a loss of zero
        return joined or [self.task.empty()]

    def begin(self) -> None:
        """Before the passes of a step, which change buffers: they are remembered where it may be taken again."""
        if self.world.membership is not None:
            self._buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]

    def abandon(self) -> None:
        """The step that was begun is not taken: its buffers are restored."""
        for buffer, before in self._buffers:
            buffer.copy_(before)
        self._buffers = []

    def divisor(self, own: int, everyone: int) -> int:
        """Targets that the loss is divided by, of this rank's and the step's: the step's."""
        return everyone

    def settle(self) -> None:
        """Before the state is saved or read as a whole: make it the same on every rank; collective."""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Around one forward and backward; gradients leave this rank only in the last of a step."""
        return nullcontext()

    def after_pass(self) -> None:
        """Called after each backward of a step."""

    def computed_at(self) -> float:
        """When (perf_counter) this rank's own part of the step was computed; called after the last pass."""
        return time.perf_counter()

    def reduce(self) -> float:
        """Finish the reduction; returns the norm of the global gradient, the same float on every rank."""
        return math.sqrt(sum(float(g.norm(dtype=torch.float64) ** 2) for g in self._gradients()))

    def overflowed(self) -> bool:
        """Whether this rank met gradients that exact sums cannot hold."""
        return False

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by ``factor`` (clipping, loss scale)."""
        for gradient in self._gradients():
            gradient.mul_(factor)

    def update(self, rate: float) -> None:
        """One optimizer step, and whatever makes the new parameters visible to all ranks."""
        self.before_update()
        self.optimizer.step(rate)

    def clear(self) -> None:
        """The step is over: drop the gradients."""
        self._buffers = []
        for parameter in self.module.parameters():
            parameter.grad = None

    def _gradients(self) -> Iterator[Tensor]:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                yield local_part(parameter.grad)

    def _whole_parameters(self) -> list[OwnedTensor]:
        """What a rank owns that owns no slices: every parameter, or its part of every DTensor."""
        named = dict(self.module.named_parameters())
        return [OwnedTensor(name, named[name], self.decays[name]) for name in self.names]

    def loss(self, inputs: Inputs, *, evaluating: bool = False) -> tuple[Tensor, Tensor]:
        """(sum of losses, right answers) of one pass, in the configured precision; gradients stay float32."""
        device = self.world.device
        tensors = {name: tensor.to(device) for name, tensor in inputs.tensors.items()}
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.parallel.precision)
        with torch.autocast(device.type, dtype=precision, enabled=precision is not None):
            return self.task.loss(self.module if evaluating else self.forward, tensors)

    # --- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Tensors to save, or to load into: {"model": …, "optimizer": {"<parameter>.<moment>": …}}."""
        saved = self.module.state_dict().items()
        model = {name: value.detach() for name, value in saved if torch.is_tensor(value)}
        return {"model": model, "optimizer": self._optimizer_state()}

    def _optimizer_state(self) -> dict[str, Tensor]:
        return {f"{n}.{m}": t for n, moments in self.optimizer.moments().items() for m, t in moments.items()}

    def steady_until_update(self) -> set[tuple[str, str]]:
        """(part, name) of the saved tensors that only `update` changes: passes leave parameters and moments alone."""
        model = {("model", name) for name in self.names}
        return model | {("optimizer", name) for name in self._optimizer_state()}

    def loading_state(self, saved: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Tensors to load into, given the manifest's ``saved`` ones by name."""
        return {part: tensors for part, tensors in self.state().items() if part != "reduction"}

    def after_load(self, updates: int) -> None:
        """Take over what was loaded into `loading_state`."""
        self.optimizer.resume(updates)

    def inexact_after(self, ranks: int) -> str:
        """Why what ``ranks`` ranks saved goes on with other bits where it is compressed; empty where not."""
        return ""

    def whole(self) -> bool:
        """Whether what this rank holds is its part of one state of all ranks, after the steps that were taken."""
        return not self.torn

    def misplaced(self) -> str:
        """Why this rank's part of the state is not that of its place in the group; empty where it is."""
        return ""

    def whole_parameters(self) -> dict[str, Tensor]:
        """Every parameter and buffer in full, on every rank (collective)."""
        whole = {}
        for name, value in self.module.state_dict().items():
            whole[name] = value.full_tensor() if isinstance(value, DTensor) else value.detach()
        return whole

    def parameters_sha256(self) -> str:
        """SHA-256 over the bytes of all parameters and buffers, in name order; collective."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.whole_parameters().items()):
            digest.update(name.encode() + b"\0")
            digest.update(
                tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()

    def local_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds between steps: parameters, gradients (while they live), optimizer."""
        moments = [t for per in self.optimizer.moments().values() for t in per.values()]
        return {
            "parameters": sum(local_part(p).nbytes for p in self.module.parameters()),
            "gradients": sum(g.nbytes for g in self._gradients()),
            "optimizer": sum(local_part(t).nbytes for t in moments),
        }


def synchronise_norms(task: Task, config: Configuration, world: World, cells: int) -> None:
    """Batch statistics over all ranks, by torch's SyncBatchNorm: else results would depend on who has which lanes.

    Raises:
        ConfigurationError: a model with BatchNorm where that cannot be had.
    """
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in task.model.modules()):  # noqa: SLF001
        return
    parallel = config.parallel
    reason = ""
    if parallel.exact != "off" or parallel.rebalance or parallel.sync_every > 1:
        reason = "exact mode, rebalancing and local steps need samples that do not depend on their neighbours"
    elif world.size > 1 and world.device.type == "cpu":
        reason = f"torch's SyncBatchNorm does not work on the CPU, and there are {world.size} ranks"
    elif cells % world.size:
        reason = f"its statistics need equal passes on all ranks, and {world.size} ranks share {cells} lanes"
    expect((not reason, f'the model has BatchNorm: {reason}; use GroupNorm (model.norm = "group")'))
    if world.size > 1:
        task.model = nn.SyncBatchNorm.convert_sync_batchnorm(task.model)  # type: ignore[no-untyped-call]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _wrap_blocks(task: Task, config: Configuration) -> None:
    """Activation checkpointing and compilation, block by block, without new names in the state."""
    for block in task.blocks():
        if config.parallel.activation_checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if config.parallel.compile:
            block.compile()
