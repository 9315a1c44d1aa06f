"""ddp and zero1 by torch's DDP, and every strategy's exact mode: each rank holds all parameters."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardkit.torch import FlatSlice

from .compression import Compression
from .configuration import Configuration
from .distributed import World
from .optimizers import LocalOptimizer, OwnedTensor
from .reductions import ExactSum
from .slices import FlatLayout
from .strategy import Strategy
from .tasks import Task

__all__ = ["Replicated"]


class LastGradient:
    """When the last gradient of a step was there: the backward goes on, waiting for others' buckets.

    A hook of a parameter, and nothing but that: torch's collector does not see through such hooks, so a strategy that
    was one would live on, and with it the group that it belongs to.
    """

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
                # DDP reads the annotations of what it is given, so it gets a function without any
                self.forward.register_comm_hook(None, lambda _state, bucket: hook(bucket))
            self.loss_scale = float(world.size)
            # without rebalancing it is telemetry, and may not cost: the gradients that come last in a chain of layers
            for parameter in self.parameters if config.parallel.rebalance else self.parameters[:2]:
                parameter.register_post_accumulate_grad_hook(self._gradients_seen)  # type: ignore[no-untyped-call]
        self.keeps_whole_gradients = config.parallel.strategy != "zero2"
        self.cuts = self.layout.owned(self.shard) if sharded else []
        owned = self._slices() if sharded else self._whole_parameters()
        self.optimizer = LocalOptimizer(owned, config.optimizer, fused=self.exact is None)

    def _lay_out(self) -> Tensor:
        """Move the parameters onto one line, so that the new values of all slices arrive by one gather."""
        line = torch.zeros(self.layout.total, device=self.world.device)
        for parameter, view in zip(self.parameters, self.layout.views(line), strict=True):
            view = view.view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        return line

    def computed_at(self) -> float:
        """With DDP, when the last gradient was there."""
        return self._gradients_seen.at or time.perf_counter()

    def _slices(self) -> list[OwnedTensor]:
        owned = []
        for index, low, high in self.cuts:
            name, whole = self.names[index], self.parameters[index].detach().view(-1)
            owned.append(OwnedTensor(name, whole[low:high], self.decays[name]))
        return owned

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """DDP reduces in the last backward only."""
        within: Any = nullcontext if self.exact is not None or last else self.forward.no_sync
        return cast("AbstractContextManager[None]", within())

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
            for index, parameter in enumerate(self.parameters if self.keeps_whole_gradients else ()):
                parameter.grad = self.exact.gradient(index, 0, parameter.numel()).view(parameter.shape)
        for (index, low, high), owned in zip(
            self.cuts, self.optimizer.owned, strict=False
        ):  # ddp cuts nothing
            whole = self.parameters[index].grad
            if self.exact is not None and not self.keeps_whole_gradients:
                owned.tensor.grad = self.exact.gradient(index, low, high)
            elif whole is not None:
                owned.tensor.grad = whole.view(-1)[low:high]
        return norm

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
        if self.compression is not None:
            self.compression.commit()
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
        if self.compression is not None:
            self.compression.forget()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """As everywhere, with what compression has not sent yet."""
        found = super().state()
        if self.compression is not None:
            found["reduction"] = self.compression.state()
        return found

    def loading_state(self, saved: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """What compression has not sent can come from another number of ranks."""
        found = super().loading_state(saved)
        if self.compression is not None:
            found["reduction"] = self.compression.loading_state(saved)
        return found

    def after_load(self, updates: int) -> None:
        """Take over what was loaded."""
        super().after_load(updates)
        if self.compression is not None:
            self.compression.after_load()

    def inexact_after(self, ranks: int) -> str:
        """Only int8 does not depend on DDP's buckets."""
        kind = self.config.parallel.reduction
        if self.compression is None or (kind == "int8" and ranks == self.world.size):
            return ""
        if ranks != self.world.size and kind != "bf16":
            return f"what {kind} had not sent is shared out among {self.world.size} ranks, not {ranks}"
        return f"the first step of a process has other buckets, and {kind} depends on them"

    def misplaced(self) -> str:
        """Its slice must be that of its rank."""
        if self.line is None or (self.shard, self.layout.shards) == (self.world.rank, self.world.size):
            return ""
        return f"owns slice {self.shard} of {self.layout.shards}, and is rank {self.world.rank} of {self.world.size}"

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
    """Torch's DDP; every rank has made the same parameters, and buffers are each rank's own."""
    # torch 2.13 renames broadcast_buffers and warns about the old name
    new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    synced: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **synced)
