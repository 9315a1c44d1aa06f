"""`repair`: what is bad or missing is made good again, from another copy, else from parity (SPEC.md, "Repair")."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from shardkit.copies.policy import ROOT_NAME, LocationRecord
from shardkit.copies.policy.opening import root_store
from shardkit.copies.repairing.checking import (
    DEPTHS,
    CheckAll,
    Checked,
    CopyCheck,
    check_copy,
    check_in_threads,
)
from shardkit.copies.repairing.healing import Report, mend_parity, repair_copies
from shardkit.copies.repairing.records import Look, Records, merge_looks, read_looks
from shardkit.copies.repairing.results import BadCopy, Healed, Lost, Repair, Unchecked
from shardkit.copies.repairing.survey import Holders, Survey, open_holders, survey
from shardkit.copies.replicating.mirroring import mirror_documents
from shardkit.copies.replicating.pacing import Pace
from shardkit.errors import NotFoundError, ShardkitError, UsageError
from shardkit.stores.local import LocalStore

__all__ = ["finish", "note_metadata", "placed", "repair", "repair_listed"]

_JOBS: Final = 4
LARGE: Final = (".tar", ".tar.zst", ".arrow", ".parity")
"""Ends of the names of objects that are not metadata."""


def repair(
    url: str,
    *,
    level: str = "read",
    from_runs: Sequence[str] = (),
    locations: Sequence[LocationRecord] = (),
    pace: Pace | None = None,
    jobs: int = _JOBS,
    check_all: CheckAll | None = None,
    report: Report | None = None,
) -> Repair:
    """Make good what is bad. May be interrupted and called again at any time.

    Args:
        url: Of the root.
        level: How deep every copy is looked at: "list", "stored" or "read"; "attested": only those that somebody
            found bad.
        from_runs: Run directories with attestations of readers that have no right to write the root.
        locations: Where further copies lie, beside those of the root's table.
        pace: How fast, and when.
        jobs: Copies looked at at once.
        check_all: Looks at copies in place of threads here.
        report: Told of progress.

    Raises:
        NotFoundError: There is no repository, or no such run directory.
        UsageError: An unknown level.
        StoreError: The root does not answer, or cannot be written.
    """
    _check_level(level)
    pace = pace or Pace()
    holders, found, done = _open(url, locations, level, pace)
    looks = merge_looks([read_looks(holders.root), *map(_run_looks, from_runs)])
    with (
        Records(holders.root, "repair") as records,
        ThreadPoolExecutor(jobs, thread_name_prefix="shardkit-repair") as pool,
    ):
        bad = list(_attested(holders, found, looks, done, records, pace))
        if level != "attested":
            known = {(one.location, one.name) for one in bad}
            wanted = [(*one, level) for one in placed(holders, found) if one[:2] not in known]
            check_all = check_all or check_in_threads(pool, pace)
            bad += _scan(holders, wanted, done, records, pace, check_all, report)
        repair_copies(holders, found, bad, done, records, pace, report)
        finish(holders, found, done, pace)
    return done


def repair_listed(
    url: str, *, level: str, pace: Pace, jobs: int = _JOBS, check_all: CheckAll | None = None
) -> Repair:
    """Make good what the root lacks and what is wrong anywhere; copies that are not there are left to `replicate`.

    Nothing is recorded: whoever replicates need not have the right to write attestations.

    Args:
        url: Of the root.
        level: How deep to look at copies of shards and parity; metadata is read.
        pace: How fast, and when.
        jobs: Copies looked at at once.
        check_all: Looks at copies in place of threads here.

    Raises:
        As `repair`.
    """
    _check_level(level)
    holders, found, done = _open(url, (), level, pace)
    wanted = [(*one, level if one[1].endswith(LARGE) else "read") for one in placed(holders, found)]
    records = Records(None, "replicate")
    with ThreadPoolExecutor(jobs, thread_name_prefix="shardkit-repair") as pool:
        check_all = check_all or check_in_threads(pool, pace)
        bad = _scan(holders, wanted, done, records, pace, check_all, None)
    bad = [one for one in bad if one.location == ROOT_NAME or one.was != "missing"]
    repair_copies(holders, found, bad, done, records, pace)
    finish(holders, found, done, pace, is_lag_left=True)
    return done


def _check_level(level: str) -> None:
    if level != "attested" and level not in DEPTHS:
        raise UsageError(f"level {level!r}: expected attested, {', '.join(DEPTHS)}")


def _open(
    url: str, locations: Sequence[LocationRecord], level: str, pace: Pace
) -> tuple[Holders, Survey, Repair]:
    """The root with its documents and metadata made good."""
    holders = open_holders(url, locations, mend=True)
    done = Repair(url=holders.repository.url, level=level, healed=list(holders.healed))
    found = survey(holders, pace, mend=True)
    done.versions = found.versions
    done.unchecked += [Unchecked(name, "", why) for name, why in holders.absent.items()]
    note_metadata(found, done)
    return holders, found, done


def finish(holders: Holders, found: Survey, done: Repair, pace: Pace, *, is_lag_left: bool = False) -> None:
    """What comes after the objects: documents of parity, then all documents of the copies."""
    mend_parity(holders, found, done, pace)
    done.healed += holders.documents.heal_copies(is_lag_left=is_lag_left)
    root, *others = holders.locations.values()
    for location in others:
        try:
            for name, was in mirror_documents(root_store(root.store), location.store):
                if was == "wrong":
                    done.healed.append(Healed(location.name, name, was, root.name, 0))
        except ShardkitError as error:
            done.unchecked.append(Unchecked(location.name, "", str(error)))
    done.lost += holders.documents.lost
    done.unchecked += holders.documents.unchecked


def note_metadata(found: Survey, done: Repair) -> None:
    """What was found of manifests and pages."""
    done.healed += [Healed("root", name, "missing", "parity", 0) for name in found.restored]
    done.lost += [Lost(name, 0, why) for name, why in found.lost.items()]
    done.unchecked += [Unchecked("root", name, why) for name, why in found.unknown.items()]


def _run_looks(run: str) -> dict[str, dict[str, Look]]:
    """What the readers of a run attested."""
    if not os.path.isdir(run):
        raise NotFoundError(
            f"run directory {run} is not there; give the directory that the loader was given as run="
        )
    return read_looks(LocalStore(run, read_only=True))


def placed(holders: Holders, found: Survey) -> Iterator[tuple[str, str, int | None]]:
    """(location, object name, size) of every copy that should be there, the smallest kinds of objects first."""
    for one in found.needed.values():
        for location in one.where:
            if location in holders.locations:
                yield location, one.name, one.size


def _attested(
    holders: Holders,
    found: Survey,
    looks: dict[str, dict[str, Look]],
    done: Repair,
    records: Records,
    pace: Pace,
) -> Iterator[BadCopy]:
    """Copies that somebody found bad, and that are bad now."""
    for location, names in sorted(looks.items()):
        for name, look in sorted(names.items()):
            if not look.is_bad or name not in found.needed:
                continue
            if location in holders.absent:
                continue  # told once
            if location not in holders.locations:
                why = f"attested {look.result} by {look.by} at {look.time}, in a location that is not known here"
                done.unchecked.append(Unchecked(location, name, f"{why}; name it: --location {location}=URL"))
                continue
            belongs = location in found.needed[name].where or not holders.table.others
            if look.result == "missing" and not belongs:
                continue  # the policy wants no copy there
            checked = check_copy(
                holders.locations[location].store, name, found.needed[name].size, "read", pace
            )
            if checked.result == "good":  # said so that it outweighs what was said before
                checked = checked._replace(result="healed")
            yield from _noted(location, name, checked, done, records)


def _noted(location: str, name: str, checked: Checked, done: Repair, records: Records) -> Iterator[BadCopy]:
    done.copies += 1
    done.read_bytes += checked.num_bytes
    if checked.result == "unreadable":
        done.unchecked.append(Unchecked(location, name, checked.why))
        return
    records.add(location, name, checked.result, checked.level)
    if checked.result not in ("good", "healed"):
        yield BadCopy(location, name, checked.result)


def _scan(
    holders: Holders,
    wanted: list[tuple[str, str, int | None, str]],
    done: Repair,
    records: Records,
    pace: Pace,
    check_all: CheckAll,
    report: Report | None,
) -> list[BadCopy]:
    """Look at every copy."""
    checks = [
        CopyCheck(holders.locations[where].store, name, size, depth)  # type: ignore[arg-type]
        for where, name, size, depth in wanted
    ]
    bad: list[BadCopy] = []
    try:
        for number, (one, checked) in enumerate(zip(wanted, check_all(checks), strict=True), 1):
            bad += _noted(one[0], one[1], checked, done, records)
            if report is not None:
                report("checked", number, len(wanted))
    except BaseException:
        pace.stop()  # what the other threads are at ends soon
        raise
    return bad
