"""What a root's versions need and where it lies, as far as that can be known where anything may be damaged."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from shardkit.copies.documents import check_documents
from shardkit.copies.placement import Needed, add_needed, needed_of
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.reading.adopted import AdoptedStore
from shardkit.reading.inventory import (
    Inventory,
    VersionRecord,
    first_good,
    read_version_record,
    take_inventory,
    version_record_name,
    walk_versions,
)
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import ROOT_NAME, Location
from shardkit.reading.parity.rebuilding import restore
from shardkit.reading.parity.sets import ParitySet, SetRecord, find_records, known_sets, read_record, sets_of
from shardkit.repository.location_table import (
    LocationRecord,
    LocationTable,
    draft_table,
    first_root,
    read_table,
)
from shardkit.repository.policy import Policy
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore, open_store
from shardkit.stores.store import Store, object_name, parse_object_name, put_over, root_store
from shardkit.stores.waiting import RateLimiter

_DAMAGED: Final = (NotFoundError, IntegrityError, FormatError)


class Survey:
    """A root, all places where copies of its objects lie, and what its versions need, from wherever it is good.

    Args:
        url: of the root.
        more: locations beside those of its table.
        pace: how fast.
        heal: repair documents that the root has wrong, without which it cannot be opened, and make manifests and pages
            that are good nowhere again from parity, in the root.

    Attributes:
        documents: what was found of those that no manifest names. healed: of them, in the root.
        repository: the root alone.
        table: locations and policy; made up where none was ever committed.
        locations: name → location, the root first; open for writing where that is allowed.
        versions: manifest ids that refs and tags name.
        needed: object name → what is needed of it.
        sets: digest of a member → its parity set, for versions that have parity.
        rows: object name of a shard → its samples.
        restored: names of manifests and pages that had to be made again to get this far.
        lost: name → why: a manifest or page that is nowhere; what it names is not known.
        unknown: name → why: that could not be read just now.

    Raises:
        NotFoundError: there is no repository.
        StoreError: the root does not answer.
    """

    def __init__(self, url: str, more: Sequence[LocationRecord], pace: RateLimiter, *, heal: bool) -> None:
        self.documents = check_documents(open_store(url), more)
        self.healed = self.documents.heal_root() if heal else []
        self.repository = Repository.open(url)
        plain = root_store(self.repository.store)
        table = read_table(plain, self.repository.id)
        self.table: LocationTable = table or draft_table(
            self.repository.id, None, Policy(), (first_root(plain),)
        )
        # Adopted tars count as the root's; what is in the root itself is found first, and a disk is the nearest place.
        rank = -1_000 if isinstance(plain, LocalStore) else self.table.root.rank
        own = Location(name=ROOT_NAME, store=AdoptedStore(plain), domain=self.table.root.domain, rank=rank)
        self.locations = {ROOT_NAME: own, **self.documents.locations}
        located = LocatedStore(list(self.locations.values()))
        self._reader = self.repository.with_store(located, read_only=True)
        self._pace, self._heals = pace, heal
        self._scanned: dict[str, SetRecord] | None = None
        self.needed: dict[str, Needed] = {}
        self.sets: dict[str, ParitySet] = {}
        self.rows: dict[str, int] = {}
        self.restored: list[str] = []
        self.lost: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        head = self.documents.newest
        self.versions = list(dict.fromkeys([*head.refs.values(), *head.tags.values()])) if head else []
        for version in self.versions:
            self._add(version)

    @property
    def root(self) -> Store:
        """Where results are recorded."""
        return self.locations[ROOT_NAME].store

    @property
    def stores(self) -> list[Store]:
        """Of all locations, the root's first."""
        return [one.store for one in self.locations.values()]

    def _add(self, version: str) -> None:
        while True:
            try:
                for inventory in walk_versions(self._reader, [version]):
                    self._add_inventory(inventory)
                return
            except _DAMAGED as error:
                wanted = self._first_damaged(version)
                if not self._heals or wanted is None or not self._restore_damaged(wanted):
                    self.lost[wanted or object_name(version, "manifest")] = str(error)
                    return
            except ShardkitError as error:
                self.unknown[object_name(version, "manifest")] = str(error)
                return

    def _add_inventory(self, inventory: Inventory) -> None:
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
        """The set of an object, by its document, or by the headers of parity objects; None where it is in none."""
        one = self.sets.get(digest)
        if one is not None:
            found = first_good(self.stores, functools.partial(read_record, wanted=one))
            if found is not None:
                return found
        return self._scan().get(digest)

    def _scan(self) -> dict[str, SetRecord]:
        """Digest of an object → its set, by all documents and headers."""
        if self._scanned is None:
            self._scanned = {}
            for record in find_records(self.stores):
                for position in range(record.set.k + 2):
                    self._scanned.setdefault(record.object_at(position).digest, record)
        return self._scanned

    def _members(self, inventory: Inventory) -> int | None:
        """Members of a set of a version: by its first good document, else by the sets that there are.

        A document that is damaged in the root, or gone, is put again; where nothing tells what it said, it is taken
        away: the version can be encoded again.
        """
        version, root = inventory.manifest.id, self.root
        name = version_record_name(version)
        ask = functools.partial(read_version_record, manifest_id=version)
        if (good := first_good([root], ask)) is not None:
            return good.members_per_set
        good = first_good(self.stores[1:], ask)
        k = None if good is None else good.members_per_set
        if k is None:
            is_there = root.head(name) is not None
            if not is_there and next(iter(root.list_after("parity/sets/")), None) is None:
                return None
            sets = {one.set.id: one.set.k for one in self._scan().values()}
            for likely in sorted(set(sets.values()), reverse=True):
                if any(one.id in sets for one in sets_of(inventory, likely, inventory.rest)):
                    k = likely
                    break
            if k is None and is_there and self._heals:
                root.delete(name)
        if k is not None and self._heals:
            put_over(root, name, VersionRecord(version, k).to_bytes())
        return k

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
                self.stores,
                pool=pool,
                pace=self._pace.take,
                without=without,
            )
        return made[position].size

    def _first_damaged(self, version: str) -> str | None:
        """The manifest or page without which a version cannot be read."""
        damaged: list[str] = []
        try:
            take_inventory(
                self._reader, version, unreadable=lambda name, _digest, _error: damaged.append(name)
            )
        except ShardkitError:
            return object_name(version, "manifest")
        return damaged[0] if damaged else None

    def _restore_damaged(self, name: str) -> bool:
        """Make a manifest or page again in the root, from parity; False where that is not possible."""
        record = self.record(parse_object_name(name)[0])
        if record is None or name in self.restored:
            return False
        try:
            self.restore(record, name, self.root)
        except IntegrityError:
            return False
        self.restored.append(name)
        return True
