"""`scrub`: copies are looked at, those first that nobody has looked at for longest (SPEC.md, "Scrubs")."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shardkit.copies.policy import LocationRecord
from shardkit.copies.repairing.checking import CheckAll, Checked, CopyCheck, Depth, check_in_threads
from shardkit.copies.repairing.healing import repair_copies
from shardkit.copies.repairing.records import Look, Records, read_looks
from shardkit.copies.repairing.repairing import finish, note_metadata, placed
from shardkit.copies.repairing.results import BadCopy, Repair, Unchecked
from shardkit.copies.repairing.survey import Holders, Survey, open_holders, survey
from shardkit.copies.replicating.pacing import Pace
from shardkit.errors import UsageError
from shardkit.exit_codes import ExitCode
from shardkit.stores.utc import utc_text

__all__ = ["Scrub", "ScrubbedLocation", "scrub"]

_JOBS: Final = 4
_AHEAD: Final = 4  # looks under way per job: few, so that the end of the time is the end


class _Due(NamedTuple):
    """A copy to look at."""

    last: str
    """When it was last looked at; "" for never, which comes first."""
    name: str
    location: str
    size: int | None


@dataclass
class ScrubbedLocation:
    """What was found in one location.

    Attributes:
        copies: that belong there.
        checked: by this call.
        stored: of these, by the store's own checksum, without reading a byte.
        read_bytes: of the others.
        bad: object name → "wrong" or "missing".
        not_due: that somebody looked at lately.
        oldest: when the copy was looked at that now waits longest; "" where one never was, None where there is none.
    """

    copies: int = 0
    checked: int = 0
    stored: int = 0
    read_bytes: int = 0
    bad: dict[str, str] = field(default_factory=dict)
    not_due: int = 0
    oldest: str | None = None


@dataclass
class Scrub:
    """What was found.

    Attributes:
        url: of the root.
        locations: name → what was found there.
        remaining: copies that are due and were not looked at, because the time was up.
        unchecked: copies of which nothing is known.
        repair: what was done about the bad ones; None where that was not asked for.
        lost: manifests and pages that are nowhere.
    """

    url: str
    locations: dict[str, ScrubbedLocation] = field(default_factory=dict)
    remaining: int = 0
    unchecked: list[Unchecked] = field(default_factory=list)
    repair: Repair | None = None
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def num_bad(self) -> int:
        """Bad copies that were met."""
        return sum(len(one.bad) for one in self.locations.values())

    @property
    def exit_code(self) -> ExitCode:
        """Bad copies that are left come before what could not be looked at."""
        if self.repair is not None:
            return self.repair.exit_code
        if self.num_bad or self.lost:
            return ExitCode.DAMAGED
        return ExitCode.UNCHECKED if self.unchecked else ExitCode.DONE

    @property
    def verdict(self) -> str:
        """In words."""
        if self.repair is not None:
            return self.repair.verdict
        words = {ExitCode.DAMAGED: "bad copies", ExitCode.UNCHECKED: "could not check everything"}
        return words.get(self.exit_code, "clean")


def scrub(
    url: str,
    *,
    depth: Depth = "stored",
    older_than_s: int | None = None,
    time_box_s: float | None = None,
    only: Sequence[str] = (),
    heal: bool = False,
    locations: Sequence[LocationRecord] = (),
    pace: Pace | None = None,
    jobs: int = _JOBS,
    check_all: CheckAll | None = None,
    report: Callable[[str, int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scrub:
    """Look at copies that are due, longest waiting first; results go to ``attest/``, as they come.

    May be interrupted at any time: the next call begins with what this one did not reach.

    Args:
        url: of the root.
        depth: "stored": by the store's own checksums where it keeps some, else by reading; "read": by reading.
        older_than_s: what was looked at less long ago is not due; None: everything is due.
        time_box_s: stop after so long; None: look at all that is due.
        only: names of locations; all by default.
        heal: repair what is bad, at once.
        locations: where further copies lie, beside those of the root's table.
        pace: how fast, and when.
        jobs: copies looked at at once.
        check_all: looks at copies in place of threads here.
        report: told of progress.
        clock: seconds.

    Raises:
        NotFoundError: there is no repository.
        UsageError: no location of a name in `only`.
        StoreError: the root does not answer, or cannot be written.
    """
    pace, started = pace or Pace(), clock()
    holders = open_holders(url, locations, mend=heal)
    unknown = sorted(set(only) - holders.locations.keys() - holders.absent.keys())
    if unknown:
        raise UsageError(f"no location {unknown[0]!r}; there are: {', '.join(holders.locations)}")
    found = survey(holders, pace, mend=heal)
    done = Scrub(url=holders.repository.url)
    done.unchecked += [
        Unchecked(name, "", why) for name, why in holders.absent.items() if not only or name in only
    ]
    fixed = Repair(url=done.url, level=depth, versions=found.versions, healed=list(holders.healed))
    note_metadata(found, fixed)
    done.lost = {one.name: one.why for one in (*fixed.lost, *holders.documents.lost)}
    due = _due(holders, found, read_looks(holders.root), only, older_than_s, done)
    with (
        Records(holders.root, "scrub") as records,
        ThreadPoolExecutor(jobs, thread_name_prefix="shardkit-scrub") as pool,
    ):
        looker = _Looker(holders, depth, check_all or check_in_threads(pool, pace), records, done, report)
        until = None if time_box_s is None else started + time_box_s
        try:
            looker.look(due, jobs * _AHEAD, lambda: until is not None and clock() >= until)
        except BaseException:
            pace.stop()
            raise
        if heal:
            done.repair = fixed
            fixed.unchecked += done.unchecked
            repair_copies(holders, found, looker.bad, fixed, records, pace, report)
            finish(holders, found, fixed, pace)
    for document in () if heal else holders.documents.bad:
        done.locations.setdefault(document.location, ScrubbedLocation()).bad[document.name] = document.was
    return done


class _Looker:
    """Looks at copies in groups, and notes what it finds."""

    def __init__(
        self,
        holders: Holders,
        depth: Depth,
        check_all: CheckAll,
        records: Records,
        done: Scrub,
        report: Callable[[str, int, int], None] | None,
    ) -> None:
        self._holders, self._depth, self._check_all = holders, depth, check_all
        self._records, self._done, self._report = records, done, report
        self.bad: list[BadCopy] = []

    def look(self, due: list[_Due], at_once: int, is_over: Callable[[], bool]) -> None:
        """At all that is due, in order, until the time is over."""
        number = 0
        while number < len(due) and not is_over():
            group = due[number : number + at_once]
            checks = [
                CopyCheck(self._holders.locations[one.location].store, one.name, one.size, self._depth)
                for one in group
            ]
            for one, checked in zip(group, self._check_all(checks), strict=True):
                number += 1
                _note(one, checked, self._done, self._records, self.bad)
                if self._report is not None:
                    self._report("checked", number, len(due))
        self._done.remaining = len(due) - number
        for one in due[number:]:
            there = self._done.locations[one.location]
            there.oldest = one.last if there.oldest is None else min(there.oldest, one.last)


def _due(
    holders: Holders,
    found: Survey,
    looks: dict[str, dict[str, Look]],
    only: Sequence[str],
    older_than_s: int | None,
    done: Scrub,
) -> list[_Due]:
    """Copies to look at, in order."""
    border = "9" if older_than_s is None else utc_text(time.time() - older_than_s)
    due: list[_Due] = []
    for one in _copies(holders, found, only):
        there = done.locations.setdefault(one.location, ScrubbedLocation())
        there.copies += 1
        look = looks.get(one.location, {}).get(one.name)
        if look is None or look.is_bad:  # what was bad is looked at again first
            due.append(one)
        elif look.time <= border:
            due.append(one._replace(last=look.time))
        else:
            there.not_due += 1
            there.oldest = look.time if there.oldest is None else min(there.oldest, look.time)
    return sorted(due)


def _copies(holders: Holders, found: Survey, only: Sequence[str]) -> Iterator[_Due]:
    for location, name, size in placed(holders, found):
        if not only or location in only:
            yield _Due("", name, location, size)


def _note(one: _Due, checked: Checked, done: Scrub, records: Records, bad: list[BadCopy]) -> None:
    there = done.locations[one.location]
    if checked.result == "unreadable":
        done.unchecked.append(Unchecked(one.location, one.name, checked.why))
        return
    there.checked += 1
    there.stored += checked.level == "stored"
    there.read_bytes += checked.num_bytes
    records.add(one.location, one.name, checked.result, checked.level)
    if checked.result != "good":
        there.bad[one.name] = checked.result
        bad.append(BadCopy(one.location, one.name, checked.result))
