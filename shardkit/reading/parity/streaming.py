"""Pieces of a set made from others, streamed and verified on both sides (SPEC.md §4, §5)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StoreError
from shardkit.reading.parity.galois import recover
from shardkit.reading.parity.sets import ParitySet
from shardkit.stores.store import Descriptor, Stage, Store, object_name

Bytes = NDArray[np.uint8]

_PIECE_BYTES: Final = 2**20


class BadSource(Exception):
    """A copy that was read is wrong, missing or unreadable.

    Attributes:
        position: in the set.
        store: where.
    """

    def __init__(self, position: int, store: Store, why: str) -> None:
        super().__init__(why)
        self.position, self.store = position, store


class _WrongResult(Exception):
    """What was made has not the digest that it should have."""


class Made(NamedTuple):
    """An object of a set that was made again: verified, and published where it was asked for."""

    position: int
    descriptor: Descriptor


class _Source:
    """A copy being read from front to back, and hashed where `is_hashed`."""

    def __init__(
        self, position: int, store: Store, wanted: Descriptor, skip: bytes, *, is_hashed: bool
    ) -> None:
        self.position, self.store, self._wanted, self._skip = position, store, wanted, len(skip)
        self.length = wanted.size - len(skip)
        self._hash = hashlib.sha256(skip) if is_hashed else None

    def read(self, offset: int, length: int) -> Bytes:
        length = max(0, min(length, self.length - offset))
        if not length:
            return np.empty(0, dtype=np.uint8)
        name = self._wanted.name
        try:
            data = self.store.get_range(name, self._skip + offset, length)
        except (NotFoundError, IntegrityError, StoreError) as error:
            raise BadSource(self.position, self.store, str(error)) from error
        if self._hash is not None:
            self._hash.update(data)
        return np.frombuffer(data, dtype=np.uint8)

    def check(self) -> None:
        """Raise where what was read does not have the digest, or the object is longer."""
        if self._hash is None:
            return
        try:
            stat = self.store.head(self._wanted.name)
        except StoreError as error:
            raise BadSource(self.position, self.store, str(error)) from error
        same = f"sha256:{self._hash.hexdigest()}" == self._wanted.digest
        if not same or stat is None or stat.size != self._wanted.size:
            why = f"{self._wanted.name} in {self.store.url} is not what its name says"
            raise BadSource(self.position, self.store, why)


def restore(
    one: ParitySet,
    objects: Sequence[Descriptor | None],
    targets: Mapping[int, Store],
    stores: Sequence[Store],
    *,
    pool: ThreadPoolExecutor,
    pace: Callable[[int], None] | None = None,
    stopped: Callable[[], bool] | None = None,
    without: Collection[tuple[int | None, str]] = (),
) -> list[Made]:
    """Make objects of a set from k others, wherever those lie; a source that turns out bad is done without.

    Args:
        one: The set.
        objects: k + 2: members, P, Q; None for a parity object whose digest is not known yet.
        targets: Position → where what is made is put.
        stores: Where the others may lie, nearest first.
        pool: For reads at the same time.
        pace: Called with the bytes that were read, before they are used; may sleep.
        stopped: Asked between pieces; KeyboardInterrupt is raised where it says so.
        without: (position, URL of a store) of copies that are known to be bad.

    Raises:
        IntegrityError: Fewer than k others are left, or what was made has not the digest that it should have. Nothing
            was published.
        StoreError: A target cannot be written. Nothing torn has a final name.
    """
    excluded: set[tuple[int | None, str]] = set(without)
    # The digests of what is made prove the sources as well: they are hashed only where those are not known, or wrong.
    is_hashed = any(objects[i] is None for i in targets)
    while True:
        sources: dict[int, Store] = {}
        for i, wanted in enumerate(objects):
            if wanted is not None and i not in targets and len(sources) < one.k:
                store = _holder(i, wanted, stores, excluded)
                if store is not None:
                    sources[i] = store
        if len(sources) < one.k:
            raise IntegrityError(
                f"parity set {one.id}: {len(sources)} good objects are left of {one.k + 2}, {one.k} are needed"
            )
        try:
            return _make(
                one, objects, sources, targets, pool=pool, pace=pace, stopped=stopped, is_hashed=is_hashed
            )
        except BadSource as bad:
            excluded.add((bad.position, bad.store.url))
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
        if (position, store.url) in excluded:
            continue
        try:
            stat = store.head(wanted.name)
        except ShardkitError:
            stat = None
        if stat is not None and stat.size == wanted.size:
            return store
        excluded.add((position, store.url))
    return None


def _make(
    one: ParitySet,
    objects: Sequence[Descriptor | None],
    sources: Mapping[int, Store],
    targets: Mapping[int, Store],
    *,
    pool: ThreadPoolExecutor,
    pace: Callable[[int], None] | None = None,
    stopped: Callable[[], bool] | None = None,
    is_hashed: bool,
) -> list[Made]:
    """One attempt, from these sources; published once everything is verified.

    Raises:
        BadSource: A source is not what it should be. Nothing was published.
        _WrongResult: What was made has not the digest that it should have. Nothing was published.
    """
    readers = [
        _Source(
            i, store, _known(objects[i]), one.header(i - one.k) if i >= one.k else b"", is_hashed=is_hashed
        )
        for i, store in sorted(sources.items())
    ]
    through = max(reader.length for reader in readers)
    with contextlib.ExitStack() as staging:
        stages: dict[int, Stage] = {}
        for i, store in targets.items():
            stages[i] = staging.enter_context(
                store.stage("parity" if i >= one.k else _known(objects[i]).extension)
            )
            if i >= one.k:
                stages[i].write(one.header(i - one.k))
        for offset in range(0, through, _PIECE_BYTES):
            if stopped is not None and stopped():
                raise KeyboardInterrupt
            read = pool.map(lambda reader, at=offset: reader.read(at, _PIECE_BYTES), readers)
            pieces = {reader.position: piece for reader, piece in zip(readers, read, strict=True)}
            if pace is not None:
                pace(sum(map(len, pieces.values())))
            _write(one, pieces, stages, offset, min(_PIECE_BYTES, one.length - offset))
        for reader in readers:
            reader.check()
        for i, stage in stages.items():
            _check_made(one, i, objects[i], stage)
        return [_publish(one, i, stages[i]) for i in sorted(targets)]


def _write(
    one: ParitySet, pieces: Mapping[int, Bytes], stages: Mapping[int, Stage], offset: int, length: int
) -> None:
    """One piece of each object that is made."""
    if length <= 0 or not stages:
        return
    members = [pieces.get(i) for i in range(one.k)]
    made = recover(members, pieces.get(one.k), pieces.get(one.k + 1), length, stages)
    for i, stage in stages.items():
        stage.write(made[i][: max(0, _length(one, i) - offset)].data)


def _check_made(one: ParitySet, position: int, wanted: Descriptor | None, stage: Stage) -> None:
    size = one.parity_bytes if position >= one.k else one.members[position].size
    if stage.size != size or (wanted is not None and wanted.digest != f"sha256:{stage.digest}"):
        raise _WrongResult(
            f"position {position} of parity set {one.id} came out as sha256:{stage.digest}, {stage.size} bytes, which "
            "is not what it was"
        )


def _publish(one: ParitySet, position: int, stage: Stage) -> Made:
    kind = "parity" if position >= one.k else one.members[position].extension
    found = Descriptor(f"sha256:{stage.digest}", stage.size, kind)
    stage.publish(object_name(found.digest, kind), replace=True)
    return Made(position, found)


def _length(one: ParitySet, position: int) -> int:
    return one.length if position >= one.k else one.members[position].size


def _known(found: Descriptor | None) -> Descriptor:
    assert found is not None, "only a parity object that is made may be unknown"
    return found
