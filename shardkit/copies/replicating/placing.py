"""`place`: other locations or another policy, and the bytes moved after them: copy, verify, commit, delete later."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from shardkit.copies.policy import (
    ROOT_NAME,
    LocationRecord,
    LocationTable,
    Policy,
    commit_table,
    location_of,
    read_table,
    read_tables,
)
from shardkit.copies.policy.opening import prepare_copy, root_store
from shardkit.copies.policy.table import first_root
from shardkit.copies.replicating.dropping import Drops, drop_surplus, surplus
from shardkit.copies.replicating.facts import Facts, look
from shardkit.copies.replicating.needed import Needed, find_needed, live_versions, strata_of, there_are
from shardkit.copies.replicating.pacing import Pace
from shardkit.copies.replicating.protecting import encode_parity
from shardkit.copies.replicating.replicating import (
    Replication,
    Report,
    begun,
    copy_missing,
    finished,
    mirror,
    over_all,
)
from shardkit.errors import ConfigurationError, StoreError, UsageError
from shardkit.repository.repository import Repository
from shardkit.stores.utc import seconds_of

__all__ = ["GRACE_S", "Change", "Placing", "changed_table", "place", "prepare", "undo"]

GRACE_S: Final = 7 * 86_400
"""How long surplus copies stay after a table was committed: until then it can be undone without a copy being made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a user wants of the locations.

    Attributes:
        locations: added, or given other properties by their name.
        empty: names of locations that shall give away what they have.
        forget: names of locations that are gone, or shall not be looked at any more.
        refill: names of locations that are empty, because their disk was replaced, and shall be filled again.
        policy: makes the new policy of the old one.
        is_undo: it goes back to what was there: strata that have gone since are no mistake.
    """

    locations: tuple[LocationRecord, ...] = ()
    empty: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()
    refill: tuple[str, ...] = ()
    policy: Callable[[Policy], Policy] | None = None
    is_undo: bool = False


@dataclass(slots=True)
class Placing:
    """What `place` did.

    Attributes:
        table: that holds now; None where the root has none.
        was: the table before, None where there was none.
        committed: whether this call made the table.
        copies: what was copied.
        drops: what was taken away.
        surplus: copies that are not needed where they are: objects, bytes are deleted after the grace.
        due_in_s: seconds until they may be deleted.
    """

    table: LocationTable | None
    was: LocationTable | None
    committed: bool = False
    copies: Replication = field(default_factory=Replication)
    drops: Drops = field(default_factory=Drops)
    surplus: int = 0
    due_in_s: int = 0

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        table = self.table
        return {
            "table": table.n if table else 0,
            "committed": self.committed,
            "policy": table.policy.to_table() if table else None,
            "locations": [one.to_json() for one in table.locations] if table else [],
            "copies": self.copies.to_json(),
            "deleted": {"objects": self.drops.objects, "bytes": self.drops.bytes},
            "kept": [list(one) for one in self.drops.kept],
            "surplus": self.surplus,
            "due_in_s": self.due_in_s,
        }


def changed_table(
    repository: Repository, base: LocationTable | None, change: Change
) -> tuple[Policy, tuple[LocationRecord, ...]]:
    """Policy and locations after a change; nothing is written.

    Raises:
        UsageError: it names a location that there is not.
        ConfigurationError: the policy could not be met.
    """
    root = base.root if base else first_root(root_store(repository.store))
    records = {one.name: one for one in (base.locations if base else (root,))}
    for name in (*change.empty, *change.forget, *change.refill):
        if name not in records or name == ROOT_NAME:
            others = ", ".join(one for one in records if one != ROOT_NAME) or "none"
            raise UsageError(f"no location {name!r} beside the root; there are: {others}")
    for one in change.locations:
        if one.name == ROOT_NAME:
            if one.weight != LocationRecord(ROOT_NAME, one.url, one.domain).weight:
                raise ConfigurationError("the root holds every object; it has no weight")
            one = dataclasses.replace(one, url=root.url, rank=0)
        records[one.name] = one
    for name in change.empty:
        records[name] = dataclasses.replace(records[name], weight=0)
    for name in change.forget:
        del records[name]
    policy = base.policy if base else Policy()
    return (change.policy(policy) if change.policy else policy), tuple(records.values())


def prepare(repository: Repository, locations: Iterable[LocationRecord]) -> None:
    """Make places copies of this root, empty as they are.

    Raises:
        UsageError: a place holds something else.
        StoreError: it cannot be written.
    """
    root = root_store(repository.store)
    for record in locations:
        if record.name != ROOT_NAME:
            prepare_copy(root, location_of(record, writable=True).store, record.name, repository.id)


def place(
    repository: Repository,
    change: Change,
    *,
    pace: Pace | None = None,
    dry_run: bool = False,
    grace_s: int = GRACE_S,
    message: str = "",
    author: str = "",
    report: Report | None = None,
    clock: Callable[[], float] = time.time,
) -> Placing:
    """Change where copies belong, and move them: copy and verify, then commit, then delete what is due.

    A killed call changes nothing that matters: copies that were made stay and are found again; the table is committed
    only when all copies are there that it asks for; deleting goes on with the next call.

    Args:
        repository: opened for writing.
        change: what is wanted; an empty one only deletes what is due.
        pace: how fast, and when.
        dry_run: only look.
        grace_s: surplus copies are deleted when the table is so old.
        message: why.
        author: who.
        report: progress of copying.
        clock: seconds since 1970.

    Raises:
        UsageError, ConfigurationError: a change that cannot be carried out.
        CommitConflict: somebody else changed the locations meanwhile.
        StoreError: copies that the new table asks for could not be made; the old one holds.
    """
    pace = pace or Pace()
    base = read_table(root_store(repository.store), repository.id)
    table = _table_after(repository, base, change)
    placing = Placing(base, base)
    if table is None:
        return placing
    if not dry_run:
        new = [
            one
            for one in table.locations
            if base is None or base.find(one.name) is None or one.name in change.refill
        ]
        prepare(repository, new)
        encode_parity(repository, table, live_versions(repository), pace)
    needed = find_needed(over_all(repository), table, live_versions(repository))
    facts = look(repository, table, needed)
    placing.copies = begun(table, facts)
    if dry_run:
        _mark_new(placing.copies, base)
        placing.table = table
    else:
        if table is not base or change.refill:
            _copy(repository, facts, placing.copies, pace, report)
        if table is not base:
            placing.table = _commit(repository, base, table, message, author)
            placing.committed = True
    finished(facts, placing.copies)
    _delete_due(placing, facts, needed, pace, grace_s, clock, dry_run=dry_run)
    if not dry_run:
        mirror(repository, facts, placing.copies)
    return placing


def _table_after(repository: Repository, base: LocationTable | None, change: Change) -> LocationTable | None:
    """The table that a change asks for: the one that holds where it changes nothing, else one to place by."""
    policy, records = changed_table(repository, base, change)
    if base is not None and policy == base.policy and records == base.locations:
        return base
    if base is None and len(records) == 1 and policy == Policy():
        return None
    if not change.is_undo:
        _check_strata(repository, base, policy)
    return _draft(repository, base, policy, records)


def _check_strata(repository: Repository, base: LocationTable | None, policy: Policy) -> None:
    """Refuse a critical stratum that no version has: it would protect nothing, and nobody would be told."""
    before = {one.stratum for one in base.policy.critical} if base else set[str]()
    new = sorted({one.stratum for one in policy.critical} - before)
    versions = live_versions(repository)
    if not new or not versions:
        return
    known = strata_of(over_all(repository), versions)
    for name in new:
        if name not in known:
            raise ConfigurationError(
                f"critical stratum {name!r}: no version of {repository.url} has it; {there_are(name, known)}"
            )


def _commit(
    repository: Repository, base: LocationTable | None, table: LocationTable, message: str, author: str
) -> LocationTable:
    return commit_table(
        root_store(repository.store),
        repository.id,
        base,
        table.policy,
        table.locations,
        message=message or _told(base, table.locations),
        author=author,
    )


def undo(repository: Repository, **options: Any) -> Placing:
    """Put locations and policy back to what they were before the newest table; what was deleted is copied again.

    Args:
        repository: opened for writing.
        options: of `place`.

    Raises:
        UsageError: there is nothing to undo.
    """
    tables = read_tables(root_store(repository.store), repository.id)
    if len(tables) < 2:
        raise UsageError(f"{repository.url}: there is no earlier placement to go back to")
    now, before = tables[0], tables[1]
    back = {one.name for one in before.locations}
    change = Change(
        locations=before.others,
        forget=tuple(one.name for one in now.others if one.name not in back),
        refill=(),
        policy=lambda _: before.policy,
        is_undo=True,
    )
    return place(repository, change, **{"message": f"undo of placement {now.n}", **options})


def _draft(
    repository: Repository, base: LocationTable | None, policy: Policy, records: Sequence[LocationRecord]
) -> LocationTable:
    """The table as it would be committed, to place by."""
    return LocationTable(
        n=base.n + 1 if base else 1,
        repository=repository.id,
        previous="",
        txn="0" * 32,
        time="1970-01-01T00:00:00Z",
        author="",
        message="",
        policy=policy,
        locations=tuple(records),
    )


def _mark_new(copies: Replication, base: LocationTable | None) -> None:
    """What is not there yet because nothing was done is no problem."""
    for one in copies.locations:
        if one.state == "unprepared" and (base is None or base.find(one.name) is None):
            one.state, one.problem = "new", ""


def _copy(
    repository: Repository, facts: Facts, copies: Replication, pace: Pace, report: Report | None
) -> None:
    copy_missing(repository, facts, copies, pace, report=report)
    finished(facts, copies)
    if facts.missing:
        bad = [one for one in copies.locations if one.lag]
        told = "; ".join(f"{one.name}: {one.problem or one.state}" for one in bad)
        raise StoreError(
            f"{repository.url}: {len(facts.missing)} copies are missing that the new placement asks for ({told}); the "
            "old one holds; mend that, or leave the location out (--forget NAME), then run the same command again"
        )


def _delete_due(
    placing: Placing,
    facts: Facts,
    needed: dict[str, Needed],
    pace: Pace,
    grace_s: int,
    clock: Callable[[], float],
    *,
    dry_run: bool,
) -> None:
    table = placing.table
    if table is None:
        return
    copies = surplus(facts, needed)
    placing.surplus = len(copies)
    since = clock() if table.time.startswith("1970") else seconds_of(table.time)
    placing.due_in_s = max(0, int(since + grace_s - clock())) if copies else 0
    if copies and placing.due_in_s == 0 and not dry_run:
        placing.drops = drop_surplus(table, facts, needed, copies, pace)
        placing.surplus -= placing.drops.objects


def _told(base: LocationTable | None, records: Sequence[LocationRecord]) -> str:
    before = {one.name: one for one in base.locations} if base else {}
    now = {one.name: one for one in records}
    parts = [f"added {name}" for name in now if name not in before and name != ROOT_NAME]
    parts += [f"forgot {name}" for name in before if name not in now]
    parts += [
        f"emptying {name}"
        for name, one in now.items()
        if name in before and before[name].weight and not one.weight
    ]
    return ", ".join(parts) or "changed the policy"
