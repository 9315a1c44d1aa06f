"""`collect`: objects that nothing names go in two rounds, over all locations, and may race with anything.

A collection marks in one round and deletes in a later one; a commit checks that nothing it names is being collected
(SPEC.md, "Garbage").
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from shardkit.copies.documents import log_conflict
from shardkit.copies.placement import Holdings
from shardkit.copies.replicate import mirror
from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StoreError, UsageError
from shardkit.formats.canonical_json import seconds_of
from shardkit.reading.inventory import walk_versions
from shardkit.reading.objects import ROOT_NAME
from shardkit.reading.parity.sets import parity_names
from shardkit.repository.garbage_lists import (
    MAX_NAMES,
    forget_lists,
    list_seen,
    put_list,
    put_seen,
    read_list,
)
from shardkit.repository.log import NO_COMMIT, LogEntry
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import FOLDER
from shardkit.stores.local import LocalStore
from shardkit.stores.store import EXTENSIONS, Store, object_name, parse_object_name, root_store

GRACE_S: Final = 7 * 86_400
"""From the marking of an object to its deletion, by default."""

HISTORY_S: Final = 30 * 86_400
"""For how long versions stay that a ref or tag named, by default."""

TAKE_OVER_S: Final = 3_600
COLLECTED: Final = frozenset(EXTENSIONS) - {"tensor", "checkpoint"}
"""Extensions that a collection may take: checkpoints belong to runs, which remove their own."""

_HEX: Final = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_MAX_RECORD_BYTES: Final = 64 * 2**20

_CHECK_EVERY_S: Final = 1.0
_SETTLE_S: Final = 3.0
"""From the taking over of a collection to its end: its collector, if it lives after all, has looked by then."""
_KEEP_LISTS_S: Final = 365 * 86_400

_OBJECTS: Final = "objects/"
_FIRST: Final = ("manifest", "page", "selection", "lookup", "cost", "sources", "about")
"""Kinds that go first: a version of which something is gone has no manifest, so that nothing names it by mistake."""

Report = Callable[[int, int], None]
"""(objects deleted, objects to delete)."""


@dataclass(slots=True)
class Collection:
    """What `collect` found and did.

    Attributes:
        live: objects that are needed.
        garbage: objects, over all locations, that nothing names; each once. garbage_bytes: in the root.
        marked: of those, how many were seen unreferenced for the first time.
        waiting: how many were seen before, but not long enough ago.
        due: how many may be deleted now. due_bytes: their bytes in the root.
        deleted: copies deleted, by location.
        finished: collections of killed calls that were finished first.
        unreachable: location → what it said; its garbage stays until the next call.
    """

    live: int = 0
    garbage: int = 0
    garbage_bytes: int = 0
    marked: int = 0
    waiting: int = 0
    due: int = 0
    due_bytes: int = 0
    deleted: dict[str, int] = field(default_factory=dict)
    finished: int = 0
    unreachable: dict[str, str] = field(default_factory=dict)


def collect(
    repository: Repository,
    *,
    delete: bool = False,
    grace_s: int = GRACE_S,
    history_s: int = HISTORY_S,
    take_over_s: int = TAKE_OVER_S,
    settle_s: float = _SETTLE_S,
    clock: Callable[[], float] = time.time,
    report: Report | None = None,
) -> Collection:
    """Find objects that nothing names; with `delete`, mark new ones and delete those that were marked long enough ago.

    Safe whatever else happens, whatever clocks say, and however often it is killed (SPEC.md, "Garbage"); the grace only
    spares builds under way the work of putting objects again, and readers of dropped versions a surprise.
    """
    work = _Collector(repository, report)
    done, store = work.done, work.store
    if any(name.endswith("/plan.json") for name in store.list_after("erasures/")):
        raise UsageError(f"an erasure was begun; finish it first: shardkit remove {repository.url} --resume")
    if delete:
        work.check_logs()
        work.finish_killed(clock, take_over_s, settle_s)
    before = _begun_ever(repository.head())
    reading = Repository.open(repository.url, read_only=True)
    since = clock() - history_s
    live = mark_live(reading, repository.newest_commits(), since)
    listed = work.listed()
    garbage = {name for name in listed if _is_ours(name)} - live
    done.live, done.garbage = len(listed) - len(garbage), len(garbage)
    due = _rounds(store, garbage, int(clock()), grace_s, done, write=delete)
    done.due = len(due)
    if not delete:
        done.garbage_bytes, done.due_bytes = _bytes(store, garbage), _bytes(store, due)
        return done
    if due:
        chosen = set(sorted(due)[:MAX_NAMES])

        def still_due() -> list[str]:
            return sorted(chosen - mark_live(reading, repository.newest_commits(), since))

        work.collect(before, still_due, int(clock()))
    head = repository.head()
    forget_lists(store, int(clock()), _KEEP_LISTS_S, head.collecting.values() if head else ())
    return done


def _rounds(
    store: Store, garbage: set[str], now: int, grace_s: int, done: Collection, *, write: bool
) -> set[str]:
    """First round: remember what is seen unreferenced. Second: what was remembered long enough ago is due."""
    first: dict[str, int] = {}
    for seen in list_seen(store):
        # A clock that was ahead must not keep garbage for ever: what it wrote is remembered again.
        still = {name for name in seen.names & garbage if seen.time <= now}
        for name in still:
            first[name] = min(first.get(name, seen.time), seen.time)
        if write and still != seen.names:  # what is needed again starts over when it is not
            put_seen(store, seen.time, still)
            store.delete(seen.document)
    new = garbage - first.keys()
    if write and new:
        put_seen(store, now, new)
    due = {name for name, seconds in first.items() if now - seconds >= grace_s}
    done.marked, done.waiting = len(new), len(first) - len(due)
    return due


class _Collector:
    """One call of `collect` that deletes, over all locations."""

    def __init__(self, repository: Repository, report: Report | None) -> None:
        self._repository, self._report, self.done = repository, report, Collection()
        self.store = root_store(repository.store)
        self._found = Holdings(repository)
        self._is_listed = False
        self.done.unreachable = dict(self._found.problems)

    def check_logs(self) -> None:
        """Refuse to delete anything if a copy's log names more than the root's, or cannot be compared with it."""
        url = self._repository.url
        for name, why in self.done.unreachable.items():
            raise StoreError(
                f"location {name!r}: {why}; its log cannot be compared with the root's, so nothing is deleted; mount "
                f"or repair it, or take it out: shardkit place {url} --forget {name}"
            )
        for name, location in self._found.stores.items():
            conflict = "" if name == ROOT_NAME else log_conflict(self.store, location.store)
            if conflict:
                raise IntegrityError(f"nothing was deleted: {conflict}")

    def listed(self) -> set[str]:
        """Objects over all locations that answer."""
        self._found.fill()
        self._is_listed = True
        self.done.unreachable |= self._found.problems
        return set().union(*self._found.held.values())

    def collect(self, before: int, still_due: Callable[[], list[str]], now: int) -> None:
        """Announce in the log what is due, and delete it."""
        names: list[str] = []

        def put(head: LogEntry | None) -> str | None:
            for under_way in head.collecting if head else ():  # of two that begin at once the log lets one
                _refuse_second(self._repository, _time_of_begin(self._repository, under_way))
            if _begun_ever(head) != before:
                return None  # another one came and went: what is due by our listing may be gone, or put again
            names[:] = still_due()
            return put_list(self.store, now, names) if names else None

        identity = begin_collection(self._repository, put)
        if identity is not None and self._sweep(identity, names):
            rename_collection(self._repository, identity, None)
            mirror(self._found)
            for name, one in self._found.all.items():
                if one.state == "failed":
                    self.done.unreachable.setdefault(name, one.problem)

    def finish_killed(self, clock: Callable[[], float], take_over_s: int, settle_s: float) -> None:
        """Collections that were begun and not ended: nothing can name their objects, so they are deleted again."""
        repository, head = self._repository, self._repository.head()
        for identity, digest in dict(head.collecting if head else {}).items():
            begun = _time_of_begin(repository, identity)
            if clock() - seconds_of(begun) < take_over_s:
                _refuse_second(repository, begun)
            names = read_list(self.store, digest)
            taken, since = uuid.uuid4().hex, time.monotonic()
            if rename_collection(repository, identity, taken) and self._sweep(taken, names):
                time.sleep(max(0.0, settle_s - (time.monotonic() - since)))
                rename_collection(repository, taken, None)
            self.done.finished += 1

    def _sweep(self, identity: str, names: Iterable[str]) -> bool:
        """Delete everywhere; copies first, so that what the root does not have is nowhere.

        A location that does not answer keeps its copies until the next call; a root that does not answer ends this one.

        Returns:
            False where somebody else finished this collection: what is put from then on is not ours to delete.
        """
        done, checked = self.done, time.monotonic()
        ordered = sorted(names, key=lambda name: (parse_object_name(name)[1] not in _FIRST, name))
        locations = sorted(self._found.stores.values(), key=lambda one: one.name == ROOT_NAME)
        total, gone = len(ordered) * len(locations), 0
        for location in locations:
            held = self._found.held[location.name]
            for name in ordered:
                if time.monotonic() - checked > _CHECK_EVERY_S:
                    head = self._repository.head()
                    if head is None or identity not in head.collecting:
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


def begin_collection(repository: Repository, put_list: Callable[[LogEntry | None], str | None]) -> str | None:
    """Announce in the log what is going to be deleted: from then on no commit may name any of it.

    Returns:
        Id of the collection; None where there is nothing to collect.
    """
    identity = uuid.uuid4().hex

    def change(head: LogEntry | None) -> Mapping[str, Any] | None:
        digest, head = put_list(head), head or NO_COMMIT
        under_way = {**head.collecting, identity: digest}
        return None if digest is None else {"collected": head.collected + 1, "collecting": under_way}

    return identity if repository.append(change, repository.head(), "garbage: deleting") else None


def rename_collection(repository: Repository, old: str, new: str | None) -> bool:
    """Give a collection that is under way another id: it is taken over from a collector that cannot end it.

    None ends it: everything on its list was deleted, and nobody deletes any more of it.

    Returns:
        Whether it was under way.
    """

    def change(head: LogEntry | None) -> Mapping[str, Any] | None:
        collecting = dict((head or NO_COMMIT).collecting)
        digest = collecting.pop(old, None)
        if digest is None:
            return None
        return {"collecting": {**collecting, **({new: digest} if new else {})}}

    message = "garbage: taken over" if new else "garbage: deleted"
    return repository.append(change, repository.head(), message) is not None


def _refuse_second(repository: Repository, begun: str) -> NoReturn:
    raise UsageError(
        f"{repository.url}: a collection is under way since {begun}; wait for it. If it was killed: "
        f"shardkit gc {repository.url} --delete --take-over"
    )


def _begun_ever(head: LogEntry | None) -> int:
    return head.collected if head else 0


def _time_of_begin(repository: Repository, identity: str) -> str:
    under_way = itertools.takewhile(lambda entry: identity in entry.collecting, repository.newest_commits())
    return min(entry.time for entry in under_way)


def _is_ours(name: str) -> bool:
    try:
        return parse_object_name(name)[1] in COLLECTED
    except ShardkitError:
        return False  # a foreign file


def _bytes(store: Store, names: Iterable[str]) -> int:
    total = 0
    for name in names:
        with contextlib.suppress(ShardkitError):
            stat = store.head(name)
            total += stat.size if stat else 0
    return total


def versions_of(log: Iterable[LogEntry], since: float) -> tuple[set[str], set[str]]:
    """Versions that refs and tags name now, and those that they named at some time since `since`."""
    now: set[str] | None = None
    recent: set[str] = set()
    for entry in log:
        named = {*entry.refs.values(), *entry.tags.values()}
        now = named if now is None else now
        recent |= named
        if seconds_of(entry.time) < since:
            break
    return now or set(), recent - (now or set())


def mark_live(repository: Repository, log: Iterable[LogEntry], since: float) -> set[str]:
    """Names of all objects that refs, tags and the history since `since` need, and builds under way have put."""
    now, past = versions_of(log, since)
    # Versions of the past may be gone; what is left of them is no reason to stop.
    return _mark(repository, now) | _mark(repository, past, optional=True) | objects_of_builds(repository)


def _mark(repository: Repository, versions: Iterable[str], *, optional: bool = False) -> set[str]:
    found: set[str] = set()
    for inventory in walk_versions(repository.store, versions, optional=optional):
        found |= {name for name, _ in inventory.names()} | parity_names(repository.store, inventory)
    return found


def objects_of_builds(repository: Repository) -> set[str]:
    """What unfinished builds below ``tmp/`` of a local root, or ``scratch/`` of another, say that they have put.

    Every digest in their records counts, whatever kind of object it may be of: a build that goes on finds its work.
    """
    store = root_store(repository.store)
    records = _local_records(store) if isinstance(store, LocalStore) else _stored_records(store)
    found = {match.decode() for record in records for match in _HEX.findall(record)}
    return {object_name(f"sha256:{digest}", kind) for digest in found for kind in COLLECTED}


def _stored_records(store: Store) -> Iterator[bytes]:
    """Records of builds over several machines (SPEC.md of shardkit.dataset §6)."""
    for name in store.list_after("scratch/"):
        if name.endswith(".done"):
            try:
                yield store.get(name, max_bytes=_MAX_RECORD_BYTES)
            except (IntegrityError, NotFoundError):
                continue  # finished meanwhile, or no record


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
                continue  # finished meanwhile
