"""What a root's versions need and where it lies, as far as that can be known where anything may be damaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from shardkit.copies.policy import LocationRecord, LocationTable, Policy, open_locations, read_table
from shardkit.copies.policy.opening import location_of, root_store
from shardkit.copies.repairing.documents import Documents, look_at_documents
from shardkit.copies.repairing.results import Healed
from shardkit.copies.replicating.needed import Needed, find_needed
from shardkit.copies.replicating.pacing import Pace
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.manifest import MAX_MANIFEST_BYTES, Manifest
from shardkit.reading.adopted import AdoptedStore
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.locations import Location
from shardkit.reading.parity.catalogue import (
    find_records,
    known_sets,
    put_record,
    read_record,
    read_version_record,
    sets_of,
)
from shardkit.reading.parity.sets import ParitySet, SetRecord, VersionRecord, version_record_name
from shardkit.reading.parity.streaming import restore
from shardkit.repository.identity import IDENTITY_NAME, MAX_IDENTITY_BYTES
from shardkit.repository.inventory import take_inventory, walk_versions
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore
from shardkit.stores.objects import object_name
from shardkit.stores.store import Store
from shardkit.stores.urls import open_store

__all__ = ["Holders", "Survey", "open_holders", "survey"]

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
        documents: what was found of those that no manifest names; what the root had wrong is right again where
            repairing was asked for.
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
        return next(iter(self.locations.values())).store

    @property
    def stores(self) -> list[Store]:
        """Of all locations, the root's first."""
        return [one.store for one in self.locations.values()]


def open_holders(url: str, more: Sequence[LocationRecord] = (), *, mend: bool) -> Holders:
    """Open a root with the locations of its table, and others that are named.

    Args:
        url: of the root.
        more: locations beside those of the table.
        mend: put right documents that the root has wrong, without which it cannot be opened.

    Raises:
        NotFoundError: there is no repository.
        UsageError: a location is named twice.
        StoreError: the root does not answer.
    """
    documents = look_at_documents(open_store(url), more, writable=True)
    healed = documents.heal_root() if mend else []
    repository = Repository.open(url)
    plain = root_store(repository.store)
    table = read_table(plain, repository.id)
    if table is None:
        root = LocationRecord("root", _recordable(plain.url), "root")
        table = LocationTable(n=1, repository=repository.id, previous="", txn="0" * 32, time="1970-01-01T00:00:00Z",
                              author="", message="", policy=Policy(), locations=(root,))  # fmt: skip
    locations = {one.name: one for one in open_locations(repository, writable=True)}
    for record in more:
        locations[record.name] = location_of(record, writable=True)
    first, *others = locations
    coming = {
        (one.location, one.name) for one in documents.puts
    }  # a copy that is known by its mark gets it again
    absent = {
        name: why
        for name in others
        if (name, IDENTITY_NAME) not in coming and (why := _absence(plain, locations[name].store))
    }
    for name in absent:
        del locations[name]
    # adopted tars count as the root's; what is in the root itself is found first, and a disk is the nearest place
    rank = -1_000 if isinstance(plain, LocalStore) else locations[first].rank
    locations[first] = dataclasses.replace(locations[first], store=AdoptedStore(plain), rank=rank)
    identity = repository._identity  # noqa: SLF001 - the same repository over another view of its stores
    reader = Repository(LocatedStore(list(locations.values())), identity, read_only=True)
    return Holders(repository, reader, table, locations, absent, documents, tuple(healed))


def _absence(root: Store, copy: Store) -> str | None:
    """Why a location cannot be taken for a copy of the root: a disk that is not mounted looks like an empty folder."""
    try:
        found = copy.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES)
        if found == root.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES):
            return None
    except NotFoundError:
        refill = f"shardkit place {root.url} --refill NAME"
        return f"{copy.url} is empty, or its disk is not mounted; to fill it anew: {refill}"
    except ShardkitError as error:
        return str(error)
    return f"{copy.url} holds another repository; give this location another place"


def _recordable(url: str) -> str:
    return url if "://" in url or url.startswith("/") else f"/{url}"


@dataclass
class Survey:
    """What is needed.

    Attributes:
        versions: manifest ids that refs and tags name.
        needed: object name → what is needed of it.
        sets: digest of a member → its parity set, for versions that have parity.
        rows: object name of a shard → its samples.
        restored: names of manifests and pages that had to be made again to get this far.
        lost: name → why: a manifest or page that is nowhere; what it names is not known.
        unknown: name → why: that could not be read just now.
    """

    versions: list[str] = field(default_factory=list)
    needed: dict[str, Needed] = field(default_factory=dict)
    sets: dict[str, ParitySet] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    restored: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    _scanned: dict[str, SetRecord] | None = None

    def record(self, holders: Holders, digest: str) -> SetRecord | None:
        """The set of an object, by its document, or by the headers of parity objects; None where it is in none."""
        one = self.sets.get(digest)
        if one is not None:
            for store in holders.stores:
                try:
                    found = read_record(store, one)
                except ShardkitError:
                    continue
                if found is not None:
                    return found
        if self._scanned is None:
            self._scanned = {}
            for record in find_records(holders.stores):
                for position in range(record.set.k + 2):
                    self._scanned.setdefault(record.object_at(position).digest, record)
        return self._scanned.get(digest)


def survey(holders: Holders, pace: Pace, *, mend: bool) -> Survey:
    """Read every version's metadata, from wherever it is good.

    Args:
        holders: of the root.
        pace: how fast.
        mend: make what is good nowhere again from parity, in the root.

    Raises:
        StoreError: the root does not answer.
    """
    found = Survey()
    head = holders.documents.newest
    found.versions = list(dict.fromkeys([*head.refs.values(), *head.tags.values()])) if head else []
    for version in found.versions:
        _version(holders, version, found, pace, mend=mend)
    return found


def _version(holders: Holders, version: str, found: Survey, pace: Pace, *, mend: bool) -> None:
    mended = False
    stores: list[Store] | None = None
    while True:
        try:
            if mend and not mended and _lacks_its_document(holders, version):
                _mend_documents(holders, version, found)
                mended = True
            needed = find_needed(holders.reader, holders.table, [version], stores=stores)
            found.needed |= {
                name: one if name not in found.needed or len(found.needed[name].where) < len(one.where)
                else found.needed[name]
                for name, one in needed.items()
            }  # fmt: skip
            _parity(holders, version, found)
            return
        except _DAMAGED as error:
            wanted = _first_damaged(holders.reader, version)
            if mend and wanted is None and not mended:
                mended = True
                _mend_documents(holders, version, found)
            elif wanted is None and stores is None:
                stores = holders.stores  # what is lost is done without, so that the rest is looked at
            elif not mend or wanted is None or not _restore_one(holders, wanted, found, pace):
                found.lost[wanted or object_name(version, "manifest")] = str(error)
                return
        except ShardkitError as error:
            found.unknown[object_name(version, "manifest")] = str(error)
            return


def _parity(holders: Holders, version: str, found: Survey) -> None:
    for one, inventory in walk_versions(holders.reader, [version]):
        found.rows |= dict(zip((shard.name for shard in inventory.shards), inventory.shard_rows, strict=True))
        known = (_version_record(store, one) for store in holders.stores)
        k = next((found_k for found_k in known if found_k is not None), None)
        if k is None:
            continue
        for parity_set in known_sets(holders.reader, inventory, k, holders.stores):
            found.sets.update((member.digest, parity_set) for member in parity_set.members)


def _lacks_its_document(holders: Holders, version: str) -> bool:
    """Whether a root has parity, and nothing good that says so of this version; it may be another version's."""
    root = holders.root
    if root.head(version_record_name(version)) is not None:
        return _version_record(root, version) is None
    return next(iter(root.list_after("parity/sets/")), None) is not None


def _mend_documents(holders: Holders, version: str, found: Survey) -> None:
    """Documents of parity that are damaged in the root: from other locations, or from the parity objects' headers.

    What cannot be made again is taken away: it can be encoded again.
    """
    root, name = holders.root, version_record_name(version)
    known = (_version_record(store, version) for store in holders.stores)
    k = next((one for one in known if one is not None), None)
    inventory = take_inventory(holders.reader, version)
    if k is None:
        scanned = {one.set.id: one.set.k for one in find_records(holders.stores)}
        likely = sorted(set(scanned.values()), reverse=True)
        k = next((k for k in likely if any(one.id in scanned for one in sets_of(inventory, k))), None)
    if k is None:
        root.delete(name)
        return
    put_record(root, name, VersionRecord(version, k).to_bytes())
    for one in known_sets(holders.reader, inventory, k, holders.stores):
        try:
            read_record(root, one)
        except _DAMAGED:
            good = found.record(holders, one.members[0].digest)
            if good is not None and good.set == one:
                put_record(root, one.record_name, good.to_bytes())
            else:
                root.delete(one.record_name)


def _version_record(store: Store, version: str) -> int | None:
    try:
        record = read_version_record(store, version)
    except ShardkitError:
        return None
    return None if record is None else record.members_per_set


def _first_damaged(reader: Repository, version: str) -> str | None:
    """The manifest or page without which a version cannot be read."""
    name = object_name(version, "manifest")
    try:
        manifest = Manifest.from_bytes(reader.get_object(version, "manifest", max_bytes=MAX_MANIFEST_BYTES))
    except ShardkitError:
        return name
    for ref in manifest.pages:
        try:
            reader.get_object(ref.digest, "page", ref.size)
        except ShardkitError:
            return object_name(ref.digest, "page")
    return None


def _restore_one(holders: Holders, name: str, found: Survey, pace: Pace) -> bool:
    """Make a manifest or page again in the root, from parity; False where that is not possible."""
    digest = f"sha256:{name.rpartition('/')[2].partition('.')[0]}"
    record = found.record(holders, digest)
    if record is None or name in found.restored:
        return False
    position = record.position(digest)
    assert position is not None
    objects = [record.object_at(i) for i in range(record.set.k + 2)]
    with ThreadPoolExecutor(8, thread_name_prefix="shardkit-repair") as pool:
        try:
            restore(record.set, objects, {position: holders.root}, holders.stores, pool=pool, pace=pace.take)
        except IntegrityError:
            return False
    found.restored.append(name)
    return True
