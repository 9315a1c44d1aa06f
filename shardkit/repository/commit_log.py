"""The log of a root: reading it with its chain verified, and adding to it without ever guessing (SPEC.md §4)."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

from shardkit.errors import (
    CommitConflict,
    CommitUnknown,
    FormatError,
    IntegrityError,
    NotFoundError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    UsageError,
)
from shardkit.formats.digest import sha256_digest
from shardkit.manifest.json_fields import utc_text
from shardkit.reading.located_store import read_checked
from shardkit.repository.log import (
    IDENTITY_NAME,
    LOG_PREFIX,
    MAX_ENTRY_BYTES,
    NO_COMMIT,
    Identity,
    LogEntry,
    check_succession,
    entry_name,
    entry_number,
)
from shardkit.stores.store import Store

Change = Callable[[LogEntry | None], Mapping[str, Any] | None]
"""Head, None for an empty log → the fields in which the next entry differs from it; None for no entry at all."""

_ATTEMPTS: Final = 1_000
_PUT_ATTEMPTS: Final = 3
_LONGEST_PAUSE_S: Final = 0.05
# Forked writers must not draw the same pauses, hence the system's own source.
_JITTER: Final = random.SystemRandom()
_MAX_UNLISTED: Final = 1_000


class CommitLog:
    """Log entries of one repository."""

    def __init__(self, store: Store, identity: Identity) -> None:
        self._store = store
        self._identity = identity
        self._seen = 0  # number of the newest entry met so far: a log never gets shorter

    def head(self) -> LogEntry | None:
        """The newest commit, None before the first. Lists names and reads one entry."""
        number = self._last_number()
        return None if number == 0 else self._entry(number)[0]

    def log(self) -> list[LogEntry]:
        """All commits, newest first, with the whole chain verified down to ``shardkit.json``.

        Raises:
            IntegrityError: An entry is missing or damaged, or the chain is broken.
        """
        entries = list(self.newest_commits())
        if entries and entries[-1].previous != sha256_digest(self._identity.to_bytes()):
            raise IntegrityError(
                f"log of {self._store.url}: entry 1 belongs to another {IDENTITY_NAME}; restore it from a copy of "
                "the root"
            )
        return entries

    def newest_commits(self) -> Iterator[LogEntry]:
        """Commits one by one, newest first, the chain verified as far as it is walked.

        Raises:
            IntegrityError: See `log`.
        """
        later: LogEntry | None = None
        for number in range(self._last_number(), 0, -1):
            entry, data = self._entry(number)
            if later is not None:
                check_succession(entry, data, later, self._store.url)
            yield entry
            later = entry

    def _append(
        self, change: Change, head: LogEntry | None, message: str, author: str = ""
    ) -> LogEntry | None:
        """Append one entry after the newest.

        Args:
            change: Asked for every head that the entry could follow, so that a commit is rebased over those that come
                first; raises CommitConflict where that cannot be.
            head: The head as the caller knows it.
            message: Why.
            author: Who.

        Returns:
            The entry, durably in the log; None where `change` says that there is nothing to do.
        """
        txn = uuid.uuid4().hex
        for attempt in range(_ATTEMPTS):
            changed = change(head)
            if changed is None:
                return None
            entry = self._entry_after(head, {**changed, "txn": txn, "message": message, "author": author})
            if self._put(entry):
                self._seen = max(self._seen, entry.n)
                return entry
            time.sleep(_JITTER.uniform(0, min(_LONGEST_PAUSE_S, 0.001 * 2 ** min(attempt, 10))))
            head = self.head()
        raise CommitConflict(
            f"{self._store.url}: {_ATTEMPTS} other commits came first each time; commit less often, or try again later"
        )

    def _put(self, entry: LogEntry) -> bool:
        """Put the entry; True when it is durably in the log, False when another commit has its number."""
        return put_numbered(
            self._store,
            entry_name(entry.n),
            entry.to_bytes(),
            lambda: self._entry(entry.n)[1],
            what=f"commit {entry.txn} to {self._store.url}",
            then=f"ask again: Repository.find_commit({entry.txn!r})",
        )

    def _entry_after(self, head: LogEntry | None, fields: Mapping[str, Any]) -> LogEntry:
        entry = dataclasses.replace(
            head or NO_COMMIT,
            n=head.n + 1 if head else 1,
            repository=self._identity.id,
            previous=sha256_digest((head or self._identity).to_bytes()),
            time=utc_text(),
            software=f"shardkit {_version()}",
            **fields,
        )
        try:
            # nobody may write what nobody will read
            return LogEntry.from_bytes(entry.to_bytes(), "this commit")
        except FormatError as error:
            raise UsageError(f"the commit cannot be written: {error}") from error

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


def put_numbered(
    store: Store, name: str, data: bytes, read_back: Callable[[], bytes], *, what: str, then: str
) -> bool:
    """Put a document that is the next of its row: True when it is durably there, False when another has its number.

    After an error it is read back and compared, never guessed at: each holds random bits that no other has. Ours is
    put again: that it exists then also says that it is durable.

    Args:
        store: of the root.
        name: of the document.
        data: its bytes.
        read_back: gives what lies there, checked.
        what: how messages name the change.
        then: what messages say is to be done once the store or disk was looked at.

    Raises:
        CommitUnknown: the store failed and does not say whether it landed.
        StoreError: the store refused; nothing was changed.
    """
    failure: StoreError | None = None
    found: bytes | None = None
    for _ in range(_PUT_ATTEMPTS):
        try:
            if store.put_new(name, data):
                return True
            failure = None
        except StoreError as error:
            failure = error
        try:
            found = read_back()
        except NotFoundError:
            found = None
        except (StoreError, IntegrityError, FormatError) as error:
            raise CommitUnknown(
                f"{what}: writing {name} failed ({failure}) and it cannot be read back ({error}); look at the store, "
                f"then {then}"
            ) from error
        if found is not None and found != data:
            return False
        if found is not None and failure is None:
            return True
        if found is None and isinstance(failure, (StoreFullError, StoreReadOnlyError)):
            break  # asking again does not help
    if found is None and failure is not None:
        raise failure  # it is not there, and the store says why
    raise CommitUnknown(
        f"{what}: {name} is there but may not survive a power cut; look at the disk, then {then}"
    ) from failure


def _version() -> str:
    import importlib.metadata  # takes as long as ten modules of ours, and is asked by writers only

    try:
        return importlib.metadata.version("shardkit")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
