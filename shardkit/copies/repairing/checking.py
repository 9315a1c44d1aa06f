"""Looking at one copy: whether it is there, and is what its name says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal, NamedTuple

from shardkit.copies.replicating.pacing import Pace
from shardkit.errors import IntegrityError, NotFoundError, ShardkitError
from shardkit.stores.objects import parse_object_name
from shardkit.stores.store import Store

__all__ = ["DEPTHS", "CheckAll", "Checked", "CopyCheck", "Depth", "check_copy", "check_in_threads"]

Depth = Literal["list", "stored", "read"]
"""How to look at a copy; see `DEPTHS`."""

DEPTHS: Final[tuple[Depth, ...]] = ("list", "stored", "read")
"""Size alone; the checksum that the store keeps; every byte."""

_PIECE_BYTES: Final = 8 * 2**20


class Checked(NamedTuple):
    """What was found."""

    result: str
    """"good", "wrong", "missing", or "unreadable": the store did not answer, and nothing is known."""
    level: Depth
    """How deep it was looked."""
    num_bytes: int
    """That were read for it."""
    why: str = ""


class CopyCheck(NamedTuple):
    """A look to be taken; see `check_copy`."""

    store: Store
    name: str
    size: int | None
    depth: Depth


CheckAll = Callable[[Sequence[CopyCheck]], Iterator[Checked]]
"""Looks at many copies and yields what was found, in their order: by threads, or by other machines."""


def check_in_threads(pool: ThreadPoolExecutor, pace: Pace) -> CheckAll:
    """The way of one machine."""
    return lambda checks: pool.map(
        lambda one: check_copy(one.store, one.name, one.size, one.depth, pace), checks
    )


def check_copy(store: Store, name: str, size: int | None, depth: Depth, pace: Pace) -> Checked:
    """Look at a copy.

    Args:
        store: where.
        name: of an object.
        size: bytes, None where that is not known.
        depth: "list": it is there and has its size; "stored": and the checksum that the store keeps is that of the
            name, or, where the store keeps none, every byte is read; "read": every byte is read in any case.
        pace: how fast bytes may be read.
    """
    digest, _ = parse_object_name(name)
    try:
        stat = store.head(name)
        if stat is None:
            return Checked("missing", "list", 0, f"nothing of that name in {store.url}")
        if size is not None and stat.size != size:
            return Checked("wrong", "list", 0, f"{stat.size} bytes, expected {size}")
        if depth == "list":
            return Checked("good", "list", 0)
        if depth == "stored" and stat.sha256 is not None:
            if f"sha256:{stat.sha256}" == digest:
                return Checked("good", "stored", 0)
            return Checked("wrong", "stored", 0, f"the store's own checksum is sha256:{stat.sha256}")
        found = hashlib.sha256()
        for offset in range(0, stat.size, _PIECE_BYTES):
            length = min(_PIECE_BYTES, stat.size - offset)
            pace.take(length)
            found.update(store.get_range(name, offset, length))
    except NotFoundError as error:
        return Checked("missing", "list", 0, str(error))
    except IntegrityError as error:
        return Checked("wrong", "read", 0, str(error))
    except ShardkitError as error:
        return Checked("unreadable", "list", 0, str(error))
    if f"sha256:{found.hexdigest()}" == digest:
        return Checked("good", "read", stat.size)
    return Checked("wrong", "read", stat.size, f"its bytes have sha256:{found.hexdigest()}")
