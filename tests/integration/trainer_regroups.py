"""Ranks that are forked from a process with torch in it, die where a script says, and are replaced.

A start costs no import of torch, so that hundreds of deaths can be tried. The script is JSON in SHARDKIT_TEST_SCRIPT:

    {"die": [[process, stage, step], …], "wait": [[step, generation], …], "late": [[process, generation, step], …]}

A process dies by SIGKILL as soon as it enters that stage of that step, or of a later one where it was not in it then.
``gather`` lies inside of an update of zero1; ``put``, ``finish`` and ``prune`` are the n-th write, publishing and
pruning of checkpoints. At a ``wait`` step ranks stand still until the supervisor has announced that group. A
``late`` process starts when the first rank of that group has come to that step. ``"nan": [[step, lane], …]`` are
cells without a finite loss; ``"cost": [[process, ms], …]`` is what rebalancing hears of that process's cells.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit.errors import RunError
from shardkit_trainer.configuration import ModelConfig, load_configuration
from shardkit_trainer.distributed import World, leave_world
from shardkit_trainer.strategies import make_strategy
from shardkit_trainer.supervisor import ADDRESS, NAME
from shardkit_trainer.tasks import Inputs
from tests.integration import forked

LANES = 8
SCRIPT = "SHARDKIT_TEST_SCRIPT"
PATIENCE_S = 300.0  # of a loaded machine


class Network(nn.Module):
    """Odd sizes: shards are uneven, and the last layer has fewer rows than a group of four ranks."""

    passes: Tensor

    def __init__(self, width: int, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.register_buffer("passes", torch.zeros(1))
        self.hidden, self.middle, self.last = nn.Linear(5, width), nn.Linear(width, 9), nn.Linear(9, 3)

    def forward(self, features: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.counts:
            self.passes += 1
        found: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.hidden(features)))))
        return found


class NetworkTask:
    """Targets that a network of this size cannot meet: gradients stay far from zero, where Adam blows last bits up."""

    unit = "sample"

    def __init__(self, width: int = 7, counts: bool = False) -> None:
        self.model: nn.Module = Network(width, counts)

    def prepare(self, cell: Any, seed: int) -> Inputs:
        numbers = torch.as_tensor(cell.samples, dtype=torch.float32)[:, None]
        features = torch.sin(numbers * torch.arange(1, 6) * 0.37)
        targets = 2.0 + torch.cos(numbers * torch.arange(1, 4) * 1.91)
        if [cell.step, cell.lane] in json.loads(os.environ.get(SCRIPT, "{}")).get("nan", ()):
            features *= torch.nan
        return Inputs({"features": features, "targets": targets}, len(numbers), len(numbers))

    def empty(self) -> Inputs:
        return Inputs({"features": torch.zeros(1, 5), "targets": torch.full((1, 3), torch.nan)}, 0, 0)

    def loss(self, forward: Callable[..., Any], tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        found, targets = forward(tensors["features"]), tensors["targets"]
        counts = torch.isfinite(targets)
        loss = torch.where(counts, found - torch.where(counts, targets, 0.0), 0.0).square().sum()
        return loss, torch.zeros((), dtype=torch.int64)

    def blocks(self) -> Sequence[nn.Module]:
        return [self.model.hidden, self.model.middle]  # type: ignore[list-item]


def make(config: ModelConfig, _dataset: Any) -> NetworkTask:
    return NetworkTask(config.width, bool(config.arguments.get("counts")))


def become_rank(arguments: Sequence[str]) -> None:
    """In the forked process."""
    script, process = json.loads(os.environ[SCRIPT]), int(os.environ[NAME].partition("-")[2])
    for who, generation, step in script.get("late", ()):
        if who == process:
            wait_for_step(os.environ[ADDRESS], f"generation-{generation}/alive/0", step)
    follow(script, process)
    forked.become_rank(arguments)


class Scripted(forked.ForkedRank):
    """A rank that follows the script."""

    work = staticmethod(become_rank)


def wait_for_step(address: str, heartbeat: str, step: int) -> None:
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), is_master=False)  # type: ignore[attr-defined]
    store.wait([heartbeat])
    while int(store.get(heartbeat).split()[0]) < step:
        time.sleep(0.005)


def follow(script: Mapping[str, Any], process: int) -> None:
    """Make this process die, and wait, where the script says."""
    deaths = [(stage, step) for who, stage, step in script.get("die", ()) if who == process]
    waits = dict(script.get("wait", ()))
    report, gather = World.report, World.gather_slices
    kill_inside = import_module("trainer_histogram").kill_inside
    for who, cost_ms in script.get("cost", ()):
        if who == process:
            import_module("trainer_histogram").tell_cost(cost_ms / 1000)
    for stage, count in deaths:
        if stage in {"put", "finish", "prune"}:
            kill_inside(stage, count)

    def report_and_die(self: World, step: int, stage: str) -> None:
        report(self, step, stage)
        if any(stage == where and step >= when for where, when in deaths):
            os.kill(os.getpid(), signal.SIGKILL)
        if stage == "data" and step in waits:
            deadline = time.monotonic() + PATIENCE_S
            while self.membership is not None and self.membership.newest() < waits[step]:
                assert time.monotonic() < deadline, "the group that the script waits for does not come"
                time.sleep(0.005)
        self.scripted_step = step  # type: ignore[attr-defined]

    def gather_and_die(self: World, whole: Tensor, mine: Tensor) -> None:
        if any(where == "gather" and self.scripted_step >= when for where, when in deaths):  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        gather(self, whole, mine)

    World.report, World.gather_slices = report_and_die, gather_and_die  # type: ignore[method-assign]


def swap_places(rank: int, folder: str, torch_cannot_tell: bool) -> None:
    """Two ranks form a group, then another one in which they have changed places; is the new state laid out for it?"""
    from shardkit_trainer.recovery import check_layout

    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]
    config = load_configuration(
        None, ["run.directory=unused", "data.dataset=unused", "parallel.strategy=zero3"]
    )
    timeout = timedelta(seconds=60)
    for turn, place in enumerate((rank, 1 - rank)):
        under = dist.PrefixStore(f"turn-{turn}", store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=under, rank=place, world_size=2, timeout=timeout)
        world = World(place, 2, torch.device("cpu"), under, owned=True)
        if torch_cannot_tell:
            world.number = 0
            world.owned = False  # what torch has derived from the first mesh stays
        strategy = make_strategy(NetworkTask(), config, world, LANES)
        found = ""
        try:
            check_layout(world, strategy)
        except RunError as error:
            found = str(error)
        Path(f"{folder}/{turn}-{place}").write_text(found)
        leave_world(world)
        if not world.owned:
            dist.destroy_process_group()
