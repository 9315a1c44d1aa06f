"""shardkit: its DataLoader, with the worker processes of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardkit.torch
from bench.interruptions.adapters.shardkit_loader import LANES, numbers_of, open_plan, write
from bench.interruptions.samples import Adapter, Job


class Loader(Adapter):
    label = "shardkit, `shardkit.torch`"
    promise = "`DataLoader(dataset, num_workers=4)` counts its epochs and carries its state."
    elastic = "yes, if ranks divide `lanes` (12 here)"
    link = "shardkit/torch/__init__.py"
    strength = ""
    notes = LANES

    @staticmethod
    def write(folder: Path) -> None:
        write(folder)

    def __init__(self, job: Job) -> None:
        data = shardkit.torch.dataset(*open_plan(job), rank=job.rank, world=job.world)
        self.loader = shardkit.torch.DataLoader(data, num_workers=job.workers)

    def restore(self, states: list[Any]) -> None:
        self.loader.load_state_dict(states[0])

    def epoch(self, number: int, done: int) -> Iterator[list[int]]:
        for batch in self.loader:
            yield numbers_of(batch)

    def state(self) -> Any:
        return self.loader.state_dict()
