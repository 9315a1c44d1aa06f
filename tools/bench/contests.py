"""Run contests between the machine's limit, shardkit and its peers.

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
    """One run: ``amount`` of work, wall-clock seconds, and CPU seconds of this process and its ended children."""

    amount: float
    seconds: float
    cpu_s: float

    def rate(self, clock: str) -> float:
        """Return the work per second of wall time ("wall") or CPU time ("cpu"); 0 if no time was measured."""
        took = self.seconds if clock == "wall" else self.cpu_s
        return self.amount / took if took > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A participant of a contest."""

    name: str  # such as "shardkit" or "numpy.take gather"
    kind: Kind
    run: Callable[[], Round]  # run one round; raises `ShardkitError` or `OSError` on failure


@dataclass(frozen=True, slots=True)
class Contest:
    """Entries that do the same work."""

    name: str  # such as "read tokens"
    conditions: Mapping[str, int]  # must be equal in two results that are compared, such as rows
    entries: Sequence[Entry]  # in turn order
    failures: Mapping[str, str] = field(default_factory=dict)  # entry → why it cannot run


@dataclass(frozen=True, slots=True)
class ContestResults:
    """Results of a contest: entry → its rounds (equally many for each), and entry → why it failed."""

    name: str
    conditions: Mapping[str, int]
    kinds: Mapping[str, Kind]
    rounds: Mapping[str, Sequence[Round]]
    failures: Mapping[str, str]


def hold(contest: Contest, repeats: int, told: Callable[[str], None]) -> ContestResults:
    """Run all entries ``repeats`` times in turn, after a warm-up round that does not count.

    The first round loads code and fills caches, so its figures depend on earlier work of the machine.
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
    return ContestResults(contest.name, contest.conditions, kinds, sound, failures)


def spent() -> float:
    """Return the CPU seconds of this process and its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def time_round(amount: float, work: Callable[[], object]) -> Round:
    """Run ``work`` once and measure it."""
    cpu, begun = spent(), time.perf_counter()
    work()
    return Round(amount, time.perf_counter() - begun, spent() - cpu)
