"""Rebuild objects of a parity set, and ranges of them, from the other objects; encode sets (SPEC.md §4, §5)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from shardkit.arrays import Bytes
from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StoreError
from shardkit.manifest import Manifest, ShardTable
from shardkit.reading.inventory import Inventory, first_good, read_members
from shardkit.reading.objects import BlockRequest
from shardkit.reading.parity.galois import recover
from shardkit.reading.parity.sets import ParitySet, SetRecord, read_record, sets_of
from shardkit.stores.store import Descriptor, Stage, Store, object_name, parse_object_name, put_over
from shardkit.stores.waiting import RetryPolicy

ReadRange = Callable[[str, int, int], bytes]
"""Maps (object name, offset, length) to exactly these bytes, or raises ShardkitError."""

MAX_RANGE_BYTES: Final = 2**30
_PIECE_BYTES: Final = 2**20


def _threads(reads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(16, max(1, reads)), thread_name_prefix="shardkit-parity")


def _solve(
    one: ParitySet, pieces: Mapping[int, Bytes], length: int, wanted: Collection[int]
) -> Mapping[int, Bytes]:
    """Recover the pieces that are not in `pieces`; see `recover`."""
    members = [pieces.get(i) for i in range(one.k)]
    return recover(members, pieces.get(one.k), pieces.get(one.k + 1), length, wanted)


def _read_piece(one: ParitySet, position: int, name: str, offset: int, length: int, read: ReadRange) -> Bytes:
    """Read the bytes of an object at `offset` of its row: members may end early, parity objects have a header."""
    if position >= one.k:
        start = one.header_bytes + offset
    else:
        start, length = offset, min(length, one.members[position].size - offset)
    return np.frombuffer(read(name, start, length) if length > 0 else b"", dtype=np.uint8)


# Parts of objects, for readers


class ParityReads:
    """Rebuilds blocks of shards, and whole indexes, of one version; reads nothing in advance.

    May be used from any thread, after a fork, and pickled.

    Args:
        stores: stores that may hold objects of the sets, nearest first.
        manifest: manifest of the version, which must not be merged.
        table: columns over its shards.
        attempt_s: seconds without an answer after which a store counts as failed.
    """

    def __init__(
        self, stores: Sequence[Store], manifest: Manifest, table: ShardTable, *, attempt_s: float = 30.0
    ) -> None:
        retry = RetryPolicy(deadline_s=0, attempt_s=attempt_s)  # other stores are asked instead
        self._stores: list[Store] = [
            store.with_retry(retry) if hasattr(store, "with_retry") else store for store in stores
        ]
        self._manifest, self._table = manifest, table
        # No locks: threads that race store equal values, and a forked child cannot inherit a held lock.
        self._sets: dict[str, ParitySet] = {}
        self._records: dict[str, SetRecord] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sets": {}, "_records": {}}

    def __call__(self, request: BlockRequest) -> bytes | None:
        """Return the verified bytes of a block, or None if parity cannot rebuild them."""
        return self._rebuild(request.name, request.offset, request.length, request.sha256)

    def whole(self, name: str, max_bytes: int) -> bytes | None:
        """Return the verified bytes of an object of at most `max_bytes`, or None if parity cannot rebuild them."""
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
        """Read a range from the first store that has it."""
        error: ShardkitError = NotFoundError(name)
        for store in self._stores:
            try:
                return store.get_range(name, offset, length)
            except ShardkitError as met:
                error = met
        raise error

    def _record(self, digest: str) -> SetRecord | None:
        """Return the record of the set of an object, from the first store that has it."""
        if not self._sets:  # also tries again after a failed read
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
    """Rebuild a range of a member from the same range of k other objects of its set.

    Returns:
        The verified bytes, or None if too much is lost, or the range is over 1 GiB or past the end of the member.
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
    # with Q, the unreadable object is left out; if all were read, one is silently wrong: leave out each in turn
    fetch(one.k + 1)
    tried = map(attempt, failed or (others if one.k + 1 in pieces else ()))
    return next((data for data in tried if data is not None), None)


# Whole objects


class _BadSource(Exception):
    """A source is wrong, missing or unreadable."""


class _WrongResult(Exception):
    """A rebuilt object does not have the expected digest."""


class _Source:
    """A copy that is read from front to back, and hashed if `is_hashed`."""

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
        """Raise _BadSource if the bytes read do not have the digest, or the object is longer."""
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
    """Rebuild or encode objects of a set from k others; bad sources are replaced by other copies or objects.

    Args:
        one: the set.
        objects: descriptor at each position: members, P, Q; None for parity objects that are not yet known.
        targets: position to rebuild → store to publish it in.
        stores: stores to read from, nearest first.
        pace: called with the bytes read in each round; may sleep.
        without: (position, store URL) of copies not to use.

    Returns:
        Position → descriptor of the verified, published object.

    Raises:
        IntegrityError: fewer than k good objects are left, or P and Q do not match the set.
    """
    excluded: set[tuple[int | None, str]] = set(without)
    # Right digests of the results prove the sources too, so sources are hashed only if these are unknown or wrong.
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
                    f"{wrong}: its parity objects do not belong to it; repair the dataset from a copy"
                ) from None
            is_hashed = True


def _holder(
    position: int, wanted: Descriptor, stores: Sequence[Store], excluded: set[tuple[int | None, str]]
) -> Store | None:
    """Return the nearest store with an object of the right size; stores without it are excluded from then on."""
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
    """Make one attempt from these sources; publish the results after all of them are verified."""
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
    """Make P and Q of one set durable in `root`, then the set's document.

    Members are read from `stores`, nearest first. `pace` is called with the bytes read in each round, and may sleep.

    Returns:
        The set with the digests of P and Q.

    Raises:
        IntegrityError: a member is good in no store.
    """
    objects: list[Descriptor | None] = [*one.members, None, None]
    made = restore(one, objects, {one.k: root, one.k + 1: root}, stores, pace=pace)
    record = SetRecord(one, (made[one.k].digest, made[one.k + 1].digest))
    put_over(root, one.record_name, record.to_bytes())
    return record
