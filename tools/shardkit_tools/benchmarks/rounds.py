"""Contests: the limit, shardkit and its peers take turns, round after round, so that a busy minute hits all of them."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardkit.errors import ShardkitError

Kind = Literal["shardkit", "limit", "peer"]
"""What is measured: us, the limit of the machine, or a peer."""


@dataclass(frozen=True, slots=True)
class Round:
    """One run: ``amount`` of work, what the clock said, and the CPU seconds of this process and its ended children."""

    amount: float
    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One that takes part.

    Attributes:
        name: such as "shardkit" or "numpy.take gather".
        kind: shardkit is measured against limits and peers.
        run: one round; raises `ShardkitError` or `OSError` where it cannot.
    """

    name: str
    kind: Kind
    run: Callable[[], Round]


@dataclass(frozen=True, slots=True)
class Contest:
    """Entries that do the same work.

    Attributes:
        name: such as "read tokens".
        conditions: what must be equal where two results are compared, such as the number of rows.
        entries: in the order of their turns.
        failures: entry → why it cannot take part.
    """

    name: str
    conditions: Mapping[str, int]
    entries: Sequence[Entry]
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Held:
    """What came of a contest: entry → its rounds, all of the same number; and entry → why it has none."""

    name: str
    conditions: Mapping[str, int]
    kinds: Mapping[str, Kind]
    rounds: Mapping[str, Sequence[Round]]
    failures: Mapping[str, str]


def hold(contest: Contest, repeats: int, told: Callable[[str], None]) -> Held:
    """Let everybody run ``repeats`` times in turn, after a round that does not count.

    The first round loads code and fills caches: what it measures is the machine's past.

    Args:
        contest: who takes part.
        repeats: rounds that count.
        told: called with what is going on.
    """
    rounds: dict[str, list[Round]] = {entry.name: [] for entry in contest.entries}
    failures = dict(contest.failures)
    for turn in range(repeats + 1):
        for entry in contest.entries:
            if entry.name in failures:
                continue
            told(f"{contest.name}: {entry.name}, " + (f"round {turn} of {repeats}" if turn else "warming up"))
            try:
                found = entry.run()
            except (ShardkitError, OSError) as error:
                failures[entry.name] = str(error)
                continue
            if turn:
                rounds[entry.name].append(found)
    return Held(
        contest.name,
        contest.conditions,
        {entry.name: entry.kind for entry in contest.entries},
        {name: found for name, found in rounds.items() if name not in failures},
        failures,
    )


def spent() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def timed(amount: float, work: Callable[[], object]) -> Round:
    """Run ``work`` once."""
    cpu, begun = spent(), time.perf_counter()
    work()
    return Round(amount, time.perf_counter() - begun, spent() - cpu)
