"""Check copies and replace bad ones: the common part of `repair`, `replicate` and `scrub`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final

from shardkit.copies.documents import BadCopy, Fork, Healed, Lost, Unchecked, check_documents, merged_names
from shardkit.copies.mirroring import mirror_documents, restore_lost_root
from shardkit.copies.placement import Needed, add_needed, needed_of, placement
from shardkit.copies.repair_results import CheckSettings, CopyCheck, Placed, Repair
from shardkit.errors import (
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreFullError,
    StoreReadOnlyError,
)
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
    Depth,
    Location,
    check_object,
    copy_object,
)
from shardkit.reading.parity.rebuilding import encode_set, restore
from shardkit.reading.parity.sets import ParitySet, SetRecord, find_records, known_sets, read_record, sets_of
from shardkit.repository.location_table import (
    draft_table,
    first_root,
    read_table,
)
from shardkit.repository.log import LOG, NO_COMMIT, LogEntry
from shardkit.repository.policy import Policy
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore, open_store
from shardkit.stores.store import Store, object_name, parse_object_name, root_store

_DAMAGED: Final = (NotFoundError, IntegrityError, FormatError)


class _Failed(Exception):
    """A copy could not be repaired from copies, or from parity.

    Attributes:
        is_sure: False if a location that did not answer may have good bytes, or the bad copy cannot be overwritten.
    """

    def __init__(self, why: str, *, is_sure: bool) -> None:
        super().__init__(why)
        self.is_sure = is_sure


class Repairer:
    """Context manager of one call of `repair`, `replicate` or `scrub`.

    On entry it repairs the root's documents and metadata, which are needed to find all other objects.

    Args:
        url: URL of the root.
        by: name of the command for attestations; None: attest nothing.
        level: level of the checks, for the result.
        settings: how copies are checked.
        heal: False: repair nothing.

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
    """

    def __init__(
        self,
        url: str,
        by: str | None,
        level: str,
        settings: CheckSettings | None = None,
        *,
        heal: bool = True,
    ) -> None:
        self._url, self._by, self._level, self._heal = url, by, level, heal
        self._how = how = settings or CheckSettings()
        self._pace, self._check_all, self._report = how.pace, how.check_all, how.report

    def __enter__(self) -> Repairer:
        url, how, heal = self._url, self._how, self._heal
        restored = restore_lost_root(open_store(url), how.locations) if heal else []
        self.documents = check_documents(open_store(url), how.locations)
        healed = [*restored, *(self.documents.heal_root() if heal else [])]
        self.repository = Repository.open(url)
        self.absent = self.documents.absent
        self.done = Repair(self.repository.url, self._level, healed=healed)
        self.done.unchecked = [Unchecked(name, "", why) for name, why in self.absent.items()]
        plain = root_store(self.repository.store)
        table = read_table(plain, self.repository.id)
        self.table = table or draft_table(self.repository.id, None, Policy(), (first_root(plain),))
        # a local disk is read first
        rank = -1_000 if isinstance(plain, LocalStore) else self.table.root.rank
        own = Location(name=ROOT_NAME, store=plain, domain=self.table.root.domain, rank=rank)
        self.locations = {ROOT_NAME: own, **self.documents.locations}
        self._reader = LocatedStore(list(self.locations.values()))
        self._scanned: dict[str, SetRecord] | None = None
        self.needed: dict[str, Needed] = {}
        self.sets: dict[str, ParitySet] = {}
        self.rows: dict[str, int] = {}
        if heal:
            self._merge_forks()
        head = self.documents.newest
        self.done.versions = list(dict.fromkeys([*head.refs.values(), *head.tags.values()])) if head else []
        for version in self.done.versions:
            self._add(version)
        self.records = Records(None if self._by is None else self.root, self._by or "")
        self._pool = ThreadPoolExecutor(how.jobs, thread_name_prefix="shardkit-check")
        return self

    def _merge_forks(self) -> None:
        """Commit the names that only a copy's log has, before the root's log replaces it."""
        for fork in self.documents.forks:

            def change(head: LogEntry | None, fork: Fork = fork) -> Mapping[str, Any] | None:
                return merged_names(head or NO_COMMIT, fork, self._has_manifest)

            message = f"names that only the log of {fork.location} has"
            entry = self.repository.append(change, self.repository.head(), message)
            if entry is not None:
                self.documents.add_commit(entry)
                name, data = LOG.name(entry.n), entry.to_bytes()
                self.done.healed.append(Healed(ROOT_NAME, name, "missing", fork.location, len(data)))

    def _has_manifest(self, version: str) -> bool:
        name = object_name(version, "manifest")
        for store in self.stores:
            with contextlib.suppress(ShardkitError):
                if store.head(name) is not None:
                    return True
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._pace.stop()  # so that the other threads end soon
        self._pool.shutdown()
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

    def _add(self, version: str) -> None:
        while True:
            try:
                for inventory in walk_versions(self._reader, [version]):
                    self._add_inventory(inventory)
                return
            except _DAMAGED as error:
                wanted = self._first_damaged(version)
                if not self._heal or wanted is None or not self._restore_damaged(wanted):
                    name = wanted or object_name(version, "manifest")
                    self.done.lost.append(Lost(name, 0, str(error)))
                    return
            except ShardkitError as error:
                name = object_name(version, "manifest")
                self.done.unchecked.append(Unchecked(ROOT_NAME, name, str(error)))
                return

    def _add_inventory(self, inventory: Inventory) -> None:
        root = self.locations[ROOT_NAME]
        if inventory.manifest.adopted and not isinstance(root.store, AdoptedStore):
            # adopted tars count as copies in the root; an object in the root itself is found first
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

    def restore(
        self, record: SetRecord, name: str, target: Store, without: Collection[tuple[int | None, str]] = ()
    ) -> int:
        """Rebuild an object of a parity set from the other objects and return its size in bytes; see `restore`."""
        position = record.position(parse_object_name(name)[0])
        assert position is not None
        objects = [record.object_at(i) for i in range(record.set.k + 2)]
        made = restore(
            record.set, objects, {position: target}, self.stores, pace=self._pace.take, without=without
        )
        return made[position].size

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
            self.restore(record, name, self.root)
        except IntegrityError:
            return False
        self.done.healed.append(Healed(ROOT_NAME, name, "missing", "parity", 0))
        return True

    def placed(self) -> Iterator[Placed]:
        """Yield every copy that belongs in a usable location."""
        for one in self.needed.values():
            for location in one.where:
                if location in self.locations:
                    yield Placed(location, one.name, one.size)

    # Checking

    def check_each(
        self, wanted: Sequence[Placed], depth: Callable[[Placed], Depth]
    ) -> Iterator[tuple[Placed, CheckResult]]:
        """Check copies in parallel and yield the results in order."""
        stores = {name: location.store for name, location in self.locations.items()}
        checks = [CopyCheck(stores[one.location], one.name, one.size, depth(one)) for one in wanted]
        if self._check_all is not None:
            return zip(wanted, self._check_all(checks), strict=True)

        def check(one: CopyCheck) -> CheckResult:
            return check_object(one.store, one.name, one.size, one.depth, self._pace.take)

        return zip(wanted, self._pool.map(check, checks), strict=True)

    def check_copies(self, wanted: Sequence[Placed], depth: Callable[[Placed], Depth]) -> list[BadCopy]:
        """Check copies and return the bad ones."""
        bad: list[BadCopy] = []
        for number, (one, result) in enumerate(self.check_each(wanted, depth), 1):
            bad += self.note(one.location, one.name, result)
            if self._report is not None:
                self._report("checked", number, len(wanted))
        return bad

    def check_attested(self, looks: dict[str, dict[str, Attestation]]) -> Iterator[BadCopy]:
        """Check copies that were attested as bad, and yield the copies that are still bad."""
        for location, names in sorted(looks.items()):
            for name, look in sorted(names.items()):
                needed = self.needed.get(name)
                if not look.is_bad or needed is None or location in self.absent:
                    continue  # an absent location is reported once, not per copy
                if location not in self.locations:
                    why = f"attested {look.result} by {look.by} at {look.time}, in a location that is not known here"
                    why += f"; name it: --location {location}=URL"
                    self.done.unchecked.append(Unchecked(location, name, why))
                    continue
                if look.result == "missing" and location not in needed.where and self.table.others:
                    continue  # the policy wants no copy there
                store = self.locations[location].store
                result = check_object(store, name, needed.size, "read", self._pace.take)
                if result.is_good:  # "healed" outweighs an earlier "wrong" or "missing"
                    result = result._replace(result="healed")
                yield from self.note(location, name, result)

    def note(self, location: str, name: str, result: CheckResult) -> list[BadCopy]:
        """Count and attest the result of a check. Return the copy in a list if it is bad, otherwise an empty list."""
        self.done.copies += 1
        self.done.read_bytes += result.num_bytes
        if result.result == "unreadable":
            self.done.unchecked.append(Unchecked(location, name, result.got))
            return []
        self.records.add(location, name, result.result, result.level)
        is_bad = result.result not in ("good", "healed")
        return [BadCopy(location, name, result.result)] if is_bad else []

    # Repairing

    def repair_copies(self, bad: Iterable[BadCopy]) -> None:
        """Replace bad copies. Copies that cannot be repaired are added to `done.lost` or `done.unchecked`.

        Copies in other locations are used first, because each repaired copy helps to rebuild others from parity. Parity
        is tried repeatedly until no copy is repaired, because a rebuilt object may complete another set.
        """
        left = sorted(set(bad))
        self._num_bad, self._num_healed = len(left), 0
        copies = self._repair_each(left, self._from_copies)
        parity = {one: _Failed("", is_sure=True) for one in copies}
        while True:
            known = list(parity)
            parity = self._repair_each(known, lambda one, known=known: self._from_parity(one, known))  # type: ignore[misc]
            if len(parity) == len(known):
                break
        for one, failed in parity.items():
            why = f"{copies[one]}, and {failed}"
            if not (copies[one].is_sure and failed.is_sure):
                why = f"it could not be healed: {why}"
                self.done.unchecked.append(Unchecked(one.location, one.name, why))
            elif all(lost.name != one.name for lost in self.done.lost):
                self.done.lost.append(Lost(one.name, self.rows.get(one.name, 0), why))

    def _repair_each(
        self, bad: Iterable[BadCopy], attempt: Callable[[BadCopy], Healed]
    ) -> dict[BadCopy, _Failed]:
        """Try to repair each copy, and return the copies that stay bad with the reasons."""
        left: dict[BadCopy, _Failed] = {}
        for one in bad:
            try:
                self.done.healed.append(attempt(one))
            except _Failed as failed:
                left[one] = failed
                continue
            self._num_healed += 1
            self.records.add(one.location, one.name, "healed", "read")
            if self._report is not None:
                self._report("healed", self._num_healed, self._num_bad)
        return left

    def _from_copies(self, bad: BadCopy) -> Healed:
        told: list[str] = []
        absent = [f"{name} does not answer" for name in self.absent]
        try:
            source, size = copy_object(
                bad.name,
                list(self.locations.values()),
                self.locations[bad.location],
                replace=bad.was == "wrong",
                pace=self._pace.take,
                bad_copy=lambda one, _name, result: told.append(f"{one.name}: {result}"),
            )
        except (StoreFullError, StoreReadOnlyError) as error:
            raise _Failed(str(error), is_sure=False) from None  # no source can help
        except IntegrityError:
            silent = absent
        except ShardkitError as error:
            silent = [str(error), *absent]
        else:
            return Healed(bad.location, bad.name, bad.was, source, size)
        why = "; ".join([*told, *silent]) or "there is no other location"
        raise _Failed(f"no other copy is good ({why})", is_sure=not silent)

    def _from_parity(self, bad: BadCopy, left: Iterable[BadCopy]) -> Healed:
        """Rebuild a copy from the other objects of its parity set, without those known to be bad."""
        record = self.record(parse_object_name(bad.name)[0])
        if record is None:
            raise _Failed("it has no parity", is_sure=True)
        locations = self.locations
        known = {
            (record.position(parse_object_name(one.name)[0]), locations[one.location].store.url)
            for one in left
        }
        try:
            size = self.restore(record, bad.name, locations[bad.location].store, known)
        except ShardkitError as error:
            raise _Failed(str(error), is_sure=isinstance(error, IntegrityError)) from None
        return Healed(bad.location, bad.name, bad.was, "parity", size)

    # Documents

    def finish(self, *, is_lag_left: bool = False) -> None:
        """Repair the documents of parity, then all documents of the copies; to be called after the objects."""
        self._heal_parity()
        done, documents = self.done, self.documents
        done.healed += documents.heal_copies(is_lag_left=is_lag_left)
        for name, location in self.locations.items():
            if name != ROOT_NAME:
                try:
                    mirrored = mirror_documents(root_store(self.root), location.store)
                except ShardkitError as error:
                    done.unchecked.append(Unchecked(name, "", str(error)))
                else:
                    done.healed += [
                        Healed(name, one, was, ROOT_NAME, 0) for one, was in mirrored if was == "wrong"
                    ]
        done.lost += documents.lost
        done.unchecked += documents.unchecked

    def _heal_parity(self) -> None:
        """Restore missing or damaged documents of parity sets, and encode the sets whose parity is lost."""
        root, done = self.root, self.done
        lost = {one.name for one in done.lost}
        encoded: list[SetRecord] = []
        for one in {one.id: one for one in self.sets.values()}.values():
            was = "missing"
            try:
                if read_record(root, one) is not None:
                    continue
            except ShardkitError:  # damaged or not a regular file
                was = "wrong"
            record = self.record(one.members[0].digest)
            if record is not None and record.set == one:
                data = record.to_bytes()
                root.replace(one.record_name, data)
                done.healed.append(Healed(ROOT_NAME, one.record_name, was, "parity", len(data)))
                continue
            if was == "wrong":
                root.delete(one.record_name)  # damaged, and no good copy exists
            if not any(member.name in lost for member in one.members):
                try:
                    encoded.append(encode_set(root, one, self.stores, pace=self._pace.take))
                except ShardkitError as error:
                    why = f"it has no parity: {error}"
                    done.unchecked.append(Unchecked(ROOT_NAME, one.record_name, why))
        done.encoded += len(encoded)
        self._copy_parity(encoded)

    def _copy_parity(self, encoded: Iterable[SetRecord]) -> None:
        """Copy the parity objects of newly encoded sets to the locations that they belong in."""
        for record in encoded:
            for parity in (record.object_at(record.set.k), record.object_at(record.set.k + 1)):
                where = placement(self.table.policy, self.table.locations, parity.digest, "parity")
                add_needed(self.needed, [Needed(parity.name, parity.size, where, is_critical=False)])
                placed = [one for one in self.placed() if one.name == parity.name]
                self.repair_copies(self.check_copies(placed, lambda _: "read"))
