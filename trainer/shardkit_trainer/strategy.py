"""The learning-rate schedule, the optimizer over owned tensors (SPEC.md §3), and the interface of a strategy."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from .configuration import Configuration, OptimizerConfig, ScheduleConfig, expect
from .distributed import World
from .tasks import Inputs, Task, concatenate

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


def check_floating(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters that the flat layout cannot hold."""
    for name, parameter in parameters:
        advice = "expected float32 (parallel.precision lowers the computation)"
        expect((parameter.dtype == torch.float32, f"parameter {name} is {parameter.dtype}; {advice}"))


LOSS_BITS = 20
"""Fraction bits of summed losses: integers give the same sum in any order."""


class Strategy:
    """Base of all strategies: one model on one rank.

    A step is: ``for inputs in passes(cells): with accumulate(last): backward`` → ``reduce`` → ``scale_gradients`` →
    ``update``. Losses are sums divided by the step's number of valid targets, times `loss_scale`.

    Attributes:
        forward: callable that the task gets as its model.
        before_update: called before parameters change; waits for a checkpoint that is being copied.
        loss_scale: divisor of the strategy's reduction.
        equal_passes: whether all ranks must run the same number of passes.
    """

    loss_scale: float = 1.0
    equal_passes = False

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
        self.optimizer: LocalOptimizer

    # --- one step ----------------------------------------------------------------------------------------------------

    def passes(self, cells: Sequence[Inputs], cells_of_ranks: Sequence[int], cell_size: int) -> list[Inputs]:
        """Join cells into passes of at most ``pass_samples`` samples, or of one cell in exact mode."""
        per_pass = 1
        if self.config.parallel.exact == "off":
            per_pass = max(1, self.config.parallel.pass_samples // cell_size)
        joined = [concatenate(cells[at : at + per_pass]) for at in range(0, len(cells), per_pass)]
        if self.equal_passes:
            most = -(-max(cells_of_ranks) // per_pass)
            joined += [self.task.empty() for _ in range(most - len(joined))]
        # torch's reductions are collective, so a rank without cells takes part with a loss of zero
        return joined or [self.task.empty()]

    def divisor(self, own: int, everyone: int) -> int:
        """Return the divisor of the loss, given the valid targets of this rank and of all ranks."""
        return everyone

    def settle(self) -> None:
        """Make the state equal on all ranks, before it is saved or evaluated; collective."""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of one forward and backward; gradients are reduced only in the last pass of a step."""
        return nullcontext()

    def after_pass(self) -> None:
        """Process the gradients of a pass; called after each backward."""

    def computed_at(self) -> float:
        """Return the time (perf_counter) at which this rank's own work ended; called after the last pass."""
        return time.perf_counter()

    def reduce(self) -> float:
        """Finish the reduction; return the norm of the global gradient, the same float on every rank."""
        return math.sqrt(sum(float(g.norm(dtype=torch.float64) ** 2) for g in self._gradients()))

    def overflowed(self) -> bool:
        """Return True if gradients of this rank did not fit the exact sum."""
        return False

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by ``factor`` (clipping, loss scale)."""
        for gradient in self._gradients():
            gradient.mul_(factor)

    def update(self, rate: float) -> None:
        """Take one optimizer step and make the new parameters visible to all ranks."""
        self.before_update()
        self.optimizer.step(rate)

    def clear(self) -> None:
        """Drop the gradients at the end of a step."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def _gradients(self) -> Iterator[Tensor]:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                yield local_part(parameter.grad)

    def _whole_parameters(self) -> list[OwnedTensor]:
        """Return every parameter as owned, for ranks that own no slices (a DTensor stands for its local part)."""
        named = dict(self.module.named_parameters())
        return [OwnedTensor(name, named[name], self.decays[name]) for name in self.names]

    def loss(self, inputs: Inputs, *, evaluating: bool = False) -> tuple[Tensor, Tensor]:
        """Return (losses, right answers) of one pass in the configured precision; gradients stay float32.

        Losses are (samples,) or a scalar, as the task returns them.
        """
        device = self.world.device
        tensors = {name: tensor.to(device) for name, tensor in inputs.tensors.items()}
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.parallel.precision)
        with torch.autocast(device.type, dtype=precision, enabled=precision is not None):
            return self.task.loss(self.module if evaluating else self.forward, tensors)

    # --- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return tensors to save or to load into: {"model": …, "optimizer": {"<parameter>.<moment>": …}}."""
        saved = self.module.state_dict().items()
        model = {name: value.detach() for name, value in saved if torch.is_tensor(value)}
        return {"model": model, "optimizer": self._optimizer_state()}

    def _optimizer_state(self) -> dict[str, Tensor]:
        return {f"{n}.{m}": t for n, moments in self.optimizer.moments().items() for m, t in moments.items()}

    def steady_until_update(self) -> set[tuple[str, str]]:
        """Return (part, name) of the saved tensors that only `update` changes: parameters and moments."""
        model = {("model", name) for name in self.names}
        return model | {("optimizer", name) for name in self._optimizer_state()}

    def loading_state(self, saved: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Return tensors to load into; ``saved`` are the manifest's tensors by name."""
        return {part: tensors for part, tensors in self.state().items() if part != "reduction"}

    def after_load(self, updates: int) -> None:
        """Continue after ``updates`` updates with the tensors loaded into `loading_state`."""
        self.optimizer.resume(updates)

    def inexact_after(self, ranks: int) -> str:
        """Return why a resume from ``ranks`` ranks gives other bits; empty if it does not."""
        return ""

    def whole_parameters(self) -> dict[str, Tensor]:
        """Return every parameter and buffer in full, on every rank; collective."""
        whole = {}
        for name, value in self.module.state_dict().items():
            whole[name] = value.full_tensor() if isinstance(value, DTensor) else value.detach()
        return whole

    def parameters_sha256(self) -> str:
        """Return the SHA-256 of the bytes of all parameters and buffers, in name order; collective."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.whole_parameters().items()):
            digest.update(name.encode() + b"\0")
            digest.update(
                tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()

    def local_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank holds: parameters, gradients (while they exist) and optimizer."""
        moments = [t for per in self.optimizer.moments().values() for t in per.values()]
        return {
            "parameters": sum(local_part(p).nbytes for p in self.module.parameters()),
            "gradients": sum(g.nbytes for g in self._gradients()),
            "optimizer": sum(local_part(t).nbytes for t in moments),
        }


def synchronise_norms(task: Task, config: Configuration, world: World, cells: int) -> None:
    """Replace BatchNorm by torch's SyncBatchNorm, or refuse it.

    With statistics of one rank, results would depend on the assignment of lanes.
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
    """Return this rank's part of a DTensor, or any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _wrap_blocks(task: Task, config: Configuration) -> None:
    """Set up activation checkpointing and compilation, block by block, without changing names in the state."""
    for block in task.blocks():
        if config.parallel.activation_checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if config.parallel.compile:
            block.compile()
