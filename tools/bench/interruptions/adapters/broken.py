"""Not a loader: streams with known faults, which show that the harness counts.

After each resume, the first step of rank 0 has 2 samples of the step before instead of 3 of its own, and the third
step changes places with the fourth.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.interruptions.samples import COUNT, GLOBAL_BATCH, STEPS, Adapter, Job


class Loader(Adapter):
    label = "broken on purpose"
    promise = "After each resume it loses 3 samples, repeats 2 and exchanges two steps."
    elastic = "no"
    link = "tools/bench/interruptions/adapters/broken.py"
    strength = "none"
    align = 6  # so that the faults of two resumes do not meet
    workers = 0
    lacks = dict.fromkeys(
        ("mixture", "text", "validation", "workers", "odd"), "the broken loader reads one collection"
    )

    @staticmethod
    def write(folder: Path) -> None:
        pass

    def __init__(self, job: Job) -> None:
        self.job = job
        self.cut: tuple[int, int] | None = None  # where this rank resumed

    def restore(self, states: list[Any]) -> None:
        self.cut = self.job.epoch, self.job.step

    def state(self) -> Any:
        return None

    def epoch(self, number: int, done: int) -> Iterator[list[int]]:
        order = random.Random(1000 * self.job.seed + number).sample(range(COUNT), COUNT)
        steps = [order[at : at + GLOBAL_BATCH] for at in range(0, COUNT, GLOBAL_BATCH)]
        for step in range(done, STEPS):
            after = step - self.cut[1] if self.cut is not None and self.cut[0] == number else -1
            other = {2: 1, 3: -1}.get(after, 0)
            mine = steps[step + other][self.job.rank :: self.job.world]
            if after == 0 and self.job.rank == 0:
                mine = steps[step - 1][:2] + mine[3:]
            yield mine
