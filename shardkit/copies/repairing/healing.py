"""Good bytes in the place of bad ones: from another copy, else from parity (SPEC.md, "Scrubs and repair")."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from shardkit.copies.parity_encoding import encode_set
from shardkit.copies.repairing.records import Records
from shardkit.copies.repairing.results import BadCopy, Healed, Lost, Repair, Unchecked
from shardkit.copies.repairing.survey import Holders, Survey
from shardkit.copies.replicating.copying import copy_object
from shardkit.copies.replicating.pacing import Pace
from shardkit.errors import (
    FormatError,
    IntegrityError,
    ShardkitError,
    StoreFullError,
    StoreReadOnlyError,
)
from shardkit.reading.parity.catalogue import put_record, read_record
from shardkit.reading.parity.sets import ParitySet, SetRecord
from shardkit.reading.parity.streaming import restore
from shardkit.stores.objects import parse_object_name

__all__ = ["Report", "mend_parity", "repair_copies"]

Report = Callable[[str, int, int], None]
"""(what is done, how many are done, of how many)."""


class _Failed(Exception):
    """A copy could not be healed this way.

    Attributes:
        is_sure: nobody has it; else somebody who did not answer may, or the place of the bad copy cannot be written.
    """

    def __init__(self, why: str, *, is_sure: bool) -> None:
        super().__init__(why)
        self.is_sure = is_sure


def repair_copies(
    holders: Holders,
    found: Survey,
    bad: Iterable[BadCopy],
    done: Repair,
    records: Records,
    pace: Pace,
    report: Report | None = None,
) -> None:
    """Put good bytes in the place of bad ones; what is possible is done, the rest is told in `done`.

    All that other copies can give comes first: parity then has more to go by. What parity has given may be what it
    lacked for another one, so it is asked again as long as that helps.
    """
    left = sorted(set(bad))
    total, before = len(left), len(done.healed)
    why: dict[BadCopy, list[_Failed]] = {one: [] for one in left}

    def turn(attempt: Callable[[BadCopy], Healed]) -> list[BadCopy]:
        still: list[BadCopy] = []
        for one in left:
            try:
                done.healed.append(attempt(one))
            except _Failed as failed:
                why[one].append(failed)
                still.append(one)
            else:
                records.add(one.location, one.name, "healed", "read")
                if report is not None:
                    report("healed", len(done.healed) - before, total)
        return still

    left = turn(lambda one: _from_copies(holders, one, pace))
    while left:
        known = tuple(left)
        for one in left:
            del why[one][1:]
        still = turn(functools.partial(_from_parity, holders, found, pace, known))
        if len(still) == len(left):
            break
        left = still
    for one in left:
        _give_up(found, one, why[one], done)


def _from_copies(holders: Holders, bad: BadCopy, pace: Pace) -> Healed:
    """From another location."""
    target = holders.locations[bad.location]
    told: list[str] = []
    silent: list[str] = []
    for source in holders.locations.values():
        if source.name == target.name:
            continue
        try:
            size = copy_object(
                bad.name,
                [source],
                target,
                pace=pace,
                bad_copy=lambda one, _name, result: told.append(f"{one.name}: {result}"),
            )
            return Healed(target.name, bad.name, bad.was, source.name, size)
        except IntegrityError:
            continue
        except (StoreFullError, StoreReadOnlyError) as error:
            raise _Failed(
                str(error), is_sure=False
            ) from None  # the place cannot be written: no other source helps
        except ShardkitError as error:
            silent.append(str(error))
    silent += [f"{name} does not answer" for name in holders.absent]
    why = "; ".join([*told, *silent]) or "there is no other location"
    raise _Failed(f"no other copy is good ({why})", is_sure=not silent)


def _from_parity(
    holders: Holders, found: Survey, pace: Pace, left: Iterable[BadCopy], bad: BadCopy
) -> Healed:
    """From the others of its set, those that are known to be bad left out."""
    digest, _ = parse_object_name(bad.name)
    record = found.record(holders, digest)
    if record is None:
        raise _Failed("it has no parity", is_sure=True)
    target = holders.locations[bad.location].store
    position = _position(record, bad.name)
    assert position is not None
    known = {(_position(record, one.name), holders.locations[one.location].store.url) for one in left}
    objects = [record.object_at(i) for i in range(record.set.k + 2)]
    with ThreadPoolExecutor(8, thread_name_prefix="shardkit-parity") as pool:
        try:
            made = restore(
                record.set,
                objects,
                {position: target},
                holders.stores,
                pool=pool,
                pace=pace.take,
                without=known,
            )
        except IntegrityError as error:
            raise _Failed(str(error), is_sure=True) from None
        except ShardkitError as error:
            raise _Failed(str(error), is_sure=False) from None
    return Healed(bad.location, bad.name, bad.was, "parity", made[0].descriptor.size)


def _position(record: SetRecord, name: str) -> int | None:
    return record.position(parse_object_name(name)[0])


def _give_up(found: Survey, bad: BadCopy, why: list[_Failed], done: Repair) -> None:
    told = ", and ".join(map(str, why))
    if not all(one.is_sure for one in why):
        done.unchecked.append(Unchecked(bad.location, bad.name, f"it could not be healed: {told}"))
    elif all(lost.name != bad.name for lost in done.lost):
        done.lost.append(Lost(bad.name, found.rows.get(bad.name, 0), told))


def mend_parity(holders: Holders, found: Survey, done: Repair, pace: Pace) -> None:
    """Sets whose document is gone get it again; those whose parity is known of nowhere are encoded again."""
    sets = {one.id: one for one in found.sets.values()}
    lost = {one.name for one in done.lost}
    for one in sets.values():
        try:
            if read_record(holders.root, one) is not None:
                continue
        except FormatError:
            pass
        record = found.record(holders, one.members[0].digest)
        if record is not None and record.set == one:
            data = record.to_bytes()
            put_record(holders.root, one.record_name, data)
            done.healed.append(Healed("root", one.record_name, "missing", "parity", len(data)))
        elif not any(member.name in lost for member in one.members):
            _encode(holders, one, done, pace)


def _encode(holders: Holders, one: ParitySet, done: Repair, pace: Pace) -> None:
    with ThreadPoolExecutor(8, thread_name_prefix="shardkit-parity") as pool:
        try:
            encode_set(holders.root, one, holders.stores, pool=pool, pace=pace.take)
        except ShardkitError as error:
            done.unchecked.append(Unchecked("root", one.record_name, f"it has no parity: {error}"))
        else:
            done.encoded += 1
