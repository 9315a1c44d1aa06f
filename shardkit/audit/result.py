"""Findings of an audit, the overall result, and its HTML page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final, Literal

from shardkit.exit_codes import ExitCode
from shardkit.extras import shell_word
from shardkit.notebook import table

Severity = Literal["violated", "unknown", "explained", "note"]
"""Severity of a finding.

violated: the run did not consume the planned samples, or its record was changed.
unknown: a check was not possible.
explained: the run deviated from the plan, and the ledger gives the reason.
note: information that casts no doubt on the run (restarts, forks, torn tails).
"""


@dataclass(frozen=True)
class Finding:
    """One observation of an audit.

    Attributes:
        severity: see `Severity`.
        kind: stable name, such as "ledger", "step", "plan", "manifest", "shard", "checkpoint", "coverage".
        subject: the file, step or checkpoint concerned.
        text: the expected and found values, and the next action.
    """

    severity: Severity
    kind: str
    subject: str
    text: str


Worst = Literal["clean", "explained", "unknown", "violated"]
"""Severity of the worst finding; "clean" if there are only notes."""

AuditProgress = Callable[[str, int, int], None]
"""Progress callback, called with (activity, done, total)."""


@dataclass(frozen=True)
class Coverage:
    """Coverage of one epoch by the replayed steps."""

    epoch: int  # number of the epoch
    # first, last: the replayed steps [first, last) of the epoch
    first: int
    last: int
    # begin, end: all steps [begin, end) of the epoch
    begin: int
    end: int
    drawn: int  # number of samples in the replayed steps
    distinct: int  # number of different samples among them
    rows: int  # number of samples in the dataset
    # number of samples that a whole epoch leaves out; -1 if it depends on more than the number of rows
    # (grouped or joined rows) and is not checked
    remainder: int

    def __str__(self) -> str:
        part = "" if self.is_whole else f"steps {self.first:,} to {self.last - 1:,} of it: "
        if not self.is_exact:
            return f"{part}NOT exact: {self.drawn:,} drawn, {self.distinct:,} different"
        left = f"; {self.remainder:,} left out, in turn" if self.remainder > 0 and self.is_whole else ""
        return f"{part}{self.distinct:,} samples of {self.rows:,}, each once{left}"

    @property
    def is_whole(self) -> bool:
        """Return True if every step of the epoch was replayed."""
        return (self.first, self.last) == (self.begin, self.end)

    @property
    def is_exact(self) -> bool:
        """Return True if no sample was drawn twice and a whole epoch lacks only its remainder."""
        return self.drawn == self.distinct and (
            not self.is_whole or self.remainder < 0 or self.rows - self.distinct == self.remainder
        )


@dataclass
class Audit:
    """Result of an audit.

    Attributes:
        run: the run directory.
        manifest: manifest id of the last step.
        plan: plan digest of the last step.
        first, steps: the run consumed steps [first, steps).
        samples: number of samples in these steps.
        checked: number of steps whose digest was recomputed from the plan.
        replay_s: duration of the replay in seconds.
        head: heads of both trees.
        coverage: coverage of each replayed epoch.
        starts: start events, one per launch of the run.
        event_counts: number of events by kind.
        checkpoints: (name, step, True if the ledger once had its head, None if it has no head).
        bound_checkpoints: number of checkpoints that are consistent and recorded by the ledger.
        tensors: number of checked tensor objects of checkpoints.
        verified: result of the shard check; None if it was not requested.
        findings: all findings.
        losses: SHA-256 in hex over the recorded digests of losses; empty if the ledger covers none.
        software: software versions recorded in run.json.
        worst: severity of the worst finding.
        exit_code: exit code of the command. Explained deviations are no failure.
        verdict: result in words.
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
    losses: str = ""
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
    """Return (name, value) pairs that summarise an audit as text."""
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
        *([("checkpoints", f"{fitting} of {len(audit.checkpoints)} hold a head of this ledger")]
          if audit.checkpoints else []),
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
"""Heading for each severity, the worst first."""


# ---- the page

_COLOURS = {"clean": "#1a7f4b", "explained": "#946200", "violated": "#b3261e", "unknown": "#6b4fa0"}
_STYLE = """
:root{color-scheme:light dark;--ink:#1c1e21;--soft:#5f6670;--line:#d9dce1;--paper:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e7e9ec;--soft:#9aa2ad;--line:#363b43;--paper:#16181b}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:62rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}
.verdict{color:#fff;padding:.7rem 1rem;border-radius:.4rem;margin:1rem 0;font-weight:600}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .8rem .3rem 0;
border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500;white-space:nowrap}td.n{text-align:right;font-variant-numeric:tabular-nums}
code{font:13px ui-monospace,monospace;overflow-wrap:anywhere}.soft{color:var(--soft)}
"""


def html_report(audit: Audit) -> str:
    """Return the audit as one HTML file without scripts or external resources. All values are escaped."""
    run, verdict = escape(audit.run), escape(audit.verdict)
    software = [(f"software: {name}", value) for name, value in sorted(audit.software.items())]
    facts = [*facts_of(audit), *software]
    parts = [table(["", ""], facts, len(facts))]
    for severity, heading in HEADINGS.items():
        rows = [(one.kind, one.subject, one.text) for one in audit.findings if one.severity == severity]
        if rows:
            parts += [f"<h2>{heading}: {len(rows)}</h2>", table(["kind", "where", "what"], rows, len(rows))]
    columns = ("start", "step", "ranks", "repeats")
    words = {True: "its head is one of the ledger's", False: "does NOT fit the ledger", None: "holds no head"}
    starts = [[one.get(name, "") for name in columns] for one in audit.starts]
    checkpoints = [(name, step, words[fits]) for name, step, fits in audit.checkpoints]
    parts += ["<h2>Starts</h2>", table(columns, starts, len(starts))]
    parts += ["<h2>Checkpoints</h2>", table(["name", "after step", ""], checkpoints, len(checkpoints))]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Audit: {verdict}</title><style>{_STYLE}</style></head>\n<body>\n"
        f'<h1>Audit of a training run</h1><p class="soft"><code>{run}</code></p>'
        f'<div class="verdict" style="background:{_COLOURS[audit.worst]}">{verdict.capitalize()}</div>\n'
        + "\n".join(parts)
        + f"<h2>How to check this yourself</h2><p><code>shardkit audit {escape(shell_word(audit.run))}</code> computes "
        "every figure above again, "
        "from the ledger, the manifest and the plan's settings alone. The trees are those of RFC 6962.</p>"
        "\n</body></html>\n"
    )
