"""`replicate`: copy what is missing until the policy is met, from wherever the last call stopped.

And what a commit waits for: the mode of the policy; and how far copies are below the policy while a run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from shardkit.copies.documents import Healed, Unchecked
from shardkit.copies.mirroring import log_conflict, mirror_documents, mirror_log
from shardkit.copies.parity_encoding import encode_parity
from shardkit.copies.placement import (
    Holding,
    Holdings,
    Missing,
    Needed,
    add_needed,
    find_needed,
    live_versions,
    look,
)
from shardkit.copies.repair import repair_listed
from shardkit.copies.repair_results import CheckSettings
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
from shardkit.reading.objects import ROOT_NAME, Depth, Location, copy_object
from shardkit.repository.location_table import LocationTable, location_of, read_mark, read_table
from shardkit.repository.log import LogEntry
from shardkit.repository.opening import open_locations
from shardkit.repository.repository import Repository
from shardkit.stores.store import root_store
from shardkit.stores.waiting import RateLimiter
from shardkit.telemetry import Record

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
    size: int


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
    locations: list[Holding] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    dry_run: bool = False
    healed: list[Healed] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)

    @classmethod
    def of(cls, found: Holdings, *, dry_run: bool = False) -> Replication:
        """Nothing was copied yet of what is missing."""
        lag = found.lag_bytes
        return cls(lag, lag, len(found.missing), list(found.all.values()), dry_run=dry_run)

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
        return {
            "lag_before": self.lag_before,
            "lag_after": self.lag_after,
            "objects": self.objects,
            "locations": list(map(dataclasses.asdict, self.locations)),
            "lost": self.lost,
            "healed": [one._asdict() for one in self.healed],
            "unchecked": [one._asdict() for one in self.unchecked],
            "exit_code": self.exit_code,
        }


def replicate(
    repository: Repository,
    *,
    level: Depth = "stored",
    settings: CheckSettings | None = None,
    dry_run: bool = False,
    copy_all: CopyAll | None = None,
    report: Report | None = None,
    versions: Iterable[str] | None = None,
) -> Replication:
    """Copy every object that a ref or tag needs to where it belongs and is not, or is damaged.

    Each copy is verified by its digest while it is made, and has its name only then; so this may be killed at any
    moment and called again.
    """
    settings = settings or CheckSettings()
    fixed = None if dry_run else repair_listed(repository.url, level=level, settings=settings)
    table = read_table(root_store(repository.store), repository.id)
    if table is None:
        raise NotFoundError(
            f"{repository.url} has no locations beside itself; add one: shardkit place {repository.url} --location "
            "NAME=URL --copies 2"
        )
    if fixed is None:
        chosen = live_versions(repository) if versions is None else versions
        needed = find_needed(over_all(repository), table, chosen)
        return Replication.of(look(repository, table, needed), dry_run=True)
    chosen = fixed.versions if versions is None else list(versions)
    problem = ""
    try:
        encode_parity(repository, table, chosen, settings.pace)
    except (StoreFullError, StoreReadOnlyError):
        raise
    except StoreError as error:  # some sets have none: what is lost stops nothing else
        problem = str(error)
    found = look(repository, table, _needed(repository, table, chosen))
    done = copy_missing(found, settings.pace, settings.jobs, report, copy_all)
    done.healed, done.unchecked = fixed.healed, fixed.unchecked
    done.lag_before += sum(one.num_bytes for one in fixed.healed if one.was == "missing")
    done.lost = sorted({*done.lost, *(one.name for one in fixed.lost)})
    if problem:
        done.unchecked.append(Unchecked(ROOT_NAME, "", problem))
    mirror(found)
    return done


def _needed(repository: Repository, table: LocationTable, versions: Iterable[str]) -> dict[str, Needed]:
    """What is needed of all versions that can be read; what is lost was told."""
    reading, found = over_all(repository), dict[str, Needed]()
    stores = [one.store for one in open_locations(repository.store, repository.id)]
    for version in versions:
        with contextlib.suppress(NotFoundError, IntegrityError, FormatError):
            add_needed(found, find_needed(reading, table, [version], stores=stores).values())
    return found


def copy_missing(
    found: Holdings,
    pace: RateLimiter,
    jobs: int = _JOBS,
    report: Report | None = None,
    copy_all: CopyAll | None = None,
) -> Replication:
    """Make the copies that a comparison found missing, small and critical ones first; see `replicate`."""
    done = Replication.of(found)
    copying = _Copying(found, done, report)
    if copy_all is not None:
        left = ((i, copying.task(one)) for i, one in enumerate(copying.work) if copying.is_wanted(one))
        for number, outcome in copy_all(left):
            copying.settle(copying.work[number], outcome)
            copying.moved(outcome if isinstance(outcome, int) else 0)
    else:

        def copy(one: Missing) -> None:
            if copying.is_wanted(one):
                copying.settle(one, copy_task(copying.task(one), pace, copying.moved))
                copying.moved(0)

        with ThreadPoolExecutor(jobs, thread_name_prefix="shardkit-copy") as pool:
            try:
                list(pool.map(copy, copying.work))
            except BaseException:
                pace.stop()
                pool.shutdown(cancel_futures=True)
                raise
    found.count_missing()
    done.lag_after = found.lag_bytes
    return done


class _Copying:
    """Copies under way, of several threads."""

    def __init__(self, found: Holdings, done: Replication, report: Report | None) -> None:
        self._found, self._done, self._report = found, done, report
        self._targets = found.stores
        self.work = sorted(
            (one for one in found.missing if one.location in self._targets),
            key=lambda one: (not one.needed.is_critical, -len(one.needed.where), one.size, one.needed.name),
        )
        self._total_bytes = sum(one.size for one in self.work)
        self._objects = self._bytes = 0
        self._failures = dict.fromkeys(found.all, 0)
        self._lock = threading.Lock()
        # Adopted tars are no objects of the root, and yet the root is where they are read.
        self._adopted = Location(name=ROOT_NAME, store=AdoptedStore(found.root))

    def is_wanted(self, one: Missing) -> bool:
        return self._found.all[one.location].state == "ok"

    def task(self, one: Missing) -> CopyTask:
        sources = self._found.sources(one.needed.name) or [self._adopted]
        return CopyTask(one.needed.name, tuple(sources), self._targets[one.location], one.size)

    def moved(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes += num_bytes
            if self._report is not None:
                self._report(self._objects, len(self.work), self._bytes, self._total_bytes)

    def settle(self, one: Missing, outcome: int | IntegrityError | StoreError) -> None:
        """Note what came of a copy: its bytes, or why there is none."""
        there, name = self._found.all[one.location], one.needed.name
        with self._lock:
            if isinstance(outcome, IntegrityError):
                if name not in self._done.lost:
                    self._done.lost.append(name)
                there.problem = there.problem or str(outcome)
            elif isinstance(outcome, StoreError):
                self._failures[one.location] += 1
                there.problem = str(outcome)
                hopeless = isinstance(outcome, (StoreFullError, StoreReadOnlyError))
                if hopeless or self._failures[one.location] >= _FAILURES:
                    there.state = "failed"
            else:
                self._failures[one.location] = 0
                there.copied += 1
                there.copied_bytes += outcome
                self._objects += 1
                self._found.held[one.location].add(name)


def mirror(found: Holdings) -> None:
    """Copy log and documents to every location that answers."""
    for name, location in found.stores.items():
        there = found.all[name]
        if name != ROOT_NAME and there.state == "ok":
            try:
                mirror_documents(found.root, location.store)
                there.commits = mirror_log(found.root, location.store)
            except ShardkitError as error:
                there.state, there.problem = "failed", str(error)


def over_all(repository: Repository) -> Repository:
    """The same repository for reading, over all its locations: metadata that the root has lost is read from a copy."""
    return Repository.open(repository.url, read_only=True)


def commit(
    repository: Repository,
    set_refs: Mapping[str, str | None] | None = None,
    set_tags: Mapping[str, str] | None = None,
    *,
    message: str,
    author: str = "",
    expected: Mapping[str, str | None] | None = None,
    withdraw: Mapping[str, str] | None = None,
) -> LogEntry:
    """Commit as `Repository.commit` does, with the copies that the policy's mode asks for.

    Sync: all copies, parity included, are made before the commit. Hybrid: those of metadata and of shards with critical
    strata. Async: none. After the commit, in sync and hybrid mode, copies that answer get the log.
    """
    return repository.commit(
        set_refs,
        set_tags,
        message=message,
        author=author,
        expected=expected,
        withdraw=withdraw,
        copies=functools.partial(_copies_of_commit, repository),
    )


def _copies_of_commit(repository: Repository, versions: Sequence[str]) -> Callable[[], None]:
    table = read_table(root_store(repository.store), repository.id)
    if table is None or not table.others:
        return lambda: None
    _check_logs(repository, table)
    mode = table.policy.mode
    if mode == "async":
        return lambda: None
    if versions:
        _copy_before_commit(repository, table, versions)

    def follow_up() -> None:
        """The commit stands: a copy that does not answer now is caught up by `replicate`; that is lag, no error."""
        mirror(Holdings(repository, table.locations))

    return follow_up


def _check_logs(repository: Repository, table: LocationTable) -> None:
    """Refuse to commit if a copy's log has entries that the root lost: the commit would fork the log."""
    for record in table.others:
        conflict = ""
        with contextlib.suppress(ShardkitError):  # a copy that does not answer says nothing
            copy = location_of(record).store
            if read_mark(copy) is not None:
                conflict = log_conflict(root_store(repository.store), copy)
        if conflict:
            raise IntegrityError(f"nothing was committed: {conflict}")


def _copy_before_commit(repository: Repository, table: LocationTable, versions: Sequence[str]) -> None:
    mode, pace = table.policy.mode, RateLimiter()
    if mode == "sync":
        encode_parity(repository, table, versions, pace)
    needed = find_needed(repository, table, versions)
    if mode == "hybrid":
        needed = {name: one for name, one in needed.items() if one.is_critical}
    found = look(repository, table, needed, listing=len(needed) > _FEW)
    done = copy_missing(found, pace)
    if done.lag_after or done.lost or found.missing:
        bad = [one for one in done.locations if one.lag or one.state != "ok"]
        told = "; ".join(f"{one.name}: {one.problem or one.state}" for one in bad) or ", ".join(done.lost[:3])
        raise StoreError(
            f"{repository.url}: nothing was committed, because {len(found.missing)} copies could not be made that mode "
            f"{mode!r} waits for ({told}); mend that and run the same command again, or let copies follow later: "
            f"shardkit place {repository.url} --mode async"
        )


_BETWEEN_S: Final = 600.0
_SHARE_OF_TIME: Final = 1 / 200


class ReplicationLag:
    """A hook of rank 0's recorder: lists the locations every ten minutes at most, on a thread of its own.

    Nothing is done where a dataset has no policy. What a location does not answer counts as missing there.

    Args:
        roots: URLs of the repositories of the dataset's parts; opened for each look.
        versions: manifest that counts, for a dataset of one part; else all that refs name.
    """

    def __init__(self, roots: Sequence[str], versions: Sequence[str]) -> None:
        self._roots, self._versions = list(roots), list(versions)
        self._next_look, self._policies, self._lag_bytes = 0.0, 0, 0.0
        self._thread: threading.Thread | None = None

    def __call__(self, record: Record) -> None:
        """Begin a look if it is time to."""
        if time.monotonic() >= self._next_look and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self.look, name="shardkit-replication-lag", daemon=True)
            self._thread.start()

    def look(self) -> None:
        started = time.monotonic()
        policies, lag = 0, 0.0
        for root in self._roots:
            with contextlib.suppress(ShardkitError):  # a root that does not answer tells nothing new
                repository = Repository.open(root, read_only=True)
                if read_table(root_store(repository.store), repository.id) is None:
                    continue
                versions = self._versions if len(self._roots) == 1 else None
                lag += replicate(repository, dry_run=True, versions=versions).lag_before
                policies += 1
        self._policies, self._lag_bytes = policies, lag
        took = time.monotonic() - started
        self._next_look = time.monotonic() + max(_BETWEEN_S, took / _SHARE_OF_TIME)

    def numbers(self) -> dict[str, float]:
        """For `Telemetry.add_source`; empty until a policy was found."""
        return {"policies": float(self._policies), "lag_bytes": self._lag_bytes} if self._policies else {}
