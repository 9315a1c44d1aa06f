"""What each location has, compared with what belongs there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Literal

from shardkit.copies.placement import Needed
from shardkit.errors import IntegrityError, ShardkitError
from shardkit.reading.adopted import AdoptedStore
from shardkit.reading.locations import ROOT_NAME, Location
from shardkit.repository.location_table import LocationRecord, LocationTable, first_root, read_table
from shardkit.repository.opening import is_prepared, location_of
from shardkit.repository.repository import Repository
from shardkit.stores.store import root_store

State = Literal["ok", "unreachable", "unprepared", "foreign"]
"""Of a location: fit; does not answer; not set up yet; of another repository."""

_OBJECTS: Final = "objects/"
_QUESTIONS: Final = 16


@dataclass(frozen=True, slots=True)
class Missing:
    """A copy that belongs in a location and is not there."""

    needed: Needed
    location: str
    size: int


@dataclass(slots=True)
class Facts:
    """One look at all locations.

    Attributes:
        states: location → "ok"; "unreachable"; "unprepared": empty, or not mounted; "foreign": it is something else.
        problems: location → what it said.
        stores: location → as a source and target; of those that are "ok".
        held: location → names of the objects that it lists.
        missing: copies that are not there, of all locations, also of those that do not answer.
    """

    states: dict[str, State] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    stores: dict[str, Location] = field(default_factory=dict)
    held: dict[str, set[str]] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)

    @property
    def lag_bytes(self) -> int:
        """Bytes of copies that are not there: what is below the policy."""
        return sum(one.size for one in self.missing)

    def lag_of(self, location: str) -> tuple[int, int]:
        """(objects, bytes) that a location lacks."""
        sizes = [one.size for one in self.missing if one.location == location]
        return len(sizes), sum(sizes)

    def sources(self, name: str) -> list[Location]:
        """Who lists an object, the root first."""
        return [one for one in self.stores.values() if name in self.held[one.name]]


def open_all(repository: Repository, records: Iterable[LocationRecord]) -> Facts:
    """Open locations for writing and see that each is what it should be; nothing is listed yet."""
    facts = Facts()
    for record in records:
        _open(repository, record, facts)
    return facts


def open_recorded(repository: Repository) -> Facts:
    """`open_all` for the table of a root; the root alone where it has none."""
    root = root_store(repository.store)
    table = read_table(root, repository.id)
    return open_all(repository, table.locations if table else (first_root(root),))


def look(
    repository: Repository, table: LocationTable, needed: Mapping[str, Needed], *, listing: bool = True
) -> Facts:
    """List all locations and compare.

    What a location does not answer counts as missing there: a policy is met by copies that are known of.

    Args:
        repository: opened in any way.
        table: what belongs where.
        needed: the objects that are looked for.
        listing: False asks for each object by name: for a few objects in a large root.

    Raises:
        StoreError: the root does not answer.
    """
    facts = open_all(repository, table.locations)
    ask = None if listing else functools.partial(_ask, names=list(needed))
    fill_held(facts, ask)
    root = repository.store
    for one in needed.values():
        lacking = [name for name in one.where if one.name not in facts.held.get(name, ())]
        if lacking:
            stat = None if one.size is not None else root.head(one.name)
            size = one.size if one.size is not None else stat.size if stat else 0
            elsewhere = [name for name in lacking if name != ROOT_NAME or _is_lost(repository, one.name)]
            facts.missing += [Missing(one, name, size) for name in elsewhere]
    return facts


def fill_held(facts: Facts, ask: Callable[[Location], set[str] | ShardkitError] | None = None) -> None:
    """Find out what each location holds, by listing it or by `ask`; one that does not answer is set aside.

    Raises:
        StoreError: the root does not answer.
    """
    with ThreadPoolExecutor(max(1, len(facts.stores)), thread_name_prefix="shardkit-list") as pool:
        listings = dict(zip(facts.stores, pool.map(ask or _list, list(facts.stores.values())), strict=True))
    for name, found in listings.items():
        if isinstance(found, ShardkitError):
            if name == ROOT_NAME:
                raise found
            facts.states[name], facts.problems[name] = "unreachable", str(found)
            del facts.stores[name]
        else:
            facts.held[name] = found


def _is_lost(repository: Repository, name: str) -> bool:
    """Whether the root lacks an object that it does not list: an adopted tar lies elsewhere and counts as there."""
    return AdoptedStore(root_store(repository.store)).head(name) is None


def _open(repository: Repository, record: LocationRecord, facts: Facts) -> None:
    if record.name == ROOT_NAME:
        store = root_store(repository.store)
        facts.stores[ROOT_NAME] = Location(name=ROOT_NAME, store=store, domain=record.domain, heal=True)
        facts.states[ROOT_NAME] = "ok"
        return
    try:
        location = location_of(record, writable=True)
        if is_prepared(location.store, record.name, repository.id):
            facts.stores[record.name], facts.states[record.name] = location, "ok"
        else:
            facts.states[record.name] = "unprepared"
            facts.problems[record.name] = (
                f"{record.url} is empty, or its disk is not mounted; to fill it anew: shardkit place "
                f"{repository.url} --refill {record.name}"
            )
    except IntegrityError as error:
        facts.states[record.name], facts.problems[record.name] = "foreign", str(error)
    except ShardkitError as error:
        facts.states[record.name], facts.problems[record.name] = "unreachable", str(error)


def _ask(location: Location, names: list[str]) -> set[str] | ShardkitError:
    try:
        with ThreadPoolExecutor(_QUESTIONS, thread_name_prefix="shardkit-head") as pool:
            found = pool.map(location.store.head, names)
            return {name for name, stat in zip(names, found, strict=True) if stat is not None}
    except ShardkitError as error:
        return error


def _list(location: Location) -> set[str] | ShardkitError:
    try:
        return set(location.store.list_after(_OBJECTS))
    except ShardkitError as error:
        return error
