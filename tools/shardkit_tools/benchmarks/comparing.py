"""A result beside an earlier one: which ratios got worse beyond the noise that the earlier one itself showed.

The noise margin of a ratio is its recorded range over its recorded median, at least 5 %. A ratio is worse where its
median is lower than recorded by more than the margin and not even its best round reaches the worst recorded one (of
two equal series of five rounds, one in 250 does so by chance); better likewise. With a margin of 50 % and more nothing
can be told, nor with fewer than three recorded rounds. Machines need not be the same: ratios are to what the same
machine does in the same round; where they differ, the comparison says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardkit.exit_codes import ExitCode
from shardkit_tools.benchmarks.results import Ratio, Result

__all__ = ["LEAST_ROUNDS", "MOST_MARGIN", "Comparison", "Finding", "compare"]

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
        """Of the ratio."""
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
