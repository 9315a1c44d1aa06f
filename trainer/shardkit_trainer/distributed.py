"""The process group, the small collectives of a step, and the name of the rank that everybody waits for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardkit.errors import RunError

from .configuration import Configuration

__all__ = ["STAGES", "World", "join_world", "leave_world"]

STAGES = ("start", "data", "exchange", "compute", "reduce", "step", "checkpoint", "end")


@dataclass
class World:
    """This process among the ranks of a run.

    Attributes:
        rank, size: as in torch.
        device: where the model lives.
        store: of the rendezvous; carries the heartbeats.
        owned: whether `leave_world` destroys the process group (it was made here).
        bytes_moved: payload bytes of the collectives that the trainer itself issued, counted once per rank.
    """

    rank: int
    size: int
    device: torch.device
    store: dist.Store
    owned: bool
    bytes_moved: int = 0
    _place: tuple[int, str] = field(default=(0, "start"))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        self.bytes_moved += tensor.numel() * tensor.element_size()
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's row of integers, by rank."""
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return [row.tolist() for row in rows]

    def gather_slices(self, whole: Tensor, mine: Tensor) -> None:
        """Fill ``whole`` (size · n) with every rank's n elements."""
        self.bytes_moved += whole.numel() * whole.element_size()
        if self.size == 1:
            whole.copy_(mine)
        elif hasattr(dist, "all_gather_single"):  # the name since torch 2.13; the older one warns there
            dist.all_gather_single(whole, mine)
        else:
            dist.all_gather_into_tensor(whole, mine)

    def report(self, step: int, stage: str) -> None:
        """Heartbeat: which stage of which step this rank has entered."""
        self._place = (step, stage)
        self.store.set(f"alive/{self.rank}", f"{step} {STAGES.index(stage)}")

    def describe_failure(self, error: BaseException) -> RunError:
        """Turn a failed collective into an error that names the ranks that did not get so far."""
        step, stage = self._place
        behind = []
        for rank in range(self.size):
            place = self._last_report(rank)
            if rank != self.rank and place < (step, STAGES.index(stage)):
                at = f"step {place[0]}, stage {STAGES[place[1]]}" if place[0] >= 0 else "the start"
                behind.append(f"rank {rank} (last seen at {at})")
        names = ", ".join(behind) or "no rank is behind by its heartbeat: look at the network"
        return RunError(
            f"rank {self.rank} waited in step {step}, stage {stage}, for: {names}. It died, is frozen, or is slower than"
            f" parallel.timeout_s; restart the run: it goes on from its newest checkpoint ({error})"
        )

    def _last_report(self, rank: int) -> tuple[int, int]:
        with suppress(RuntimeError):
            key = f"alive/{rank}"
            if self.store.check([key]):
                step, stage = self.store.get(key).decode().split()
                return int(step), int(stage)
        return (-1, 0)


def join_world(config: Configuration) -> World:
    """Join the process group that the environment describes, or make one of this process alone.

    The store is prefixed by torchrun's restart count: workers of a restarted job otherwise read the addresses of the
    dead ones from the agent's store and hang (pytorch issue 135712).
    """
    cuda = config.run.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(config.parallel.threads)
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only way to the store of a given group
        return World(dist.get_rank(), dist.get_world_size(), device, store, owned=False)
    timeout = timedelta(seconds=config.parallel.timeout_s)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    found: dist.Store = dist.HashStore()
    if "RANK" in os.environ:
        found, rank, size = next(iter(dist.rendezvous("env://", rank, size, timeout=timeout)))
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", found)
    store.set_timeout(timeout)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return World(rank, size, device, store, owned=True)


def leave_world(world: World) -> None:
    """Destroy the group that `join_world` made."""
    if world.owned and dist.is_initialized():
        dist.destroy_process_group()
