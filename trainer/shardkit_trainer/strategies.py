"""How ranks share parameters, gradients and optimizer state: four strategies behind one small interface.

==========  ============  =====================  ===============  ========================================
strategy    parameters    gradients              optimizer        made of
==========  ============  =====================  ===============  ========================================
ddp         whole         whole                  whole            torch DDP
zero1       whole         whole                  1/ranks          torch DDP, flat slices
zero2       1/ranks (*)   1/ranks                1/ranks          fully_shard, gathered from forward to backward
zero3       1/ranks       1/ranks                1/ranks          fully_shard, gathered layer by layer
==========  ============  =====================  ===============  ========================================

(*) in exact mode zero2 keeps whole parameters and slices of gradients. Exact mode replaces DDP's reduction by
`ExactSum`.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardkit.errors import ConfigurationError

from .compression import Compression
from .configuration import Configuration
from .distributed import World
from .optimizers import LocalOptimizer, OwnedTensor, check_floating
from .reductions import ExactSum
from .slices import FlatLayout, FlatSlice
from .tasks import Inputs, Task, concatenate

__all__ = ["Strategy", "make_strategy"]


class Strategy:
    """One model on one rank of one strategy.

    A step is: ``for inputs in passes(cells): with accumulate(last): backward`` → ``reduce`` → ``scale_gradients`` →
    ``update``. Losses are sums divided by the step's count of valid targets, times `loss_scale`.

    Attributes:
        forward: what the task calls.
        before_update: called before parameters change; a checkpoint that is being copied makes the update wait.
        loss_scale: what the reduction of this strategy divides by.
        equal_passes: every rank must run the same number of passes.
        state_is_whole: every rank holds all of the state, so that one survivor is enough to go on.
    """

    loss_scale: float = 1.0
    equal_passes = False
    state_is_whole = False

    def __init__(self, task: Task, config: Configuration, world: World, cells: int):
        self.task, self.config, self.world = task, config, world
        _synchronise_norms(task, config, world, cells)
        self.module = task.model.to(world.device)
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        check_floating(named)
        self.names = [name for name, _ in named]
        # matrices decay; biases, norms and other vectors do not
        self.decays = {name: parameter.dim() >= 2 for name, parameter in named}
        self.shapes = {name: parameter.shape for name, parameter in named}
        _wrap_blocks(task, config)
        self.forward: Any = self.module
        self.before_update: Callable[[], object] = lambda: None
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

    def divisor(self, own: int, everyone: int) -> int:
        """Targets that the loss is divided by, of this rank's and the step's: the step's."""
        return everyone

    def settle(self) -> None:
        """Before the state is saved or looked at as a whole: make it the same on every rank; collective."""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Around one forward and backward; gradients leave this rank only in the last of a step."""
        return nullcontext()

    def after_pass(self) -> None:
        """After one backward."""

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
        """Drop the gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def _gradients(self) -> Iterator[Tensor]:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                yield _local(parameter.grad)

    # --- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Tensors to save, or to load into: {"model": …, "optimizer": {"<parameter>.<moment>": …}}."""
        model = {
            name: value.detach() for name, value in self.module.state_dict().items() if torch.is_tensor(value)
        }
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

    def whole_parameters(self) -> dict[str, Tensor]:
        """Every parameter and buffer in full, on every rank (collective)."""
        whole = {}
        for name, value in self.module.state_dict().items():
            whole[name] = value.full_tensor() if isinstance(value, DTensor) else value.detach()
        return whole

    def local_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds between steps: parameters, gradients (while they live), optimizer."""
        moments = [t for per in self.optimizer.moments().values() for t in per.values()]
        return {
            "parameters": sum(_local(p).nbytes for p in self.module.parameters()),
            "gradients": sum(g.nbytes for g in self._gradients()),
            "optimizer": sum(_local(t).nbytes for t in moments),
        }


class Replicated(Strategy):
    """ddp, zero1 and exact zero2: every rank holds all parameters."""

    def __init__(self, task: Task, config: Configuration, world: World, cells: int):
        super().__init__(task, config, world, cells)
        named = dict(self.module.named_parameters())
        self.parameters = [named[name] for name in self.names]
        sharded = config.parallel.strategy != "ddp"
        self.layout = FlatLayout.of(self.parameters, world.size if sharded else 1)
        self.shard = world.rank if sharded else 0
        self.state_is_whole = not sharded
        self.line = self._lay_out() if sharded else None
        self.exact: ExactSum | None = None
        self.compression: Compression | None = None
        self._last_gradient_at: float | None = None
        if config.parallel.exact != "off":
            self.exact = ExactSum(self.parameters, self.layout, config.parallel.exact, world, cells)
        else:
            self.forward = _distributed_data_parallel(self.module)
            if config.parallel.reduction != "fp32":
                self.compression = Compression(self.names, self.parameters, config.parallel, world)
                hook = self.compression.hook
                # DDP reads the annotations of what it is given, so it gets a function without any
                self.forward.register_comm_hook(None, lambda _state, bucket: hook(bucket))
            self.loss_scale = float(world.size)
            # without rebalancing it is telemetry, and may not cost: the gradients that come last in a chain of layers
            self._note_gradients(self.parameters if config.parallel.rebalance else self.parameters[:2])
        self.keeps_whole_gradients = self.exact is None or config.parallel.strategy != "zero2"
        self.cuts = self.layout.owned(self.shard)
        self.optimizer = LocalOptimizer(self._owned(), config.optimizer, fused=self.exact is None)

    def _lay_out(self) -> Tensor:
        """Move the parameters onto one line, so that the new values of all slices arrive by one gather."""
        line = torch.zeros(self.layout.total, device=self.world.device)
        for parameter, offset, length in zip(
            self.parameters, self.layout.offsets, self.layout.lengths, strict=True
        ):
            view = line[offset : offset + length].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        return line

    def _note_gradients(self, parameters: Sequence[Any]) -> None:
        """The last backward of a step ends with waiting for others' buckets; this rank's gradients are there before."""

        def note(_parameter: Tensor) -> None:
            self._last_gradient_at = time.perf_counter()

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(note)

    def computed_at(self) -> float:
        """With DDP, when the last gradient was there."""
        return self._last_gradient_at or time.perf_counter()

    def _owned(self) -> list[OwnedTensor]:
        if self.line is None:
            return [
                OwnedTensor(n, p, self.decays[n]) for n, p in zip(self.names, self.parameters, strict=True)
            ]
        owned = []
        for index, low, high in self.cuts:
            slice_ = self.parameters[index].detach().view(-1)[low:high]
            owned.append(OwnedTensor(self.names[index], slice_, self.decays[self.names[index]]))
        return owned

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """DDP reduces in the last backward only."""
        if self.exact is not None or last:
            return nullcontext()
        no_sync: AbstractContextManager[None] = self.forward.no_sync()
        return no_sync

    def after_pass(self) -> None:
        """Exact mode: this cell's gradient goes into the integer sum."""
        if self.exact is not None:
            self.exact.add_cell()

    def reduce(self) -> float:
        """DDP has reduced in the backward; the exact sum is reduced here. Hands each owned tensor its gradient."""
        if self.exact is None:
            norm = super().reduce()
            if self.compression is None:
                self.world.bytes_moved += sum(p.nbytes for p in self.parameters)
        else:
            norm = self.exact.reduce()
            whole = ((i, 0, length) for i, length in enumerate(self.layout.lengths))
            for index, low, high in whole if self.keeps_whole_gradients else ():
                parameter = self.parameters[index]
                parameter.grad = self.exact.gradient(index, low, high).view(parameter.shape)
        if self.line is not None:
            for owned, (index, low, high) in zip(self.optimizer.owned, self.cuts, strict=True):
                owned.tensor.grad = self._gradient_of(index, low, high)
        return norm

    def _gradient_of(self, index: int, low: int, high: int) -> Tensor | None:
        if self.exact is not None and not self.keeps_whole_gradients:
            return self.exact.gradient(index, low, high)
        whole = self.parameters[index].grad
        return None if whole is None else whole.view(-1)[low:high]

    def overflowed(self) -> bool:
        """Exact mode: a value outside the fixed-point range, or not finite."""
        return self.exact is not None and self.exact.overflowed

    def _gradients(self) -> Iterator[Tensor]:
        if self.keeps_whole_gradients:
            yield from super()._gradients()
        else:
            yield from (o.tensor.grad for o in self.optimizer.owned if o.tensor.grad is not None)

    def update(self, rate: float) -> None:
        """Update the owned elements; with slices, gather everybody's."""
        super().update(rate)
        if self.line is not None:
            start = self.shard * self.layout.share
            # a copy: gloo may not gather into the buffer that it sends from
            self.world.gather_slices(self.line, self.line[start : start + self.layout.share].clone())

    def clear(self) -> None:
        """Drop gradients and sums."""
        super().clear()
        for owned in self.optimizer.owned:
            owned.tensor.grad = None
        if self.exact is not None:
            self.exact.clear()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """As everywhere, with what compression has not sent yet."""
        found = super().state()
        return found if self.compression is None else {**found, "reduction": self.compression.state()}

    def loading_state(self, saved: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """What compression has not sent can come from another number of ranks."""
        found = super().loading_state(saved)
        return (
            found
            if self.compression is None
            else {**found, "reduction": self.compression.loading_state(saved)}
        )

    def after_load(self, updates: int) -> None:
        """Take over what was loaded."""
        super().after_load(updates)
        if self.compression is not None:
            self.compression.after_load()

    def _optimizer_state(self) -> dict[str, Tensor]:
        if self.line is None:
            return super()._optimizer_state()
        moments = self.optimizer.moments()
        state: dict[str, Tensor] = {}
        cuts = {self.names[index]: (low, high) for index, low, high in self.cuts}
        for name in self.names:
            low, high = cuts.get(name, (0, 0))
            for moment in self.optimizer.moment_names():
                run = moments[name][moment] if low < high else torch.empty(0, device=self.world.device)
                state[f"{name}.{moment}"] = FlatSlice(run, self.shapes[name], low)
        return state


class CollectiveClock:
    """fully_shard's own collectives, and the seconds that this rank was inside of them, most of them waiting."""

    def __init__(self) -> None:
        # torch 2.13 renames both and warns about the old names
        single = hasattr(dist, "all_gather_single")
        gather = dist.all_gather_single if single else dist.all_gather_into_tensor
        scatter = dist.reduce_scatter_single if single else dist.reduce_scatter_tensor
        self.gather: Any = _Timed(self, gather)  # torch asks for classes of its own that it does not export
        self.scatter: Any = _Timed(self, scatter)
        self.seconds = 0.0

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class _Timed:
    """One collective, as `FSDPModule.set_custom_all_gather` and its twin expect it."""

    def __init__(self, clock: CollectiveClock, collective: Callable[..., Any]):
        self._clock, self._collective = clock, collective

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **named: Any) -> Any:
        started = time.perf_counter()
        work = self._collective(output_tensor, input_tensor, **named)
        self._clock.seconds += time.perf_counter() - started
        return work


class FullySharded(Strategy):
    """zero2 and zero3: torch's fully_shard; the optimizer works on each rank's rows."""

    def __init__(self, task: Task, config: Configuration, world: World, cells: int):
        super().__init__(task, config, world, cells)
        shards = config.parallel.shard_ranks or world.size
        if world.size % shards:
            raise ConfigurationError(
                f"parallel.shard_ranks = {shards}: {world.size} ranks are no multiple of it"
            )
        self.replicas = world.size // shards
        names = ("dp_replicate", "dp_shard")
        mesh: DeviceMesh = init_device_mesh(world.device.type, (self.replicas, shards), mesh_dim_names=names)
        if self.replicas == 1:
            mesh = mesh["dp_shard"]
        self.equal_passes = config.parallel.strategy == "zero3"
        self._clock = CollectiveClock()
        for block in (*task.blocks(), self.module):
            sharded = fully_shard(block, mesh=mesh, reshard_after_forward=self.equal_passes)
            # plain sums: gloo lacks the scaled ones, and the loss is scaled already
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            if config.parallel.rebalance:
                sharded.set_custom_all_gather(self._clock.gather)
                sharded.set_custom_reduce_scatter(self._clock.scatter)
        named = dict(self.module.named_parameters())
        owned = [OwnedTensor(name, named[name], self.decays[name]) for name in self.names]
        self.optimizer = LocalOptimizer(owned, config.optimizer, fused=True)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """zero2 reduces in the last pass; zero3 in every one, since it may not keep whole gradients."""
        assert isinstance(self.module, FSDPModule)
        if not self.equal_passes:
            self.module.set_requires_gradient_sync(last)
            self.module.set_reshard_after_backward(last)
        return nullcontext()

    def computed_at(self) -> float:
        """As if the passes had not waited for other ranks: without the time inside of collectives."""
        return time.perf_counter() - self._clock.take()

    def reduce(self) -> float:
        """The norm over all shards, of which each replica has every one."""
        squares = sum(float(g.norm(dtype=torch.float64) ** 2) for g in self._gradients()) / self.replicas
        total = torch.tensor([squares], dtype=torch.float64, device=self.world.device)
        moved = sum(_local(p).nbytes for p in self.module.parameters()) * self.world.size // self.replicas
        self.world.bytes_moved += moved * (3 if self.equal_passes else 2)
        return math.sqrt(float(self.world.all_reduce(total)))


def make_strategy(task: Task, config: Configuration, world: World, cells: int) -> Strategy:
    """The strategy that the configuration names; ``cells``, those of a whole step, bound the sums of exact mode."""
    if config.parallel.sync_every > 1:
        from .local_steps import LocalSteps

        return LocalSteps(task, config, world, cells)
    sharded = config.parallel.strategy in {"zero2", "zero3"} and config.parallel.exact == "off"
    return FullySharded(task, config, world, cells) if sharded else Replicated(task, config, world, cells)


def _synchronise_norms(task: Task, config: Configuration, world: World, cells: int) -> None:
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
    if reason:
        raise ConfigurationError(f'the model has BatchNorm: {reason}; use GroupNorm (model.norm = "group")')
    if world.size > 1:
        task.model = nn.SyncBatchNorm.convert_sync_batchnorm(task.model)  # type: ignore[no-untyped-call]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _distributed_data_parallel(module: nn.Module) -> DistributedDataParallel:
    """Torch's DDP; every rank has made the same parameters, and buffers are each rank's own."""
    # torch 2.13 renames broadcast_buffers and warns about the old name
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    synced: dict[str, Any] = {name: False}
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **synced)


def _wrap_blocks(task: Task, config: Configuration) -> None:
    """Activation checkpointing and compilation, block by block, without new names in the state."""
    for block in task.blocks():
        if config.parallel.activation_checkpointing:
            block.forward = _recomputed(block.forward)
        if config.parallel.compile:
            block.compile()


def _recomputed(forward: Any) -> Any:
    def run(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False)

    return run


@contextmanager
def autocast(config: Configuration, device: torch.device) -> Iterator[None]:
    """The computation's precision; gradients are reduced in float32."""
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.parallel.precision)
    with torch.autocast(device.type, dtype=precision, enabled=precision is not None):
        yield
