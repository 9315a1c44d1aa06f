"""Content-addressed objects over any store: one way to publish a large one, and one to check any."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol

from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, UsageError
from shardkit.stores.local import LocalStage
from shardkit.stores.store import (
    MAX_OBJECT_BYTES,
    Descriptor,
    Stage,
    Store,
    parse_object_name,
)

PIECE_BYTES: Final = 8 * 2**20
"""Read and hashed at a time."""

Depth = Literal["list", "stored", "read"]
"""How deep to check; see `DEPTHS`."""

DEPTHS: Final[tuple[Depth, ...]] = ("list", "stored", "read")
"""Size alone; the checksum that the store keeps; every byte."""


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
    ) -> bytes: ...


class ObjectStage:
    """A large object being written; its name is known when it is finished."""

    def __init__(self, store: Store, stage: Stage, extension: str) -> None:
        self._store, self._stage, self._extension = store, stage, extension

    @property
    def size(self) -> int:
        return self._stage.size

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        """Append all of `data`; returns its length. UsageError: more than any store takes in one piece."""
        check_size(self._stage.size + memoryview(data).nbytes)
        return self._stage.write(data)

    def sync(self) -> None:
        """Make durable what was written so far, where the store can: `finish` has less to wait for then."""
        if isinstance(self._stage, LocalStage):
            self._stage.sync()

    def finish(self) -> Descriptor:
        """Publish under the digest of what was written, durably."""
        return publish(self._store, self._stage, self._extension)


def publish(store: Store, stage: Stage, extension: str) -> Descriptor:
    """Give a finished stage the name of its digest."""
    descriptor = Descriptor(f"sha256:{stage.digest}", stage.size, extension)
    if not stage.publish(descriptor.name) and not is_good(store, descriptor):
        stage.publish(descriptor.name, replace=True)
    return descriptor


def is_good(store: Store, descriptor: Descriptor) -> bool:
    """Whether the bytes that lie there are those of the name; what cannot be read is as bad as what is wrong.

    Callers have the good bytes in hand, so this is the moment to repair bad ones.
    """
    return check_object(store, descriptor.name, descriptor.size, "stored").is_good


def check_size(size: int) -> None:
    """Refuse more bytes than any store takes in one piece; UsageError."""
    if size > MAX_OBJECT_BYTES:
        raise UsageError(f"object of {size} bytes: expected at most {MAX_OBJECT_BYTES}; use smaller samples")


class CheckResult(NamedTuple):
    """What a check found."""

    result: str
    """"good", "wrong", "missing", or "unreadable": nothing is known."""
    level: Depth
    """How deep it was checked."""
    num_bytes: int = 0
    """That were read for it."""
    expected: str = ""
    got: str = ""
    error: ShardkitError | None = None
    """What the store said instead of an answer."""

    @property
    def is_good(self) -> bool:
        return self.result == "good"


def check_object(
    store: Store,
    name: str,
    size: int | None,
    depth: Depth,
    pace: Callable[[int], None] | None = None,
    *,
    may_read: bool = True,
) -> CheckResult:
    """Check an object.

    Args:
        store: where.
        name: of the object.
        size: bytes, None where that is not known.
        depth: "list": it is there and has its size; "stored": and the checksum that the store keeps is that of the
            name, or, where the store keeps none, every byte is read; "read": every byte is read in any case.
        pace: called with the number of bytes before they are read; may sleep.
        may_read: False: at "stored", an object of which the store keeps no checksum is "unreadable".
    """
    digest, _ = parse_object_name(name)
    there = "the object" if size is None else f"{size} bytes"
    try:
        stat = store.head(name)
        if stat is None:
            return CheckResult("missing", "list", 0, there, "nothing of that name")
        if size is not None and stat.size != size:
            return CheckResult("wrong", "list", 0, there, f"{stat.size} bytes")
        if depth == "list":
            return CheckResult("good", "list")
        if depth == "stored" and stat.sha256 is None and not may_read:
            return CheckResult("unreadable", "list", 0, "a stored checksum", "none")
        if depth == "stored" and stat.sha256 is not None:
            return _compared(digest, f"sha256:{stat.sha256}", "stored", 0)
        found = hashlib.sha256()
        for offset in range(0, stat.size, PIECE_BYTES):
            length = min(PIECE_BYTES, stat.size - offset)
            if pace is not None:
                pace(length)
            found.update(store.get_range(name, offset, length))
    except NotFoundError as error:
        return CheckResult("missing", "list", 0, digest, str(error), error)
    except IntegrityError as error:
        return CheckResult("wrong", "read", 0, digest, str(error), error)
    except ShardkitError as error:
        return CheckResult("unreadable", "list", 0, digest, str(error), error)
    return _compared(digest, f"sha256:{found.hexdigest()}", "read", stat.size)


def _compared(digest: str, found: str, level: Depth, num_bytes: int) -> CheckResult:
    return CheckResult("good" if found == digest else "wrong", level, num_bytes, digest, found)
