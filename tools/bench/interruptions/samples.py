"""The data of the interruption benchmark, and the interface of an adapter."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, ClassVar

GLOBAL_BATCH = 24
"""Samples of a step on all ranks together: 1, 2, 3 and 4 ranks divide it."""
STEPS = 84
"""Steps of an epoch of a collection without a remainder."""
COUNT = GLOBAL_BATCH * STEPS
BUFFER = 100
"""Samples of a shuffle buffer, for loaders that have one."""
SHARDS = 24
"""Files of a collection, for loaders that distribute files to ranks and workers."""
SEQUENCE = 16
"""Tokens of a packed row."""

SOURCES = {"a": range(1008), "b": range(1008, 1632), "c": range(1632, COUNT)}
WEIGHTS = {"a": 5, "b": 3, "c": 2}
COLLECTIONS = {
    "train": range(COUNT),
    "odd": range(2011),  # a prime: neither ranks nor batches divide it
    "validation": range(COUNT, COUNT + 8 * GLOBAL_BATCH),
    **SOURCES,
}
"""Numbers of the samples by collection. A sample has one field, its number."""


def documents() -> list[list[int]]:
    """Return the texts to pack: 1 to 31 tokens each, and every token is a number of its own."""
    draw = random.Random(0)
    ends = list(accumulate(draw.randint(1, 31) for _ in range(COUNT)))
    return [list(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)]


def parts(numbers: range, count: int = SHARDS) -> list[range]:
    """Split the numbers of a collection into the numbers of ``count`` files."""
    return [
        numbers[len(numbers) * part // count : len(numbers) * (part + 1) // count] for part in range(count)
    ]


@dataclass(frozen=True)
class Job:
    """Facts that a trainer knows when one of its ranks opens a loader."""

    folder: Path  # written by `Adapter.write`
    collection: str  # name in COLLECTIONS, "mixture" or "text"
    rank: int
    world: int
    workers: int
    seed: int
    epoch: int = 0  # from the trainer's own checkpoint
    step: int = 0  # steps of this epoch that are done, from the trainer's own checkpoint
    first_world: int = 0  # when the run began
    first_workers: int = 0

    @cached_property
    def batch(self) -> int:
        """Samples of a step on this rank."""
        return GLOBAL_BATCH // self.world

    @property
    def validates(self) -> bool:
        """Whether the loader reads the validation samples: unshuffled, each once."""
        return self.collection == "validation"


class Adapter(ABC):
    """A loader as its documentation says to use it. An object is made in the process of each rank."""

    label: ClassVar[str]
    promise: ClassVar[str]  # sentence of the documentation about resuming, quoted
    elastic: ClassVar[str]  # whether the documentation promises to resume on other ranks
    link: ClassVar[str]  # where the sentence stands
    strength: ClassVar[str]  # something that the loader does better than shardkit
    notes: ClassVar[str] = ""  # settings that the documentation asks for
    lacks: ClassVar[
        dict[str, str]
    ] = {}  # "mixture", "text", "workers" or "validation": why it is not measured
    documented: ClassVar[str] = ""  # documented loss of a resume on the same topology
    random: ClassVar[bool] = False  # samples are drawn with replacement, by design
    forks: ClassVar[bool] = True  # ranks may be forked from a process that has imported the library
    imported_by_ranks: ClassVar[tuple[str, ...]] = ()  # packages that start threads when they are imported
    workers: ClassVar[int] = 2  # in scenarios that are not about workers
    align: ClassVar[int] = (
        1  # states are saved at multiples of this number of steps, if the documentation asks for it
    )

    @staticmethod
    @abstractmethod
    def write(folder: Path) -> None:
        """Write the collections, once."""

    @abstractmethod
    def __init__(self, job: Job) -> None:
        """Open the loader of one rank."""

    @abstractmethod
    def restore(self, states: list[Any]) -> None:
        """Load the states that the ranks of the run before saved, in rank order."""

    @abstractmethod
    def epoch(self, number: int, done: int) -> Iterator[list[int]]:
        """Yield the samples of this rank in each remaining step of an epoch.

        Args:
            number: the epoch, as the trainer counts it.
            done: steps of it that the trainer has done.
        """

    @abstractmethod
    def state(self) -> Any:
        """Return what this rank saves between two steps; None if the documentation has it save nothing."""


def rest_of(stream: Iterator[list[int]], done: int) -> Iterator[list[int]]:
    """Cut the remaining steps of an epoch from a stream without an end."""
    return islice(stream, STEPS - done)
