"""Putting and getting content-addressed objects over any store: verified on the way in and on the way out."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Final, Protocol

from shardkit.errors import IntegrityError, NotFoundError, StoreError, UsageError
from shardkit.formats.digest import sha256_digest
from shardkit.reading.documents import asked_twice
from shardkit.stores.objects import EXTENSIONS, Descriptor, object_name
from shardkit.stores.staging import LocalStage
from shardkit.stores.store import Stage, Store

__all__ = ["MAX_OBJECT_BYTES", "ObjectAccess", "ObjectStage", "OpenedRoot"]

MAX_OBJECT_BYTES: Final = 5 * 2**30
"""The largest single upload that object stores take, and so the largest object."""

_PIECE_BYTES: Final = 8 * 2**20


class OpenedRoot(Protocol):
    """What readers of objects need of a `Repository`."""

    @property
    def store(self) -> Store: ...

    @property
    def url(self) -> str: ...

    @property
    def id(self) -> str: ...

    def get_object(
        self, digest: str, extension: str, size: int | None = None, *, max_bytes: int = ...
    ) -> bytes:
        """The bytes of an object, verified."""


class ObjectStage:
    """A large object being written; its name is known when it is finished."""

    def __init__(self, objects: ObjectAccess, stage: Stage, extension: str) -> None:
        self._objects = objects
        self._stage = stage
        self._extension = extension

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._stage.size

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        """Append all of `data`; returns its length.

        Raises:
            UsageError: The object would be larger than any store takes in one piece.
        """
        total = self._stage.size + memoryview(data).nbytes
        if total > MAX_OBJECT_BYTES:
            raise UsageError(
                f"object of {total} bytes: expected at most {MAX_OBJECT_BYTES}; use smaller samples"
            )
        return self._stage.write(data)

    def sync(self) -> None:
        """Make durable what was written so far, where the store can: `finish` has less to wait for then.

        Raises:
            StoreError: it cannot be written; the object must be dropped.
        """
        if isinstance(self._stage, LocalStage):
            self._stage.sync()

    def finish(self) -> Descriptor:
        """Publish under the digest of what was written, durably."""
        return self._objects.publish(self._stage, self._extension)


class ObjectAccess:
    """Objects of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, data: bytes, extension: str) -> Descriptor:
        """Make bytes durable under their digest."""
        if len(data) > MAX_OBJECT_BYTES:
            raise UsageError(
                f"object of {len(data)} bytes: expected at most {MAX_OBJECT_BYTES}; use smaller samples"
            )
        descriptor = Descriptor(sha256_digest(data), len(data), extension)
        if not self._store.put_new(descriptor.name, data) and not self._is_good(descriptor):
            self._store.replace(descriptor.name, data)
        return descriptor

    @contextlib.contextmanager
    def stage(self, extension: str) -> Iterator[ObjectStage]:
        """Write a large object piece by piece."""
        if extension not in EXTENSIONS:
            raise UsageError(f"object extension {extension!r}: expected one of {', '.join(EXTENSIONS)}")
        with self._store.stage(extension) as stage:
            yield ObjectStage(self, stage, extension)

    def publish(self, stage: Stage, extension: str) -> Descriptor:
        """Give a finished stage the name of its digest."""
        descriptor = Descriptor(f"sha256:{stage.digest}", stage.size, extension)
        if not stage.publish(descriptor.name) and not self._is_good(descriptor):
            stage.publish(descriptor.name, replace=True)
        return descriptor

    def get(self, digest: str, extension: str, size: int | None, max_bytes: int) -> bytes:
        """The bytes, after size and SHA-256 have been compared."""
        name = object_name(digest, extension)
        if size is not None and not 0 <= size <= MAX_OBJECT_BYTES:
            raise UsageError(f"{name}: size {size}, expected 0 to {MAX_OBJECT_BYTES}")

        def ask() -> bytes:
            data = self._store.get(name, max_bytes=max_bytes if size is None else size)
            if size is not None and len(data) != size:
                self._refuse(name, f"{len(data)} bytes, expected {size}")
            found = sha256_digest(data)
            if found != digest:
                self._refuse(name, f"SHA-256 mismatch (got {found})")
            return data

        return asked_twice(ask)

    def _is_good(self, descriptor: Descriptor) -> bool:
        """Whether the object that lies there has the bytes that its name promises.

        Someone who puts an object again has the good bytes in hand: the moment to find out, and to heal, bad
        ones.
        """
        name = descriptor.name
        try:
            stat = self._store.head(name)
            if stat is None or stat.size != descriptor.size:
                return False
            if stat.sha256 is not None:
                return f"sha256:{stat.sha256}" == descriptor.digest
            digest = hashlib.sha256()
            for offset in range(0, stat.size, _PIECE_BYTES):
                digest.update(self._store.get_range(name, offset, min(_PIECE_BYTES, stat.size - offset)))
        except (StoreError, IntegrityError, NotFoundError):
            return False  # unreadable is as bad as wrong
        return f"sha256:{digest.hexdigest()}" == descriptor.digest

    def _refuse(self, name: str, what: str) -> None:
        raise IntegrityError(
            f"{name} in {self._store.url}: {what}; the bytes are not those that were written; "
            f"run: shardkit repair {self._store.url}"
        )
