"""Parity as the last resort of a reader: a range of an object from the same range of others (SPEC.md §5)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import NotFoundError, ShardkitError
from shardkit.manifest import Manifest, ShardTable
from shardkit.reading.inventory import Inventory
from shardkit.reading.locations import BlockRequest
from shardkit.reading.parity.galois import recover
from shardkit.reading.parity.sets import (
    ParitySet,
    SetRecord,
    first_good,
    read_record,
    read_version_record,
    sets_of,
)
from shardkit.stores.remote.waiting import RetryPolicy
from shardkit.stores.store import Store, parse_object_name

Bytes = NDArray[np.uint8]

ReadRange = Callable[[str, int, int], bytes]
"""(object name, offset, length) → exactly these bytes; a ShardkitError where that is not possible."""

MAX_RANGE_BYTES: Final = 2**30


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
        manifest = self._manifest
        version = first_good(self._stores, functools.partial(read_version_record, manifest_id=manifest.id))
        if version is None:
            return {}
        sets = sets_of(Inventory(manifest, (self._table,)), version.members_per_set)
        return {member.digest: one for one in sets for member in one.members}


def _patient(store: Store, attempt_s: float) -> Store:
    """With a client that does not ask again and again: there are others to ask."""
    if not hasattr(store, "with_retry"):
        return store
    patient: Store = store.with_retry(RetryPolicy(deadline_s=0, attempt_s=attempt_s))
    return patient


def rebuild_range(
    record: SetRecord,
    position: int,
    offset: int,
    length: int,
    sha256: bytes,
    read: ReadRange,
    pool: ThreadPoolExecutor,
) -> bytes | None:
    """Part of a member, from the same part of k others.

    Args:
        record: Of the set.
        position: Of the member that is lost.
        offset: Of the part, in the member.
        length: Of the part.
        sha256: 32 bytes, which the part must have: what the others give is trusted as far as this.
        read: Reads a range of an object, from wherever it lies.
        pool: For reads at the same time.

    Returns:
        The bytes, verified; None where too much is lost.
    """
    one = record.set
    if length > MAX_RANGE_BYTES or offset + length > one.members[position].size:
        return None
    ranges = _Ranges(record, offset, length, read, pool)
    ranges.fetch([i for i in range(one.k + 1) if i != position])
    if len(ranges.failed) <= 1:
        found = _attempt(ranges, position, (), sha256)
        if found is not None:
            return found
        # one of those that were read is silently wrong: with Q, each is done without in turn
        if not ranges.failed:
            ranges.fetch([one.k + 1])
            for suspect in range(one.k + 1):
                if suspect != position and one.k + 1 not in ranges.failed:
                    found = _attempt(ranges, position, (suspect,), sha256)
                    if found is not None:
                        return found
    return None


class _Ranges:
    """The same range of several objects of a set."""

    def __init__(
        self, record: SetRecord, offset: int, length: int, read: ReadRange, pool: ThreadPoolExecutor
    ) -> None:
        self.record, self.offset, self.length = record, offset, length
        self._read, self._pool = read, pool
        self.pieces: dict[int, Bytes] = {}
        self.failed: set[int] = set()

    def fetch(self, positions: Sequence[int]) -> None:
        running: dict[int, Future[bytes]] = {}
        for i in positions:
            start, length = self._span(i)
            if length <= 0:
                self.pieces[i] = np.empty(0, dtype=np.uint8)
            else:
                running[i] = self._pool.submit(self._read, self.record.object_at(i).name, start, length)
        for i, future in running.items():
            try:
                self.pieces[i] = np.frombuffer(future.result(), dtype=np.uint8)
            except ShardkitError:
                self.failed.add(i)

    def _span(self, position: int) -> tuple[int, int]:
        """What of an object the range covers: members end early, parity objects begin with a header."""
        one = self.record.set
        if position >= one.k:
            return one.header_bytes + self.offset, self.length
        return self.offset, min(self.length, one.members[position].size - self.offset)


def _attempt(ranges: _Ranges, position: int, without: Sequence[int], sha256: bytes) -> bytes | None:
    """The part, if what was read without `without` gives it."""
    k = ranges.record.set.k
    if ranges.failed and k + 1 not in ranges.pieces:
        ranges.fetch([k + 1])
    usable: Mapping[int, Bytes] = {i: piece for i, piece in ranges.pieces.items() if i not in without}
    members = [None if i == position else usable.get(i) for i in range(k)]
    p, q = usable.get(k), usable.get(k + 1)
    if sum(piece is None for piece in (*members, p, q)) > 2:
        return None
    data = recover(members, p, q, ranges.length, ())[position].tobytes()
    return data if hashlib.sha256(data).digest() == sha256 else None
