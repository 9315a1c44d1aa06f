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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

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


# ---- Results: documents, as `shardkit bench --out` writes them


class Ratio(TypedDict):
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
    conditions: dict[str, int]  # equal where two results are compared


class Result(TypedDict):
    """All that one run of the benchmarks found."""

    shardkit_bench: int  # FORMAT
    facts: dict[str, Any]  # of the machine, and the settings
    ratios: list[Ratio]  # in the order of measuring
    failures: dict[str, str]  # "contest" or "contest: entry" → why it has no figures
    rates: dict[str, dict[str, list[list[float]]]]  # contest → entry → rounds, for inspection; never compared


def load_result(path: str | Path) -> Result:
    """Read a result, without its rates."""
    try:
        with open(path, "rb") as stream:
            document = json.loads(stream.read(_MAX_BYTES))
        version = document["shardkit_bench"]
        if version == FORMAT:
            failures = {str(name): str(text) for name, text in document["failures"].items()}
            return Result(shardkit_bench=FORMAT, facts=dict(document["facts"]),
                          ratios=[*map(_checked, document["ratios"])], failures=failures, rates={})  # fmt: skip
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


_NUMBERS = {"median": float, "lowest": float, "highest": float, "rounds": int}


def _checked(entry: Mapping[str, Any]) -> Ratio:
    names = ("contest", "of", "to", "kind", "clock", *_NUMBERS)
    conditions = {str(name): int(value) for name, value in entry["conditions"].items()}
    ratio: Any = {name: _NUMBERS.get(name, str)(entry[name]) for name in names} | {"conditions": conditions}
    is_range = 0 < ratio["lowest"] <= ratio["median"] <= ratio["highest"] < float("inf")
    if not is_range or ratio["kind"] not in ("limit", "peer") or ratio["clock"] not in ("wall", "cpu"):
        raise ValueError(f"the ratio {dict(entry)!r} is not one")
    return ratio  # type: ignore[no-any-return]


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
            found.append(Ratio(
                contest=held.name, of=of, to=to, kind=held.kinds[to], clock=clock, median=statistics.median(values),
                lowest=min(values), highest=max(values), rounds=len(values), conditions=dict(held.conditions),
            ))  # fmt: skip
    return found


LEAST_MARGIN = 0.05
MOST_MARGIN = 0.5
"""A ratio that varies by more than this share says nothing."""

LEAST_ROUNDS = 3
"""With fewer no range is known."""

Verdict = Literal["worse", "same", "better", "too noisy", "other conditions", "failed", "not measured", "new"]
_COMPARED = {"worse", "same", "better"}
_MACHINE = ("machine", "processor", "cpus", "system")


class Finding(TypedDict):
    """A ratio then and now."""

    recorded: Ratio | None  # None where it is missing, as `now`
    now: Ratio | None
    margin: float  # the noise that is allowed for; 0.1 is 10 %
    verdict: Verdict  # or why there is none
    reason: str  # for people
    name: str
    change: float | None  # relative: −0.2 is a fifth less


class Comparison(TypedDict):
    """What came of it."""

    exit_code: (
        ExitCode  # NO: something is worse; UNCHECKED: nothing could be compared, or a measurement failed
    )
    notes: list[str]
    findings: list[Finding]  # in the order of the recorded result, then new ones


def compare(now: Result, recorded: Result) -> Comparison:
    """Hold a result against a recorded one; pure."""
    fresh = {_name(ratio): ratio for ratio in now["ratios"]}
    findings = [_finding(then, fresh.pop(_name(then), None), now["failures"]) for then in recorded["ratios"]]
    findings += [
        Finding(
            recorded=None, now=ratio, margin=LEAST_MARGIN, verdict="new", reason="", name=name, change=None
        )
        for name, ratio in fresh.items()
    ]
    verdicts = {finding["verdict"] for finding in findings}
    if "worse" in verdicts:
        code = ExitCode.NO
    else:
        code = ExitCode.UNCHECKED if "failed" in verdicts or not verdicts & _COMPARED else ExitCode.DONE
    return Comparison(exit_code=code, notes=_notes(now, recorded), findings=findings)


def _name(ratio: Ratio) -> str:
    """What the same ratio has in every result."""
    return f"{ratio['contest']}: {ratio['of']} / {ratio['to']}" + (
        ", by CPU" if ratio["clock"] == "cpu" else ""
    )


def _finding(then: Ratio, now: Ratio | None, failures: Mapping[str, str]) -> Finding:
    margin = max(LEAST_MARGIN, (then["highest"] - then["lowest"]) / then["median"])
    verdict, reason = _verdict(then, now, margin, failures)
    return Finding(
        recorded=then, now=now, margin=margin, verdict=verdict, reason=reason, name=_name(then),
        change=None if now is None else now["median"] / then["median"] - 1,
    )  # fmt: skip


def _verdict(
    then: Ratio, now: Ratio | None, margin: float, failures: Mapping[str, str]
) -> tuple[Verdict, str]:
    if now is None:
        contest = then["contest"]
        for what in (contest, f"{contest}: {then['of']}", f"{contest}: {then['to']}"):
            if what in failures:
                return "failed", f"{what}: {failures[what]}"
        return "not measured", ""
    if now["conditions"] != then["conditions"]:
        return "other conditions", _difference(now["conditions"], then["conditions"])
    if then["rounds"] < LEAST_ROUNDS:
        said = f"recorded with {then['rounds']} rounds, {LEAST_ROUNDS} at least show what noise there is"
        return "too noisy", f"{said}; record again"
    if margin >= MOST_MARGIN:
        return "too noisy", "its recorded rounds lie too far apart; record again"
    if now["median"] < then["median"] * (1 - margin) and now["highest"] < then["lowest"]:
        return "worse", ""
    if now["median"] > then["median"] * (1 + margin) and now["lowest"] > then["highest"]:
        return "better", ""
    return "same", ""


def _difference(now: Mapping[str, int], then: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} {now.get(name, 'not told')}, recorded with {then.get(name, 'not told')}"
        for name in sorted({*now, *then})
        if now.get(name) != then.get(name)
    )


def _notes(now: Result, recorded: Result) -> list[str]:
    here, there = now["facts"], recorded["facts"]
    differ = [
        f"{name} {here.get(name)}, recorded on {there[name]}"
        for name in _MACHINE
        if there.get(name) not in (None, here.get(name))
    ]
    mine, theirs = here.get("versions") or {}, there.get("versions") or {}
    both = sorted(mine.keys() & theirs.keys())
    changed = [f"{one} {mine[one]}, then {theirs[one]}" for one in both if mine[one] != theirs[one]]
    told = {"another machine": differ, "other packages": changed}
    return [f"{what}: {'; '.join(found)}" for what, found in told.items() if found]
