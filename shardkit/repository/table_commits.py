"""Reading the newest location table of a root, and committing the next one."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import uuid
from collections.abc import Sequence
from typing import Final

from shardkit.errors import CommitConflict, FormatError, IntegrityError, ShardkitError
from shardkit.formats.digest import sha256_digest
from shardkit.manifest.json_fields import utc_text
from shardkit.reading.located_store import read_checked
from shardkit.reading.locations import ROOT_NAME
from shardkit.repository.commit_log import put_numbered
from shardkit.repository.location_table import MAX_TABLE_BYTES, LocationRecord, LocationTable, absolute_url
from shardkit.repository.policy import Policy
from shardkit.stores.store import Store

TABLES: Final = "locations/"
"""Folder of the tables, and of the places of parts and adopted tars."""

SPARES: Final = "locations/spare/"
"""Folder of the tables' second copies, in the root alone."""

_TABLE_NAME: Final = re.compile(r"locations/([0-9]{20})\.json")
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
    table = dataclasses.replace(
        draft_table(repository_id, base, policy, locations),
        previous=sha256_digest(base.to_bytes()) if base else "",
        txn=uuid.uuid4().hex,
        time=utc_text(),
        author=author,
        message=message,
    )
    LocationTable.from_bytes(table.to_bytes(), "these locations")  # nobody may write what nobody will read
    name = table_name(table.n)
    if not put_numbered(
        store,
        name,
        table.to_bytes(),
        lambda: read_checked(store, name, LocationTable.from_bytes, max_bytes=MAX_TABLE_BYTES).to_bytes(),
        what=f"locations of {store.url}",
        then="run the same command again",
    ):
        raise CommitConflict(
            f"locations of {store.url} were changed by somebody else meanwhile; look at them (shardkit place "
            f"{store.url}), then run the same command again"
        )
    # the table holds; repair and replicate put a spare that is missing
    with contextlib.suppress(ShardkitError):
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


def table_name(number: int) -> str:
    """``locations/<20 digits>.json``."""
    return f"{TABLES}{number:020d}.json"


def table_number(name: str) -> int | None:
    """The number in a table's name, None for any other name."""
    match = _TABLE_NAME.fullmatch(name)
    return int(match[1]) if match else None


def spare_name(number: int) -> str:
    """``locations/spare/<20 digits>.json``: the same table again, for without one nobody knows where copies are."""
    return f"{SPARES}{number:020d}.json"


def spare_number(name: str) -> int | None:
    """The number in the name of a spare, None for any other name."""
    return table_number(name.replace(SPARES, TABLES, 1)) if name.startswith(SPARES) else None
