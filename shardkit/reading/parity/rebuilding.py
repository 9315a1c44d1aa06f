"""Objects of a set, and parts of them, made from the others and verified by digest (SPEC.md §4, §5)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StoreError
from shardkit.manifest import Manifest, ShardTable
from shardkit.reading.inventory import Inventory, first_good, read_members
from shardkit.reading.objects import BlockRequest
from shardkit.reading.parity.galois import recover
from shardkit.reading.parity.sets import ParitySet, SetRecord, read_record, sets_of
from shardkit.stores.store import Descriptor, Stage, Store, object_name, parse_object_name, put_over
from shardkit.stores.waiting import RetryPolicy

Bytes = NDArray[np.uint8]

ReadRange = Callable[[str, int, int], bytes]
"""(object name, offset, length) → exactly these bytes; a ShardkitError where that is not possible."""

MAX_RANGE_BYTES: Final = 2**30
_PIECE_BYTES: Final = 2**20


def _threads(reads: int) -> ThreadPoolExecutor:
    """For so many reads at the same time."""
    return ThreadPoolExecutor(min(16, max(1, reads)), thread_name_prefix="shardkit-parity")


def _solve(
    one: ParitySet, pieces: Mapping[int, Bytes], length: int, wanted: Collection[int]
) -> Mapping[int, Bytes]:
    """What is not among `pieces`, all of the same place of their objects; see `recover`."""
    members = [pieces.get(i) for i in range(one.k)]
    return recover(members, pieces.get(one.k), pieces.get(one.k + 1), length, wanted)


def _read_piece(one: ParitySet, position: int, name: str, offset: int, length: int, read: ReadRange) -> Bytes:
    """What an object has from `offset` on: members end early, parity objects begin with a header."""
    if position >= one.k:
        start = one.header_bytes + offset
    else:
        start, length = offset, min(length, one.members[position].size - offset)
    return np.frombuffer(read(name, start, length) if length > 0 else b"", dtype=np.uint8)


# Parts of objects, for readers


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
        retry = RetryPolicy(deadline_s=0, attempt_s=attempt_s)  # there are others to ask
        self._stores: list[Store] = [
            store.with_retry(retry) if hasattr(store, "with_retry") else store for store in stores
        ]
        self._manifest, self._table = manifest, table
        # No locks: what two threads find out at the same time is the same, and a forked child has none to wait for.
        self._sets: dict[str, ParitySet] = {}
        self._records: dict[str, SetRecord] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sets": {}, "_records": {}}

    def __call__(self, request: BlockRequest) -> bytes | None:
        """The bytes of a block, verified; None where parity cannot give them."""
        return self._rebuild(request.name, request.offset, request.length, request.sha256)

    def whole(self, name: str, max_bytes: int) -> bytes | None:
        """The bytes of a whole object of at most `max_bytes`, verified; None where parity cannot give them."""
        digest, _ = parse_object_name(name)
        record = self._record(digest)
        position = None if record is None else record.set.position(digest)
        size = -1 if record is None or position is None else record.set.members[position].size
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
        return rebuild_range(record, position, offset, length, sha256, self._read)

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
        if not self._sets:  # what could not be read just now is asked for again
            k = first_good(self._stores, functools.partial(read_members, manifest_id=self._manifest.id))
            sets = [] if k is None else sets_of(Inventory(self._manifest, (self._table,)), k)
            self._sets = {member.digest: one for one in sets for member in one.members}
        one = self._sets.get(digest)
        if one is None:
            return None
        found = self._records.get(one.id) or first_good(
            self._stores, functools.partial(read_record, wanted=one)
        )
        if found is not None:
            self._records[one.id] = found
        return found


def rebuild_range(
    record: SetRecord,
    position: int,
    offset: int,
    length: int,
    sha256: bytes,
    read: ReadRange,
) -> bytes | None:
    """Part of a member, from the same part of k others.

    Returns:
        The bytes, verified; None where too much is lost.
    """
    one = record.set
    if length > MAX_RANGE_BYTES or offset + length > one.members[position].size:
        return None
    pieces: dict[int, Bytes] = {}

    def fetch(i: int) -> None:
        with contextlib.suppress(ShardkitError):
            pieces[i] = _read_piece(one, i, record.object_at(i).name, offset, length, read)

    def attempt(without: int | None = None) -> bytes | None:
        usable = {i: piece for i, piece in pieces.items() if i != without}
        if len(usable) < one.k:
            return None
        data = _solve(one, usable, length, ())[position].tobytes()
        return data if hashlib.sha256(data).digest() == sha256 else None

    others = [i for i in range(one.k + 1) if i != position]
    with _threads(len(others)) as pool:
        list(pool.map(fetch, others))
    found = attempt()
    failed = [i for i in others if i not in pieces]
    if found is not None or len(failed) > 1:
        return found
    # with Q, the one that cannot be read is done without, or each in turn: one is silently wrong
    fetch(one.k + 1)
    tried = map(attempt, failed or (others if one.k + 1 in pieces else ()))
    return next((data for data in tried if data is not None), None)


# Whole objects


class _BadSource(Exception):
    """A copy that was read is wrong, missing or unreadable."""


class _WrongResult(Exception):
    """What was made has not the digest that it should have."""


class _Source:
    """A copy that is read from front to back, and hashed where `is_hashed`."""

    def __init__(
        self, one: ParitySet, position: int, store: Store, wanted: Descriptor, is_hashed: bool
    ) -> None:
        self._set, self.position, self.store, self._wanted = one, position, store, wanted
        self._hash = hashlib.sha256(one.header(position - one.k) if position >= one.k else b"")
        self._is_hashed = is_hashed

    def read(self, offset: int, length: int) -> Bytes:
        try:
            data = _read_piece(
                self._set, self.position, self._wanted.name, offset, length, self.store.get_range
            )
        except (NotFoundError, IntegrityError, StoreError) as error:
            raise _BadSource(self.position, self.store.url) from error
        if self._is_hashed:
            self._hash.update(data.data)
        return data

    def check(self) -> None:
        """Raise where what was read does not have the digest, or the object is longer."""
        try:
            stat = self.store.head(self._wanted.name) if self._is_hashed else None
        except StoreError as error:
            raise _BadSource(self.position, self.store.url) from error
        is_same = f"sha256:{self._hash.hexdigest()}" == self._wanted.digest
        if self._is_hashed and not (is_same and stat is not None and stat.size == self._wanted.size):
            raise _BadSource(self.position, self.store.url)


def restore(
    one: ParitySet,
    objects: Sequence[Descriptor | None],
    targets: Mapping[int, Store],
    stores: Sequence[Store],
    *,
    pace: Callable[[int], None] | None = None,
    without: Collection[tuple[int | None, str]] = (),
) -> dict[int, Descriptor]:
    """Make objects of a set from k others, wherever those lie; a source that turns out bad is done without.

    Returns:
        Position → what was made, verified and published.
    """
    excluded: set[tuple[int | None, str]] = set(without)
    # The digests of what is made prove the sources as well: they are hashed only where those are not known, or wrong.
    is_hashed = any(objects[i] is None for i in targets)
    while True:
        sources: list[_Source] = []
        for i, wanted in enumerate(objects):
            if wanted is not None and i not in targets and len(sources) < one.k:
                holder = _holder(i, wanted, stores, excluded)
                if holder is not None:
                    sources.append(_Source(one, i, holder, wanted, is_hashed))
        if len(sources) < one.k:
            raise IntegrityError(
                f"parity set {one.id}: {len(sources)} good objects are left of {one.k + 2}, {one.k} are needed"
            )
        try:
            return _make(one, objects, sources, targets, pace)
        except _BadSource as bad:
            position, url = bad.args
            excluded.add((position, url))
        except _WrongResult as wrong:
            if is_hashed:
                raise IntegrityError(
                    f"{wrong}: its parity objects do not belong to it; run: shardkit repair with a replica"
                ) from None
            is_hashed = True


def _holder(
    position: int, wanted: Descriptor, stores: Sequence[Store], excluded: set[tuple[int | None, str]]
) -> Store | None:
    """The nearest store that has an object of the right size, as far as it is known."""
    for store in stores:
        if (position, store.url) not in excluded:
            with contextlib.suppress(ShardkitError):
                stat = store.head(wanted.name)
                if stat is not None and stat.size == wanted.size:
                    return store
            excluded.add((position, store.url))
    return None


def _make(
    one: ParitySet,
    objects: Sequence[Descriptor | None],
    sources: Sequence[_Source],
    targets: Mapping[int, Store],
    pace: Callable[[int], None] | None,
) -> dict[int, Descriptor]:
    """One attempt, from these sources; published once everything is verified."""
    kinds = {i: "parity" if i >= one.k else one.members[i].extension for i in sorted(targets)}
    sizes = {i: one.length if i >= one.k else one.members[i].size for i in targets}
    with contextlib.ExitStack() as staging:
        pool = staging.enter_context(_threads(len(sources)))
        stages: dict[int, Stage] = {}
        for i, kind in kinds.items():
            stages[i] = staging.enter_context(targets[i].stage(kind))
            if i >= one.k:
                stages[i].write(one.header(i - one.k))
        for offset in range(0, one.length, _PIECE_BYTES):
            length = min(_PIECE_BYTES, one.length - offset)
            read = pool.map(lambda source, at=offset, size=length: source.read(at, size), sources)
            pieces = {source.position: piece for source, piece in zip(sources, read, strict=True)}
            if pace is not None:
                pace(sum(map(len, pieces.values())))
            made = _solve(one, pieces, length, stages)
            for i, stage in stages.items():
                stage.write(made[i][: max(0, sizes[i] - offset)].data)
        for source in sources:
            source.check()
        for i, stage in stages.items():
            wanted = objects[i]
            size = one.parity_bytes if i >= one.k else sizes[i]
            if stage.size != size or (wanted is not None and wanted.digest != f"sha256:{stage.digest}"):
                raise _WrongResult(
                    f"position {i} of parity set {one.id} came out as sha256:{stage.digest}, {stage.size} bytes, which "
                    "is not what it was"
                )
        found = {i: Descriptor(f"sha256:{stage.digest}", stage.size, kinds[i]) for i, stage in stages.items()}
        for i, stage in stages.items():
            stage.publish(object_name(found[i].digest, kinds[i]), replace=True)
        return found


def encode_set(
    root: Store,
    one: ParitySet,
    stores: Sequence[Store],
    *,
    pace: Callable[[int], None] | None = None,
) -> SetRecord:
    """P and Q of one set, then its document."""
    objects: list[Descriptor | None] = [*one.members, None, None]
    made = restore(one, objects, {one.k: root, one.k + 1: root}, stores, pace=pace)
    record = SetRecord(one, (made[one.k].digest, made[one.k + 1].digest))
    put_over(root, one.record_name, record.to_bytes())
    return record
