"""`place`: change locations or policy and move the copies: copy, verify, commit the table, delete later."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from shardkit.copies.placement import Holdings, find_needed, look, unknown_strata
from shardkit.copies.repair import encode_parity
from shardkit.copies.replicate import CopyProgress, Replication, copy_missing, mirror, over_all
from shardkit.copies.walk import CheckSettings
from shardkit.documents import seconds_of, utc_text
from shardkit.errors import (
    CommitConflict,
    ConfigurationError,
    NotFoundError,
    ShardkitError,
    StoreError,
    UsageError,
)
from shardkit.exit_codes import ExitCode
from shardkit.extras import shell_word
from shardkit.reading.objects import ROOT_NAME, check_object
from shardkit.repository.locations import (
    COPY_NAME,
    SPARE_NAME,
    first_root,
    location_of,
    prepare_copy,
    read_mark,
    read_table,
    spare_bytes,
)
from shardkit.repository.log import LogEntry, identity_in
from shardkit.repository.policy import LocationRecord, LocationTable, Policy, absolute_url, local_path
from shardkit.repository.repository import Repository
from shardkit.stores.local import open_store
from shardkit.stores.store import Store, put_over, root_store
from shardkit.stores.waiting import RateLimiter

GRACE_S: Final = 7 * 86_400
"""Seconds from the commit of a table to the deletion of surplus copies. Until then, an undo needs no new copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChange:
    """A change of the locations and the policy."""

    locations: tuple[LocationRecord, ...] = ()  # locations to add, or to change by name
    empty: tuple[str, ...] = ()  # names of locations whose objects are moved to other locations
    forget: tuple[str, ...] = ()  # names of locations to remove from the table
    refill: tuple[str, ...] = ()  # names of locations to fill again, such as after the replacement of a disk
    policy: Callable[[Policy], Policy] | None = None  # function from the old policy to the new one
    is_undo: bool = False  # True to accept critical strata that no version has


@dataclass(slots=True)
class Drops:
    """Deleted surplus copies."""

    objects: int = 0  # number of copies deleted
    bytes: int = 0  # bytes of those copies
    # (location, name) of surplus copies that were kept because other copies are missing or bad
    kept: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # errors of locations


@dataclass(slots=True)
class Placing:
    """The result of `place`."""

    table: LocationTable | None  # current table; None if the root has none
    was: LocationTable | None  # table before the call; None if there was none
    committed: bool = False  # True if this call committed the table
    copies: Replication = field(default_factory=Replication)  # copies made
    drops: Drops = field(default_factory=Drops)  # surplus copies deleted
    surplus: int = 0  # number of copies in locations where they do not belong
    due_in_s: int = 0  # seconds until the surplus copies may be deleted

    @property
    def exit_code(self) -> ExitCode:
        """UNCHECKED if a location did not get the log and the documents, otherwise DONE."""
        has_failed = any(one.state == "failed" for one in self.copies.locations)
        return ExitCode.UNCHECKED if has_failed else ExitCode.DONE


def changed_table(
    repository: Repository, base: LocationTable | None, change: PlacementChange
) -> tuple[Policy, tuple[LocationRecord, ...]]:
    """Return policy and locations after a change, without writing.

    Raises:
        UsageError: A location to empty, forget or refill is unknown.
        ConfigurationError: A location overlaps another one, or the root gets a weight.
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
    _check_apart([one.name for one in change.locations], list(records.values()))
    policy = base.policy if base else Policy()
    return (change.policy(policy) if change.policy else policy), tuple(records.values())


def _check_apart(names: Collection[str], records: Sequence[LocationRecord]) -> None:
    """Raise ConfigurationError if a location is inside or above another one: both would fail together."""
    paths = {one.name: os.path.realpath(path) for one in records if (path := local_path(one.url))}
    for name in names:
        for other in paths.keys() - {name} if name in paths else ():
            if os.path.commonpath([paths[name], paths[other]]) in (paths[name], paths[other]):
                raise ConfigurationError(
                    f"location {name!r} at {paths[name]} and location {other!r} at {paths[other]} are the same folder, "
                    "or one is inside the other, so they fail together; choose a folder on another disk or machine"
                )


def place(
    repository: Repository,
    change: PlacementChange,
    *,
    pace: RateLimiter | None = None,
    dry_run: bool = False,
    grace_s: int = GRACE_S,
    message: str = "",
    author: str = "",
    report: CopyProgress | None = None,
    clock: Callable[[], float] = time.time,
) -> Placing:
    """Change where copies belong, and move them: copy and verify, commit the table, then delete due surplus copies.

    The table is committed only if no copy is missing that it asks for. After a killed call, the next call finds the
    copies that were made, and continues the deletion.

    Args:
        repository: the root.
        change: the change.
        pace: rate limit of the copies.
        dry_run: only find what would be done.
        grace_s: seconds from the commit of the table to the deletion of surplus copies.
        message: message of the table; by default a description of the change.
        author: author of the table.
        report: called with progress.
        clock: clock in seconds since 1970.

    Raises:
        StoreError: A copy is missing; the old table stays valid.
        ConfigurationError: A critical stratum is in no version.
    """
    pace = pace or RateLimiter()
    base = read_table(root_store(repository.store), repository.id)
    table = _table_after(repository, base, change)
    placing = Placing(base, base)
    if table is None:
        return placing
    if not dry_run:
        for record in table.locations:
            is_new = base is None or base.find(record.name) is None or record.name in change.refill
            if is_new and record.name != ROOT_NAME:
                copy = location_of(record, writable=True).store
                prepare_copy(root_store(repository.store), copy, record.name, repository.id)
        encode_parity(repository, table.policy.parity, repository.versions, pace).check()
    found = look(repository, table, find_needed(over_all(repository), table, repository.versions))
    placing.copies = Replication.of(found)
    if dry_run:
        for one in found.all.values():  # a new location is not prepared in a dry run, which is no problem
            if one.state == "unprepared" and (base is None or base.find(one.name) is None):
                one.state, one.problem = "new", ""
        placing.table = table
    else:
        if table is not base or change.refill:
            placing.copies = copy_missing(found, CheckSettings(pace=pace), report)
            _check_copied(repository, found)
        if table is not base:
            told = message or _describe(base, table.locations)
            placing.table = commit_table(repository, base, table, message=told, author=author)
            placing.committed = True
    _delete_due(placing, found, pace, grace_s, clock, dry_run=dry_run)
    if not dry_run:
        mirror(found)
    return placing


def commit_table(
    repository: Repository,
    base: LocationTable | None,
    table: LocationTable,
    *,
    message: str,
    author: str = "",
) -> LocationTable:
    """Commit a table that was made from `base`, and return it with its number and time.

    Raises:
        CommitConflict: Another process committed a table after `base`.
    """

    def change(head: LogEntry) -> Mapping[str, Any]:
        if head.locations != base:
            raise CommitConflict(
                f"locations of {repository.url} were changed by somebody else meanwhile; look at them (shardkit place "
                f"{shell_word(repository.url)}), then run the same command again"
            )
        return {"locations": msgspec.structs.replace(table, n=head.n + 1, time=utc_text())}

    entry = repository.append(change, repository.head(), message, author)
    assert entry is not None
    assert entry.locations is not None
    # The table is committed. Repair puts a missing second copy.
    with contextlib.suppress(ShardkitError):
        spare = spare_bytes(repository.id, entry.locations)
        put_over(root_store(repository.store), SPARE_NAME, spare)
    return entry.locations


def _table_after(
    repository: Repository, base: LocationTable | None, change: PlacementChange
) -> LocationTable | None:
    """Return a draft of the changed table; `base` if nothing changes; None if no table is needed."""
    policy, records = changed_table(repository, base, change)
    if base is not None and policy == base.policy and records == base.locations:
        return base
    if base is None and len(records) == 1 and policy == Policy():
        return None
    if not change.is_undo:
        _check_strata(repository, base, policy)
    return LocationTable(policy=policy, locations=records)


def _check_strata(repository: Repository, base: LocationTable | None, policy: Policy) -> None:
    """Raise ConfigurationError for a new critical stratum that no version has, such as a misspelled one."""
    before = {one.stratum for one in base.policy.critical} if base else set[str]()
    new = sorted({one.stratum for one in policy.critical} - before)
    for name, hint in unknown_strata(over_all(repository), new).items() if new else ():
        raise ConfigurationError(f"critical stratum {name!r}: no version of {repository.url} has it; {hint}")


def undo(repository: Repository, **options: Any) -> Placing:
    """Restore the locations and the policy of the table before the newest one, and copy deleted copies again.

    Raises:
        UsageError: There is no earlier table.
    """
    tables = itertools.pairwise(entry.locations for entry in repository.newest_commits())
    now, before = next(((one, other) for one, other in tables if one != other), (None, None))
    if now is None or before is None:
        raise UsageError(f"{repository.url}: there is no earlier placement to go back to")
    back = {one.name for one in before.locations}
    change = PlacementChange(
        locations=before.others,
        forget=tuple(one.name for one in now.others if one.name not in back),
        refill=(),
        policy=lambda _: before.policy,
        is_undo=True,
    )
    return place(repository, change, **{"message": f"undo of placement {now.n}", **options})


def _check_copied(repository: Repository, found: Holdings) -> None:
    if found.missing:
        bad = [one for one in found.all.values() if one.lag]
        told = "; ".join(f"{one.name}: {one.problem or one.state}" for one in bad)
        raise StoreError(
            f"{repository.url}: {len(found.missing)} copies are missing that the new placement asks for ({told}); the "
            "old one holds; mend that, or leave the location out (--forget NAME), then run the same command again"
        )


def _delete_due(
    placing: Placing,
    found: Holdings,
    pace: RateLimiter,
    grace_s: int,
    clock: Callable[[], float],
    *,
    dry_run: bool,
) -> None:
    table = placing.table
    if table is None:
        return
    copies = surplus(found)
    placing.surplus = len(copies)
    since = seconds_of(table.time) if table.n else clock()
    placing.due_in_s = max(0, int(since + grace_s - clock())) if copies else 0
    if copies and placing.due_in_s == 0 and not dry_run:
        placing.drops = drop_surplus(table, found, copies, pace)
        placing.surplus -= placing.drops.objects


def _describe(base: LocationTable | None, records: Sequence[LocationRecord]) -> str:
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


def surplus(found: Holdings) -> list[tuple[str, str]]:
    """Return (location, object) of copies of needed objects that do not belong in the location.

    Objects that no version needs are left to `gc`.
    """
    return [
        (location, name)
        for location in found.stores
        if location != ROOT_NAME
        for name in sorted(found.held[location])
        if name in found.needed and location not in found.needed[name].where
    ]


def drop_surplus(
    table: LocationTable,
    found: Holdings,
    copies: Iterable[tuple[str, str]],
    pace: RateLimiter,
) -> Drops:
    """Delete each surplus copy, after a check that all copies that the policy asks for are good.

    The check uses the store's own checksum, requested now, or reads every byte. Listings and attestations do not count.
    """
    done = Drops()
    domains = {one.name: one.domain for one in table.locations}
    for location, name in copies:
        one = found.needed[name]
        good = {
            domains[other] for other in one.where if other != location and _is_good(found, other, name, pace)
        }
        if len(good) < len({domains[other] for other in one.where}):
            done.kept.append((location, name))
            continue
        store = found.stores[location].store
        try:
            stat = store.head(name)
            store.delete(name)
        except ShardkitError as error:
            done.problems.append(f"{location}: {error}")
            continue
        found.held[location].discard(name)
        done.objects += 1
        done.bytes += stat.size if stat else 0
    return done


def _is_good(found: Holdings, location: str, name: str, pace: RateLimiter) -> bool:
    store = found.stores[location].store if location in found.stores else None
    return store is not None and check_object(store, name, None, "stored", pace.take).is_good


def promote(
    url: str | os.PathLike[str], *, copies: int | None = None, message: str = "", author: str = ""
) -> LocationTable:
    """Make a copy the root, which gets the commits. `replicate` then copies the objects that it lacks.

    Commits that were made after the log was last copied are lost with the old root. May be killed and called again.

    Raises:
        UsageError: The store is not a copy, or the old root still answers.
    """
    store = open_store(url)
    mark = read_mark(store)
    identity = identity_in(store)
    table = read_table(store, identity.id)
    if mark is None or table is None:
        raise UsageError(f"{store.url} is no copy of a root; there is nothing to promote")
    if table.root.url != absolute_url(store.url):
        _check_lost(table, store, identity.id)
        own = table.find(mark.location)
        root = dataclasses.replace(
            table.root, url=absolute_url(store.url), domain=own.domain if own else table.root.domain
        )
        others = [one for one in table.others if one.name != mark.location]
        policy: Policy = table.policy if copies is None else table.policy.changed(copies=copies)
        new = LocationTable(policy=policy, locations=(root, *others))
        told = message or f"{mark.location} is the root now"
        repository = Repository(store, identity, read_only=False)
        table = commit_table(repository, table, new, message=told, author=author)
    store.delete(COPY_NAME)  # last: the mark prevents commits until then
    return table


def _check_lost(table: LocationTable, store: Store, repository_id: str) -> None:
    """Raise UsageError if the root of the table still answers: two roots would fork the log."""
    try:
        root = Repository.open(table.root.url, read_only=True)
    except (NotFoundError, ShardkitError):
        return
    if root.id == repository_id and root.url != store.url:
        raise UsageError(
            f"the {ROOT_NAME} at {root.url} answers: it must be gone before a copy takes its place; take it away first"
        )
