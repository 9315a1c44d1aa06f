"""Parity as the last resort of a reader: what `LocatedStore` asks when no location has good bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shardkit.errors import NotFoundError, ShardkitError
from shardkit.manifest import ADOPTED, MIXED, Manifest, ShardTable
from shardkit.reading.adopted import AdoptedStore
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.locations import BlockRequest, Location
from shardkit.reading.parity.catalogue import first_good, read_record, read_version_record, sets_of
from shardkit.reading.parity.rebuilding import rebuild_range
from shardkit.reading.parity.sets import ParitySet, SetRecord, version_record_name
from shardkit.repository.inventory import Inventory
from shardkit.repository.repository import Repository
from shardkit.stores.remote import ObjectStore
from shardkit.stores.remote.backoff import Patience
from shardkit.stores.store import Store, parse_object_name

__all__ = ["ParityReads", "with_parity"]


class ParityReads:
    """Rebuilds blocks of shards, and whole indexes, of one version; nothing is read before it is needed.

    May be used from any thread, after a fork, and pickled.

    Args:
        stores: where objects of the sets may lie, nearest first.
        manifest: the version; not merged.
        table: its shards.
        attempt_s: silence for so long is a failure of a store.
    """

    def __init__(
        self, stores: Sequence[Store], manifest: Manifest, table: ShardTable, *, attempt_s: float = 30.0
    ) -> None:
        self._stores = [_patient(store, attempt_s) for store in stores]
        self._manifest, self._table = manifest, table
        self._open()

    def _open(self) -> None:
        # No locks: what two threads find out at the same time is the same, and a forked child has none to wait for.
        self._sets: dict[str, ParitySet] | None = None
        self._records: dict[str, SetRecord] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_stores", "_manifest", "_table")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __call__(self, request: BlockRequest) -> bytes | None:
        """The bytes of a block, verified; None where parity cannot give them."""
        return self._rebuild(request.name, request.offset, request.length, request.sha256)

    def whole(self, name: str, max_bytes: int) -> bytes | None:
        """The bytes of a whole object of at most `max_bytes`, verified; None where parity cannot give them."""
        digest, _ = parse_object_name(name)
        record = self._record(digest)
        if record is None:
            return None
        position = record.set.position(digest)
        size = -1 if position is None else record.set.members[position].size
        if not 0 <= size <= max_bytes:
            return None
        return self._rebuild(name, 0, size, bytes.fromhex(digest.removeprefix("sha256:")))

    def _rebuild(self, name: str, offset: int, length: int, sha256: bytes) -> bytes | None:
        try:
            digest, _ = parse_object_name(name)
            record = self._record(digest)
        except ShardkitError:
            return None
        position = None if record is None else record.set.position(digest)
        if record is None or position is None:
            return None
        with ThreadPoolExecutor(min(16, record.set.k + 1), thread_name_prefix="shardkit-parity") as pool:
            return rebuild_range(record, position, offset, length, sha256, self._read, pool)

    def _read(self, name: str, offset: int, length: int) -> bytes:
        """A range, from the first store that has it."""
        error: ShardkitError = NotFoundError(name)
        for store in self._stores:
            try:
                return store.get_range(name, offset, length)
            except ShardkitError as met:
                error = met
        raise error

    def _record(self, digest: str) -> SetRecord | None:
        """The document of the set of an object, from the first store that has it."""
        sets = self._sets or self._cut()
        if sets:  # what could not be read just now is asked for again
            self._sets = sets
        one = sets.get(digest)
        if one is None:
            return None
        found = self._records.get(one.id) or first_good(
            self._stores, functools.partial(read_record, wanted=one)
        )
        if found is not None:
            self._records[one.id] = found
        return found

    def _cut(self) -> dict[str, ParitySet]:
        """Member → set, for shards and indexes."""
        manifest = self._manifest
        version = first_good(self._stores, functools.partial(read_version_record, manifest_id=manifest.id))
        if version is None:
            return {}
        sets = sets_of(Inventory(manifest, (self._table,)), version.members_per_set)
        return {member.digest: one for one in sets for member in one.members}


def with_parity(repository: Repository, manifest: Manifest, table: ShardTable) -> Repository:
    """The repository as a reader of `manifest` needs it: one that rebuilds what no location has.

    A local root without parity is left as it is.
    """
    if MIXED in (manifest.format, manifest.compression) or manifest.parts:
        return repository
    store = repository.store
    if isinstance(store, LocatedStore):
        holders = [one.store for one in store.locations if one.holds == "objects"]
        holders[:1] = [_adopting(holders[0], manifest)]
        reads = ParityReads(holders, manifest, table, attempt_s=store.settings.attempt_s)
        return repository.with_store(store.with_parity(reads))
    if store.local_path(version_record_name(manifest.id)) is None:
        return repository
    reads = ParityReads([_adopting(store, manifest)], manifest, table)
    located = LocatedStore([Location(name="root", store=store, domain=store.url)])
    return repository.with_store(located.with_parity(reads))


def _adopting(root: Store, manifest: Manifest) -> Store:
    """Tars that lie outside of the root are members of its sets as well."""
    return AdoptedStore(root) if ADOPTED in manifest.features else root


def _patient(store: Store, attempt_s: float) -> Store:
    """With a client that does not ask again and again: there are others to ask."""
    if isinstance(store, ObjectStore | AdoptedStore):
        return store.with_patience(Patience(deadline_s=0, attempt_s=attempt_s))
    return store
