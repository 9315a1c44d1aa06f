"""`replicate`: copy what is missing until the policy is met, from wherever the last call stopped."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shardkit.copies.policy import ROOT_NAME, LocationTable, read_table
from shardkit.copies.policy.opening import open_locations, root_store
from shardkit.copies.replicating.copying import CopyAll, CopyTask, copy_task
from shardkit.copies.replicating.facts import Facts, Missing, look
from shardkit.copies.replicating.mirroring import mirror_documents, mirror_log
from shardkit.copies.replicating.needed import Needed, find_needed, live_versions
from shardkit.copies.replicating.pacing import Pace
from shardkit.copies.replicating.protecting import encode_parity
from shardkit.errors import (
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from shardkit.exit_codes import ExitCode
from shardkit.reading.adopted import AdoptedStore
from shardkit.reading.locations import Location
from shardkit.repository.repository import Repository

if TYPE_CHECKING:
    from shardkit.copies.repairing.checking import CheckAll
    from shardkit.copies.repairing.results import Healed, Unchecked

__all__ = [
    "LocationResult",
    "Replication",
    "begun",
    "copy_missing",
    "finished",
    "mirror",
    "over_all",
    "replicate",
    "table_of",
]

_JOBS: Final = 4
_FAILURES: Final = 3
"""After so many failures in a row a location is left alone until the next call."""

Report = Callable[[int, int, int, int], None]
"""(objects done, objects, bytes done, bytes)."""


@dataclass(slots=True)
class LocationResult:
    """What became of one location.

    Attributes:
        name: of the location.
        url: where it is.
        domain: its failure domain.
        state: "ok", "unreachable", "unprepared", "foreign", "failed", or "new" where nothing was done yet.
        problem: what it said, or "".
        copied: objects that this call copied to it. copied_bytes: their bytes.
        commits: log entries that this call copied to it.
        lag: objects that belong there and are not. lag_bytes: their bytes.
    """

    name: str
    url: str
    domain: str
    state: str = "ok"
    problem: str = ""
    copied: int = 0
    copied_bytes: int = 0
    commits: int = 0
    lag: int = 0
    lag_bytes: int = 0


@dataclass(slots=True)
class Replication:
    """What `replicate` did.

    Attributes:
        lag_before: bytes below the policy when it began. lag_after: when it ended.
        objects: copies that were missing when it began.
        locations: in the table's order.
        lost: names of objects of which no location has good bytes.
        dry_run: whether it was only looked what is missing.
        healed: copies and documents that were damaged, or that the root had lost.
        unchecked: copies of which nothing is known.
    """

    lag_before: int = 0
    lag_after: int = 0
    objects: int = 0
    locations: list[LocationResult] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    dry_run: bool = False
    healed: list[Healed] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        """Done where the policy is met; a location that does not answer, or cannot be filled, is unchecked."""
        if self.lost:
            return ExitCode.DAMAGED
        if self.unchecked or any(one.state != "ok" for one in self.locations):
            return ExitCode.UNCHECKED
        if not self.lag_after:
            return ExitCode.DONE
        return ExitCode.NO if self.dry_run else ExitCode.FAILED

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        names = LocationResult.__slots__
        return {
            "lag_before": self.lag_before,
            "lag_after": self.lag_after,
            "objects": self.objects,
            "locations": [{name: getattr(one, name) for name in names} for one in self.locations],
            "lost": self.lost,
            "healed": [one._asdict() for one in self.healed],
            "unchecked": [one._asdict() for one in self.unchecked],
            "exit_code": self.exit_code,
        }


def replicate(
    repository: Repository,
    *,
    level: str = "stored",
    pace: Pace | None = None,
    dry_run: bool = False,
    jobs: int = _JOBS,
    copy_all: CopyAll | None = None,
    check_all: CheckAll | None = None,
    report: Report | None = None,
    versions: Iterable[str] | None = None,
) -> Replication:
    """Copy every object that a ref or tag needs to where it belongs and is not, or is damaged.

    Each copy is verified by its digest while it is made, and has its name only then; so this may be killed at any
    moment and called again.

    Args:
        repository: opened for writing.
        level: how deep copies of shards and parity that are listed are looked at; see `repair`. Metadata is read.
        pace: how fast, and when.
        dry_run: only list what is missing.
        jobs: objects under way at once.
        copy_all: copies objects in place of threads here.
        check_all: looks at copies in place of threads here.
        report: progress.
        versions: manifest ids; by default all that refs and tags name.

    Raises:
        NotFoundError: the root has no locations.
        StoreError: the root does not answer.
        KeyboardInterrupt: the pace was stopped.
    """
    if dry_run:
        table = table_of(repository)
        chosen = live_versions(repository) if versions is None else versions
        facts = look(repository, table, find_needed(over_all(repository), table, chosen))
        done = begun(table, facts)
        done.dry_run = True
        finished(facts, done)
        return done
    # Imported here, because repairs copy by what this package has.
    from shardkit.copies.repairing.repairing import repair_listed
    from shardkit.copies.repairing.results import Unchecked

    pace = pace or Pace()
    fixed = repair_listed(repository.url, level=level, pace=pace, jobs=jobs, check_all=check_all)
    table = table_of(repository)
    chosen = fixed.versions if versions is None else versions
    problem = _encoding_problem(repository, table, chosen, pace)
    facts = look(repository, table, _needed(repository, table, chosen))
    done = begun(table, facts)
    done.healed, done.unchecked = fixed.healed, fixed.unchecked
    done.lag_before += sum(one.num_bytes for one in fixed.healed if one.was == "missing")
    copy_missing(repository, facts, done, pace, jobs, report, copy_all)
    done.lost = sorted({*done.lost, *(one.name for one in fixed.lost)})
    if problem:
        done.unchecked.append(Unchecked(ROOT_NAME, "", problem))
    mirror(repository, facts, done)
    finished(facts, done)
    return done


def _encoding_problem(
    repository: Repository, table: LocationTable, versions: Iterable[str], pace: Pace
) -> str:
    """Encode parity; why some sets have none, or "": what is lost stops nothing else."""
    try:
        encode_parity(repository, table, versions, pace)
    except (StoreFullError, StoreReadOnlyError):
        raise
    except StoreError as error:
        return str(error)
    return ""


def _needed(repository: Repository, table: LocationTable, versions: Iterable[str]) -> dict[str, Needed]:
    """What is needed of all versions that can be read; what is lost was told."""
    reading, found = over_all(repository), dict[str, Needed]()
    stores = [one.store for one in open_locations(repository)]
    for version in versions:
        with contextlib.suppress(NotFoundError, IntegrityError, FormatError):
            for name, one in find_needed(reading, table, [version], stores=stores).items():
                if name not in found or len(found[name].where) < len(one.where):
                    found[name] = one
    return found


def copy_missing(
    repository: Repository,
    facts: Facts,
    done: Replication,
    pace: Pace,
    jobs: int = _JOBS,
    report: Report | None = None,
    copy_all: CopyAll | None = None,
) -> None:
    """Make the copies that `facts` found missing, small and critical ones first; what is made is taken off the list."""
    work = [one for one in facts.missing if one.location in facts.stores]
    work.sort(key=lambda one: (not one.needed.is_critical, -len(one.needed.where), one.size, one.needed.name))
    copying = _Copying(repository, facts, done, pace, work, report)
    if copy_all is not None:
        for number, outcome in copy_all(copying.tasks()):
            copying.settle(work[number], outcome)
            if isinstance(outcome, int):
                copying.moved(outcome)
        return
    with ThreadPoolExecutor(jobs, thread_name_prefix="shardkit-copy") as pool:
        running: set[Future[None]] = set()
        try:
            for one in work:
                running.add(pool.submit(copying.copy, one))
                while len(running) >= 2 * jobs:
                    running = _settled(running)
            while running:
                running = _settled(running)
        except BaseException:
            pace.stop()
            for future in running:
                future.cancel()
            raise


def _settled(running: set[Future[None]]) -> set[Future[None]]:
    finished, left = wait(running, return_when=FIRST_COMPLETED)
    for future in finished:
        future.result()
    return left


class _Copying:
    """The copies of one call; its methods are called by several threads."""

    def __init__(
        self,
        repository: Repository,
        facts: Facts,
        done: Replication,
        pace: Pace,
        work: list[Missing],
        report: Report | None,
    ) -> None:
        self._facts, self._done, self._pace, self._work, self._report = facts, done, pace, work, report
        self._results = {one.name: one for one in done.locations}
        self._failures = dict.fromkeys(facts.stores, 0)
        self._lock = threading.Lock()
        self._objects, self._bytes = 0, 0
        self._all = len(work), sum(one.size for one in work)
        # Adopted tars are no objects of the root, and yet the root is where they are read.
        self._adopted = Location(name=ROOT_NAME, store=AdoptedStore(root_store(repository.store)))

    def tasks(self) -> Iterator[tuple[int, CopyTask]]:
        """What there is to copy, with its number; nothing more for a location that has failed."""
        for number, one in enumerate(self._work):
            if self._results[one.location].state == "ok":
                yield number, self._task(one)

    def _task(self, one: Missing) -> CopyTask:
        sources = self._facts.sources(one.needed.name) or [self._adopted]
        return CopyTask(one.needed.name, tuple(sources), self._facts.stores[one.location])

    def copy(self, one: Missing) -> None:
        if self._results[one.location].state == "ok":
            self.settle(one, copy_task(self._task(one), self._pace, self.moved))
            self.moved(0)

    def settle(self, one: Missing, outcome: int | IntegrityError | StoreError) -> None:
        """Note what came of a copy: its bytes, or why there is none."""
        result = self._results[one.location]
        if isinstance(outcome, IntegrityError):
            with self._lock:
                if one.needed.name not in self._done.lost:
                    self._done.lost.append(one.needed.name)
                result.problem = result.problem or str(outcome)
            return
        if isinstance(outcome, StoreError):
            self._failed(result, outcome)
            return
        with self._lock:
            self._failures[one.location] = 0
            result.copied += 1
            result.copied_bytes += outcome
            self._objects += 1
            self._facts.held[one.location].add(one.needed.name)

    def moved(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes += num_bytes
            if self._report is not None:
                self._report(self._objects, self._all[0], self._bytes, self._all[1])

    def _failed(self, result: LocationResult, error: StoreError) -> None:
        with self._lock:
            self._failures[result.name] += 1
            result.problem = str(error)
            hopeless = isinstance(error, (StoreFullError, StoreReadOnlyError))
            if hopeless or self._failures[result.name] >= _FAILURES:
                result.state = "failed"


def mirror(repository: Repository, facts: Facts, done: Replication) -> None:
    """Copy log and documents to every location that answers."""
    root = root_store(repository.store)
    for result in done.locations:
        if result.name == ROOT_NAME or result.state != "ok":
            continue
        try:
            store = facts.stores[result.name].store
            mirror_documents(root, store)
            result.commits = mirror_log(root, store)
        except ShardkitError as error:
            result.state, result.problem = "failed", str(error)


def begun(table: LocationTable, facts: Facts) -> Replication:
    """What can be said before anything is copied."""
    done = Replication(lag_before=facts.lag_bytes, objects=len(facts.missing))
    for record in table.locations:
        state, problem = facts.states[record.name], facts.problems.get(record.name, "")
        done.locations.append(LocationResult(record.name, record.url, record.domain, state, problem))
    return done


def finished(facts: Facts, done: Replication) -> None:
    """What is missing now."""
    facts.missing = [one for one in facts.missing if one.needed.name not in facts.held.get(one.location, ())]
    done.lag_after = facts.lag_bytes
    for result in done.locations:
        result.lag, result.lag_bytes = facts.lag_of(result.name)


def table_of(repository: Repository) -> LocationTable:
    """Locations and policy of a root.

    Raises:
        NotFoundError: it has none.
    """
    table = read_table(root_store(repository.store), repository.id)
    if table is None:
        raise NotFoundError(
            f"{repository.url} has no locations beside itself; add one: shardkit place {repository.url} --location "
            "NAME=URL --copies 2"
        )
    return table


def over_all(repository: Repository) -> Repository:
    """The same repository for reading, over all its locations: metadata that the root has lost is read from a copy."""
    return Repository.open(repository.url, read_only=True)
