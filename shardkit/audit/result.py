"""What an audit found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardkit.audit.findings import Finding
from shardkit.audit.replay import Coverage

__all__ = ["Audit", "Report"]

Report = Callable[[str, int, int], None]
"""Called with (what, done, of)."""


@dataclass
class Audit:
    """What an audit found.

    Attributes:
        run: the run directory.
        exit_code: 0 clean, 1 deviations that the ledger explains, 2 violated, 3 could not be checked.
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
    verified: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)
    software: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """See above."""
        kinds = {finding.severity for finding in self.findings}
        return 2 if "violated" in kinds else 3 if "unknown" in kinds else 1 if "explained" in kinds else 0

    @property
    def verdict(self) -> str:
        """In words."""
        return {
            0: "clean: the run consumed exactly what its plan says",
            1: "explained: the run consumed what its plan says, but for the deviations listed",
            2: "violated",
            3: "could not be checked in full",
        }[self.exit_code]
