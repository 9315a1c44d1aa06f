"""The log of a store: reading it with its chain verified, and appending to it without ever guessing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final, NoReturn

from shardkit.errors import (
    CommitUnknown,
    FormatError,
    IntegrityError,
    NotFoundError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from shardkit.formats.digest import sha256_digest
from shardkit.reading.documents import read_checked
from shardkit.repository.identity import IDENTITY_NAME, Identity
from shardkit.repository.log import (
    LOG_PREFIX,
    MAX_ENTRY_BYTES,
    LogEntry,
    check_succession,
    entry_name,
    entry_number,
)
from shardkit.stores.store import Store

__all__ = ["CommitLog"]

_PUT_ATTEMPTS: Final = 3
_MAX_UNLISTED: Final = 1_000


class CommitLog:
    """Log entries of one repository."""

    def __init__(self, store: Store, identity: Identity) -> None:
        self._store = store
        self._identity = identity
        self._seen = 0  # number of the newest entry met so far: a log never gets shorter

    def head(self) -> LogEntry | None:
        """The newest entry, None before the first."""
        number = self._last_number()
        return None if number == 0 else self._entry(number)[0]

    def entries(self) -> list[LogEntry]:
        """All entries, newest first, with the whole chain verified down to ``shardkit.json``."""
        entries = list(self.newest_first())
        if entries and entries[-1].previous != sha256_digest(self._identity.to_bytes()):
            raise IntegrityError(
                f"log of {self._store.url}: entry 1 belongs to another {IDENTITY_NAME}; restore it from a copy of "
                "the root"
            )
        return entries

    def newest_first(self) -> Iterator[LogEntry]:
        """Entries one by one, each verified to be what its successor follows: for who needs but the newest."""
        later: LogEntry | None = None
        for number in range(self._last_number(), 0, -1):
            entry, data = self._entry(number)
            if later is not None:
                check_succession(entry, data, later, self._store.url)
            yield entry
            later = entry

    def append(self, entry: LogEntry) -> bool:
        """Put the entry; True when it is durably in the log, False when another commit has its number.

        After an error the entry is read back and known by its transaction id, never guessed at. Ours is put
        again: that it exists then also says that it is durable.
        """
        name, data = entry_name(entry.n), entry.to_bytes()
        failure: StoreError | None = None
        found: LogEntry | None = None
        for _ in range(_PUT_ATTEMPTS):
            try:
                if self._store.put_new(name, data):
                    return self._landed(entry)
                failure = None
            except StoreError as error:
                failure = error
            found = self._read_back(entry, failure)
            if found is not None and found.txn != entry.txn:
                return False
            if found is not None and failure is None:
                return self._landed(entry)
            if found is None and isinstance(failure, (StoreFullError, StoreReadOnlyError)):
                break  # asking again does not help
        if found is None and failure is not None:
            raise failure  # it is not in the log, and the store says why
        raise CommitUnknown(
            f"commit {entry.txn} to {self._store.url}: entry {entry.n} is there but may not survive a power cut; "
            f"look at the disk, then ask again: Repository.find_commit({entry.txn!r})"
        ) from failure

    def _landed(self, entry: LogEntry) -> bool:
        self._seen = max(self._seen, entry.n)
        return True

    def _read_back(self, entry: LogEntry, failure: StoreError | None) -> LogEntry | None:
        try:
            return self._entry(entry.n)[0]
        except NotFoundError:
            return None
        except (StoreError, IntegrityError, FormatError) as error:
            raise CommitUnknown(
                f"commit {entry.txn} to {self._store.url}: writing entry {entry.n} failed ({failure}) and it cannot "
                "be read "
                f"back ({error}); ask later: Repository.find_commit({entry.txn!r})"
            ) from error

    def _last_number(self) -> int:
        """Number of the newest entry; all before it are there.

        A directory that is listed while others commit may show a later entry and not an earlier one, and a network
        file system may show an old listing: what a listing lacks is looked up by name before it counts as missing.
        """
        seen = self._seen  # before the listing: another thread may commit while it is made
        listed = {n for n in map(entry_number, self._store.list_after(LOG_PREFIX)) if n is not None}
        last = max(seen, max(listed, default=0))
        if last > len(listed) + _MAX_UNLISTED:
            self._refuse_log(next(n for n in itertools.count(1) if n not in listed))
        for number in sorted(set(range(1, last + 1)) - listed):
            if not self._is_there(number):
                self._refuse_log(number)
        self._seen = max(self._seen, last)
        return last

    def _refuse_log(self, missing: int) -> NoReturn:
        raise IntegrityError(
            f"log of {self._store.url}: entry {missing} is missing; run: shardkit repair {self._store.url}"
        )

    def _is_there(self, number: int) -> bool:
        """Whether an entry that was not listed can be read, from the root or from a copy of it."""
        if self._store.head(entry_name(number)) is not None:
            return True
        try:
            self._entry(number)
        except NotFoundError:
            return False
        return True

    def _entry(self, number: int) -> tuple[LogEntry, bytes]:
        name = entry_name(number)

        def parse(data: bytes, where: str) -> tuple[LogEntry, bytes]:
            entry = LogEntry.from_bytes(data, where)
            if entry.n != number or entry.repository != self._identity.id:
                raise IntegrityError(
                    f"{where} is entry {entry.n} of repository {entry.repository}, expected entry {number} of "
                    f"{self._identity.id}; run: shardkit repair {self._store.url}"
                )
            return entry, data

        return read_checked(self._store, name, parse, max_bytes=MAX_ENTRY_BYTES)
