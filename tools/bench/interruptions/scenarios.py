"""The topologies of a run and the steps at which it is interrupted."""

from __future__ import annotations

import random
from dataclasses import dataclass

EPOCHS = 2


@dataclass(frozen=True)
class Segment:
    """A part of a run between two interruptions."""

    world: int
    workers: int
    steps: int | None  # until the state is saved; None: to the end of the run
    lost_steps: int = 0  # steps between saving and the kill


@dataclass(frozen=True)
class Scenario:
    """One way to interrupt a run."""

    title: str
    worlds: tuple[int, ...] = (2, 2, 2, 2)
    workers: tuple[int, ...] | None = None  # None: as many as the adapter says
    collection: str = "train"
    needs: tuple[str, ...] = ()  # keys of Adapter.lacks
    kills_later: bool = False
    validation: bool = False
    at_epoch_end: bool = False


RANKS = (2, 3, 1, 4)
SCENARIOS = {
    "same": Scenario("same topology: 2 ranks"),
    "workers": Scenario("other workers: 2 → 1 → 3 → 2", workers=(2, 1, 3, 2), needs=("workers",)),
    "ranks": Scenario("other ranks: 2 → 3 → 1 → 4", RANKS),
    "constant": Scenario(
        "ranks × workers stays 4: 2×2 → 4×1 → 1×4", (2, 4, 1), (2, 1, 4), needs=("workers",)
    ),
    "killed": Scenario("killed 1 to 9 steps after saving", kills_later=True),
    "odd": Scenario("other ranks, 2,011 samples", RANKS, collection="odd"),
    "mixture": Scenario("three weighted sources, 2 ranks", collection="mixture", needs=("mixture",)),
    "mixture_ranks": Scenario(
        "three weighted sources, other ranks", RANKS, collection="mixture", needs=("mixture",)
    ),
    "text": Scenario("packed text, other ranks", RANKS, collection="text", needs=("text",)),
    "validation": Scenario(
        "validation loader next to it, other ranks", RANKS, needs=("validation",), validation=True
    ),
    "epoch_end": Scenario(
        "saved after the last batch of an epoch, other ranks", (2, 3, 1), at_epoch_end=True
    ),
}
QUESTIONS = ("same", "workers", "ranks")
"""The scenarios of the first table."""
UNCHANGED = ("same", "killed", "mixture")
"""The scenarios that change neither ranks nor workers."""


def segments(scenario: Scenario, seed: int, length: int, workers: int, align: int = 1) -> list[Segment]:
    """Draw the interruptions of a run from its seed: all but one in the first epoch.

    Args:
        length: steps of an undisturbed epoch.
        align: interruptions are at multiples of this number of steps of an epoch.
    """
    draw = random.Random(seed)
    last = (length - 8) // align
    count = len(scenario.worlds) - 1
    cuts = sorted(draw.sample([align * at for at in range(1, last) if align * at >= 8], count))
    cuts[-1] += length
    if scenario.at_epoch_end:
        cuts = [*cuts[:-1], length]
    kept = scenario.workers or (workers,) * (count + 1)
    lost = [draw.randint(1, 9) if scenario.kills_later else 0 for _ in cuts]
    steps = [end - start for start, end in zip([0, *cuts], cuts, strict=False)]
    return [
        *map(Segment, scenario.worlds, kept, steps, lost),
        Segment(scenario.worlds[-1], kept[-1], None),
    ]


def undisturbed(scenario: Scenario, workers: int) -> list[Segment]:
    """Return the run without interruptions, on the topology on which the scenario begins."""
    return [Segment(scenario.worlds[0], scenario.workers[0] if scenario.workers else workers, None)]
