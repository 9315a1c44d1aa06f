"""Walk over the copies of a root: every object that its versions need, in each location that it belongs in.

`repair`, `replicate` and `scrub` take the copies from `CopyWalk.copies`, check them in an order and at a depth of their
own with `CopyWalk.check`, and pass bad copies to `shardkit.copies.repair`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

from shardkit.copies.documents import (
    Fork,
    HealedCopy,
    LostObject,
    UncheckedCopy,
    check_documents,
    merged_names,
)
from shardkit.copies.placement import Copy, NeededObject, add_needed, list_copies, needed_of, placement
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError, StoreError
from shardkit.exit_codes import ExitCode
from shardkit.reading.adopted import AdoptedStore
from shardkit.reading.attestations import Attestation, Records
from shardkit.reading.inventory import (
    Inventory,
    first_good,
    read_members,
    take_inventory,
    version_record,
    version_record_name,
    walk_versions,
)
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import (
    ROOT_NAME,
    CheckResult,
    CopyResult,
    Depth,
    Location,
    check_object,
    copy_object,
)
from shardkit.reading.parity.rebuilding import restore
from shardkit.reading.parity.sets import ParitySet, SetRecord, find_records, known_sets, read_record, sets_of
from shardkit.repository.locations import SPARE_NAME, first_root, read_table, spare_bytes
from shardkit.repository.log import NO_COMMIT, LogEntry, entry_name
from shardkit.repository.policy import LocationRecord, LocationTable, Policy
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore, open_store
from shardkit.stores.store import Store, object_name, parse_object_name, put_over, root_store
from shardkit.stores.waiting import RateLimiter

# ---- Checks and copies of single objects, as tasks that threads of this process or an engine run

Pace = Callable[[int], None]
"""Called with the bytes of each piece before it is read; may sleep."""


class CopyCheck(NamedTuple):
    """A check to make; see `check_object`."""

    store: Store
    name: str
    size: int | None
    depth: Depth

    @property
    def stores(self) -> list[Store]:
        return [self.store]

    def run(self, pace: Pace) -> CheckResult:
        return check_object(self.store, self.name, self.size, self.depth, pace)

    def failed(self, problem: str) -> CheckResult:
        """Return the result if a store cannot be accessed."""
        return CheckResult("unreadable", "list", got=problem)


class CopyTask(NamedTuple):
    """A copy to make; see `copy_object`."""

    name: str
    sources: tuple[Location, ...]
    target: Location
    size: int | None
    replace: bool = False

    @property
    def stores(self) -> list[Store]:
        return [self.target.store, *(one.store for one in self.sources)]

    def run(self, pace: Pace) -> CopyResult:
        return copy_object(self.name, self.sources, self.target, replace=self.replace, pace=pace)

    def failed(self, problem: str) -> CopyResult:
        """Return the result if a store cannot be accessed."""
        return CopyResult(problem=StoreError(problem))


RunAll = Callable[[Iterable[tuple[int, CopyCheck | CopyTask]]], Iterator[tuple[int, Any]]]
"""Runs numbered tasks, taken one by one, and yields (number, result) as each is finished."""


def run_in_threads(
    tasks: Iterable[tuple[int, CopyCheck | CopyTask]], jobs: int, pace: RateLimiter
) -> Iterator[tuple[int, Any]]:
    """Run tasks in `jobs` threads; see `RunAll`. A task is taken only when another one is finished."""
    waiting = iter(tasks)
    running: dict[Future[Any], int] = {}
    finished: SimpleQueue[Future[Any]] = SimpleQueue()
    with ThreadPoolExecutor(jobs, thread_name_prefix="shardkit-copies") as pool:

        def start(count: int) -> None:
            for number, task in itertools.islice(waiting, count):
                future: Future[Any] = pool.submit(task.run, pace.take)
                running[future] = number
                future.add_done_callback(finished.put)

        try:
            start(2 * jobs)
            while running:
                future = finished.get()
                yield running.pop(future), future.result()
                start(1)
        except BaseException:
            pace.stop()  # so that the other threads end soon
            pool.shutdown(cancel_futures=True)
            raise


CheckProgress = Callable[[str, int, int], None]
"""(action, number of copies done, number of copies)."""


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """How copies are checked and made."""

    locations: Sequence[LocationRecord] = ()  # further copies that the root's table does not name
    pace: RateLimiter = field(default_factory=RateLimiter)  # rate limit and schedule
    jobs: int = 4  # number of copies checked or made at once
    engine: RunAll | None = None  # runs checks and copies in place of the threads of this process
    report: CheckProgress | None = None  # called with progress

    def run_all(self, tasks: Iterable[tuple[int, CopyCheck | CopyTask]]) -> Iterator[tuple[int, Any]]:
        """Run tasks on the engine, otherwise in threads; see `RunAll`."""
        return self.engine(tasks) if self.engine else run_in_threads(tasks, self.jobs, self.pace)


@dataclass
class Repair:
    """The result of a repair."""

    url: str  # URL of the root
    level: str  # level of the checks; "attested" if only copies attested as bad were checked
    versions: list[str] = field(default_factory=list)  # manifest ids of the versions
    copies: int = 0  # number of copies checked
    read_bytes: int = 0  # bytes read to check them
    healed: list[HealedCopy] = field(default_factory=list)  # copies and documents that are good again
    lost: list[LostObject] = field(default_factory=list)  # objects without a good copy in any location
    unchecked: list[UncheckedCopy] = field(default_factory=list)  # copies that could not be read or written
    encoded: int = 0  # number of parity sets that had no parity and got it

    @property
    def exit_code(self) -> ExitCode:
        """DAMAGED if an object is lost, otherwise UNCHECKED if a copy could not be checked."""
        return ExitCode.DAMAGED if self.lost else ExitCode.UNCHECKED if self.unchecked else ExitCode.DONE

    @property
    def verdict(self) -> str:
        if self.lost:
            return "data is lost"
        if self.unchecked:
            return "could not check or heal everything"
        return "repaired" if self.healed else "clean"


class CopyWalk:
    """Context manager of one call of `repair`, `replicate` or `scrub`.

    On entry it repairs the root's documents and metadata, which are needed to find all other objects.

    Args:
        url: URL of the root.
        by: name of the command for attestations; None: attest nothing.
        level: level of the checks, for the result.
        settings: how copies are checked.
        heal: False: repair nothing.
        restored: documents that the caller has copied to a lost root.

    Attributes:
        documents: result of the check of documents that no manifest names.
        repository: the root alone.
        table: locations and policy; a default one if the root has no table.
        locations: name → location open for writing, the root first.
        absent: name → reason, of the locations that cannot be used.
        needed: object name → needed object, of the versions whose metadata can be read.
        sets: digest of a member → its parity set, for versions that have parity.
        rows: object name of a shard → its number of samples.
        done: result of the call.
        records: attestations of the call.
        settings: how copies are checked and made.
        pace: rate limit and schedule.
        report: called with progress.
    """

    def __init__(
        self,
        url: str,
        by: str | None,
        level: str,
        settings: CheckSettings | None = None,
        *,
        heal: bool = True,
        restored: Sequence[HealedCopy] = (),
    ) -> None:
        self._url, self._by, self._level, self._heal = url, by, level, heal
        self._restored = restored
        self.settings = settings or CheckSettings()
        self.pace, self.report = self.settings.pace, self.settings.report

    def __enter__(self) -> CopyWalk:
        url, more, heal = self._url, self.settings.locations, self._heal
        self.documents = check_documents(open_store(url), more)
        healed = [*self._restored, *(self.documents.heal_root() if heal else [])]
        self.repository = Repository.open(url)
        self.absent = self.documents.absent
        self.done = Repair(self.repository.url, self._level, healed=healed)
        self.done.unchecked = [UncheckedCopy(name, "", why) for name, why in self.absent.items()]
        plain = root_store(self.repository.store)
        table = read_table(plain, self.repository.id, self.documents.newest)
        self.table = table or LocationTable(policy=Policy(), locations=(first_root(plain),))
        # a local disk is read first
        rank = -1_000 if isinstance(plain, LocalStore) else self.table.root.rank
        own = Location(name=ROOT_NAME, store=plain, domain=self.table.root.domain, rank=rank)
        self.locations = {ROOT_NAME: own, **self.documents.locations}
        self._reader = LocatedStore(list(self.locations.values()))
        self._scanned: dict[str, SetRecord] | None = None
        self.needed: dict[str, NeededObject] = {}
        self.sets: dict[str, ParitySet] = {}
        self.rows: dict[str, int] = {}
        if heal:
            self._merge_forks()
        self.done.versions = (self.documents.newest or NO_COMMIT).versions
        for version in self.done.versions:
            self._add(version)
        self.records = Records(None if self._by is None else self.root, self._by or "")
        return self

    def _merge_forks(self) -> None:
        """Commit the names that only a copy's log has, before the root's log replaces it."""
        for fork in self.documents.forks:

            def change(head: LogEntry, fork: Fork = fork) -> Mapping[str, Any] | None:
                return merged_names(head, fork, self._has_manifest)

            message = f"names that only the log of {fork.location} has"
            entry = self.repository.append(change, self.repository.head(), message)
            if entry is not None:
                self.documents.add_commit(entry)
                name, data = entry_name(entry.n), entry.to_bytes()
                self.done.healed.append(HealedCopy(ROOT_NAME, name, "missing", fork.location, len(data)))
                if entry.locations is not None:
                    put_over(self.root, SPARE_NAME, spare_bytes(self.repository.id, entry.locations))

    def _has_manifest(self, version: str) -> bool:
        name = object_name(version, "manifest")
        return bool(first_good(self.stores, lambda store: store.head(name)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # keep the results so far, but do not hide the first error
        with contextlib.suppress(*([] if error is None else [ShardkitError])):
            self.records.flush()

    @property
    def root(self) -> Store:
        """Store of the root."""
        return self.locations[ROOT_NAME].store

    @property
    def stores(self) -> list[Store]:
        """Stores of all locations, the root first."""
        return [one.store for one in self.locations.values()]

    # Copies and their states

    def copies(self) -> Iterator[Copy]:
        """Yield every copy that belongs in a usable location."""
        return (one for one in list_copies(self.needed) if one.location in self.locations)

    def check(
        self, copies: Iterable[Copy], depth: Callable[[Copy], Depth], total: int
    ) -> Iterator[tuple[Copy, CheckResult]]:
        """Check copies, taken one by one; count and attest the results, and yield them in any order.

        Args:
            copies: copies to check.
            depth: function that returns the depth of a copy's check.
            total: number of copies, for progress.

        Returns:
            The copies with their states, and the results.
        """
        running: dict[int, Copy] = {}

        def checks() -> Iterator[tuple[int, CopyCheck]]:
            for number, one in enumerate(copies):
                running[number] = one
                yield number, CopyCheck(self.locations[one.location].store, one.name, one.size, depth(one))

        for number, result in self.settings.run_all(checks()):
            yield self._note(running.pop(number), result), result
            if self.report is not None:
                self.report("checked", self.done.copies, total)

    def find_bad(self, copies: Sequence[Copy], depth: Callable[[Copy], Depth]) -> list[Copy]:
        """Check copies and return the wrong and missing ones."""
        total = self.done.copies + len(copies)
        return [one for one, _ in self.check(copies, depth, total) if one.is_bad]

    def check_attested(self, looks: dict[str, dict[str, Attestation]]) -> Iterator[Copy]:
        """Check copies that were attested as bad, and yield the copies that are still bad."""
        for location, names in sorted(looks.items()):
            for name, look in sorted(names.items()):
                needed = self.needed.get(name)
                if not look.is_bad or needed is None or location in self.absent:
                    continue  # an absent location is reported once, not per copy
                if location not in self.locations:
                    why = f"attested {look.result} by {look.by} at {look.time}, in a location that is not known here"
                    why += f"; name it: --location {location}=URL"
                    self.done.unchecked.append(UncheckedCopy(location, name, why))
                    continue
                if look.result == "missing" and location not in needed.where and self.table.others:
                    continue  # the policy wants no copy there
                one = Copy(location, name, needed.size)
                store = self.locations[location].store
                result = check_object(store, name, needed.size, "read", self.pace.take)
                if result.is_good:  # "healed" outweighs an earlier "wrong" or "missing"
                    result = result._replace(result="healed")
                one = self._note(one, result)
                if one.is_bad:
                    yield one

    def _note(self, one: Copy, result: CheckResult) -> Copy:
        """Count and attest the result of a check, and return the copy with its state."""
        self.done.copies += 1
        self.done.read_bytes += result.num_bytes
        if result.result == "unreadable":
            self.done.unchecked.append(UncheckedCopy(one.location, one.name, result.got))
        else:
            self.records.add(one.location, one.name, result.result, result.level)
        return one._replace(state=result.result)

    # Versions

    def _add(self, version: str) -> None:
        while True:
            try:
                for inventory in walk_versions(self._reader, [version]):
                    self._add_inventory(inventory)
                return
            except (NotFoundError, IntegrityError, FormatError) as error:
                wanted = self._first_damaged(version)
                if not self._heal or wanted is None or not self._restore_damaged(wanted):
                    name = wanted or object_name(version, "manifest")
                    self.done.lost.append(LostObject(name, 0, str(error)))
                    return
            except ShardkitError as error:
                name = object_name(version, "manifest")
                self.done.unchecked.append(UncheckedCopy(ROOT_NAME, name, str(error)))
                return

    def _add_inventory(self, inventory: Inventory) -> None:
        root = self.locations[ROOT_NAME]
        if inventory.manifest.adopted and not isinstance(root.store, AdoptedStore):
            # adopted files count as copies in the root; an object in the root itself is found first
            self.locations[ROOT_NAME] = dataclasses.replace(root, store=AdoptedStore(root.store))
        parity: set[str] = set()
        k = None if inventory.manifest.parts else self._members(inventory)
        for one in known_sets(self._reader, inventory, k, self.stores) if k is not None else ():
            self.sets.update((member.digest, one) for member in one.members)
            record = self.record(one.members[0].digest)
            if record is not None and record.set == one:
                parity |= {record.object_at(one.k).name, record.object_at(one.k + 1).name}
        add_needed(self.needed, needed_of(self.table, inventory, parity))
        self.rows |= dict(zip((shard.name for shard in inventory.shards), inventory.shard_rows, strict=True))

    def _first_damaged(self, version: str) -> str | None:
        """Return the name of the first damaged manifest or page of a version, None if all are good."""
        damaged: list[str] = []
        try:
            take_inventory(
                self._reader, version, unreadable=lambda name, _digest, _error: damaged.append(name)
            )
        except ShardkitError:
            return object_name(version, "manifest")
        return damaged[0] if damaged else None

    def _restore_damaged(self, name: str) -> bool:
        """Rebuild a manifest or page in the root from parity. Return False if that is not possible."""
        record = self.record(parse_object_name(name)[0])
        if record is None or any(one.name == name for one in self.done.healed):
            return False
        try:
            self.rebuild(record, name, self.root)
        except IntegrityError:
            return False
        self.done.healed.append(HealedCopy(ROOT_NAME, name, "missing", "parity", 0))
        return True

    # Parity

    def record(self, digest: str) -> SetRecord | None:
        """Return the parity set of an object, from its document or from headers of parity objects; None if none."""
        one = self.sets.get(digest)
        if one is not None:
            found = first_good(self.stores, functools.partial(read_record, wanted=one))
            if found is not None:
                return found
        return self._scan().get(digest)

    def _scan(self) -> dict[str, SetRecord]:
        """Return the parity sets of all documents and headers, by digest of each object."""
        if self._scanned is None:
            self._scanned = {}
            for record in find_records(self.stores):
                for position in range(record.set.k + 2):
                    self._scanned.setdefault(record.object_at(position).digest, record)
        return self._scanned

    def _members(self, inventory: Inventory) -> int | None:
        """Return the number of members of a version's parity sets, None if the version has no parity.

        It comes from the first good document of the version, otherwise from existing sets. If `heal`, a damaged or
        missing document in the root is restored; if its content is unknown, it is deleted, so that the version can be
        encoded again.
        """
        version, root = inventory.manifest.id, self.root
        name = version_record_name(version)
        ask = functools.partial(read_members, manifest_id=version)
        if (good := first_good([root], ask)) is not None:
            return good
        k = first_good(self.stores[1:], ask)
        if k is None:
            is_there = root.head(name) is not None
            if not is_there and next(iter(root.list_after("parity/sets/")), None) is None:
                return None
            sets = {one.set.id: one.set.k for one in self._scan().values()}
            for likely in sorted(set(sets.values()), reverse=True):
                if any(one.id in sets for one in sets_of(inventory, likely, inventory.rest)):
                    k = likely
                    break
            if k is None and is_there and self._heal:
                root.delete(name)
        if k is not None and self._heal:
            root.replace(name, version_record(version, k))
        return k

    def rebuild(
        self, record: SetRecord, name: str, target: Store, without: Collection[tuple[int | None, str]] = ()
    ) -> int:
        """Rebuild an object of a parity set from the other objects and return its size in bytes; see `restore`."""
        position = record.position(parse_object_name(name)[0])
        assert position is not None
        objects = [record.object_at(i) for i in range(record.set.k + 2)]
        made = restore(
            record.set, objects, {position: target}, self.stores, pace=self.pace.take, without=without
        )
        return made[position].size

    def need_parity(self, record: SetRecord) -> list[Copy]:
        """Add the parity objects of a set that was encoded in this call to `needed`. Return their copies."""
        new: dict[str, NeededObject] = {}
        for parity in (record.object_at(record.set.k), record.object_at(record.set.k + 1)):
            where = placement(self.table.policy, self.table.locations, parity.digest, "parity")
            add_needed(new, [NeededObject(parity.name, parity.size, where, is_critical=False)])
        add_needed(self.needed, new.values())
        return [one for one in list_copies(new) if one.location in self.locations]
