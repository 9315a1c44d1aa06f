"""A model whose final parameters say which samples were trained on, and when: the data path, made visible.

Parameter s gets the gradient (times sample s is in the step) / (samples of the step). With plain SGD and a rate that
differs from step to step, its final value is −Σ rate(step) / batch over the steps that held sample s: a lost, repeated,
or misplaced sample changes it.

Faults are scripted by the environment: ``SHARDKIT_TEST_FAULT=kill:1:7`` kills rank 1 when it prepares step 7;
``freeze`` stops it, ``nan`` gives it a loss that is not a number, ``term`` sends SIGTERM to itself, ``hold2`` waits
until it is asked to stop if there are two ranks. ``put``, ``finish`` and ``prune`` kill it inside its n-th write of an
object, in publishing, and in pruning a checkpoint. For `straggler`: ``slow:3:12`` makes a cell of rank 3 cost 12 ms at
least, those of other ranks 6 ms.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardkit_trainer.configuration import ModelConfig
from shardkit_trainer.tasks import ClassifierTask, Inputs


class Histogram(nn.Module):
    def __init__(self, samples: int):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(samples))

    def forward(self, samples: Tensor) -> Tensor:
        return self.seen[samples].sum()


class HistogramTask:
    unit = "sample"

    def __init__(self, samples: int):
        self.model: nn.Module = Histogram(samples)
        self.faults = [
            fault.split(":") for fault in os.environ.get("SHARDKIT_TEST_FAULT", "").split(",") if fault
        ]
        self.rank = int(os.environ.get("RANK", "0"))
        for kind, rank, count in self.faults:
            if int(rank) == self.rank and kind in {"put", "finish", "prune"}:
                kill_inside(kind, int(count))

    def prepare(self, cell: Any, seed: int) -> Inputs:
        valid = len(cell.samples)
        for kind, rank, step in self.faults:
            if int(rank) == self.rank and int(step) == cell.step:
                numbers = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM}
                if kind in numbers:
                    os.kill(os.getpid(), numbers[kind])
                elif kind == f"hold{os.environ.get('WORLD_SIZE')}":
                    wait_for_stop()
                elif kind == "nan":
                    return Inputs(
                        {"samples": torch.as_tensor(cell.samples), "nan": torch.ones(1)}, valid, valid
                    )
        return Inputs({"samples": torch.as_tensor(cell.samples), "nan": torch.zeros(1)}, valid, valid)

    def empty(self) -> Inputs:
        return Inputs({"samples": torch.zeros(0, dtype=torch.int64), "nan": torch.zeros(1)}, 0, 0)

    def loss(self, forward: Callable[..., Any], tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss = forward(tensors["samples"])
        if float(tensors["nan"].sum()):
            loss = loss * float("nan")
        return loss, torch.zeros((), dtype=torch.int64)

    def blocks(self) -> Sequence[nn.Module]:
        return []


def make(config: ModelConfig, dataset: Any) -> HistogramTask:
    return HistogramTask(len(dataset))


class Straggler(ClassifierTask):
    """A real model whose cells cost sleep: four ranks share two cores, and sleep is what they do not share."""

    def cell_ms(self) -> int:
        """Milliseconds that a cell of this rank costs."""
        faults = [fault.split(":") for fault in os.environ.get("SHARDKIT_TEST_FAULT", "").split(",") if fault]
        slow = {rank: int(ms) for kind, rank, ms in faults if kind == "slow"}
        return slow.get(os.environ.get("RANK", "0"), 6)

    def prepare(self, cell: Any, seed: int) -> Inputs:
        time.sleep(self.cell_ms() / 1000)
        return super().prepare(cell, seed)


def straggler(config: ModelConfig, dataset: Any) -> Straggler:
    task = Straggler(config, dataset)
    tell_cost(task.cell_ms() / 1000)
    return task


def tell_cost(seconds: float) -> None:
    """Tell rebalancing and telemetry what a cell is to cost: a busy machine's own delays may not decide a test."""
    from shardkit.loader import lanes
    from shardkit_trainer.reporting import StageMeter

    owner: Any = lanes.Rebalancer
    finished = owner.finished

    def finish(self: Any, cells: int, _computed_s: float, _waited_s: float) -> None:
        finished(self, cells, seconds * cells, 0.0)

    def add_up(self: Any, *, computed_s: float, cells: int, **rest: float) -> dict[str, float]:
        self.seconds |= {"data": 0.0, "prepare": seconds * cells, "update": 0.0}
        taken: dict[str, float] = step(self, computed_s=0.0, cells=cells, **rest)
        return taken

    meter: Any = StageMeter
    step, meter.step = meter.step, add_up
    owner.finished = finish


def wait_for_stop() -> None:
    """Until this process was asked to stop; it notices in the step's exchange."""
    request: Any = signal.getsignal(signal.SIGTERM)
    while not request.__self__.is_set():
        time.sleep(0.02)


def kill_inside(kind: str, count: int) -> None:
    """Replace one operation of checkpointing by one that dies at its ``count``-th call."""
    import shardkit_trainer.checkpoints as checkpoints
    from shardkit.torch import CheckpointWriter

    owner: Any = checkpoints if kind == "prune" else CheckpointWriter
    name = {"put": "_put", "finish": "finish", "prune": "prune_checkpoints"}[kind]
    original, calls = getattr(owner, name), [0]

    def replacement(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(owner, name, replacement)
