"""How copies are checked and repaired, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardkit.copies.documents import Healed, Lost, Unchecked
from shardkit.exit_codes import ExitCode
from shardkit.reading.objects import (
    CheckResult,
    Depth,
)
from shardkit.repository.location_table import (
    LocationRecord,
)
from shardkit.stores.store import Store
from shardkit.stores.waiting import RateLimiter

Report = Callable[[str, int, int], None]
"""(what is done, how many are done, of how many)."""


class CopyCheck(NamedTuple):
    """A check to be made; see `check_object`."""

    store: Store
    name: str
    size: int | None
    depth: Depth


CheckAll = Callable[[Sequence[CopyCheck]], Iterator[CheckResult]]
"""Checks many copies and yields what was found, in their order: by threads, or by other machines."""


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """How copies are checked.

    Attributes:
        locations: where further copies lie, beside those of the root's table.
        pace: how fast, and when.
        jobs: copies checked at once.
        check_all: checks copies in place of threads here.
        report: told of progress.
    """

    locations: Sequence[LocationRecord] = ()
    pace: RateLimiter = field(default_factory=RateLimiter)
    jobs: int = 4
    check_all: CheckAll | None = None
    report: Report | None = None


class Placed(NamedTuple):
    """A copy that should be there."""

    location: str
    name: str
    size: int | None


@dataclass
class Repair:
    """What was found and done.

    Attributes:
        url: of the root.
        level: how deep every copy was checked; "attested" where only what was attested as bad.
        versions: manifest ids.
        copies: that were checked.
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
        """What is healed is done; what is lost comes before what could not be checked."""
        return ExitCode.DAMAGED if self.lost else ExitCode.UNCHECKED if self.unchecked else ExitCode.DONE

    @property
    def verdict(self) -> str:
        if self.lost:
            return "data is lost"
        if self.unchecked:
            return "could not check or heal everything"
        return "repaired" if self.healed else "clean"
