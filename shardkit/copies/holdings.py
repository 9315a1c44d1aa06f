"""What each location of a root holds, compared with what belongs there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from shardkit.copies.placement import Needed
from shardkit.errors import IntegrityError, ShardkitError
from shardkit.reading.adopted import AdoptedStore
from shardkit.reading.locations import ROOT_NAME, Location
from shardkit.repository.location_table import LocationRecord, LocationTable, first_root, read_table
from shardkit.repository.opening import is_prepared, location_of
from shardkit.repository.repository import Repository
from shardkit.stores.store import root_store

_OBJECTS: Final = "objects/"
_QUESTIONS: Final = 16
_REPORTED: Final = (
    *("name", "url", "domain", "state", "problem", "copied", "copied_bytes", "commits"),
    *("lag", "lag_bytes"),
)


@dataclass(frozen=True, slots=True)
class Missing:
    """A copy that belongs in a location and is not there."""

    needed: Needed
    location: str
    size: int


@dataclass(slots=True)
class Holding:
    """One location: how it answers, what it holds, and what a call did there.

    Attributes:
        name: of the location.
        url: where it is.
        domain: its failure domain.
        location: as a source and target; None while it does not answer, or is not what it should be.
        state: "ok"; "unreachable"; "unprepared": empty, or not mounted; "foreign": it is something else; "failed"
            where copies could not be put; "new" where nothing was done yet.
        problem: what it said, or "".
        held: names of the objects that it lists.
        copied: objects that this call copied to it. copied_bytes: their bytes.
        commits: log entries that this call copied to it.
        lag: objects that belong there and are not. lag_bytes: their bytes.
    """

    name: str
    url: str
    domain: str
    location: Location | None = None
    state: str = "ok"
    problem: str = ""
    held: set[str] = field(default_factory=set)
    copied: int = 0
    copied_bytes: int = 0
    commits: int = 0
    lag: int = 0
    lag_bytes: int = 0

    def leave_out(self, state: str, problem: str) -> None:
        """Neither read nor write there any more."""
        self.location, self.state, self.problem = None, state, problem

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _REPORTED}


class Holdings:
    """Locations, opened for writing; each has been seen to be what it should be, and nothing is listed yet.

    Args:
        repository: the root, opened in any way.
        records: by default those of the root's table, or the root alone where it has none.

    Attributes:
        root: its store.
        all: name → what is known of it.
        missing: copies that are not there, of all locations, also of those that do not answer.
    """

    def __init__(self, repository: Repository, records: Sequence[LocationRecord] | None = None) -> None:
        self.root = root_store(repository.store)
        if records is None:
            table = read_table(self.root, repository.id)
            records = table.locations if table else (first_root(self.root),)
        self.all = {one.name: Holding(one.name, one.url, one.domain) for one in records}
        self.missing: list[Missing] = []
        for record in records:
            self._open(repository, record, self.all[record.name])

    def _open(self, repository: Repository, record: LocationRecord, found: Holding) -> None:
        if record.name == ROOT_NAME:
            found.location = Location(name=ROOT_NAME, store=self.root, domain=record.domain, heal=True)
            return
        try:
            found.location = location_of(record, writable=True)
            if not is_prepared(found.location.store, record.name, repository.id):
                refill = f"shardkit place {repository.url} --refill {record.name}"
                why = f"{record.url} is empty, or its disk is not mounted; to fill it anew: {refill}"
                found.leave_out("unprepared", why)
        except IntegrityError as error:
            found.leave_out("foreign", str(error))
        except ShardkitError as error:
            found.leave_out("unreachable", str(error))

    @property
    def stores(self) -> dict[str, Location]:
        """Name → location, of those that can be used."""
        return {name: one.location for name, one in self.all.items() if one.location is not None}

    @property
    def problems(self) -> dict[str, str]:
        """Name → why, of those that cannot be used."""
        return {name: one.problem for name, one in self.all.items() if one.location is None}

    @property
    def lag_bytes(self) -> int:
        """Bytes of copies that are not there: what is below the policy."""
        return sum(one.size for one in self.missing)

    def sources(self, name: str) -> list[Location]:
        """Who lists an object, the root first."""
        return [one for one in self.stores.values() if name in self.all[one.name].held]

    def fill(self, names: Collection[str] | None = None) -> None:
        """Find out what each location holds; one that does not answer is left out.

        Args:
            names: of the objects that are asked for, one by one; None lists all.

        Raises:
            StoreError: the root does not answer.
        """

        def ask(location: Location) -> set[str] | ShardkitError:
            try:
                if names is None:
                    return set(location.store.list_after(_OBJECTS))
                with ThreadPoolExecutor(_QUESTIONS, thread_name_prefix="shardkit-head") as pool:
                    stats = zip(names, pool.map(location.store.head, names), strict=True)
                    return {name for name, stat in stats if stat is not None}
            except ShardkitError as error:
                return error

        stores = self.stores
        with ThreadPoolExecutor(max(1, len(stores)), thread_name_prefix="shardkit-list") as pool:
            answers = dict(zip(stores, pool.map(ask, stores.values()), strict=True))
        for name, answer in answers.items():
            if not isinstance(answer, ShardkitError):
                self.all[name].held = answer
            elif name == ROOT_NAME:
                raise answer
            else:
                self.all[name].leave_out("unreachable", str(answer))

    def count_missing(self) -> None:
        """What is missing now; and so what each location lacks."""
        self.missing = [one for one in self.missing if one.needed.name not in self.all[one.location].held]
        for name, found in self.all.items():
            sizes = [one.size for one in self.missing if one.location == name]
            found.lag, found.lag_bytes = len(sizes), sum(sizes)


def look(
    repository: Repository, table: LocationTable, needed: Mapping[str, Needed], *, listing: bool = True
) -> Holdings:
    """List all locations and compare: the one place that tells how far copies are below the policy.

    What a location does not answer counts as missing there: a policy is met by copies that are known of.

    Args:
        repository: opened in any way.
        table: what belongs where.
        needed: the objects that are looked for.
        listing: False asks for each object by name: for a few objects in a large root.

    Raises:
        StoreError: the root does not answer.
    """
    found = Holdings(repository, table.locations)
    found.fill(None if listing else list(needed))
    adopting = AdoptedStore(found.root)  # adopted tars lie elsewhere and count as there
    for one in needed.values():
        lacking = [name for name in one.where if one.name not in found.all[name].held]
        if ROOT_NAME in lacking and adopting.head(one.name) is not None:
            lacking.remove(ROOT_NAME)
        if lacking:
            stat = None if one.size is not None else repository.store.head(one.name)
            size = one.size if one.size is not None else stat.size if stat else 0
            found.missing += [Missing(one, name, size) for name in lacking]
    found.count_missing()
    return found
