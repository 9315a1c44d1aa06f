"""zero2 and zero3 by torch's fully_shard, with all ranks or in groups that hold a copy each (HSDP)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from .configuration import Configuration, expect
from .distributed import World, all_gather_single, reduce_scatter_single
from .optimizers import LocalOptimizer
from .strategy import Strategy, local_part
from .tasks import Task

__all__ = ["FullySharded"]


class TimedCollective:
    """One of fully_shard's own collectives, as `FSDPModule.set_custom_all_gather` and its twin expect it.

    Attributes:
        seconds: that this rank was inside of it, most of them waiting.
    """

    def __init__(self, collective: Callable[..., Any]):
        self._collective, self.seconds = collective, 0.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer to gather or scatter into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **named: Any) -> Any:
        started = time.perf_counter()
        work = self._collective(output_tensor, input_tensor, **named)
        self.seconds += time.perf_counter() - started
        return work


class FullySharded(Strategy):
    """zero2 and zero3: torch's fully_shard; the optimizer works on each rank's rows."""

    def __init__(self, task: Task, config: Configuration, world: World, cells: int):
        super().__init__(task, config, world, cells)
        shards = _shards(config.parallel.shard_ranks, world)
        self.replicas = world.size // shards
        # Meshes of equal shape and names are equal to torch, which keeps what it has derived from the first of them,
        # such as this process's place in it: the names tell the groups that a process has been in apart.
        names = (f"replicas_{world.number}", f"shards_{world.number}")
        mesh: DeviceMesh = init_device_mesh(world.device.type, (self.replicas, shards), mesh_dim_names=names)
        self.mesh = mesh = mesh[names[1]] if self.replicas == 1 else mesh
        self.equal_passes = config.parallel.strategy == "zero3"
        # torch's own classes for these are not exported: they are matched by what they can do
        timed: Any = TimedCollective
        self._gather, self._scatter = timed(all_gather_single), timed(reduce_scatter_single)
        for block in (*task.blocks(), self.module):
            sharded = fully_shard(block, mesh=mesh, reshard_after_forward=self.equal_passes)
            # plain sums: gloo lacks the scaled ones, and the loss is scaled already
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            if config.parallel.rebalance:
                sharded.set_custom_all_gather(self._gather)
                sharded.set_custom_reduce_scatter(self._scatter)
        self.optimizer = LocalOptimizer(self._whole_parameters(), config.optimizer, fused=True)

    def misplaced(self) -> str:
        """Every DTensor must lie on the mesh of this group, at this rank's place of it."""
        rank, shards = self.world.rank, self.world.size // self.replicas
        place = [rank // shards, rank % shards][-self.mesh.ndim :]
        placements = [Replicate(), Shard(0)][-self.mesh.ndim :]
        for part, tensors in self.state().items():
            for name, tensor in tensors.items():
                if not isinstance(tensor, DTensor):
                    continue
                mesh = tensor.device_mesh
                ranks = [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]
                found = [list(mesh.get_coordinate() or ()), [one.index(rank) for one in ranks if rank in one]]
                if found != [place, place] or list(tensor.placements) != placements:
                    layout = f"at {found[0]} of {mesh.mesh.tolist()}, {list(tensor.placements)}"
                    return f"holds {part}.{name} {layout}; expected {place} of {self.world.size} ranks, {placements}"
        return ""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """zero2 reduces in the last pass; zero3 in every one, since it may not keep whole gradients."""
        assert isinstance(self.module, FSDPModule)
        if not self.equal_passes:
            self.module.set_requires_gradient_sync(last)
            self.module.set_reshard_after_backward(last)
        return nullcontext()

    def computed_at(self) -> float:
        """As if the passes had not waited for other ranks: without the time inside of collectives."""
        waited = self._gather.seconds + self._scatter.seconds
        self._gather.seconds = self._scatter.seconds = 0.0
        return time.perf_counter() - float(waited)

    def reduce(self) -> float:
        """The norm over all shards, of which each replica has every one."""
        squares = super().reduce() ** 2 / self.replicas
        total = torch.tensor([squares], dtype=torch.float64, device=self.world.device)
        moved = sum(local_part(p).nbytes for p in self.module.parameters()) * self.world.size // self.replicas
        self.world.bytes_moved += moved * (3 if self.equal_passes else 2)
        return math.sqrt(float(self.world.all_reduce(total)))


def _shards(wanted: int, world: World) -> int:
    """Ranks that share one copy: those of ``parallel.shard_ranks``, else all.

    Where ranks have died in process the others go on: all of them share one copy until their number fits again.
    """
    fits = not wanted or world.size % wanted == 0
    expect(
        (
            fits or world.generation > 0,
            f"parallel.shard_ranks = {wanted}: {world.size} ranks are no multiple of it",
        )
    )
    return wanted if wanted and fits else world.size
