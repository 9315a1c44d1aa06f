"""Which sets a version has, and where their documents say P and Q are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.reading.located_store import find_checked
from shardkit.reading.parity.sets import (
    MAX_HEADER_BYTES,
    MAX_RECORD_BYTES,
    ParitySet,
    SetRecord,
    VersionRecord,
    form_sets,
    parse_header,
    version_record_name,
)
from shardkit.repository.inventory import Inventory
from shardkit.repository.repository import Repository
from shardkit.stores.store import Descriptor, Store, object_name, parse_object_name

SETS: Final = "parity/sets/"
VERSIONS: Final = "parity/versions/"

_Found = TypeVar("_Found")


def sets_of(inventory: Inventory, k: int, small: Iterable[Descriptor] = ()) -> list[ParitySet]:
    """All sets of a version (SPEC.md §2).

    Args:
        inventory: of the version.
        k: members of a full set.
        small: `Inventory.small`; without them, the sets of shards and indexes.
    """
    rows = (inventory.shards, inventory.indexes, sorted(small, key=lambda member: member.digest))
    return [found for row in rows for found in form_sets(row, k)]


def known_sets(
    repository: Repository, inventory: Inventory, k: int, stores: Sequence[Store]
) -> list[ParitySet]:
    """All sets of a version, also where an object is lost without whose size one cannot tell how the rest was cut.

    Those of the rest are then the ones that documents and headers of parity objects tell of.
    """
    try:
        return sets_of(inventory, k, inventory.small(repository))
    except (NotFoundError, IntegrityError):
        members = {one.digest for one in inventory.rest} | {digest for digest, _ in inventory.unsized}
    told = (record.set for record in find_records(stores))
    return sets_of(inventory, k) + [
        one for one in told if any(member.digest in members for member in one.members)
    ]


def read_version_record(store: Store, manifest_id: str) -> VersionRecord | None:
    """How a version was cut into sets; None where it has no parity.

    Raises:
        FormatError: it is damaged, or of another version.
    """

    def parse(data: bytes, where: str) -> VersionRecord:
        record = VersionRecord.from_bytes(data, where)
        if record.manifest != manifest_id:
            raise FormatError(f"{where} is of version {record.manifest}; do not trust it")
        return record

    return find_checked(store, version_record_name(manifest_id), parse, max_bytes=MAX_RECORD_BYTES)


def read_record(store: Store, wanted: ParitySet) -> SetRecord | None:
    """The document of a set; None where there is none.

    Raises:
        FormatError: it is damaged, or of another set.
    """

    def parse(data: bytes, where: str) -> SetRecord:
        record = SetRecord.from_bytes(data, where)
        if record.set != wanted:
            raise FormatError(f"{where} is of another set; do not trust it")
        return record

    return find_checked(store, wanted.record_name, parse, max_bytes=MAX_RECORD_BYTES)


def first_good(stores: Sequence[Store], ask: Callable[[Store], _Found | None]) -> _Found | None:
    """What the first store says that says anything good."""
    for store in stores:
        with contextlib.suppress(ShardkitError):
            found = ask(store)
            if found is not None:
                return found
    return None


def parity_names(
    repository: Repository, inventory: Inventory, *, stores: Sequence[Store] | None = None
) -> set[str]:
    """Names of everything that the parity of a version consists of: documents and parity objects.

    What a collector of garbage must keep. Empty for a version without parity. A set that is being encoded is not among
    them until its document is there.

    Args:
        repository: that holds the version.
        inventory: of the version.
        stores: where parity objects may lie; given, what is lost or damaged is done without: for repairs.

    Raises:
        NotFoundError, IntegrityError, FormatError: the version or a document is damaged: nothing may be collected.
    """
    version = read_version_record(repository.store, inventory.manifest.id)
    if version is None:
        return set()
    found, k = {version.name}, version.members_per_set
    sets = (
        known_sets(repository, inventory, k, stores)
        if stores
        else sets_of(inventory, k, inventory.small(repository))
    )
    for one in sets:
        try:
            record = read_record(repository.store, one)
        except (FormatError, IntegrityError):
            if stores is None:
                raise
            record = None
        if record is not None:
            found.add(one.record_name)
            found.update(object_name(digest, "parity") for digest in record.parity)
    return found


def find_records(stores: Sequence[Store]) -> Iterator[SetRecord]:
    """All sets that can be known of without any manifest: from documents, and from the headers of parity objects.

    Reads the beginning of every parity object; for repairs, where documents or manifests are lost. What is damaged is
    passed over. A set whose P or Q is not in any store has its document, or is not found.
    """
    known: set[str] = set()
    for store in stores:
        for name in _listed(store, SETS):
            with contextlib.suppress(ShardkitError):
                record = SetRecord.from_bytes(store.get(name, max_bytes=MAX_RECORD_BYTES), name)
                if record.set.record_name == name and record.set.id not in known:
                    known.add(record.set.id)
                    yield record
    rows: dict[str, tuple[ParitySet, dict[int, str]]] = {}
    for store in stores:
        for name in _listed(store, "objects/"):
            if not name.endswith(".parity"):
                continue
            with contextlib.suppress(ShardkitError):
                found, row = _read_header(store, name)
                rows.setdefault(found.id, (found, {}))[1].setdefault(row, parse_object_name(name)[0])
    for found, parity in rows.values():
        if found.id not in known and len(parity) == 2:
            yield SetRecord(found, (parity[0], parity[1]))


def sets_that_hold(store: Store, digests: set[str]) -> Iterator[SetRecord]:
    """Sets with at least one of these members: what an erasure must take away as well."""
    for record in find_records([store]):
        if any(member.digest in digests for member in record.set.members):
            yield record


def _listed(store: Store, prefix: str) -> Iterator[str]:
    try:
        yield from store.list_after(prefix)
    except ShardkitError:
        return


def _read_header(store: Store, name: str) -> tuple[ParitySet, int]:
    stat = store.head(name)
    if stat is None:
        raise NotFoundError(f"{name} is not in {store.url}")
    data = store.get_range(name, 0, min(stat.size, MAX_HEADER_BYTES))
    return parse_header(data, stat.size, f"{name} in {store.url}")
