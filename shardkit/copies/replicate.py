"""`replicate`: copy what is missing until the policy is met, from wherever the last call stopped.

And what a commit waits for: the mode of the policy.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from shardkit.copies.documents import mirror_documents, mirror_log
from shardkit.copies.facts import Facts, Missing, look, open_all
from shardkit.copies.pacing import RateLimiter
from shardkit.copies.parity_encoding import encode_parity
from shardkit.copies.placement import Needed, add_needed, find_needed, live_versions
from shardkit.copies.records import Healed, Unchecked
from shardkit.copies.repair import CheckAll, repair_listed
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
from shardkit.reading.copying import copy_object
from shardkit.reading.locations import ROOT_NAME, Location
from shardkit.repository.location_table import LocationTable, read_table
from shardkit.repository.opening import open_locations
from shardkit.repository.repository import Repository
from shardkit.stores.objects import Depth
from shardkit.stores.store import root_store

_JOBS: Final = 4
_FEW: Final = 2_000
_FAILURES: Final = 3
"""After so many failures in a row a location is left alone until the next call."""

Report = Callable[[int, int, int, int], None]
"""(objects done, objects, bytes done, bytes)."""


class CopyTask(NamedTuple):
    """A copy to be made; see `copy_object`."""

    name: str
    sources: tuple[Location, ...]
    target: Location


CopyAll = Callable[
    [Iterable[tuple[int, CopyTask]]], Iterator[tuple[int, "int | IntegrityError | StoreError"]]
]
"""Makes numbered copies and yields what came of each as it comes: its bytes, or why there is none."""


def copy_task(
    task: CopyTask, pace: RateLimiter, moved: Callable[[int], None] | None = None
) -> int | IntegrityError | StoreError:
    """Make a copy: its bytes, or why there is none."""
    try:
        return copy_object(task.name, task.sources, task.target, pace=pace.take, moved=moved)[1]
    except (IntegrityError, StoreError) as error:
        return error


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
        dry_run: whether it was only found out what is missing.
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
    level: Depth = "stored",
    pace: RateLimiter | None = None,
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
        level: how deep copies of shards and parity that are listed are checked; see `repair`. Metadata is read.
        pace: how fast, and when.
        dry_run: only list what is missing.
        jobs: objects under way at once.
        copy_all: copies objects in place of threads here.
        check_all: checks copies in place of threads here.
        report: progress.
        versions: manifest ids; by default all that refs and tags name.

    Raises:
        NotFoundError: the root has no locations.
        StoreError: the root does not answer.
        KeyboardInterrupt: the pace was stopped.
    """
    pace = pace or RateLimiter()
    fixed = None
    if not dry_run:
        fixed = repair_listed(repository.url, level=level, pace=pace, jobs=jobs, check_all=check_all)
    table = read_table(root_store(repository.store), repository.id)
    if table is None:
        raise NotFoundError(
            f"{repository.url} has no locations beside itself; add one: shardkit place {repository.url} --location "
            "NAME=URL --copies 2"
        )
    if fixed is None:
        chosen = live_versions(repository) if versions is None else versions
        facts = look(repository, table, find_needed(over_all(repository), table, chosen))
        done = Copying(repository, table, facts).finished()
        done.dry_run = True
        return done
    chosen = fixed.versions if versions is None else versions
    problem = _encoding_problem(repository, table, chosen, pace)
    copying = Copying(repository, table, look(repository, table, _needed(repository, table, chosen)))
    done = copying.copy_missing(pace, jobs, report, copy_all)
    done.healed, done.unchecked = fixed.healed, fixed.unchecked
    done.lag_before += sum(one.num_bytes for one in fixed.healed if one.was == "missing")
    done.lost = sorted({*done.lost, *(one.name for one in fixed.lost)})
    if problem:
        done.unchecked.append(Unchecked(ROOT_NAME, "", problem))
    copying.mirror()
    return done


def _encoding_problem(
    repository: Repository, table: LocationTable, versions: Iterable[str], pace: RateLimiter
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
            add_needed(found, find_needed(reading, table, [version], stores=stores).values())
    return found


class Copying:
    """The copies that one comparison found missing, made; methods of a copy are called by several threads.

    Args:
        repository: the root.
        table: locations and policy.
        facts: what was found missing; what is made is taken off the list.

    Attributes:
        done: what came of it.
    """

    def __init__(self, repository: Repository, table: LocationTable, facts: Facts) -> None:
        self.facts = facts
        self.done = Replication(lag_before=facts.lag_bytes, objects=len(facts.missing))
        for one in table.locations:
            state, problem = facts.states[one.name], facts.problems.get(one.name, "")
            self.done.locations.append(LocationResult(one.name, one.url, one.domain, state, problem))
        self._root = root_store(repository.store)
        self._results = {one.name: one for one in self.done.locations}
        self._failures = dict.fromkeys(facts.stores, 0)
        self._lock = threading.Lock()
        self._objects, self._bytes = 0, 0
        # Adopted tars are no objects of the root, and yet the root is where they are read.
        self._adopted = Location(name=ROOT_NAME, store=AdoptedStore(self._root))

    def copy_missing(
        self,
        pace: RateLimiter,
        jobs: int = _JOBS,
        report: Report | None = None,
        copy_all: CopyAll | None = None,
    ) -> Replication:
        """Make the copies, small and critical ones first; see `replicate` for the arguments."""
        work = [one for one in self.facts.missing if one.location in self.facts.stores]
        work.sort(
            key=lambda one: (not one.needed.is_critical, -len(one.needed.where), one.size, one.needed.name)
        )
        total_bytes = sum(one.size for one in work)

        def moved(num_bytes: int) -> None:
            with self._lock:
                self._bytes += num_bytes
                if report is not None:
                    report(self._objects, len(work), self._bytes, total_bytes)

        def copy(one: Missing) -> None:
            if self._results[one.location].state == "ok":
                self._settle(one, copy_task(self._task(one), pace, moved))
                moved(0)

        if copy_all is not None:
            left = (
                (number, one) for number, one in enumerate(work) if self._results[one.location].state == "ok"
            )
            for number, outcome in copy_all((number, self._task(one)) for number, one in left):
                self._settle(work[number], outcome)
                moved(outcome if isinstance(outcome, int) else 0)
            return self.finished()
        with ThreadPoolExecutor(jobs, thread_name_prefix="shardkit-copy") as pool:
            try:
                for _ in pool.map(copy, work):
                    pass
            except BaseException:
                pace.stop()
                pool.shutdown(cancel_futures=True)
                raise
        return self.finished()

    def _task(self, one: Missing) -> CopyTask:
        sources = self.facts.sources(one.needed.name) or [self._adopted]
        return CopyTask(one.needed.name, tuple(sources), self.facts.stores[one.location])

    def _settle(self, one: Missing, outcome: int | IntegrityError | StoreError) -> None:
        """Note what came of a copy: its bytes, or why there is none."""
        result = self._results[one.location]
        with self._lock:
            if isinstance(outcome, IntegrityError):
                if one.needed.name not in self.done.lost:
                    self.done.lost.append(one.needed.name)
                result.problem = result.problem or str(outcome)
            elif isinstance(outcome, StoreError):
                self._failures[one.location] += 1
                result.problem = str(outcome)
                hopeless = isinstance(outcome, (StoreFullError, StoreReadOnlyError))
                if hopeless or self._failures[one.location] >= _FAILURES:
                    result.state = "failed"
            else:
                self._failures[one.location] = 0
                result.copied += 1
                result.copied_bytes += outcome
                self._objects += 1
                self.facts.held[one.location].add(one.needed.name)

    def mirror(self) -> None:
        """Copy log and documents to every location that answers."""
        for result in self.done.locations:
            if result.name == ROOT_NAME or result.state != "ok":
                continue
            try:
                store = self.facts.stores[result.name].store
                mirror_documents(self._root, store)
                result.commits = mirror_log(self._root, store)
            except ShardkitError as error:
                result.state, result.problem = "failed", str(error)

    def finished(self) -> Replication:
        """What is missing now."""
        facts = self.facts
        facts.missing = [
            one for one in facts.missing if one.needed.name not in facts.held.get(one.location, ())
        ]
        self.done.lag_after = facts.lag_bytes
        for result in self.done.locations:
            result.lag, result.lag_bytes = facts.lag_of(result.name)
        return self.done


def over_all(repository: Repository) -> Repository:
    """The same repository for reading, over all its locations: metadata that the root has lost is read from a copy."""
    return Repository.open(repository.url, read_only=True)


def copy_before_commit(repository: Repository, table: LocationTable, versions: Iterable[str]) -> None:
    """Make the copies that must be there before a commit may name these versions.

    Sync: all that the policy asks for, parity included. Hybrid: those of metadata and of shards with critical strata.
    Async: none beside the root's.

    Raises:
        StoreError: a copy could not be made; nothing was committed.
    """
    mode, chosen = table.policy.mode, list(versions)
    if mode == "async" or not chosen:
        return
    pace = RateLimiter()
    if mode == "sync":
        encode_parity(repository, table, chosen, pace)
    needed = find_needed(repository, table, chosen)
    if mode == "hybrid":
        needed = {name: one for name, one in needed.items() if one.is_critical}
    facts = look(repository, table, needed, listing=len(needed) > _FEW)
    done = Copying(repository, table, facts).copy_missing(pace)
    if done.lag_after or done.lost or facts.missing:
        bad = [one for one in done.locations if one.lag or one.state != "ok"]
        told = "; ".join(f"{one.name}: {one.problem or one.state}" for one in bad) or ", ".join(done.lost[:3])
        raise StoreError(
            f"{repository.url}: nothing was committed, because {len(facts.missing)} copies could not be made that mode "
            f"{mode!r} waits for ({told}); mend that and run the same command again, or let copies follow later: "
            f"shardkit place {repository.url} --mode async"
        )


def copies_of_commit(
    repository: Repository, table: LocationTable, versions: Sequence[str]
) -> Callable[[], None]:
    """The hook of a commit: makes the copies that it waits for; lets copies have the log once it stands.

    Raises:
        StoreError: a copy could not be made; nothing was committed.
    """
    copy_before_commit(repository, table, versions)
    return functools.partial(copy_log, repository, table)


def copy_log(repository: Repository, table: LocationTable) -> None:
    """Let the copies have the newest commit too, where they answer; what is missing is lag, not an error.

    The commit stands already: a copy that does not answer now is caught up by `replicate`.
    """
    if table.policy.mode == "async":
        return
    facts = open_all(repository, table.locations)
    root = root_store(repository.store)
    for name, location in facts.stores.items():
        if name != ROOT_NAME:
            with contextlib.suppress(ShardkitError):
                mirror_documents(root, location.store)
                mirror_log(root, location.store)
