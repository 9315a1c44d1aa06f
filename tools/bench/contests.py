"""Contests of the machine's limit, shardkit and its peers.

Entries take turns, round after round, so that a busy minute affects all of them.
"""

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

    def rate(self, clock: str) -> float:
        """Work per second of the clock ("wall") or of CPU ("cpu"); 0 where it took none that could be measured."""
        took = self.seconds if clock == "wall" else self.cpu_s
        return self.amount / took if took > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One that takes part."""

    name: str  # such as "shardkit" or "numpy.take gather"
    kind: Kind
    run: Callable[[], Round]  # one round; raises `ShardkitError` or `OSError` where it cannot


@dataclass(frozen=True, slots=True)
class Contest:
    """Entries that do the same work."""

    name: str  # such as "read tokens"
    conditions: Mapping[str, int]  # what must be equal where two results are compared, such as rows
    entries: Sequence[Entry]  # in the order of their turns
    failures: Mapping[str, str] = field(default_factory=dict)  # entry → why it cannot take part


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
    kinds = {entry.name: entry.kind for entry in contest.entries}
    sound = {name: found for name, found in rounds.items() if name not in failures}
    return Held(contest.name, contest.conditions, kinds, sound, failures)


def spent() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def timed(amount: float, work: Callable[[], object]) -> Round:
    """Run ``work`` once."""
    cpu, begun = spent(), time.perf_counter()
    work()
    return Round(amount, time.perf_counter() - begun, spent() - cpu)
