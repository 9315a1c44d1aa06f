"""`collect`: delete objects that no version needs, in all locations, safely during other commands.

An object is deleted if it was marked as garbage and is still garbage a grace period later. A log entry announces the
deletion, and commits are checked against it (SPEC.md of `shardkit.repository`, "Garbage").
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from shardkit.copies.placement import Holdings
from shardkit.copies.replicate import mirror
from shardkit.documents import seconds_of
from shardkit.errors import (
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreError,
    UsageError,
)
from shardkit.extras import shell_word
from shardkit.reading.inventory import walk_versions
from shardkit.reading.objects import ROOT_NAME
from shardkit.reading.parity.sets import parity_names
from shardkit.repository.garbage import (
    MAX_NAMES,
    forget_lists,
    put_list,
    read_list,
    read_marks,
    write_marks,
)
from shardkit.repository.locations import log_conflict
from shardkit.repository.log import Deletion, LogEntry, read_entry
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import FOLDER
from shardkit.stores.local import LocalStore
from shardkit.stores.store import EXTENSIONS, Store, object_name, parse_object_name, root_store

GRACE_S: Final = 7 * 86_400
"""Default time in seconds from the mark of an object to its deletion."""

HISTORY_S: Final = 30 * 86_400
"""Default time in seconds for which versions are kept after the last ref or tag named them."""

COLLECTED: Final = frozenset(EXTENSIONS) - {"tensor", "checkpoint"}
"""Extensions of objects that may be deleted. Checkpoints are not: runs delete their own."""

_HEX: Final = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_MAX_RECORD_BYTES: Final = 64 * 2**20

_CHECK_EVERY_S: Final = 1.0
_PAUSE_S: Final = 3.0
"""Minimum time in seconds from taking a deletion over to its end, in which a live collector notices and stops."""

_OBJECTS: Final = "objects/"
_FIRST: Final = ("manifest", "page", "selection", "lookup", "cost", "sources", "about")
"""Extensions that are deleted first, so that no version keeps its manifest and lacks another object."""

DeletionProgress = Callable[[int, int], None]
"""(objects deleted, objects to delete)."""


@dataclass(slots=True)
class Collection:
    """The result of `collect`."""

    live: int = 0  # number of needed objects
    garbage: int = 0  # number of objects in all locations that no version needs
    garbage_bytes: int = 0  # bytes of the garbage in the root
    marked: int = 0  # number of garbage objects without a mark before this call
    waiting: int = 0  # number of garbage objects marked less than a grace period ago
    due: int = 0  # number of garbage objects that may be deleted now
    due_bytes: int = 0  # bytes of those objects in the root
    deleted: dict[str, int] = field(default_factory=dict)  # location → number of copies deleted
    finished: int = 0  # number of deletions of killed calls that this call finished
    # version of the history that no location has whole → what is missing or damaged
    lost_versions: dict[str, str] = field(default_factory=dict)
    # location → its error; its garbage is kept until the next call
    unreachable: dict[str, str] = field(default_factory=dict)


def collect(
    repository: Repository,
    *,
    delete: bool = False,
    grace_s: int = GRACE_S,
    history_s: int = HISTORY_S,
    report: DeletionProgress | None = None,
) -> Collection:
    """Find objects that no version needs; with `delete`, mark them, and delete those marked a grace period ago.

    Args:
        repository: The root, opened for writing.
        delete: False: change nothing.
        grace_s: Seconds from mark to deletion, so that running builds need not put their objects again. A deletion
            that was announced longer ago and has not ended counts as killed, and is finished.
        history_s: Versions that a ref or tag named within this number of seconds are kept.
        report: Called with progress.

    Raises:
        UsageError: An erasure or another deletion is under way.
        IntegrityError: The log of a copy has entries that the root's lacks.
        NotFoundError: The log has no entry, although manifests are stored.
        StoreError: A location does not answer, so that its log cannot be compared.
    """
    work = Collector(repository, report)
    done, store = work.done, work.store
    if any(name.endswith("/plan.json") for name in store.list_after("erasures/")):
        raise UsageError(
            f"an erasure was begun; finish it first: shardkit remove {shell_word(repository.url)} --resume"
        )
    if delete:
        work.check_logs()
        work.finish_killed(grace_s)
    head = repository.head()
    before = head.deletion
    reading = Repository.open(repository.url, read_only=True)
    now = time.time()
    live = mark_live(reading, repository.newest_commits(), now - history_s, done.lost_versions)
    listed = work.list_objects()
    if not head.n and any(name.endswith(".manifest") for name in listed):
        raise NotFoundError(
            f"{repository.url}: the log has no entry, but manifests are stored, so nothing was deleted; if the log was "
            "lost, restore log/ from a backup; if a first build was interrupted, run it again"
        )
    garbage = {name for name in listed if _is_ours(name)} - live
    done.live, done.garbage = len(listed) - len(garbage), len(garbage)
    # A mark in the future, from a clock that was ahead, would keep garbage for ever, so it is replaced.
    marks = {name: when for name, when in read_marks(store).items() if name in garbage and when <= now}
    due = {name for name, when in marks.items() if now - when >= grace_s}
    done.marked, done.waiting, done.due = len(garbage - marks.keys()), len(marks) - len(due), len(due)
    sizes = _sizes(store, garbage)
    done.garbage_bytes, done.due_bytes = sum(sizes.values()), sum(sizes.get(name, 0) for name in due)
    if not delete:
        return done
    write_marks(store, {**dict.fromkeys(garbage, int(now)), **marks})
    if due:
        chosen = set(sorted(due)[:MAX_NAMES])

        def still_due(head: LogEntry) -> list[str]:
            if head.deletion != before:
                return []  # another deletion ended meanwhile, so objects of this listing may have been put again
            return sorted(
                chosen - mark_live(reading, repository.newest_commits(), now - history_s, done.lost_versions)
            )

        work.collect(still_due)
    forget_lists(store, repository.head())
    return done


def announce_deletion(
    repository: Repository,
    names: Callable[[LogEntry], Sequence[str]],
    message: str = "garbage: deleting",
) -> Deletion | None:
    """Announce in the log the objects to delete: from then on no commit may name them.

    Args:
        repository: The root.
        names: Function from the head to the objects to delete, called again if another commit came first. It may raise
            UsageError because another deletion is under way.
        message: Message of the log entry.

    Returns:
        The deletion, or None if `names` returned no objects.
    """

    def change(head: LogEntry) -> Mapping[str, Any] | None:
        chosen = names(head)
        if not chosen:
            return None
        return {"deletion": put_list(root_store(repository.store), head.n + 1, chosen)}

    entry = repository.append(change, repository.head(), message)
    return entry.deletion if entry else None


def end_deletion(repository: Repository, deletion: Deletion) -> bool:
    """Record the end of a deletion in the log. Return False if another process took it over."""

    def change(head: LogEntry) -> Mapping[str, Any] | None:
        is_current = head.deletion == deletion
        return {"deletion": msgspec.structs.replace(deletion, is_ended=True)} if is_current else None

    return repository.append(change, repository.head(), "garbage: deleted") is not None


class Collector:
    """Deletes objects in all locations; also for an erasure.

    Attributes:
        store: store of the root.
        found: the locations.
        done: what was done.
    """

    def __init__(self, repository: Repository, report: DeletionProgress | None = None) -> None:
        self._repository, self._report, self.done = repository, report, Collection()
        self.store = root_store(repository.store)
        self.found = Holdings(repository)
        self._is_listed = False
        self.done.unreachable = dict(self.found.problems)

    def check_logs(self) -> None:
        """Raise an error if a copy's log has entries that the root's lacks, or cannot be compared with it."""
        url = self._repository.url
        for name, why in self.done.unreachable.items():
            raise StoreError(
                f"location {name!r}: {why}; its log cannot be compared with the root's, so nothing is deleted; mount "
                f"or repair it, or take it out: shardkit place {shell_word(url)} --forget {name}"
            )
        for name, location in self.found.stores.items():
            conflict = "" if name == ROOT_NAME else log_conflict(self.store, location.store)
            if conflict:
                raise IntegrityError(f"nothing was deleted: {conflict}")

    def list_objects(self) -> set[str]:
        """Return the objects that the locations list."""
        self.found.fill()
        self._is_listed = True
        self.done.unreachable |= self.found.problems
        return set().union(*self.found.held.values())

    def collect(self, names: Callable[[LogEntry], Sequence[str]]) -> None:
        """Announce the deletion of `names` in the log, and delete them."""

        def chosen(head: LogEntry) -> Sequence[str]:
            if head.deletion is not None and not head.deletion.is_ended:
                self._refuse_second(head.deletion)
            return names(head)

        deletion = announce_deletion(self._repository, chosen)
        if deletion is not None and self._delete(deletion):
            end_deletion(self._repository, deletion)
            mirror(self.found)
            for name, one in self.found.all.items():
                if one.state == "failed":
                    self.done.unreachable.setdefault(name, one.problem)

    def finish_killed(self, grace_s: int | None) -> None:
        """Finish a deletion that was announced a grace period ago: its collector was killed.

        With None, a deletion of any age is finished, whatever the clock says.
        """
        found = self._repository.head().deletion
        if found is not None and not found.is_ended:
            if grace_s is not None and time.time() - seconds_of(self._time_of(found)) < grace_s:
                self._refuse_second(found)
            self._take_over(found)

    def _take_over(self, found: Deletion) -> None:
        """Finish a deletion.

        It is announced again, so that a collector that is still alive notices and stops.
        """
        since = time.monotonic()
        names: Sequence[str] = ()
        with contextlib.suppress(
            NotFoundError, IntegrityError, FormatError
        ):  # without its list, the deletion is only ended
            names = read_list(self.store, found)

        def unchanged(head: LogEntry) -> Sequence[str]:
            return names if head.deletion == found else ()

        deletion = announce_deletion(self._repository, unchanged, "garbage: taken over") if names else found
        if deletion is not None and (not names or self._delete(deletion)):
            time.sleep(max(0.0, _PAUSE_S - (time.monotonic() - since)))
            end_deletion(self._repository, deletion)
        self.done.finished += 1

    def _time_of(self, deletion: Deletion) -> str:
        return read_entry(self.store, deletion.begun, self._repository.id)[0].time

    def _refuse_second(self, deletion: Deletion) -> None:
        url = self._repository.url
        raise UsageError(
            f"{url}: garbage has been deleted since {self._time_of(deletion)}; wait for it. If that command was "
            f"killed: shardkit gc {shell_word(url)} --delete --grace 0s"
        )

    def _delete(self, deletion: Deletion) -> bool:
        """Delete in all locations, the root last, so that no copy is left of an object that the root lacks.

        A location that does not answer keeps its copies until the next call. An error of the root is raised.

        Returns:
            False if another process took the deletion over: objects that are put from then on must not be deleted.
        """
        done, checked = self.done, time.monotonic()
        names = read_list(self.store, deletion)
        ordered = sorted(names, key=lambda name: (parse_object_name(name)[1] not in _FIRST, name))
        locations = sorted(self.found.stores.values(), key=lambda one: one.name == ROOT_NAME)
        total, gone = len(ordered) * len(locations), 0
        for location in locations:
            held = self.found.held[location.name]
            for name in ordered:
                if time.monotonic() - checked > _CHECK_EVERY_S:
                    if self._repository.head().deletion != deletion:
                        return False
                    checked = time.monotonic()
                try:
                    if location.name == ROOT_NAME or not self._is_listed or name in held:
                        location.store.delete(name)
                        done.deleted[location.name] = done.deleted.get(location.name, 0) + 1
                except ShardkitError as error:
                    if location.name == ROOT_NAME:
                        raise
                    done.unreachable[location.name] = str(error)
                    break
                gone += 1
                if self._report is not None:
                    self._report(gone, total)
        return True


def _is_ours(name: str) -> bool:
    try:
        return parse_object_name(name)[1] in COLLECTED
    except ShardkitError:
        return False  # a foreign file


def _sizes(store: Store, names: Iterable[str]) -> dict[str, int]:
    """Return the size in bytes of each object that the store has."""
    found: dict[str, int] = {}
    for name in sorted(names):
        with contextlib.suppress(ShardkitError):
            stat = store.head(name)
            found |= {name: stat.size} if stat else {}
    return found


def versions_of(log: Iterable[LogEntry], since: float) -> tuple[set[str], set[str]]:
    """Return the versions that refs and tags name now, and earlier versions that they named since `since`."""
    now: set[str] | None = None
    recent: set[str] = set()
    for entry in log:
        named = set(entry.versions)
        now = named if now is None else now
        recent |= named
        if seconds_of(entry.time) < since:
            break
    return now or set(), recent - (now or set())


def mark_live(
    repository: Repository, log: Iterable[LogEntry], since: float, lost: dict[str, str]
) -> set[str]:
    """Return the names of objects that refs, tags and the history since `since` need, or running builds have put.

    Versions of the history that no location has whole need nothing, and are added to `lost`.
    """
    now, past = versions_of(log, since)
    return _mark(repository, now) | _mark(repository, past, lost) | objects_of_builds(repository)


def _mark(repository: Repository, versions: Iterable[str], lost: dict[str, str] | None = None) -> set[str]:
    found: set[str] = set()
    for inventory in walk_versions(repository.store, versions, lost=lost):
        found |= {name for name, _ in inventory.names()} | parity_names(repository.store, inventory)
    return found


def objects_of_builds(repository: Repository) -> set[str]:
    """Return the names of objects in the records of unfinished builds, so that a continued build finds them.

    Records are below ``tmp/`` of a local root, or ``scratch/`` of another. Every digest in a record counts, with every
    extension.
    """
    store = root_store(repository.store)
    records = _local_records(store) if isinstance(store, LocalStore) else _stored_records(store)
    found = {match.decode() for record in records for match in _HEX.findall(record)}
    return {object_name(f"sha256:{digest}", kind) for digest in found for kind in COLLECTED}


def _stored_records(store: Store) -> Iterator[bytes]:
    """Yield the records of builds over several machines (SPEC.md of `shardkit.dataset`, §6)."""
    for name in store.list_after("scratch/"):
        if name.endswith(".done"):
            try:
                yield store.get(name, max_bytes=_MAX_RECORD_BYTES)
            except (IntegrityError, NotFoundError):
                continue  # the build finished meanwhile, or this is no record


def _local_records(store: LocalStore) -> Iterator[bytes]:
    for folder, _, files in os.walk(os.path.join(store.url, FOLDER)):
        if "build-" not in folder and "parts" not in folder and "adopt" not in folder:
            continue
        for file in files:
            path = Path(folder, file)
            try:
                if file.endswith(".done") and path.stat().st_size <= _MAX_RECORD_BYTES:
                    yield path.read_bytes()
            except OSError:
                continue  # the build finished meanwhile
