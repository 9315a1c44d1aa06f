"""Findings of an audit and what they add up to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from shardkit.exit_codes import ExitCode

Severity = Literal["violated", "unknown", "explained", "note"]
"""violated: what the run consumed is not what the plan says, or the record of it was changed;
unknown: could not be checked; explained: another sample than planned was consumed, and the ledger says why;
note: good to know, and no reason to doubt the run (restarts, other ranks, torn tails)."""


@dataclass(frozen=True)
class Finding:
    """One thing that an audit saw.

    Attributes:
        severity: see `Severity`.
        kind: a stable word, such as "ledger", "step", "plan", "manifest", "shard", "checkpoint", "coverage".
        subject: what it is about: a file, a step, a checkpoint.
        text: what was expected, what was found, and what to do.
    """

    severity: Severity
    kind: str
    subject: str
    text: str


Worst = Literal["clean", "explained", "unknown", "violated"]
"""Of all findings."""

Report = Callable[[str, int, int], None]
"""Called with (what, done, of)."""


@dataclass(frozen=True)
class Coverage:
    """What a run consumed of one epoch.

    Attributes:
        epoch: its number.
        first, last: steps [first, last) of it were replayed, of [begin, end).
        drawn: samples of these steps.
        distinct: different ones among them.
        rows: samples of the dataset.
        remainder: how many of them a whole epoch leaves out; -1 where that depends on more than their number (grouped
            or joined rows), and is not checked.
    """

    epoch: int
    first: int
    last: int
    begin: int
    end: int
    drawn: int
    distinct: int
    rows: int
    remainder: int

    def __str__(self) -> str:
        part = "" if self.is_whole else f"steps {self.first:,} to {self.last - 1:,} of it: "
        if not self.is_exact:
            return f"{part}NOT exact: {self.drawn:,} drawn, {self.distinct:,} different"
        left = f"; {self.remainder:,} left out, in turn" if self.remainder > 0 and self.is_whole else ""
        return f"{part}{self.distinct:,} samples of {self.rows:,}, each once{left}"

    @property
    def is_whole(self) -> bool:
        """Whether every step of the epoch is in it."""
        return (self.first, self.last) == (self.begin, self.end)

    @property
    def is_exact(self) -> bool:
        """No sample twice, and of a whole epoch none missing but the remainder."""
        return self.drawn == self.distinct and (
            not self.is_whole or self.remainder < 0 or self.rows - self.distinct == self.remainder
        )


@dataclass
class Audit:
    """What an audit found.

    Attributes:
        run: the run directory.
        worst: what the findings come to.
        exit_code: by `ExitCode`: deviations that the ledger explains are no failure.
        manifest, plan: of the last step.
        first, steps: the run consumed steps [first, steps).
        samples: that they hold.
        checked: steps whose digest was recomputed from the plan.
        replay_s: how long that took.
        head: heads of both trees.
        coverage: per epoch.
        starts: the launches of the run: start, step, ranks, repeats.
        event_counts: events by kind.
        checkpoints: (name, step, whether its head is one of the ledger's; None: it has none).
        bound_checkpoints: how many of them the ledger records as they are.
        tensors: tensor objects of checkpoints that were checked.
        verified: what the check of the shards saw; None where it was not asked for.
        findings: everything else.
        software: versions that run.json recorded.
    """

    run: str
    manifest: str = ""
    plan: str = ""
    first: int = 0
    steps: int = 0
    samples: int = 0
    checked: int = 0
    replay_s: float = 0.0
    head: dict[str, Any] = field(default_factory=dict)
    coverage: list[Coverage] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    event_counts: dict[str, int] = field(default_factory=dict)
    checkpoints: list[tuple[str, int, bool | None]] = field(default_factory=list)
    bound_checkpoints: int = 0
    tensors: int = 0
    verified: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)
    software: dict[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> Worst:
        kinds = {finding.severity for finding in self.findings}
        ordered: tuple[Worst, ...] = ("violated", "unknown", "explained")
        return next((kind for kind in ordered if kind in kinds), "clean")

    @property
    def exit_code(self) -> ExitCode:
        return {"violated": ExitCode.DAMAGED, "unknown": ExitCode.UNCHECKED}.get(self.worst, ExitCode.DONE)

    @property
    def verdict(self) -> str:
        return {
            "clean": "clean: the run consumed exactly what its plan says",
            "explained": "explained: the run consumed what its plan says, but for the deviations listed",
            "violated": "violated",
            "unknown": "could not be checked in full",
        }[self.worst]


def facts_of(audit: Audit, epochs: int | None = None) -> list[tuple[str, str]]:
    """(name, value) of what was found, for people; at most so many epochs, all of them by default."""
    last, shown = max(audit.first, audit.steps - 1), audit.coverage[:epochs]
    fitting = sum(fits is True for _, _, fits in audit.checkpoints)
    unseen = len(audit.coverage) - len(shown)
    events = ", ".join(f"{number} {kind}" for kind, number in audit.event_counts.items())
    found = [
        ("steps", f"{audit.first:,} to {last:,}"),
        ("samples", f"{audit.samples:,}"),
        ("recomputed", f"{audit.checked:,} steps from the plan, in {audit.replay_s:.1f} s"),
        ("manifest", audit.manifest),
        ("plan", audit.plan),
        *((f"tree of {name}", f"{one['size']:,} leaves, root {one['root']}") for name, one in audit.head.items()),
        *((f"epoch {one.epoch}", str(one)) for one in shown),
        *([("", f"and {unseen:,} epochs more (--json lists all)")] if unseen else []),
        ("checkpoints", f"{fitting} of {len(audit.checkpoints)} hold a head of this ledger"),
        ("starts", f"{len(audit.starts)}; events: {events}"),
    ]  # fmt: skip
    if (seen := audit.verified) is not None:
        shards = f"{seen['shards_seen']:,} of {seen['shards']:,} shards checked"
        found.append(("data", f"{shards}, level {seen['level']}, {seen['stored_bytes']:,} bytes read"))
    return found


HEADINGS: Final[dict[Severity, str]] = {
    "violated": "Violated",
    "unknown": "Could not check",
    "explained": "Deviations, with their reasons",
    "note": "Good to know",
}
"""Of the findings, the worst first."""
