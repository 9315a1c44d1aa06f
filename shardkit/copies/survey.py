"""What a root's versions need and where it lies, as far as that can be known where anything may be damaged."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from shardkit.copies.documents import Documents, check_documents
from shardkit.copies.pacing import RateLimiter
from shardkit.copies.placement import Needed, add_needed, needed_of
from shardkit.copies.records import Healed
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.reading.adopted import AdoptedStore
from shardkit.reading.inventory import Inventory, take_inventory, walk_versions
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.locations import ROOT_NAME, Location
from shardkit.reading.parity.rebuilding import restore
from shardkit.reading.parity.sets import (
    ParitySet,
    SetRecord,
    VersionRecord,
    find_records,
    first_good,
    known_sets,
    read_record,
    read_version_record,
    sets_of,
    version_record_name,
)
from shardkit.repository.location_table import (
    LocationRecord,
    LocationTable,
    draft_table,
    first_root,
    read_table,
)
from shardkit.repository.policy import Policy
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore
from shardkit.stores.store import Store, object_name, parse_object_name, put_over, root_store
from shardkit.stores.urls import open_store

_DAMAGED: Final = (NotFoundError, IntegrityError, FormatError)


@dataclass(frozen=True)
class Holders:
    """A root and all places where copies of its objects lie, open for writing where that is allowed.

    Attributes:
        repository: the root alone.
        reader: the same over all locations: reads go where good bytes are.
        table: locations and policy; made up where none was ever committed.
        locations: name → location, the root first.
        absent: name → why: locations that are not there, or are not what they should be.
        documents: what was found of those that no manifest names.
        healed: of them, in the root.
    """

    repository: Repository
    reader: Repository
    table: LocationTable
    locations: Mapping[str, Location]
    absent: Mapping[str, str]
    documents: Documents
    healed: tuple[Healed, ...]

    @property
    def root(self) -> Store:
        """Where results are recorded."""
        return self.locations[ROOT_NAME].store

    @property
    def stores(self) -> list[Store]:
        """Of all locations, the root's first."""
        return [one.store for one in self.locations.values()]


def open_holders(url: str, more: Sequence[LocationRecord] = (), *, heal: bool) -> Holders:
    """Open a root with the locations of its table, and others that are named.

    Args:
        url: of the root.
        more: locations beside those of the table.
        heal: repair documents that the root has wrong, without which it cannot be opened.

    Raises:
        NotFoundError: there is no repository.
        StoreError: the root does not answer.
    """
    documents = check_documents(open_store(url), more)
    healed = documents.heal_root() if heal else []
    repository = Repository.open(url)
    plain = root_store(repository.store)
    table = read_table(plain, repository.id)
    if table is None:
        table = draft_table(repository.id, None, Policy(), (first_root(plain),))
    # Adopted tars count as the root's; what is in the root itself is found first, and a disk is the nearest place.
    rank = -1_000 if isinstance(plain, LocalStore) else table.root.rank
    own = Location(name=ROOT_NAME, store=AdoptedStore(plain), domain=table.root.domain, rank=rank)
    locations = {ROOT_NAME: own, **documents.locations}
    reader = repository.with_store(LocatedStore(list(locations.values())), read_only=True)
    return Holders(repository, reader, table, locations, documents.absent, documents, tuple(healed))


class Survey:
    """What the versions of a root need, read from wherever it is good.

    Args:
        holders: of the root.
        pace: how fast.
        heal: make what is good nowhere again from parity, in the root.

    Attributes:
        versions: manifest ids that refs and tags name.
        needed: object name → what is needed of it.
        sets: digest of a member → its parity set, for versions that have parity.
        rows: object name of a shard → its samples.
        restored: names of manifests and pages that had to be made again to get this far.
        lost: name → why: a manifest or page that is nowhere; what it names is not known.
        unknown: name → why: that could not be read just now.

    Raises:
        StoreError: the root does not answer.
    """

    def __init__(self, holders: Holders, pace: RateLimiter, *, heal: bool) -> None:
        self._holders, self._pace, self._heals = holders, pace, heal
        self._scanned: dict[str, SetRecord] | None = None
        self.needed: dict[str, Needed] = {}
        self.sets: dict[str, ParitySet] = {}
        self.rows: dict[str, int] = {}
        self.restored: list[str] = []
        self.lost: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        head = holders.documents.newest
        self.versions = list(dict.fromkeys([*head.refs.values(), *head.tags.values()])) if head else []
        for version in self.versions:
            self._add(version)

    def record(self, digest: str) -> SetRecord | None:
        """The set of an object, by its document, or by the headers of parity objects; None where it is in none."""
        one = self.sets.get(digest)
        if one is not None:
            found = first_good(self._holders.stores, functools.partial(read_record, wanted=one))
            if found is not None:
                return found
        if self._scanned is None:
            self._scanned = {}
            for record in find_records(self._holders.stores):
                for position in range(record.set.k + 2):
                    self._scanned.setdefault(record.object_at(position).digest, record)
        return self._scanned.get(digest)

    def _add(self, version: str) -> None:
        documents_left = self._heals
        stores: list[Store] | None = None
        while True:
            try:
                if documents_left and self._lacks_its_document(version):
                    self._heal_documents(version)
                    # not before: without its manifest a version's documents are unknown
                    documents_left = False
                for inventory in walk_versions(self._holders.reader, [version]):
                    self._add_inventory(inventory, stores)
                return
            except _DAMAGED as error:
                wanted = self._first_damaged(version)
                if documents_left and wanted is None:
                    documents_left = False
                    self._heal_documents(version)
                elif wanted is None and stores is None:
                    stores = self._holders.stores  # what is lost is done without, so that the rest is checked
                elif not self._heals or wanted is None or not self._restore(wanted):
                    self.lost[wanted or object_name(version, "manifest")] = str(error)
                    return
            except ShardkitError as error:
                self.unknown[object_name(version, "manifest")] = str(error)
                return

    def _add_inventory(self, inventory: Inventory, stores: list[Store] | None) -> None:
        holders = self._holders
        add_needed(self.needed, needed_of(holders.reader, holders.table, inventory, stores))
        self.rows |= dict(zip((shard.name for shard in inventory.shards), inventory.shard_rows, strict=True))
        k = self._members(inventory.manifest.id)
        for parity_set in known_sets(holders.reader, inventory, k, holders.stores) if k is not None else ():
            self.sets.update((member.digest, parity_set) for member in parity_set.members)

    def _members(self, version: str) -> int | None:
        """Members of a set, as the first good document of a version says."""
        found = first_good(self._holders.stores, lambda store: read_version_record(store, version))
        return None if found is None else found.members_per_set

    def _lacks_its_document(self, version: str) -> bool:
        """Whether a root has parity, and nothing good that says so of this version; it may be another version's."""
        root = self._holders.root
        if root.head(version_record_name(version)) is not None:
            return first_good([root], lambda store: read_version_record(store, version)) is None
        return next(iter(root.list_after("parity/sets/")), None) is not None

    def _heal_documents(self, version: str) -> None:
        """Documents of parity that are damaged in the root: from other locations, or from the parity objects' headers.

        What cannot be made again is taken away: it can be encoded again.
        """
        holders, k = self._holders, self._members(version)
        inventory = take_inventory(holders.reader, version)
        if k is None:
            scanned = {one.set.id: one.set.k for one in find_records(holders.stores)}
            likely = sorted(set(scanned.values()), reverse=True)
            k = next(
                (
                    k
                    for k in likely
                    if any(one.id in scanned for one in sets_of(inventory, k, inventory.rest))
                ),
                None,
            )
        if k is None:
            holders.root.delete(version_record_name(version))
            return
        put_over(holders.root, version_record_name(version), VersionRecord(version, k).to_bytes())
        for one in known_sets(holders.reader, inventory, k, holders.stores):
            try:
                read_record(holders.root, one)
            except _DAMAGED:
                good = self.record(one.members[0].digest)
                if good is not None and good.set == one:
                    put_over(holders.root, one.record_name, good.to_bytes())
                else:
                    holders.root.delete(one.record_name)

    def _first_damaged(self, version: str) -> str | None:
        """The manifest or page without which a version cannot be read."""
        damaged: list[str] = []
        try:
            take_inventory(
                self._holders.reader, version, unreadable=lambda name, _digest, _error: damaged.append(name)
            )
        except ShardkitError:
            return object_name(version, "manifest")
        return damaged[0] if damaged else None

    def _restore(self, name: str) -> bool:
        """Make a manifest or page again in the root, from parity; False where that is not possible."""
        record = self.record(parse_object_name(name)[0])
        if record is None or name in self.restored:
            return False
        try:
            self.restore(record, name, self._holders.root)
        except IntegrityError:
            return False
        self.restored.append(name)
        return True

    def restore(
        self, record: SetRecord, name: str, target: Store, without: Collection[tuple[int | None, str]] = ()
    ) -> int:
        """Make an object of a set again from the others; see `parity.restore`. Its bytes."""
        position = record.position(parse_object_name(name)[0])
        assert position is not None
        objects = [record.object_at(i) for i in range(record.set.k + 2)]
        with ThreadPoolExecutor(8, thread_name_prefix="shardkit-parity") as pool:
            made = restore(
                record.set,
                objects,
                {position: target},
                self._holders.stores,
                pool=pool,
                pace=self._pace.take,
                without=without,
            )
        return made[position].size
