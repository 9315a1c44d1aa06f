"""Reading the newest location table of a root, and committing the next one."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shardkit.errors import (
    CommitConflict,
    CommitUnknown,
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreError,
)
from shardkit.formats.digest import sha256_digest
from shardkit.manifest.json_fields import utc_text
from shardkit.reading.located_store import read_checked
from shardkit.reading.locations import ROOT_NAME
from shardkit.repository.location_table import (
    MAX_TABLE_BYTES,
    LocationRecord,
    LocationTable,
    absolute_url,
    spare_name,
    table_name,
)
from shardkit.repository.policy import Policy

if TYPE_CHECKING:
    from shardkit.stores.store import Store

__all__ = ["commit_table", "draft_table", "first_root", "read_table", "read_tables"]

_ATTEMPTS: Final = 3
_MOST: Final = 10**6


def read_table(store: Store, repository_id: str | None) -> LocationTable | None:
    """The table that holds now; None where none was ever committed: the root is the only location.

    Finds the highest number by asking for names, not by a listing: the folder may hold many other documents, and a
    root without a table costs one question.

    Args:
        store: of the root.
        repository_id: its id; None takes the table's own word for it.

    Raises:
        IntegrityError: it is damaged, or of another repository.
        StoreError: the store does not answer.
    """
    number = _newest(store)
    return None if number == 0 else _read(store, number, repository_id)


def read_tables(store: Store, repository_id: str) -> list[LocationTable]:
    """All tables that there ever were, newest first, with their chain verified.

    Raises:
        IntegrityError: one is damaged or missing.
    """
    found: list[LocationTable] = []
    for number in range(_newest(store), 0, -1):
        table = _read(store, number, repository_id)
        if found and found[-1].previous != sha256_digest(table.to_bytes()):
            raise IntegrityError(
                f"{table_name(number)} in {store.url} is not the one that the next one follows; restore it from a copy "
                "of the root"
            )
        found.append(table)
    return found


def commit_table(
    store: Store,
    repository_id: str,
    base: LocationTable | None,
    policy: Policy,
    locations: Sequence[LocationRecord],
    *,
    message: str,
    author: str = "",
) -> LocationTable:
    """Make `policy` and `locations` hold from now on.

    Args:
        store: of the root.
        repository_id: its id.
        base: the table that this one changes, as `read_table` gave it.
        policy: the new policy.
        locations: all of them, the root first.
        message: why.
        author: who.

    Returns:
        The table; `base` where it says the same.

    Raises:
        ConfigurationError: a name or place twice, or fewer failure domains than copies.
        CommitConflict: somebody else committed a table since `base` was read.
        CommitUnknown: the store failed and does not say whether it landed.
        StoreError: the store refused; nothing was changed.
    """
    if base is not None and base.policy == policy and base.locations == tuple(locations):
        return base
    table = LocationTable(
        n=base.n + 1 if base else 1,
        repository=repository_id,
        previous=sha256_digest(base.to_bytes()) if base else "",
        txn=uuid.uuid4().hex,
        time=utc_text(),
        author=author,
        message=message,
        policy=policy,
        locations=tuple(locations),
    )
    LocationTable.from_bytes(table.to_bytes(), "these locations")  # nobody may write what nobody will read
    _put(store, table)
    with contextlib.suppress(
        ShardkitError
    ):  # the table holds; repair and replicate put a spare that is missing
        store.put_new(spare_name(table.n), table.to_bytes())
    return table


def first_root(store: Store, *, domain: str = ROOT_NAME) -> LocationRecord:
    """How a root is recorded that has no table yet."""
    return LocationRecord(name=ROOT_NAME, url=absolute_url(store.url), domain=domain, rank=0)


def draft_table(
    repository_id: str, base: LocationTable | None, policy: Policy, locations: Sequence[LocationRecord]
) -> LocationTable:
    """The table after `base` as it would be committed: to place by, not to write."""
    return LocationTable(
        n=base.n + 1 if base else 1,
        repository=repository_id,
        previous="",
        txn="0" * 32,
        time="1970-01-01T00:00:00Z",
        author="",
        message="",
        policy=policy,
        locations=tuple(locations),
    )


def _put(store: Store, table: LocationTable) -> None:
    name, data = table_name(table.n), table.to_bytes()
    failure: StoreError | None = None
    for _ in range(_ATTEMPTS):
        try:
            if store.put_new(name, data):
                return
            failure = None
        except StoreError as error:
            failure = error
        try:
            found: bytes | None = store.get(name, max_bytes=MAX_TABLE_BYTES)
        except NotFoundError:
            found = None
        except ShardkitError as error:
            raise CommitUnknown(
                f"locations of {store.url}: writing {name} failed ({failure}), it cannot be read back ({error}); look "
                "at the store, then run the same command again"
            ) from error
        if found is not None and found != data:
            raise CommitConflict(
                f"locations of {store.url} were changed by somebody else meanwhile; look at them (shardkit place "
                f"{store.url}), then run the same command again"
            )
        if found is not None and failure is None:
            return  # ours, and a put that finds it says that it is durable
    if found is None and failure is not None:
        raise failure
    raise CommitUnknown(
        f"locations of {store.url}: {name} is there but may not survive a power cut; look at the disk, then run the "
        "same command again"
    ) from failure


def _newest(store: Store) -> int:
    """The highest number that is there: doubling steps, then halving ones."""
    if store.head(table_name(1)) is None:
        return 0
    low, step = 1, 1
    while low + step <= _MOST and store.head(table_name(low + step)) is not None:
        low += step
        step *= 2
    while step > 1:
        step //= 2
        if store.head(table_name(low + step)) is not None:
            low += step
    return low


def _read(store: Store, number: int, repository_id: str | None) -> LocationTable:
    name = table_name(number)

    def parse(data: bytes, where: str) -> LocationTable:
        table = LocationTable.from_bytes(data, where)
        if table.n != number or repository_id not in (None, table.repository):
            raise IntegrityError(
                f"{where} is table {table.n} of repository {table.repository}, expected {number} of {repository_id}; "
                "restore it from a copy of the root"
            )
        return table

    try:
        return read_checked(store, name, parse, max_bytes=MAX_TABLE_BYTES)
    except (IntegrityError, FormatError):
        with contextlib.suppress(ShardkitError):
            return read_checked(store, spare_name(number), parse, max_bytes=MAX_TABLE_BYTES)
        raise
