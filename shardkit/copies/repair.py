"""`repair`: replace bad and missing copies from another copy, otherwise from parity (SPEC.md, "Repair")."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from shardkit.copies.documents import HealedCopy, LostObject, UncheckedCopy
from shardkit.copies.mirroring import mirror_documents, mirror_log
from shardkit.copies.placement import Copy
from shardkit.copies.walk import CheckSettings, CopyWalk, Repair
from shardkit.errors import (
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreFullError,
    StoreReadOnlyError,
    UsageError,
)
from shardkit.reading.attestations import read_attestations
from shardkit.reading.objects import DEPTHS, ROOT_NAME, copy_object
from shardkit.reading.parity.rebuilding import encode_set
from shardkit.reading.parity.sets import SetRecord, read_record
from shardkit.stores.local import LocalStore
from shardkit.stores.store import Store, parse_object_name, root_store


def repair(
    url: str,
    *,
    level: str = "read",
    from_runs: Sequence[str] = (),
    settings: CheckSettings | None = None,
) -> Repair:
    """Replace bad and missing copies. May be interrupted and called again at any time.

    The level "attested" checks only copies that were attested as bad, also in the run directories `from_runs`.

    Raises:
        UsageError: The level is unknown.
        NotFoundError: A run directory does not exist.
    """
    if level != "attested" and level not in DEPTHS:
        raise UsageError(f"level {level!r}: expected attested, {', '.join(DEPTHS)}")
    with CopyWalk(url, "repair", level, settings) as walk:
        looks = read_attestations([walk.root, *map(_run_store, from_runs)])
        bad = list(walk.check_attested(looks))
        if level != "attested":
            known = {(one.location, one.name) for one in bad}
            copies = [one for one in walk.copies() if (one.location, one.name) not in known]
            bad += walk.find_bad(copies, lambda _: level)  # type: ignore[arg-type, return-value]
        replace_copies(walk, bad)
        finish(walk)
    return walk.done


def _run_store(run: str) -> Store:
    """Open the directory of a run, which has the attestations of its readers."""
    if not os.path.isdir(run):
        raise NotFoundError(
            f"run directory {run} is not there; give the directory that the loader was given as run="
        )
    return LocalStore(run, read_only=True)


class _Failed(Exception):
    """A copy could not be repaired from copies, or from parity.

    Attributes:
        is_sure: False if a location that did not answer may have good bytes, or the bad copy cannot be overwritten.
    """

    def __init__(self, why: str, *, is_sure: bool) -> None:
        super().__init__(why)
        self.is_sure = is_sure


def replace_copies(walk: CopyWalk, bad: Iterable[Copy]) -> None:
    """Replace bad copies. Copies that cannot be replaced are added to `done.lost` or `done.unchecked`.

    Copies in other locations are used first, because each repaired copy helps to rebuild others from parity. Parity
    is tried repeatedly until no copy is repaired, because a rebuilt object may complete another set.
    """
    done = walk.done
    left = sorted({(one.location, one.name): one for one in bad}.items())
    num_bad, num_healed = len(left), 0

    def try_each(copies: Iterable[Copy], attempt: Callable[[Copy], HealedCopy]) -> dict[Copy, _Failed]:
        """Try to repair each copy, and return the copies that stay bad with the reasons."""
        nonlocal num_healed
        failures: dict[Copy, _Failed] = {}
        for one in copies:
            try:
                done.healed.append(attempt(one))
            except _Failed as failed:
                failures[one] = failed
                continue
            num_healed += 1
            walk.records.add(one.location, one.name, "healed", "read")
            if walk.report is not None:
                walk.report("healed", num_healed, num_bad)
        return failures

    copies = try_each([one for _, one in left], lambda one: _from_copies(walk, one))
    parity = {one: _Failed("", is_sure=True) for one in copies}
    while True:
        known = list(parity)
        parity = try_each(known, lambda one, known=known: _from_parity(walk, one, known))  # type: ignore[misc]
        if len(parity) == len(known):
            break
    for one, failed in parity.items():
        why = f"{copies[one]}, and {failed}"
        if not (copies[one].is_sure and failed.is_sure):
            why = f"it could not be healed: {why}"
            done.unchecked.append(UncheckedCopy(one.location, one.name, why))
        elif all(lost.name != one.name for lost in done.lost):
            done.lost.append(LostObject(one.name, walk.rows.get(one.name, 0), why))


def _from_copies(walk: CopyWalk, bad: Copy) -> HealedCopy:
    told: list[str] = []
    absent = [f"{name} does not answer" for name in walk.absent]
    try:
        source, size = copy_object(
            bad.name,
            list(walk.locations.values()),
            walk.locations[bad.location],
            replace=bad.state == "wrong",
            pace=walk.pace.take,
            bad_copy=lambda one, _name, result: told.append(f"{one.name}: {result}"),
        )
    except (StoreFullError, StoreReadOnlyError) as error:
        raise _Failed(str(error), is_sure=False) from None  # no source can help
    except IntegrityError:
        silent = absent
    except ShardkitError as error:
        silent = [str(error), *absent]
    else:
        return HealedCopy(bad.location, bad.name, bad.state, source, size)
    why = "; ".join([*told, *silent]) or "there is no other location"
    raise _Failed(f"no other copy is good ({why})", is_sure=not silent)


def _from_parity(walk: CopyWalk, bad: Copy, left: Iterable[Copy]) -> HealedCopy:
    """Rebuild a copy from the other objects of its parity set, without those known to be bad."""
    record = walk.record(parse_object_name(bad.name)[0])
    if record is None:
        raise _Failed("it has no parity", is_sure=True)
    locations = walk.locations
    known = {
        (record.position(parse_object_name(one.name)[0]), locations[one.location].store.url) for one in left
    }
    try:
        size = walk.rebuild(record, bad.name, locations[bad.location].store, known)
    except ShardkitError as error:
        raise _Failed(str(error), is_sure=isinstance(error, IntegrityError)) from None
    return HealedCopy(bad.location, bad.name, bad.state, "parity", size)


def finish(walk: CopyWalk, *, with_logs: bool = True) -> None:
    """Repair the documents of parity, then all documents of the copies; to be called after the objects.

    With `with_logs`, the entries that a copy lacks are added to its log.
    """
    _repair_parity(walk)
    done, documents, root = walk.done, walk.documents, root_store(walk.root)
    done.healed += documents.heal_copies()
    for name, location in walk.locations.items():
        if name != ROOT_NAME:
            try:
                mirrored = mirror_documents(root, location.store)
                if with_logs and name in documents.copies:
                    mirror_log(root, location.store)
            except ShardkitError as error:
                done.unchecked.append(UncheckedCopy(name, "", str(error)))
            else:
                done.healed += [
                    HealedCopy(name, one, was, ROOT_NAME, 0) for one, was in mirrored if was == "wrong"
                ]
    done.lost += documents.lost
    done.unchecked += documents.unchecked


def _repair_parity(walk: CopyWalk) -> None:
    """Restore missing or damaged documents of parity sets, and encode and copy the sets whose parity is lost."""
    root, done = walk.root, walk.done
    lost = {one.name for one in done.lost}
    encoded: list[SetRecord] = []
    for one in {one.id: one for one in walk.sets.values()}.values():
        was = "missing"
        try:
            if read_record(root, one) is not None:
                continue
        except ShardkitError:  # damaged or not a regular file
            was = "wrong"
        record = walk.record(one.members[0].digest)
        if record is not None and record.set == one:
            data = record.to_bytes()
            root.replace(one.record_name, data)
            done.healed.append(HealedCopy(ROOT_NAME, one.record_name, was, "parity", len(data)))
            continue
        if was == "wrong":
            root.delete(one.record_name)  # damaged, and no good copy exists
        if not any(member.name in lost for member in one.members):
            try:
                encoded.append(encode_set(root, one, walk.stores, pace=walk.pace.take))
            except ShardkitError as error:
                why = f"it has no parity: {error}"
                done.unchecked.append(UncheckedCopy(ROOT_NAME, one.record_name, why))
    done.encoded += len(encoded)
    for new in encoded:
        replace_copies(walk, walk.find_bad(walk.need_parity(new), lambda _: "read"))
