"""Contests of the limit, shardkit and its peers; what they found, as ratios; a comparison with an earlier result.

Entries take turns, round after round, so that a busy minute hits all of them. A ratio is shardkit's rate over that of a
limit or a peer in the same round of the same contest: larger is better, and what slows the whole machine down cancels.
Each is given by the clock and by CPU seconds; the latter hardly notice neighbours.

The noise margin of a recorded ratio is its range over its median, at least 5 %. A ratio is worse where its median is
lower than recorded by more than the margin and not even its best round reaches the worst recorded one (of two equal
series of five rounds, one in 250 does so by chance); better likewise. With a margin of 50 % and more nothing can be
said, nor with fewer than three recorded rounds. Machines need not be the same: ratios are to what the same machine
does in the same round; where they differ, the comparison says so.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardkit.errors import FormatError, NotFoundError, ShardkitError
from shardkit.exit_codes import ExitCode

FORMAT = 1
Clock = Literal["wall", "cpu"]
_MAX_BYTES = 16 << 20
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


# ---- Results


@dataclass(frozen=True, slots=True)
class Ratio:
    """shardkit's rate over another one."""

    contest: str  # such as "read tokens"
    of: str  # shardkit's entry
    to: str  # the other one
    kind: Kind  # of the other one
    clock: Clock
    median: float  # over the rounds
    lowest: float
    highest: float
    rounds: int
    conditions: Mapping[str, int] = field(default_factory=dict)  # equal where two results are compared

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the same ratio has in every result."""
        return (self.contest, self.of, self.to, self.clock)

    @property
    def name(self) -> str:
        return f"{self.contest}: {self.of} / {self.to}" + (", by CPU" if self.clock == "cpu" else "")


@dataclass(frozen=True, slots=True)
class Result:
    """All that one run of the benchmarks found."""

    facts: Mapping[str, Any]  # of the machine, and the settings
    ratios: Sequence[Ratio]  # in the order of measuring
    failures: Mapping[str, str] = field(
        default_factory=dict
    )  # "contest" or "contest: entry" → why no figures
    rates: Mapping[str, Mapping[str, Sequence[Round]]] = field(default_factory=dict)
    """Contest → entry → rounds, for inspection; never compared."""

    def to_json(self) -> dict[str, Any]:
        return {
            "shardkit_bench": FORMAT,
            "facts": dict(self.facts),
            "ratios": [asdict(ratio) for ratio in self.ratios],
            "failures": dict(self.failures),
            "rates": {
                contest: {name: [list(astuple(one)) for one in rounds] for name, rounds in entries.items()}
                for contest, entries in self.rates.items()
            },
        }


def load_result(path: str | Path) -> Result:
    """Read a result.

    Raises:
        NotFoundError: there is no such file.
        FormatError: it is not a result.
    """
    try:
        with open(path, "rb") as stream:
            document = json.loads(stream.read(_MAX_BYTES))
        version = document["shardkit_bench"]
        if version == FORMAT:
            failures = {str(name): str(text) for name, text in document["failures"].items()}
            return Result(dict(document["facts"]), tuple(map(_ratio_of, document["ratios"])), failures)
    except OSError as error:
        raise NotFoundError(
            f"{path}: {error.strerror}; record a result with: shardkit bench --out {path}"
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{path}: not a benchmark result ({error!r}); expected what `shardkit bench --out` writes"
        ) from None
    raise FormatError(
        f"{path}: a benchmark result of version {version!r}, this shardkit reads {FORMAT}; measure again with "
        "this one, or compare with a newer one"
    )


def ratios_of(held: Held) -> list[Ratio]:
    """Every entry of shardkit over every limit and peer, by both clocks, round by round."""
    found = []
    clocks: tuple[Clock, ...] = ("wall", "cpu")
    own = [name for name, kind in held.kinds.items() if kind == "shardkit" and name in held.rounds]
    others = [name for name in held.rounds if name not in own]
    for of, to, clock in itertools.product(own, others, clocks):
        rates = [(mine.rate(clock), theirs.rate(clock))
                 for mine, theirs in zip(held.rounds[of], held.rounds[to], strict=True)]  # fmt: skip
        if values := [mine / theirs for mine, theirs in rates if mine and theirs]:
            found.append(Ratio(held.name, of, to, held.kinds[to], clock, statistics.median(values), min(values),
                               max(values), len(values), held.conditions))  # fmt: skip
    return found


def _ratio_of(entry: Mapping[str, Any]) -> Ratio:
    median, lowest, highest = (float(entry[name]) for name in ("median", "lowest", "highest"))
    kind, clock = entry["kind"], entry["clock"]
    is_range = 0 < lowest <= median <= highest < float("inf")
    if not is_range or kind not in ("limit", "peer") or clock not in ("wall", "cpu"):
        raise ValueError(f"the ratio {dict(entry)!r} is not one")
    conditions = {str(name): int(value) for name, value in entry["conditions"].items()}
    return Ratio(str(entry["contest"]), str(entry["of"]), str(entry["to"]), kind, clock, median, lowest, highest,
                 int(entry["rounds"]), conditions)  # fmt: skip


LEAST_MARGIN = 0.05
MOST_MARGIN = 0.5
"""A ratio that varies by more than this share says nothing."""

LEAST_ROUNDS = 3
"""With fewer no range is known."""

Verdict = Literal["worse", "same", "better", "too noisy", "other conditions", "failed", "not measured", "new"]
_COMPARED = ("worse", "same", "better")
_MACHINE = ("machine", "processor", "cpus", "system")


@dataclass(frozen=True, slots=True)
class Finding:
    """A ratio then and now."""

    recorded: Ratio | None  # None where it is missing, as `now`
    now: Ratio | None
    margin: float  # the noise that is allowed for; 0.1 is 10 %
    verdict: Verdict  # or why there is none
    reason: str = ""  # for people

    @property
    def name(self) -> str:
        ratio = self.recorded or self.now
        assert ratio is not None, "a finding is of a ratio"
        return ratio.name

    @property
    def change(self) -> float | None:
        """Relative: −0.2 is a fifth less."""
        if self.recorded is None or self.now is None:
            return None
        return self.now.median / self.recorded.median - 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it: findings in the order of the recorded result, then new ones; and remarks."""

    findings: Sequence[Finding]
    notes: Sequence[str]

    def of(self, *verdicts: str) -> list[Finding]:
        """Findings with one of these verdicts."""
        return [finding for finding in self.findings if finding.verdict in verdicts]

    @property
    def exit_code(self) -> ExitCode:
        """NO: something is worse; UNCHECKED: nothing could be compared, or what was to be measured failed."""
        if self.of("worse"):
            return ExitCode.NO
        return ExitCode.UNCHECKED if self.of("failed") or not self.of(*_COMPARED) else ExitCode.DONE


def compare(now: Result, recorded: Result) -> Comparison:
    """Hold a result against a recorded one; pure."""
    fresh = {ratio.key: ratio for ratio in now.ratios}
    findings = [_finding(then, fresh.pop(then.key, None), now.failures) for then in recorded.ratios]
    findings += [Finding(None, ratio, LEAST_MARGIN, "new") for ratio in fresh.values()]
    return Comparison(tuple(findings), tuple(_notes(now, recorded)))


def _finding(then: Ratio, now: Ratio | None, failures: Mapping[str, str]) -> Finding:
    margin = max(LEAST_MARGIN, (then.highest - then.lowest) / then.median)
    verdict: Verdict = "same"
    reason = ""
    if now is None:
        verdict = "not measured"
        for what in (then.contest, f"{then.contest}: {then.of}", f"{then.contest}: {then.to}"):
            if what in failures:
                verdict, reason = "failed", f"{what}: {failures[what]}"
                break
    elif now.conditions != then.conditions:
        verdict, reason = "other conditions", _difference(now.conditions, then.conditions)
    elif then.rounds < LEAST_ROUNDS:
        verdict = "too noisy"
        reason = f"recorded with {then.rounds} rounds, {LEAST_ROUNDS} at least show what noise there is; record again"
    elif margin >= MOST_MARGIN:
        verdict, reason = "too noisy", "its recorded rounds lie too far apart; record again"
    elif now.median < then.median * (1 - margin) and now.highest < then.lowest:
        verdict = "worse"
    elif now.median > then.median * (1 + margin) and now.lowest > then.highest:
        verdict = "better"
    return Finding(then, now, margin, verdict, reason)


def _difference(now: Mapping[str, int], then: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} {now.get(name, 'not told')}, recorded with {then.get(name, 'not told')}"
        for name in sorted({*now, *then})
        if now.get(name) != then.get(name)
    )


def _notes(now: Result, recorded: Result) -> list[str]:
    machines = [(name, now.facts.get(name), recorded.facts.get(name)) for name in _MACHINE]
    differ = [
        f"{name} {here}, recorded on {there}" for name, here, there in machines if there not in (None, here)
    ]
    notes = ["another machine: " + "; ".join(differ)] if differ else []
    mine, theirs = now.facts.get("versions") or {}, recorded.facts.get("versions") or {}
    both = sorted(mine.keys() & theirs.keys())
    changed = [f"{one} {mine[one]}, then {theirs[one]}" for one in both if mine[one] != theirs[one]]
    return notes + (["other packages: " + "; ".join(changed)] if changed else [])
