"""One check of one object in one store: whether it is there, and is what its name says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from shardkit.errors import IntegrityError, NotFoundError, ShardkitError
from shardkit.stores.objects import parse_object_name
from shardkit.stores.store import Store

__all__ = [
    "DEPTHS",
    "PIECE_BYTES",
    "BadCopy",
    "CheckResult",
    "Depth",
    "Healed",
    "Lost",
    "Unchecked",
    "check_object",
]

Depth = Literal["list", "stored", "read"]
"""How deep to check; see `DEPTHS`."""

DEPTHS: Final[tuple[Depth, ...]] = ("list", "stored", "read")
"""Size alone; the checksum that the store keeps; every byte."""

PIECE_BYTES: Final = 8 * 2**20
"""Read and hashed at a time."""


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
        """Whether nothing is wrong."""
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


class BadCopy(NamedTuple):
    """A copy that is to be repaired."""

    location: str
    name: str
    was: str
    """"wrong" or "missing"."""


class Healed(NamedTuple):
    """A copy that is good again."""

    location: str
    name: str
    was: str
    source: str
    """Name of the location with the good copy, or "parity"."""
    num_bytes: int


class Lost(NamedTuple):
    """An object of which no good bytes are left anywhere."""

    name: str
    rows: int
    """Samples lost with it; 0 for what is no shard."""
    why: str


class Unchecked(NamedTuple):
    """A copy that could not be checked, or not be written."""

    location: str
    name: str
    why: str
