"""A repository: content-addressed objects and the log of commits that names them (SPEC.md §4)."""

from __future__ import annotations

import contextlib
import datetime as dt
import difflib
import importlib.metadata
import itertools
import os
import random
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Final, NoReturn

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
from shardkit.manifest.json_fields import DIGEST
from shardkit.storage.changes import Changes
from shardkit.storage.identity import IDENTITY_NAME, MAX_IDENTITY_BYTES, Identity
from shardkit.storage.log import (
    LOG_PREFIX,
    MAX_ENTRY_BYTES,
    LogEntry,
    check_ref_name,
    check_succession,
    entry_name,
    entry_number,
)
from shardkit.storage.object_access import MAX_OBJECT_BYTES, ObjectAccess, ObjectStage
from shardkit.storage.objects import Descriptor, object_name
from shardkit.storage.store import Store
from shardkit.storage.urls import open_store

__all__ = ["DEFAULT_REF", "Repository"]

DEFAULT_REF: Final = "main"

_ATTEMPTS: Final = 1_000
_PUT_ATTEMPTS: Final = 3
_MAX_UNLISTED: Final = 1_000
_LONGEST_PAUSE_S: Final = 0.05
# Forked writers must not draw the same pauses, hence the system's own source.
_JITTER: Final = random.SystemRandom()


class Repository:
    """Objects and commits below one root; may be used from any thread, after a fork, and pickled.

    Made by `create` or `open`. `read_only` repositories never write, not even housekeeping.
    """

    def __init__(self, store: Store, identity: Identity, *, read_only: bool) -> None:
        self._store = store
        self._identity = identity
        self._read_only = read_only
        self._objects = ObjectAccess(store)
        self._seen = 0  # number of the newest entry read so far: a log never gets shorter

    def __repr__(self) -> str:
        return f"Repository({self._store.url!r}, id={self.id}, read_only={self._read_only})"

    @classmethod
    def create(cls, url: str | os.PathLike[str], *, exist_ok: bool = True) -> Repository:
        """Make a root into a repository, or open the one that is there.

        Raises:
            UsageError: There is one, and not `exist_ok`.
            StoreError: The root cannot be written.
        """
        store = open_store(url)
        created = store.put_new(IDENTITY_NAME, Identity.new().to_bytes())
        if not created and not exist_ok:
            raise UsageError(f"{store.url} holds a repository already; open it, or choose another root")
        return cls(store, _read_identity(store), read_only=False)

    @classmethod
    def open(cls, url: str | os.PathLike[str], *, read_only: bool = False) -> Repository:
        """Open what `create` made.

        Raises:
            NotFoundError: There is no repository at `url`.
            FormatError, IntegrityError: ``shardkit.json`` is damaged or of a newer version.
        """
        store = open_store(url, read_only=read_only)
        return cls(store, _read_identity(store), read_only=read_only)

    @property
    def store(self) -> Store:
        """The store below."""
        return self._store

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""
        return self._store.url

    @property
    def id(self) -> str:
        """UUID that was drawn when the repository was created."""
        return self._identity.id

    @property
    def read_only(self) -> bool:
        """Whether every change is refused."""
        return self._read_only

    # Objects

    def put_object(self, data: bytes, extension: str) -> Descriptor:
        """Make bytes durable under their digest; bad bytes that lie there already are replaced."""
        self._check_writable()
        return self._objects.put(data, extension)

    @contextlib.contextmanager
    def stage_object(self, extension: str) -> Iterator[ObjectStage]:
        """Write a large object: ``write()`` pieces, then ``finish()``; what is not finished is dropped."""
        self._check_writable()
        with self._objects.stage(extension) as stage:
            yield stage

    def get_object(
        self, digest: str, extension: str, size: int | None = None, *, max_bytes: int = MAX_OBJECT_BYTES
    ) -> bytes:
        """The bytes of an object, verified.

        Args:
            digest: ``sha256:<hex>``.
            extension: One of `shardkit.storage.objects.EXTENSIONS`.
            size: Bytes it must have, compared before anything is read; give it wherever it is known.
            max_bytes: The most that is read where the size is not known.

        Raises:
            NotFoundError: The object is not there.
            IntegrityError: Its size or SHA-256 is another.
        """
        return self._objects.get(digest, extension, size, max_bytes)

    # Log

    def head(self) -> LogEntry | None:
        """The newest commit, None before the first. Lists names and reads one entry."""
        number = self._last_number()
        return None if number == 0 else self._entry(number)[0]

    def log(self) -> list[LogEntry]:
        """All commits, newest first, with the whole chain verified down to ``shardkit.json``.

        Raises:
            IntegrityError: An entry is missing or damaged, or the chain is broken.
        """
        entries: list[LogEntry] = []
        for number in range(self._last_number(), 0, -1):
            entry, data = self._entry(number)
            if entries:
                check_succession(entry, data, entries[-1], self.url)
            entries.append(entry)
        if entries and entries[-1].previous != sha256_digest(self._identity.to_bytes()):
            raise IntegrityError(
                f"log of {self.url}: entry 1 belongs to another {IDENTITY_NAME}; restore it from a copy of "
                "the root"
            )
        return entries

    def find_commit(self, txn: str) -> LogEntry | None:
        """The commit of a transaction, None where it did not land: the answer to a `CommitUnknown`."""
        return next((entry for entry in self.log() if entry.txn == txn), None)

    @property
    def refs(self) -> dict[str, str]:
        """Movable names → manifest ids."""
        head = self.head()
        return dict(head.refs) if head else {}

    @property
    def tags(self) -> dict[str, str]:
        """Unmovable names → manifest ids."""
        head = self.head()
        return dict(head.tags) if head else {}

    def resolve(self, ref: str | None = None) -> str:
        """The manifest id that a ref, a tag or a digest names; ``main`` for None.

        Raises:
            NotFoundError: Nothing of that name.
            UsageError: Not a name at all.
        """
        name = DEFAULT_REF if ref is None else ref
        if DIGEST.fullmatch(name) is not None:
            return name
        check_ref_name(name)
        head = self.head()
        names = {**head.tags, **head.refs} if head else {}
        if name not in names:
            raise NotFoundError(f"{self.url} has no ref or tag {name!r}; {_there_is(name, names)}")
        return names[name]

    # Commit

    def commit(
        self,
        set_refs: Mapping[str, str | None] | None = None,
        set_tags: Mapping[str, str] | None = None,
        *,
        message: str,
        author: str = "",
        expected: Mapping[str, str | None] | None = None,
    ) -> LogEntry:
        """Move refs and add tags, all or nothing, durably.

        All objects that the manifests name must have been put before: what `put_object` has returned is
        durable. Commits of other processes that touch other refs are rebased over.

        Args:
            set_refs: Ref → manifest id, None to drop the ref.
            set_tags: Tag → manifest id; a tag that exists can only be given the id that it has.
            message: Why.
            author: Who, as they want to be named.
            expected: Ref → manifest id (None: no such ref) that must hold when the commit lands.

        Raises:
            CommitConflict: A ref was moved meanwhile or is not as expected, or a tag exists.
            CommitUnknown: It could not be found out whether the commit landed; `find_commit` tells later.
            NotFoundError: A manifest is not in the repository.
            StoreError: The store refused; nothing was committed.
        """
        self._check_writable()
        changes = Changes(dict(set_refs or {}), dict(set_tags or {}), dict(expected or {}))
        self._check_manifests(changes)
        base = head = self.head()
        txn = uuid.uuid4().hex
        for attempt in range(_ATTEMPTS):
            refs, tags = changes.apply(base, head)
            entry = self._next_entry(head, txn, refs, tags, message, author)
            if self._append(entry):
                self._seen = max(self._seen, entry.n)
                return entry
            time.sleep(_JITTER.uniform(0, min(_LONGEST_PAUSE_S, 0.001 * 2 ** min(attempt, 10))))
            head = self.head()
        raise CommitConflict(
            f"{self.url}: {_ATTEMPTS} other commits came first each time; commit less often, or try again "
            "later"
        )

    def _next_entry(
        self,
        head: LogEntry | None,
        txn: str,
        refs: dict[str, str],
        tags: dict[str, str],
        message: str,
        author: str,
    ) -> LogEntry:
        entry = LogEntry(
            n=head.n + 1 if head else 1,
            repository=self.id,
            previous=sha256_digest(head.to_bytes() if head else self._identity.to_bytes()),
            txn=txn,
            time=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            author=author,
            message=message,
            refs=refs,
            tags=tags,
            software=f"shardkit {_version()}",
        )
        try:
            LogEntry.from_bytes(entry.to_bytes(), "this commit")  # nobody may write what nobody will read
        except FormatError as error:
            raise UsageError(f"the commit cannot be written: {error}") from error
        return entry

    def _append(self, entry: LogEntry) -> bool:
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
                    return True
                failure = None
            except StoreError as error:
                failure = error
            found = self._read_back(entry, failure)
            if found is not None and found.txn != entry.txn:
                return False
            if found is not None and failure is None:
                return True
            if found is None and isinstance(failure, (StoreFullError, StoreReadOnlyError)):
                break  # asking again does not help
        if found is None and failure is not None:
            raise failure  # it is not in the log, and the store says why
        raise CommitUnknown(
            f"commit {entry.txn} to {self.url}: entry {entry.n} is there but may not survive a power cut; "
            f"look at the disk, then ask again: Repository.find_commit({entry.txn!r})"
        ) from failure

    def _read_back(self, entry: LogEntry, failure: StoreError | None) -> LogEntry | None:
        try:
            return self._entry(entry.n)[0]
        except NotFoundError:
            return None
        except (StoreError, IntegrityError, FormatError) as error:
            raise CommitUnknown(
                f"commit {entry.txn} to {self.url}: writing entry {entry.n} failed ({failure}) and it cannot "
                "be read "
                f"back ({error}); ask later: Repository.find_commit({entry.txn!r})"
            ) from error

    # Reading the log

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
            if self._store.head(entry_name(number)) is None:
                self._refuse_log(number)
        self._seen = max(self._seen, last)
        return last

    def _refuse_log(self, missing: int) -> NoReturn:
        raise IntegrityError(
            f"log of {self.url}: entry {missing} is missing; restore it from a copy of the root"
        )

    def _entry(self, number: int) -> tuple[LogEntry, bytes]:
        name = entry_name(number)
        where = f"{name} in {self.url}"
        data = self._store.get(name, max_bytes=MAX_ENTRY_BYTES)
        entry = LogEntry.from_bytes(data, where)
        if entry.n != number or entry.repository != self.id:
            raise IntegrityError(
                f"{where} is entry {entry.n} of repository {entry.repository}, expected entry {number} of "
                f"{self.id}; "
                "restore it from a copy of the root"
            )
        return entry, data

    def _check_manifests(self, changes: Changes) -> None:
        for manifest in sorted(changes.manifests):
            if self._store.head(object_name(manifest, "manifest")) is None:
                raise NotFoundError(
                    f"manifest {manifest} is not in {self.url}: expected its objects to be put before the "
                    "commit"
                )

    def _check_writable(self) -> None:
        if self._read_only:
            raise StoreReadOnlyError(f"{self.url} was opened for reading only; open it for writing")


def _read_identity(store: Store) -> Identity:
    try:
        data = store.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES)
    except NotFoundError:
        raise NotFoundError(
            f"no dataset at {store.url}: expected {IDENTITY_NAME} in it; check the path, or run: shardkit "
            "build"
        ) from None
    return Identity.from_bytes(data, store.url)


def _there_is(name: str, names: Mapping[str, str]) -> str:
    if not names:
        return "nothing was committed yet: run shardkit build"
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(names)[:10])}"


def _version() -> str:
    try:
        return importlib.metadata.version("shardkit")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
