"""`scrub`: check the copies whose last check is longest ago (SPEC.md, "Attestations and scrubs")."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shardkit.copies.documents import UncheckedCopy
from shardkit.copies.placement import Copy
from shardkit.copies.repair import finish, healing_walk, replace_copies
from shardkit.copies.walk import CheckSettings, CopyWalk, Repair
from shardkit.documents import utc_text
from shardkit.errors import UsageError
from shardkit.exit_codes import ExitCode
from shardkit.reading.attestations import Attestation, read_attestations
from shardkit.reading.objects import CheckResult, Depth


@dataclass
class ScrubbedLocation:
    """Results of one location."""

    copies: int = 0  # number of copies that belong in the location
    checked: int = 0  # number of copies that this call checked
    stored: int = 0  # number of copies checked by the store's own checksum, without reading a byte
    read_bytes: int = 0  # bytes read to check the remaining copies
    bad: dict[str, str] = field(default_factory=dict)  # object name → "wrong" or "missing"
    not_due: int = 0  # number of copies that were checked recently
    # time of the oldest check among copies that this call did not check; "" if one was never checked, None if
    # this call checked all of them
    oldest: str | None = None

    def count(self, copy: Copy, result: CheckResult) -> None:
        """Count a copy that this call checked."""
        self.checked += copy.state != "unreadable"
        self.stored += result.level == "stored"
        self.read_bytes += result.num_bytes
        if copy.is_bad:
            self.bad[copy.name] = copy.state

    def waits_since(self, when: str) -> None:
        """Count a copy, last checked at `when`, that this call does not check."""
        self.oldest = when if self.oldest is None else min(self.oldest, when)


@dataclass
class Scrub:
    """The result of a scrub."""

    url: str  # URL of the root
    locations: dict[str, ScrubbedLocation] = field(default_factory=dict)  # location name → its results
    remaining: int = 0  # number of due copies that were not checked because the time was up
    unchecked: list[UncheckedCopy] = field(default_factory=list)  # copies that could not be checked
    repair: Repair | None = None  # result of the repair of bad copies; None without `heal`
    # name of a manifest or page without a good copy → the reason
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def num_bad(self) -> int:
        return sum(len(one.bad) for one in self.locations.values())

    @property
    def exit_code(self) -> ExitCode:
        """DAMAGED if bad copies are left, otherwise UNCHECKED if a copy could not be checked."""
        if self.repair is not None:
            return self.repair.exit_code
        if self.num_bad or self.lost:
            return ExitCode.DAMAGED
        return ExitCode.UNCHECKED if self.unchecked else ExitCode.DONE

    @property
    def verdict(self) -> str:
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
    settings: CheckSettings | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scrub:
    """Check copies that are due, in the order of their last checks, and attest the results below ``attest/``.

    May be interrupted at any time: the next call starts with the copies that this one did not reach.

    Args:
        url: URL of the root.
        depth: depth of the checks.
        older_than_s: age in seconds after which a copy is due; None: every copy is due.
        time_box_s: seconds after which no further checks start; None: no limit.
        only: names of the locations to check; empty: all.
        heal: repair bad copies.
        settings: how copies are checked.
        clock: monotonic clock in seconds.

    Raises:
        UsageError: A location of `only` is unknown.
    """
    started, settings = clock(), settings or CheckSettings()
    opened = (
        healing_walk(url, "scrub", depth, settings)
        if heal
        else CopyWalk(url, "scrub", depth, settings, heal=False)
    )
    with opened as walk:
        fixed = walk.done
        unknown = sorted(set(only) - walk.locations.keys() - walk.absent.keys())
        if unknown:
            raise UsageError(f"no location {unknown[0]!r}; there are: {', '.join(walk.locations)}")
        fixed.unchecked = [
            one
            for one in fixed.unchecked
            if not only or one.location in only or one.location in walk.locations
        ]
        done = Scrub(fixed.url, unchecked=fixed.unchecked)
        done.lost = {one.name: one.why for one in (*fixed.lost, *walk.documents.lost)}
        due = _due(walk, read_attestations([walk.root]), only, older_than_s, done)
        until = None if time_box_s is None else started + time_box_s
        bad: list[Copy] = []
        waiting = deque(due)

        def in_time() -> Iterator[Copy]:
            while waiting and (until is None or clock() < until):
                yield waiting.popleft()[1]

        for copy, result in walk.check(in_time(), lambda _: depth, len(due)):
            done.locations[copy.location].count(copy, result)
            if copy.is_bad:
                bad.append(copy)
        done.remaining = len(waiting)
        for last, copy in waiting:
            done.locations[copy.location].waits_since(last)
        if heal:
            done.repair, done.unchecked = fixed, [*fixed.unchecked]
            replace_copies(walk, bad)
            finish(walk)
    for document in () if heal else walk.documents.puts:
        done.locations.setdefault(document.location, ScrubbedLocation()).bad[document.name] = document.was
    return done


def _due(
    walk: CopyWalk,
    looks: dict[str, dict[str, Attestation]],
    only: Sequence[str],
    older_than_s: int | None,
    done: Scrub,
) -> list[tuple[str, Copy]]:
    """Return (time of the last check, copy) of the due copies, oldest first; the time is "" for never."""
    border = "9" if older_than_s is None else utc_text(time.time() - older_than_s)
    due: list[tuple[str, Copy]] = []
    for one in walk.copies():
        if only and one.location not in only:
            continue
        there = done.locations.setdefault(one.location, ScrubbedLocation())
        there.copies += 1
        look = looks.get(one.location, {}).get(one.name)
        if look is None or look.is_bad:  # bad copies are checked first
            due.append(("", one))
        elif look.time <= border:
            due.append((look.time, one))
        else:
            there.not_due += 1
            there.waits_since(look.time)
    return sorted(due, key=lambda one: (one[0], one[1].name, one[1].location))
