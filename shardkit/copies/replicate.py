"""`replicate`: make the copies that the policy asks for and that are missing.

Also `commit`, which first makes the copies that the policy's mode requires, and `ReplicationLag`, which reports the
bytes of missing copies during a run.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shardkit.copies.documents import HealedCopy, UncheckedCopy
from shardkit.copies.placement import (
    LARGE,
    Copy,
    Holding,
    Holdings,
    find_needed,
    look,
)
from shardkit.copies.repair import (
    encode_parity,
    finish,
    mirror_documents,
    replace_copies,
)
from shardkit.copies.walk import CheckSettings, CopyTask, CopyWalk
from shardkit.errors import (
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    UsageError,
)
from shardkit.exit_codes import ExitCode
from shardkit.extras import shell_word
from shardkit.reading.adopted import AdoptedStore
from shardkit.reading.objects import DEPTHS, ROOT_NAME, Depth, Location
from shardkit.repository.locations import log_conflicts, mirror_log, read_table
from shardkit.repository.log import LogEntry
from shardkit.repository.policy import LocationTable
from shardkit.repository.repository import Repository
from shardkit.stores.store import root_store

if TYPE_CHECKING:
    from shardkit.telemetry import Record

_FEW: Final = 2_000
_FAILURES: Final = 3
"""Number of consecutive failures after which a location is skipped until the next call."""

CopyProgress = Callable[[int, int, int, int], None]
"""(number of objects done, number of objects, bytes done, bytes)."""


@dataclass(slots=True)
class Replication:
    """The result of `replicate`."""

    lag_before: int = 0  # bytes of missing copies at the start
    lag_after: int = 0  # bytes of missing copies at the end
    objects: int = 0  # number of missing copies at the start
    # states of the locations, in the order of the table
    locations: list[Holding] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # names of objects without a good copy in any location
    dry_run: bool = False  # True if no copies were made
    healed: list[HealedCopy] = field(default_factory=list)  # repaired copies and documents
    # copies that could not be checked or written
    unchecked: list[UncheckedCopy] = field(default_factory=list)

    @classmethod
    def of(cls, found: Holdings, *, dry_run: bool = False) -> Replication:
        """Return the result before any copy is made."""
        lag = found.lag_bytes
        return cls(lag, lag, len(found.missing), list(found.all.values()), dry_run=dry_run)

    @property
    def exit_code(self) -> ExitCode:
        """DONE if the policy is met, DAMAGED if an object is lost, UNCHECKED if a location cannot be used.

        If copies are missing for other reasons: NO in a dry run, otherwise FAILED.
        """
        if self.lost:
            return ExitCode.DAMAGED
        if self.unchecked or any(one.state != "ok" for one in self.locations):
            return ExitCode.UNCHECKED
        if not self.lag_after:
            return ExitCode.DONE
        return ExitCode.NO if self.dry_run else ExitCode.FAILED


def replicate(
    repository: Repository,
    *,
    level: Depth = "stored",
    settings: CheckSettings | None = None,
    report: CopyProgress | None = None,
) -> Replication:
    """Repair damaged copies, and make the copies that refs and tags need and that are missing.

    Each copy is verified by its digest before it gets its name, so a call may be killed at any time and repeated.
    Nothing is attested, so that the call needs no right to write attestations.

    Args:
        repository: the root.
        level: depth of the checks of shards and parity; metadata is read.
        settings: how copies are checked and made.
        report: called with progress.

    Raises:
        UsageError: The level is unknown.
        NotFoundError: The root has no location table.
        StoreFullError, StoreReadOnlyError: Parity cannot be written to the root.
    """
    if level not in DEPTHS:
        raise UsageError(f"level {level!r}: expected {', '.join(DEPTHS)}")
    settings = settings or CheckSettings()
    with CopyWalk(repository.url, None, level, settings) as walk:
        table = _table_of(repository)
        bad = walk.find_bad(list(walk.copies()), lambda one: level if one.name.endswith(LARGE) else "read")
        replace_copies(walk, [one for one in bad if one.location == ROOT_NAME or one.state == "wrong"])
        finish(walk, with_logs=False)
        fixed = walk.done
        problem = ""
        try:
            encoding = encode_parity(repository, table.policy.parity, fixed.versions, settings.pace)
        except (StoreFullError, StoreReadOnlyError):
            raise
        except StoreError as error:  # a lost set must not prevent other copies
            problem = str(error)
        else:
            problem = encoding.problem
            for record in encoding.encoded:
                walk.need_parity(record)
    found = look(repository, table, walk.needed)
    done = copy_missing(found, settings, report)
    done.healed, done.unchecked = fixed.healed, fixed.unchecked
    done.lag_before += sum(one.num_bytes for one in fixed.healed if one.was == "missing")
    done.lost = sorted({*done.lost, *(one.name for one in fixed.lost)})
    if problem:
        done.unchecked.append(UncheckedCopy(ROOT_NAME, "", problem))
    mirror(found)
    return done


def find_lag(repository: Repository, versions: Iterable[str] | None = None) -> Replication:
    """Find the copies that `replicate` would make, from listings alone, without writing.

    Args:
        repository: the root.
        versions: manifest ids; by default all that refs and tags name.

    Raises:
        NotFoundError: The root has no location table.
    """
    table = _table_of(repository)
    chosen = repository.versions if versions is None else versions
    needed = find_needed(over_all(repository), table, chosen)
    return Replication.of(look(repository, table, needed), dry_run=True)


def _table_of(repository: Repository) -> LocationTable:
    table = read_table(root_store(repository.store), repository.id)
    if table is None:
        raise NotFoundError(
            f"{repository.url} has no locations beside itself; add one: "
            f"shardkit place {shell_word(repository.url)} --location "
            "NAME=URL --copies 2"
        )
    return table


def copy_missing(
    found: Holdings, settings: CheckSettings | None = None, report: CopyProgress | None = None
) -> Replication:
    """Make the missing copies of `found`, critical and small ones first; see `replicate`."""

    def order(one: Copy) -> tuple[bool, int, int, str]:
        """Return the sort key: critical copies first, then objects with many locations, then small ones."""
        needed = found.needed[one.name]
        return not needed.is_critical, -len(needed.where), one.size or 0, one.name

    done = Replication.of(found)
    work = sorted((one for one in found.missing if one.location in found.stores), key=order)
    # Adopted tars are not listed in the root, but they are read through it.
    adopted = Location(name=ROOT_NAME, store=AdoptedStore(found.root))
    failures: Counter[str] = Counter()  # consecutive failures of each location
    objects, num_bytes, total_bytes = 0, 0, sum(one.size or 0 for one in work)

    def tasks() -> Iterator[tuple[int, CopyTask]]:
        for number, one in enumerate(work):
            if found.all[one.location].state == "ok":
                sources = tuple(found.sources(one.name)) or (adopted,)
                yield number, CopyTask(one.name, sources, found.stores[one.location], one.size)

    for number, result in (settings or CheckSettings()).run_all(tasks()):
        one = work[number]
        there = found.all[one.location]
        if result.source:
            failures[one.location] = 0
            objects, num_bytes = objects + 1, num_bytes + result.num_bytes
            there.copied, there.copied_bytes = there.copied + 1, there.copied_bytes + result.num_bytes
            found.held[one.location].add(one.name)
        elif isinstance(result.problem, IntegrityError):
            if one.name not in done.lost:
                done.lost.append(one.name)
            there.problem = there.problem or str(result.problem)
        else:
            failures[one.location] += 1
            there.problem = str(result.problem)
            is_hopeless = isinstance(result.problem, (StoreFullError, StoreReadOnlyError))
            if is_hopeless or failures[one.location] >= _FAILURES:
                there.state = "failed"
        if report is not None:
            report(objects, len(work), num_bytes, total_bytes)
    found.count_missing()
    done.lag_after = found.lag_bytes
    return done


def mirror(found: Holdings) -> None:
    """Copy the log and the documents to every location that answers."""
    for name, location in found.stores.items():
        there = found.all[name]
        if name != ROOT_NAME and there.state == "ok":
            try:
                mirror_documents(found.root, location.store)
                there.commits = mirror_log(found.root, location.store)
            except ShardkitError as error:
                there.state, there.problem = "failed", str(error)


def over_all(repository: Repository) -> Repository:
    """Return the repository opened for reading from all locations, so that lost metadata is read from a copy."""
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

    Before the commit, mode sync makes all copies, including parity. Mode hybrid makes the copies of metadata and of
    shards with critical strata. Mode async makes none. After the commit, in modes sync and hybrid, locations that
    answer get the log and the documents.

    Raises:
        StoreError: A required copy could not be made; nothing was committed.
        IntegrityError: A copy's log has an entry that the root lacks; nothing was committed.
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


def _copies_of_commit(repository: Repository, head: LogEntry, versions: Sequence[str]) -> Callable[[], None]:
    table = read_table(root_store(repository.store), repository.id, head)
    if table is None or not table.others:
        return lambda: None
    _check_logs(repository, table)
    mode = table.policy.mode
    if mode == "async":
        return lambda: None
    if versions:
        _copy_before_commit(repository, table, versions)

    def follow_up() -> None:
        """Copy the log. A location that does not answer is not an error: `replicate` updates it later."""
        mirror(Holdings(repository, table.locations))

    return follow_up


def _check_logs(repository: Repository, table: LocationTable) -> None:
    """Raise IntegrityError if a copy's log has entries that the root lost: a commit would fork the log."""
    for conflict in log_conflicts(root_store(repository.store), table):
        raise IntegrityError(f"nothing was committed: {conflict}")


def _copy_before_commit(repository: Repository, table: LocationTable, versions: Sequence[str]) -> None:
    mode = table.policy.mode
    if mode == "sync":
        encode_parity(repository, table.policy.parity, versions).check()
    needed = find_needed(repository, table, versions)
    if mode == "hybrid":
        needed = {name: one for name, one in needed.items() if one.is_critical}
    found = look(repository, table, needed, listing=len(needed) > _FEW)
    done = copy_missing(found)
    if done.lag_after or done.lost or found.missing:
        bad = [one for one in done.locations if one.lag or one.state != "ok"]
        told = "; ".join(f"{one.name}: {one.problem or one.state}" for one in bad) or ", ".join(done.lost[:3])
        raise StoreError(
            f"{repository.url}: nothing was committed, because {len(found.missing)} copies could not be made that mode "
            f"{mode!r} waits for ({told}); mend that and run the same command again, or let copies follow later: "
            f"shardkit place {shell_word(repository.url)} --mode async"
        )


_BETWEEN_S: Final = 600.0
_SHARE_OF_TIME: Final = 1 / 200


class ReplicationLag:
    """Hook of rank 0's recorder that measures the replication lag at most every ten minutes, on its own thread.

    Roots without a location table are skipped. If a location does not answer, its copies count as missing.

    Args:
        roots: URLs of the repositories of the dataset's parts, opened for each measurement.
        versions: manifest ids, used if there is one root; otherwise all versions that refs and tags name.
    """

    def __init__(self, roots: Sequence[str], versions: Sequence[str]) -> None:
        self._roots, self._versions = list(roots), list(versions)
        self._next_look, self._policies, self._lag_bytes = 0.0, 0, 0.0
        self._thread: threading.Thread | None = None

    def __call__(self, record: Record) -> None:
        """Start a measurement if one is due."""
        if time.monotonic() >= self._next_look and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self.look, name="shardkit-replication-lag", daemon=True)
            self._thread.start()

    def look(self) -> None:
        started = time.monotonic()
        policies, lag = 0, 0.0
        for root in self._roots:
            with contextlib.suppress(ShardkitError):  # skip a root that does not answer
                repository = Repository.open(root, read_only=True)
                if read_table(root_store(repository.store), repository.id) is None:
                    continue
                versions = self._versions if len(self._roots) == 1 else None
                lag += find_lag(repository, versions).lag_before
                policies += 1
        self._policies, self._lag_bytes = policies, lag
        took = time.monotonic() - started
        self._next_look = time.monotonic() + max(_BETWEEN_S, took / _SHARE_OF_TIME)

    def numbers(self) -> dict[str, float]:
        """Return the metrics for `Telemetry.add_source`; empty until a policy is found."""
        return {"policies": float(self._policies), "lag_bytes": self._lag_bytes} if self._policies else {}
