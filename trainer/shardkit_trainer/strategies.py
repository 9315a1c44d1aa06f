"""How parameters, gradients and optimizer state are divided among ranks: four strategies, and local steps.

==========  ============  =====================  ===============  ========================================
strategy    parameters    gradients              optimizer        implementation
==========  ============  =====================  ===============  ========================================
ddp         whole         whole                  whole            torch DDP
zero1       whole         whole                  1/ranks          torch DDP, flat slices
zero2       1/ranks (*)   1/ranks                1/ranks          fully_shard, gathered from forward to backward
zero3       1/ranks       1/ranks                1/ranks          fully_shard, gathered layer by layer
==========  ============  =====================  ===============  ========================================

(*) In exact mode zero2 keeps whole parameters, as zero1 does, and both keep only slices of gradients. Exact mode
replaces DDP's reduction by `ExactSum`. Local steps (SPEC.md §9) are ddp whose replicas are averaged every H steps.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardkit.torch import FlatSlice

from .configuration import Configuration, expect
from .distributed import World, all_gather_single, reduce_scatter_single
from .optimizer import FlatLayout, LocalOptimizer, OwnedTensor
from .reductions import Compression, ExactSum
from .tasks import Inputs, Task, concatenate, synchronise_norms, wrap_blocks

LOSS_BITS = 20
"""Fraction bits of summed losses: integers give the same sum in any order."""


class Strategy:
    """Base of all strategies: one model on one rank.

    A step is: ``for inputs in passes(cells): with accumulate(last): backward`` → ``reduce`` → ``scale_gradients`` →
    ``update``. Losses are sums divided by the step's number of valid targets, times `loss_scale`.
    """

    loss_scale: float = 1.0  # divisor of the strategy's reduction
    equal_passes = False  # whether all ranks must run the same number of passes

    def __init__(self, task: Task, config: Configuration, world: World, cells: int):
        self.task, self.config, self.world = task, config, world
        synchronise_norms(task, config, world, cells)
        self.module = task.model.to(world.device)
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        for name, parameter in named.items():  # the flat layout holds no other type
            advice = "expected float32 (parallel.precision lowers the computation)"
            expect((parameter.dtype == torch.float32, f"parameter {name} is {parameter.dtype}; {advice}"))
        self.names, self.parameters = list(named), list(named.values())
        # matrices decay; biases, norms and other vectors do not
        self.decays = {name: parameter.dim() >= 2 for name, parameter in named.items()}
        self.shapes = {name: parameter.shape for name, parameter in named.items()}
        wrap_blocks(task, config)
        self.forward: Any = self.module  # the model that the task calls
        # called before parameters change; waits for a checkpoint that is being copied
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


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TimedCollective:
    """A timed collective for `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter`.

    Attributes:
        seconds: time of this rank in the collective, mostly spent waiting.
    """

    def __init__(self, collective: Callable[..., Any]):
        self._collective, self.seconds = collective, 0.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **named: Any) -> Any:
        started = time.perf_counter()
        work = self._collective(output_tensor, input_tensor, **named)
        self.seconds += time.perf_counter() - started
        return work


class FullySharded(Strategy):
    """zero2 and zero3: torch's fully_shard. The optimizer updates each rank's rows."""

    def __init__(self, task: Task, config: Configuration, world: World, cells: int):
        super().__init__(task, config, world, cells)
        shards = config.parallel.shard_ranks or world.size  # ranks that share one copy
        several = f"parallel.shard_ranks = {shards}: {world.size} ranks are no multiple of it"
        expect((world.size % shards == 0, several))
        self.replicas = world.size // shards
        names = ("replicas", "shards")
        mesh: DeviceMesh = init_device_mesh(world.device.type, (self.replicas, shards), mesh_dim_names=names)
        mesh = mesh["shards"] if self.replicas == 1 else mesh
        self.equal_passes = config.parallel.strategy == "zero3"
        # torch does not export its own classes for these; it accepts any object with the same methods
        timed: Any = TimedCollective
        self._gather, self._scatter = timed(all_gather_single), timed(reduce_scatter_single)
        for block in (*task.blocks(), self.module):
            sharded = fully_shard(block, mesh=mesh, reshard_after_forward=self.equal_passes)
            # plain sums: gloo has no scaled sums, and the loss is scaled already
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            if config.parallel.rebalance:
                sharded.set_custom_all_gather(self._gather)
                sharded.set_custom_reduce_scatter(self._scatter)
        self.optimizer = LocalOptimizer(self._whole_parameters(), config.optimizer, fused=True)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Reduce in the last pass with zero2, and in every pass with zero3, which may not keep whole gradients."""
        assert isinstance(self.module, FSDPModule)
        if not self.equal_passes:
            self.module.set_requires_gradient_sync(last)
            self.module.set_reshard_after_backward(last)
        return nullcontext()

    def computed_at(self) -> float:
        """Return the time at which the passes would have ended without the time spent in collectives."""
        waited = self._gather.seconds + self._scatter.seconds
        self._gather.seconds = self._scatter.seconds = 0.0
        return time.perf_counter() - float(waited)

    def reduce(self) -> float:
        squares = super().reduce() ** 2 / self.replicas
        total = torch.tensor([squares], dtype=torch.float64, device=self.world.device)
        moved = sum(local_part(p).nbytes for p in self.module.parameters()) * self.world.size // self.replicas
        self.world.bytes_moved += moved * (3 if self.equal_passes else 2)
        return math.sqrt(float(self.world.all_reduce(total)))


class LastGradient:
    """Time of a step's last gradient. The backward pass ends later, since it waits for buckets of other ranks."""

    at: float | None = None

    def __call__(self, _parameter: Tensor) -> None:
        self.at = time.perf_counter()


class Replicated(Strategy):
    """ddp, zero1 and exact zero2: every rank holds all parameters."""

    def __init__(self, task: Task, config: Configuration, world: World, cells: int):
        super().__init__(task, config, world, cells)
        sharded = config.parallel.strategy != "ddp"
        self.layout = FlatLayout.of(self.parameters, world.size if sharded else 1)
        self.shard = world.rank if sharded else 0
        self.line = self._lay_out() if sharded else None
        self.exact: ExactSum | None = None
        self.compression: Compression | None = None
        self._gradients_seen = LastGradient()
        if config.parallel.exact != "off":
            self.exact = ExactSum(self.parameters, self.layout, config.parallel.exact, world, cells)
        else:
            self.forward = _distributed_data_parallel(self.module)
            if config.parallel.reduction != "fp32":
                self.compression = Compression(self.names, self.parameters, config.parallel, world)
                hook = self.compression.hook
                # DDP checks a hook's annotations, so it gets a function without any
                self.forward.register_comm_hook(None, lambda _state, bucket: hook(bucket))
            self.loss_scale = float(world.size)
            # only telemetry without rebalancing: cheap hooks on the first layers, whose gradients come last
            for parameter in self.parameters if config.parallel.rebalance else self.parameters[:2]:
                parameter.register_post_accumulate_grad_hook(self._gradients_seen)  # type: ignore[no-untyped-call]
        whole = [(index, 0, length) for index, length in enumerate(self.layout.lengths)]
        self.cuts = self.layout.owned(self.shard) if sharded else whole
        owned = self._slices() if sharded else self._whole_parameters()
        self.optimizer = LocalOptimizer(owned, config.optimizer, fused=self.exact is None)

    def _lay_out(self) -> Tensor:
        """Move the parameters into one flat tensor, so that one gather collects the new values of all slices."""
        line = torch.zeros(self.layout.total, device=self.world.device)
        for parameter, view in zip(self.parameters, self.layout.views(line), strict=True):
            view = view.view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        return line

    def computed_at(self) -> float:
        return self._gradients_seen.at or time.perf_counter()

    def _slices(self) -> list[OwnedTensor]:
        owned = []
        for index, low, high in self.cuts:
            name, whole = self.names[index], self.parameters[index].detach().view(-1)
            owned.append(OwnedTensor(name, whole[low:high], self.decays[name]))
        return owned

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        within: Any = nullcontext if self.exact is not None or last else self.forward.no_sync
        return cast("AbstractContextManager[None]", within())

    def after_pass(self) -> None:
        if self.exact is not None:
            self.exact.add_cell()

    def reduce(self) -> float:
        """Reduce the exact sum (DDP has reduced in the backward pass), and set the gradient of each owned tensor."""
        norm = super().reduce() if self.exact is None else self.exact.reduce()
        if self.exact is None and self.compression is None:
            self.world.bytes_moved += sum(p.nbytes for p in self.parameters)
        for (index, low, high), owned in zip(self.cuts, self.optimizer.owned, strict=True):
            whole = self.parameters[index].grad
            if self.exact is not None:
                owned.tensor.grad = self.exact.gradient(index, low, high).view(owned.tensor.shape)
            elif self.line is not None and whole is not None:
                owned.tensor.grad = whole.view(-1)[low:high]
        return norm

    def overflowed(self) -> bool:
        return self.exact is not None and self.exact.overflowed

    def _gradients(self) -> Iterator[Tensor]:
        if self.exact is None:
            yield from super()._gradients()
        else:
            yield from (o.tensor.grad for o in self.optimizer.owned if o.tensor.grad is not None)

    def update(self, rate: float) -> None:
        super().update(rate)
        if self.compression is not None:
            self.compression.commit()
        if self.line is not None:
            start = self.shard * self.layout.share
            # a copy: gloo may not gather into the buffer that it sends from
            self.world.gather_slices(self.line, self.line[start : start + self.layout.share].clone())

    def clear(self) -> None:
        super().clear()
        for owned in self.optimizer.owned:
            owned.tensor.grad = None
        if self.exact is not None:
            self.exact.clear()
        if self.compression is not None:
            self.compression.forget()

    def state(self) -> dict[str, dict[str, Tensor]]:
        found = super().state()
        if self.compression is not None:
            found["reduction"] = self.compression.state()
        return found

    def loading_state(self, saved: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        found = super().loading_state(saved)
        if self.compression is not None:
            found["reduction"] = self.compression.loading_state(saved)
        return found

    def after_load(self, updates: int) -> None:
        super().after_load(updates)
        if self.compression is not None:
            self.compression.after_load()

    def inexact_after(self, ranks: int) -> str:
        """Return the reason why results differ after a resume, empty if there is none.

        Only int8 is independent of DDP's buckets.
        """
        kind = self.config.parallel.reduction
        if self.compression is None or (kind == "int8" and ranks == self.world.size):
            return ""
        if ranks != self.world.size and kind != "bf16":
            return f"what {kind} had not sent is shared out among {self.world.size} ranks, not {ranks}"
        return f"the first step of a process has other buckets, and {kind} depends on them"

    def _optimizer_state(self) -> dict[str, Tensor]:
        if self.line is None:
            return super()._optimizer_state()
        moments = self.optimizer.moments()
        state: dict[str, Tensor] = {}
        cuts = {self.names[index]: (low, high) for index, low, high in self.cuts}
        for name in self.names:
            low, high = cuts.get(name, (0, 0))
            for moment in self.optimizer.moment_names:
                run = moments[name][moment] if low < high else torch.empty(0, device=self.world.device)
                state[f"{name}.{moment}"] = FlatSlice(run, self.shapes[name], low)
        return state


def _distributed_data_parallel(module: nn.Module) -> DistributedDataParallel:
    """Wrap a module in torch's DDP. All ranks have initialised equal parameters, and buffers stay local."""
    # torch 2.13 renames broadcast_buffers and warns about the old name
    new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    synced: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **synced)


class LocalSteps(Strategy):
    """Local steps (SPEC.md §9): whole replicas that differ between averagings.

    An averaging (`settle`) uses the change of each replica since the last one, weighted by the samples it saw, as the
    gradient of an outer Nesterov optimizer. Moments of the inner optimizer are averaged with the same weights.
    Afterwards all of the state is equal on all ranks and fits any number of ranks.
    """

    def __init__(self, task: Task, config: Configuration, world: World, cells: int):
        super().__init__(task, config, world, cells)
        self.optimizer = LocalOptimizer(self._whole_parameters(), config.optimizer, fused=True)
        self._start = [p.detach().clone() for p in self.parameters]
        self._momentum = [torch.zeros_like(p) for p in self.parameters]
        self._samples = 0
        self._since = 0  # updates since the last averaging

    def divisor(self, own: int, everyone: int) -> int:
        return own

    def passes(self, cells: Sequence[Inputs], cells_of_ranks: Sequence[int], cell_size: int) -> list[Inputs]:
        self._samples += sum(cell.samples for cell in cells)
        return super().passes(cells, cells_of_ranks, cell_size)

    def update(self, rate: float) -> None:
        super().update(rate)
        self._since += 1
        if self._since == self.config.parallel.sync_every:
            self.settle()

    def settle(self) -> None:
        if not self._since:
            return
        everyone = sum(row[0] for row in self.world.gather_integers([self._samples]))
        weight = self._samples / max(1, everyone)
        rate, momentum = self.config.parallel.outer_lr, self.config.parallel.outer_momentum
        with torch.no_grad():
            for parameter, start, velocity in zip(self.parameters, self._start, self._momentum, strict=True):
                way = self.world.all_reduce((start - parameter) * weight)
                velocity.mul_(momentum).add_(way)
                start.sub_(way.add_(velocity, alpha=momentum), alpha=rate)
                parameter.copy_(start)
            for moments in self.optimizer.moments().values():
                for tensor in moments.values():
                    tensor.copy_(self.world.all_reduce(tensor * weight))
        self._samples = self._since = 0

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {**super().state(), "outer": dict(zip(self.names, self._momentum, strict=True))}

    def after_load(self, updates: int) -> None:
        super().after_load(updates)
        for start, parameter in zip(self._start, self.parameters, strict=True):
            start.copy_(parameter.detach())
        self._samples = self._since = 0


def make_strategy(task: Task, config: Configuration, world: World, cells: int) -> Strategy:
    """Return the strategy of a configuration; ``cells``, the cells of a whole step, bound the sums of exact mode."""
    if config.parallel.sync_every > 1:
        return LocalSteps(task, config, world, cells)
    sharded = config.parallel.strategy in {"zero2", "zero3"} and config.parallel.exact == "off"
    return FullySharded(task, config, world, cells) if sharded else Replicated(task, config, world, cells)
