"""What a benchmark found, as ratios; the document that keeps it, and a comparison with an earlier one.

A ratio is shardkit's rate over that of a limit or a peer in the same round of the same contest: larger is better, and
what slows the whole machine down cancels. Each is told by the clock and by CPU seconds;
the latter hardly notice neighbours.

The noise margin of a recorded ratio is its range over its median, at least 5 %. A ratio is worse where its median is
lower than recorded by more than the margin and not even its best round reaches the worst recorded one (of two equal
series of five rounds, one in 250 does so by chance); better likewise. With a margin of 50 % and more nothing can be
told, nor with fewer than three recorded rounds. Machines need not be the same: ratios are to what the same machine
does in the same round; where they differ, the comparison says so.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardkit.errors import FormatError, NotFoundError
from shardkit.exit_codes import ExitCode
from shardkit_tools.benchmarks.rounds import Held, Kind, Round

FORMAT = 1
Clock = Literal["wall", "cpu"]
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Ratio:
    """shardkit's rate over another one.

    Attributes:
        contest: such as "read tokens".
        of: shardkit's entry. to: the other one. kind: of the other one.
        clock: "wall", or "cpu" for rates per CPU second.
        median, lowest, highest: over the rounds. rounds: how many.
        conditions: what must be equal where two results are compared.
    """

    contest: str
    of: str
    to: str
    kind: Kind
    clock: Clock
    median: float
    lowest: float
    highest: float
    rounds: int
    conditions: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the same ratio has in every result."""
        return (self.contest, self.of, self.to, self.clock)

    @property
    def name(self) -> str:
        return f"{self.contest}: {self.of} / {self.to}" + (", by CPU" if self.clock == "cpu" else "")


@dataclass(frozen=True, slots=True)
class Result:
    """All that one run of the benchmarks found.

    Attributes:
        facts: of the machine, and the settings.
        ratios: in the order of measuring.
        failures: "contest" or "contest: entry" → why it has no figures.
        rates: contest → entry → rounds, for who wants to look; never compared.
    """

    facts: Mapping[str, Any]
    ratios: Sequence[Ratio]
    failures: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, Mapping[str, Sequence[Round]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "shardkit_bench": FORMAT,
            "facts": dict(self.facts),
            "ratios": [_ratio_json(ratio) for ratio in self.ratios],
            "failures": dict(self.failures),
            "rates": {
                contest: {
                    name: [[one.amount, one.seconds, one.cpu_s] for one in rounds]
                    for name, rounds in entries.items()
                }
                for contest, entries in self.rates.items()
            },
        }

    @classmethod
    def from_json(cls, document: Any, where: str) -> Result:
        """A recorded result.

        Raises:
            FormatError: it is none.
        """
        try:
            if document.get("shardkit_bench") == FORMAT:
                return cls(
                    dict(document["facts"]),
                    tuple(_ratio_of(entry, where) for entry in document["ratios"]),
                    {str(name): str(text) for name, text in document["failures"].items()},
                )
            version = document["shardkit_bench"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{where}: not a benchmark result ({error!r}); expected what `shardkit bench --out` writes"
            ) from None
        raise FormatError(
            f"{where}: a benchmark result of version {version!r}, this shardkit reads {FORMAT}; measure again with "
            "this one, or compare with a newer one"
        )


def load_result(path: str | Path) -> Result:
    """Read a result.

    Raises:
        NotFoundError: there is no such file.
        FormatError: it is not a result.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise NotFoundError(
            f"{path}: {error.strerror}; record a result with: shardkit bench --out {path}"
        ) from None
    if len(data) > _MAX_BYTES:
        raise FormatError(f"{path}: more than {_MAX_BYTES} bytes; not a benchmark result")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise FormatError(f"{path}: not JSON; expected what `shardkit bench --out` writes") from None
    return Result.from_json(document, str(path))


def ratios_of(held: Held) -> list[Ratio]:
    """Every entry of shardkit over every limit and peer, by both clocks, round by round."""
    found = []
    own = [name for name in held.rounds if held.kinds[name] == "shardkit"]
    for of in own:
        for to, others in held.rounds.items():
            if held.kinds[to] == "shardkit":
                continue
            pairs = list(zip(held.rounds[of], others, strict=True))
            for clock in ("wall", "cpu"):
                values = [_rate(mine, clock) / _rate(theirs, clock) for mine, theirs in pairs
                          if _cost(mine, clock) > 0 and _cost(theirs, clock) > 0]  # fmt: skip
                if values:
                    found.append(
                        Ratio(
                            held.name,
                            of,
                            to,
                            held.kinds[to],
                            clock,
                            statistics.median(values),
                            min(values),
                            max(values),
                            len(values),
                            held.conditions,
                        )
                    )
    return found


def _cost(one: Round, clock: str) -> float:
    return one.seconds if clock == "wall" else one.cpu_s


def _rate(one: Round, clock: str) -> float:
    return one.amount / _cost(one, clock)


def _ratio_json(ratio: Ratio) -> dict[str, Any]:
    names = ("contest", "of", "to", "kind", "clock", "median", "lowest", "highest", "rounds")
    return {**{name: getattr(ratio, name) for name in names}, "conditions": dict(ratio.conditions)}


def _ratio_of(entry: Mapping[str, Any], where: str) -> Ratio:
    median, lowest, highest = (float(entry[name]) for name in ("median", "lowest", "highest"))
    kind, clock = entry["kind"], entry["clock"]
    is_range = 0 < lowest <= median <= highest < float("inf")
    if not is_range or kind not in ("limit", "peer") or clock not in ("wall", "cpu"):
        raise FormatError(f"{where}: the ratio {dict(entry)!r} is not one; record the result again")
    conditions = {str(name): int(value) for name, value in entry["conditions"].items()}
    return Ratio(str(entry["contest"]), str(entry["of"]), str(entry["to"]), kind, clock, median, lowest, highest,
                 int(entry["rounds"]), conditions)  # fmt: skip


LEAST_MARGIN = 0.05
MOST_MARGIN = 0.5
"""A ratio that varies by more than this share says nothing."""

LEAST_ROUNDS = 3
"""Below them no range can be told."""

Verdict = Literal["worse", "same", "better", "too noisy", "other conditions", "failed", "not measured", "new"]
_COMPARED = ("worse", "same", "better")
_MACHINE = ("machine", "processor", "cpus", "system")


@dataclass(frozen=True, slots=True)
class Finding:
    """A ratio then and now.

    Attributes:
        recorded, now: None where it is missing.
        margin: the noise that is allowed for; 0.1 is 10 %.
        verdict: "worse", "same", "better"; or why there is none.
        reason: for people; may be empty.
    """

    recorded: Ratio | None
    now: Ratio | None
    margin: float
    verdict: Verdict
    reason: str = ""

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
    findings = [_finding(then, fresh.pop(then.key, None), now) for then in recorded.ratios]
    findings += [Finding(None, ratio, LEAST_MARGIN, "new") for ratio in fresh.values()]
    return Comparison(tuple(findings), tuple(_notes(now, recorded)))


def margin_of(recorded: Ratio) -> float:
    """The noise margin of a recorded ratio."""
    return max(LEAST_MARGIN, (recorded.highest - recorded.lowest) / recorded.median)


def _finding(then: Ratio, ratio: Ratio | None, now: Result) -> Finding:
    margin = margin_of(then)
    if ratio is None:
        for what in (then.contest, f"{then.contest}: {then.of}", f"{then.contest}: {then.to}"):
            failure = now.failures.get(what)
            if failure is not None:
                return Finding(then, None, margin, "failed", f"{what}: {failure}")
        return Finding(then, None, margin, "not measured")
    if dict(ratio.conditions) != dict(then.conditions):
        return Finding(then, ratio, margin, "other conditions", _difference(then, ratio))
    if then.rounds < LEAST_ROUNDS:
        reason = f"recorded with {then.rounds} rounds, {LEAST_ROUNDS} at least show what noise there is"
        return Finding(then, ratio, margin, "too noisy", reason)
    if margin >= MOST_MARGIN:
        return Finding(then, ratio, margin, "too noisy", "its recorded rounds lie too far apart")
    if ratio.median < then.median * (1 - margin) and ratio.highest < then.lowest:
        return Finding(then, ratio, margin, "worse")
    if ratio.median > then.median * (1 + margin) and ratio.lowest > then.highest:
        return Finding(then, ratio, margin, "better")
    return Finding(then, ratio, margin, "same")


def _difference(then: Ratio, now: Ratio) -> str:
    names = sorted({*then.conditions, *now.conditions})
    return ", ".join(
        f"{name} {now.conditions.get(name, 'not told')}, recorded with {then.conditions.get(name, 'not told')}"
        for name in names
        if now.conditions.get(name) != then.conditions.get(name)
    )


def _notes(now: Result, recorded: Result) -> list[str]:
    def told(facts: Any, name: str) -> Any:
        return facts.get(name)

    differ = [
        f"{name} {told(now.facts, name)}, recorded on {told(recorded.facts, name)}"
        for name in _MACHINE
        if told(recorded.facts, name) is not None and told(now.facts, name) != told(recorded.facts, name)
    ]
    notes = ["another machine: " + "; ".join(differ)] if differ else []
    for label, name in (("packages", "versions"), ("peers", "peer_versions")):
        mine, theirs = now.facts.get(name) or {}, recorded.facts.get(name) or {}
        changed = [
            f"{p} {mine[p]}, then {theirs[p]}" for p in sorted({*mine} & {*theirs}) if mine[p] != theirs[p]
        ]
        if changed:
            notes.append(f"other {label}: " + "; ".join(changed))
    return notes
