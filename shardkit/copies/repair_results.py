"""Settings and results of checks and repairs."""

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
"""(action, number of copies done, number of copies)."""


class CopyCheck(NamedTuple):
    """A check to make; see `check_object`."""

    store: Store
    name: str
    size: int | None
    depth: Depth


CheckAll = Callable[[Sequence[CopyCheck]], Iterator[CheckResult]]
"""Checks many copies, by threads or on other machines, and yields the results in order."""


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """How copies are checked.

    Attributes:
        locations: further copies that the root's table does not name.
        pace: rate limit and schedule.
        jobs: number of copies checked at once.
        check_all: replaces the threads of this process.
        report: called with progress.
    """

    locations: Sequence[LocationRecord] = ()
    pace: RateLimiter = field(default_factory=RateLimiter)
    jobs: int = 4
    check_all: CheckAll | None = None
    report: Report | None = None


class Placed(NamedTuple):
    """A copy that the policy asks for."""

    location: str
    name: str
    size: int | None


@dataclass
class Repair:
    """The result of a repair.

    Attributes:
        url: URL of the root.
        level: level of the checks; "attested" if only copies attested as bad were checked.
        versions: manifest ids of the versions.
        copies: number of copies checked.
        read_bytes: bytes read to check them.
        healed: copies and documents that are good again.
        lost: objects without a good copy in any location.
        unchecked: copies that could not be read or written.
        encoded: number of parity sets that had no parity and got it.
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
        """DAMAGED if an object is lost, otherwise UNCHECKED if a copy could not be checked."""
        return ExitCode.DAMAGED if self.lost else ExitCode.UNCHECKED if self.unchecked else ExitCode.DONE

    @property
    def verdict(self) -> str:
        if self.lost:
            return "data is lost"
        if self.unchecked:
            return "could not check or heal everything"
        return "repaired" if self.healed else "clean"
