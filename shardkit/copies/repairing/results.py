"""What a repair finds and does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shardkit.exit_codes import ExitCode

__all__ = ["BadCopy", "Healed", "Lost", "Repair", "Unchecked"]


class Healed(NamedTuple):
    """A copy that is good again."""

    location: str
    name: str
    was: str
    """"wrong" or "missing"."""
    source: str
    """Name of the location with the good copy, or "parity"."""
    num_bytes: int


class Lost(NamedTuple):
    """An object of which no good bytes are left anywhere."""

    name: str
    rows: int
    """Samples lost with it; 0 for what is no shard."""
    why: str


class Unchecked(NamedTuple):
    """A copy that could not be looked at, or not be written."""

    location: str
    name: str
    why: str


@dataclass
class Repair:
    """What was found and done.

    Attributes:
        url: of the root.
        level: how deep every copy was looked at; "attested" where only what was attested as bad.
        versions: manifest ids.
        copies: that were looked at.
        read_bytes: for it.
        healed: copies that are good again, and log entries.
        lost: objects of which no good bytes are left.
        unchecked: copies of which nothing is known, or that may not be written.
        encoded: parity sets that had no parity and got it.
    """

    url: str
    level: str
    versions: list[str] = field(default_factory=list)
    copies: int = 0
    read_bytes: int = 0
    healed: list[Healed] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)
    encoded: int = 0

    @property
    def exit_code(self) -> ExitCode:
        """What is healed is done; what is lost comes before what could not be looked at."""
        return ExitCode.DAMAGED if self.lost else ExitCode.UNCHECKED if self.unchecked else ExitCode.DONE

    @property
    def verdict(self) -> str:
        """In words."""
        if self.lost:
            return "data is lost"
        if self.unchecked:
            return "could not check or heal everything"
        return "repaired" if self.healed else "clean"


class BadCopy(NamedTuple):
    """A copy that is to be healed."""

    location: str
    name: str
    was: str
