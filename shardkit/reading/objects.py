"""Locations of content-addressed objects; functions to publish, check and copy an object.

Locations are configuration of a machine and never appear in a manifest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import (
    ConfigurationError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreError,
)
from shardkit.stores.store import (
    MAX_OBJECT_BYTES,
    Descriptor,
    Stage,
    Store,
    parse_object_name,
)

ROOT_NAME: Final = "root"
"""Name of the location with the log. It holds every object, and only it receives commits."""

LOCATION_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")


@dataclass(frozen=True, kw_only=True)
class Location:
    """A store with a name and a failure domain.

    Attributes:
        name: Short name, unique on this machine, used in events, statistics and attestations.
        store: Store with the data.
        domain: Failure domain, such as a machine, a rack, a bucket or a set of credentials. Copies in one domain
            count as one.
        rank: Locations of lower rank are asked first, and at equal rank the faster one.
        heal: Whether bad or missing objects may be replaced there by a good copy.
    """

    name: str
    store: Store
    domain: str = ""
    rank: int = 0
    heal: bool = False

    def __post_init__(self) -> None:
        check_location_name(self.name)


def check_location_name(name: str) -> None:
    """Raise ConfigurationError unless `name` is a valid location name."""
    if LOCATION_NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"location name {name[:60]!r}: expected at most 40 of [a-z0-9_-], starting with a letter or digit"
        )


class BlockRequest(NamedTuple):
    """Byte range and checksums of a block of a shard."""

    name: str
    """Name of the shard's object in a root."""
    offset: int
    length: int
    sha256: bytes
    """SHA-256 of the block's stored bytes: 32 bytes, from the verified index."""
    xxh3: int | None = None
    """XXH3 of the same bytes, for copies on this machine; None to use SHA-256."""
    place: int = 0
    """`place_ids` of shard and block: identifies the block before an index is read."""
    shard: int = 0
    """Number of the shard in the dataset."""
    block: int = 0
    """Number of the block in the shard."""


def place_ids(shard_digests: NDArray[np.uint8], blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return an identifier of each block, computed without the block's digest.

    Args:
        shard_digests: (n, 32) uint8 digests of shards.
        blocks: (n,) int64 numbers of blocks in their shards.

    Returns:
        (n,) uint64: 64 bits of the shard's digest plus a multiple of the block number, so collisions are unlikely.
    """
    heads = np.ascontiguousarray(shard_digests[:, :8]).view("<u8").reshape(-1)
    numbers: NDArray[np.uint64] = heads + blocks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return numbers


def block_name(sha256: bytes) -> str:
    """Return the name of a block, given its digest, in a cache and on a cache server."""
    text = sha256.hex()
    return f"blocks/{text[:2]}/{text}"


PIECE_BYTES: Final = 8 * 2**20
"""Bytes read and hashed at a time."""

Depth = Literal["list", "stored", "read"]
"""Depth of a check; see `DEPTHS`."""

DEPTHS: Final[tuple[Depth, ...]] = ("list", "stored", "read")
"""Compare the size only; the checksum that the store keeps; every byte."""


def publish(store: Store, stage: Stage, descriptor: Descriptor) -> bool:
    """Publish a finished stage under the name of its digest, durably. Return True if it replaced a bad object."""
    is_bad = not stage.publish(descriptor.name) and not is_good(store, descriptor)
    if is_bad:
        stage.publish(descriptor.name, replace=True)
    return is_bad


def is_good(store: Store, descriptor: Descriptor) -> bool:
    """Return True if the stored object has the right bytes; an unreadable object counts as bad.

    Callers hold the good bytes and can replace bad ones at once.
    """
    return check_object(store, descriptor.name, descriptor.size, "stored").is_good


class CheckResult(NamedTuple):
    """Result of checking one object."""

    result: str
    """"good", "wrong", "missing", or "unreadable" if the check could not be made."""
    level: Depth
    """Depth of the check."""
    num_bytes: int = 0
    """Bytes read."""
    expected: str = ""
    got: str = ""
    error: ShardkitError | None = None
    """Error raised by the store."""

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
        store: store of the object.
        name: name of the object.
        size: expected bytes; None if unknown.
        depth: "stored" reads every byte if the store keeps no checksum.
        pace: called with the bytes of each piece before it is read; may sleep.
        may_read: False to report an object without a stored checksum as "unreadable" at depth "stored".
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
            return _compare(digest, f"sha256:{stat.sha256}", "stored", 0)
        found = hashlib.sha256()
        for piece in _pieces(store, name, stat.size, pace):
            found.update(piece)
    except NotFoundError as error:
        return CheckResult("missing", "list", 0, digest, str(error), error)
    except IntegrityError as error:
        return CheckResult("wrong", "read", 0, digest, str(error), error)
    except ShardkitError as error:
        return CheckResult("unreadable", "list", 0, digest, str(error), error)
    return _compare(digest, f"sha256:{found.hexdigest()}", "read", stat.size)


def _compare(digest: str, found: str, level: Depth, num_bytes: int) -> CheckResult:
    return CheckResult("good" if found == digest else "wrong", level, num_bytes, digest, found)


class CopyResult(NamedTuple):
    """Result of copying one object."""

    source: str = ""
    """Name of the location with good bytes; empty if the copy was not made."""
    num_bytes: int = 0
    """Size of the object in bytes."""
    problem: IntegrityError | StoreError | None = None
    """IntegrityError if every source is wrong or lacks the object; otherwise the error of a store."""
    bad: str = ""
    """Bad sources, such as "mirror: wrong, root: missing"."""


def copy_object(
    name: str,
    sources: Sequence[Location],
    target: Location,
    *,
    replace: bool = False,
    pace: Callable[[int], None] | None = None,
) -> CopyResult:
    """Copy an object durably from the first source with good bytes to a location.

    Args:
        name: name of the object.
        sources: locations to try, in order; the target is skipped.
        target: location to write to.
        replace: overwrite an existing object without checking it.
        pace: called with the bytes of each piece before it is read; may sleep.
    """
    digest, extension = parse_object_name(name)
    bad: dict[str, str] = {}
    silent: StoreError | None = None
    try:
        for source in sources:
            if source.name == target.name:
                continue
            with target.store.stage(extension) as stage:
                try:
                    _fill(stage, source, name, pace)
                except NotFoundError:
                    bad[source.name] = "missing"
                except IntegrityError:
                    bad[source.name] = "wrong"
                except ShardkitError as error:
                    if stage.is_broken:
                        raise  # a write to the target failed: another source does not help
                    silent = error if isinstance(error, StoreError) else StoreError(str(error))
                else:
                    if f"sha256:{stage.digest}" == digest:
                        if replace:
                            stage.publish(name, replace=True)
                        else:
                            publish(target.store, stage, Descriptor(digest, stage.size, extension))
                        return CopyResult(source.name, stage.size)
                    bad[source.name] = "wrong"
    except ShardkitError as error:
        silent = error if isinstance(error, StoreError) else StoreError(str(error))
    told = ", ".join(f"{where}: {what}" for where, what in bad.items())
    lost = IntegrityError(f"{name}: no location has good bytes of it ({told or 'there is no other one'})")
    return CopyResult(problem=silent or lost, bad=told)


def _fill(stage: Stage, source: Location, name: str, pace: Callable[[int], None] | None) -> None:
    stat = source.store.head(name)
    if stat is None:
        raise NotFoundError(f"{name} is not in {source.store.url}")
    if stat.size > MAX_OBJECT_BYTES:
        raise IntegrityError(f"{name} in {source.store.url}: {stat.size} bytes, no object is that large")
    for piece in _pieces(source.store, name, stat.size, pace):
        stage.write(piece)


def _pieces(store: Store, name: str, size: int, pace: Callable[[int], None] | None) -> Iterator[bytes]:
    """Yield all bytes of an object in pieces."""
    for offset in range(0, size, PIECE_BYTES):
        length = min(PIECE_BYTES, size - offset)
        if pace is not None:
            pace(length)
        yield store.get_range(name, offset, length)
