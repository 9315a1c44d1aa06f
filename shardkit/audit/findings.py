"""What an audit says: findings, each with its kind, and what they add up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Severity"]

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
