"""`repair`: what is bad or missing is made good again, from another copy, else from parity (SPEC.md, "Repair")."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from shardkit.errors import NotFoundError, UsageError
from shardkit.storage.local import LocalStore
from shardkit.storage.policy import LocationRecord
from shardkit.storage.repairing.checking import (
    DEPTHS,
    CheckAll,
    Checked,
    CopyCheck,
    Depth,
    check_copy,
    check_in_threads,
)
from shardkit.storage.repairing.healing import Report, mend_parity, repair_copies
from shardkit.storage.repairing.log_repair import repair_log
from shardkit.storage.repairing.records import Look, Records, merge_looks, read_looks
from shardkit.storage.repairing.results import BadCopy, Healed, Lost, Repair, Unchecked
from shardkit.storage.repairing.survey import Holders, Survey, open_holders, survey
from shardkit.storage.replicating.pacing import Pace

__all__ = ["note_metadata", "placed", "repair"]

_JOBS: Final = 4


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
    if level != "attested" and level not in DEPTHS:
        raise UsageError(f"level {level!r}: expected attested, {', '.join(DEPTHS)}")
    pace = pace or Pace()
    holders = open_holders(url, locations)
    looks = merge_looks([read_looks(holders.root), *map(_run_looks, from_runs)])
    done = Repair(url=holders.repository.url, level=level)
    done.healed += [
        Healed(*one, 0) for one in repair_log(holders.repository, list(holders.locations.values())[1:])
    ]
    found = survey(holders, pace, mend=True)
    done.versions = found.versions
    done.unchecked += [Unchecked(name, "", why) for name, why in holders.absent.items()]
    note_metadata(found, done)
    with (
        Records(holders.root, "repair") as records,
        ThreadPoolExecutor(jobs, thread_name_prefix="shardkit-repair") as pool,
    ):
        bad = list(_attested(holders, found, looks, done, records, pace))
        if level != "attested":
            known = {(one.location, one.name) for one in bad}
            wanted = [one for one in placed(holders, found) if one[:2] not in known]
            check_all = check_all or check_in_threads(pool, pace)
            bad += _scan(holders, wanted, level, done, records, pace, check_all, report)  # type: ignore[arg-type]
        repair_copies(holders, found, bad, done, records, pace, report)
        mend_parity(holders, found, done, pace)
    return done


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
    wanted: list[tuple[str, str, int | None]],
    depth: Depth,
    done: Repair,
    records: Records,
    pace: Pace,
    check_all: CheckAll,
    report: Report | None,
) -> list[BadCopy]:
    """Look at every copy."""
    checks = [CopyCheck(holders.locations[where].store, name, size, depth) for where, name, size in wanted]
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
