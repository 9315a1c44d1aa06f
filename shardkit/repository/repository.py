"""A repository: content-addressed objects, and the commits that name them (SPEC.md §5)."""

from __future__ import annotations

import contextlib
import os
import random
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import msgspec

from shardkit.credentials import redact
from shardkit.documents import DIGEST, sha256_digest, utc_text
from shardkit.errors import (
    CommitConflict,
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreReadOnlyError,
    UsageError,
)
from shardkit.extras import shell_word
from shardkit.reading.attestations import record_healed
from shardkit.reading.located_store import Locations, locate
from shardkit.reading.objects import is_good, publish
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.garbage import check_not_deleted
from shardkit.repository.locations import (
    check_log_is_not_lost,
    check_root_is_not_lost,
    identity_of_copies,
    over_all,
    read_mark,
    read_table,
)
from shardkit.repository.log import (
    IDENTITY_NAME,
    NO_COMMIT,
    SINGLE_WRITER,
    Changes,
    Identity,
    LogEntry,
    check_ref_name,
    check_succession,
    entry_name,
    entry_numbers,
    first_identity,
    identity_in,
    parse_dataset_url,
    put_entry,
    read_entry,
)
from shardkit.stores.local import LocalStore, check_vacant, open_store
from shardkit.stores.store import (
    MAX_OBJECT_BYTES,
    Descriptor,
    Stage,
    Store,
    check_size,
    object_name,
    read_object,
    root_store,
)

DEFAULT_REF: Final = "main"
"""Ref to use if the caller names none."""

EntryChange = Callable[[LogEntry], Mapping[str, Any] | None]
"""Maps the head to the fields that the next entry changes, or to None to append no entry."""

CommitCopies = Callable[[LogEntry, Sequence[str]], Callable[[], None]]
"""Makes the copies that a commit after the given head, of the given versions, needs first.

Returns a function to call after the commit. Raises if the commit must not be made.
"""

_ATTEMPTS: Final = 1_000
_MAX_UNLISTED: Final = 1_000  # more are not looked up by name
_LONGEST_PAUSE_S: Final = 0.05
# Forked writers must not draw the same pauses, so a seeded generator will not do.
_JITTER: Final = random.SystemRandom()


class Repository:
    """Objects and commits of one root. Use `create` or `open` to get one.

    A repository may be used from any thread and after a fork, and may be pickled. If `read_only`, it writes nothing.
    """

    def __init__(self, store: Store, identity: Identity, *, read_only: bool) -> None:
        self.store, self._identity, self._read_only = store, identity, read_only
        self._seen = 0  # number of the newest entry read so far: a log never gets shorter
        # head when the repository was opened; None if the log could not be read
        self.opened: LogEntry | None = None

    def __repr__(self) -> str:
        return f"Repository({self.store.url!r}, id={self.id}, read_only={self._read_only})"

    @classmethod
    def create(cls, url: str | os.PathLike[str], *, single_writer: bool = False) -> Repository:
        """Create a repository, or open the existing one.

        The store of a new root that is not a local directory is probed first: see
        `shardkit.stores.remote.probing.probe`.

        Raises:
            UsageError: The URL names a ref, as ``ROOT@REF`` does.
        """
        root, ref = parse_dataset_url(url)
        if ref is not None:
            raise UsageError(
                f"{os.fspath(url)!r} names the ref {ref!r} of {root}; give {root}, and the ref as --ref (ref=); a root "
                "whose own name has an @ is written with a slash at its end"
            )
        store = open_store(url)
        # A store may ignore put-if-absent, so an existing identity is looked for before one is put.
        if isinstance(store, LocalStore) or store.head(IDENTITY_NAME) is None:
            if single_writer:
                store = _for_one_writer(store)
            elif not isinstance(store, LocalStore):
                from shardkit.stores.remote.probing import check_writers

                check_writers(store)
            if store.head(IDENTITY_NAME) is None and store.head(entry_name(1)) is None:
                check_root_is_not_lost(store)
                check_vacant(store.url, "dataset")
            features = (SINGLE_WRITER,) if single_writer else ()
            store.put_new(IDENTITY_NAME, first_identity(store, features).to_bytes())
        return cls._open_store(store, read_only=False)

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        read_only: bool = False,
        locations: Locations | None = None,
        settings: ReadSettings | None = None,
        heal: bool = False,
        alone: bool = False,
    ) -> Repository:
        """Open an existing repository."""
        store = open_store(url, read_only=read_only and not heal)
        if locations:
            store = locate(store, locations, settings=settings, heal=heal)
        repository = cls._open_store(store, read_only=read_only, alone=alone)
        if locations or read_only:
            head = repository.opened
            located = over_all(
                repository.store, repository.id, head, locations, settings, heal=heal, alone=alone
            )
            repository = repository.with_store(located)
        return repository

    @classmethod
    def _open_store(cls, store: Store, *, read_only: bool, alone: bool = False) -> Repository:
        try:
            identity = identity_in(store)
        except (NotFoundError, IntegrityError) as error:
            identity = identity_of_copies(store, error, alone=alone)
        if SINGLE_WRITER in identity.features:
            store = _for_one_writer(store)
        repository = cls(store, identity, read_only=read_only)
        if not read_only:
            _refuse_copy(store, identity)
        if not alone:
            with contextlib.suppress(ShardkitError):  # reading the log later reports the error
                repository.opened = repository.head()
        return repository

    def with_store(self, store: Store) -> Repository:
        """Return this repository with another view of its store."""
        view = Repository(store, self._identity, read_only=self._read_only)
        view.opened = self.opened
        return view

    @property
    def url(self) -> str:
        """URL of the store, without credentials."""
        return self.store.url

    @property
    def id(self) -> str:
        """UUID of the repository."""
        return self._identity.id

    # Objects

    def put_object(self, data: bytes, extension: str) -> Descriptor:
        """Store bytes durably under their digest. If the object exists with wrong bytes, they are replaced."""
        self._check_writable()
        check_size(len(data))
        placed = Descriptor(sha256_digest(data), len(data), extension)
        if not self.store.put_new(placed.name, data) and not is_good(self.store, placed):
            self.store.replace(placed.name, data)
            record_healed(self.store, placed.name)
        return placed

    def stage_object(self, extension: str) -> AbstractContextManager[Stage]:
        """Write a large object piece by piece, then `publish` it. An unpublished object is discarded."""
        self._check_writable()
        return self.store.stage(extension)

    def publish(self, stage: Stage, extension: str) -> Descriptor:
        """Store a staged object durably under its digest. If the object exists with wrong bytes, it is replaced."""
        placed = Descriptor(f"sha256:{stage.digest}", stage.size, extension)
        if publish(self.store, stage, placed):
            record_healed(self.store, placed.name)
        return placed

    def get_object(
        self, digest: str, extension: str, size: int | None = None, *, max_bytes: int = MAX_OBJECT_BYTES
    ) -> bytes:
        """Return the verified bytes of an object; see `shardkit.stores.store.read_object`."""
        return read_object(self.store, digest, extension, size, max_bytes=max_bytes)

    # Log

    def head(self) -> LogEntry:
        """Return the newest commit, `NO_COMMIT` if there is none. Lists names and reads one entry."""
        number = self._last_number()
        return self._entry(number)[0] if number else NO_COMMIT

    def log(self) -> list[LogEntry]:
        """Return all commits, newest first, and verify the whole chain down to ``shardkit.json``."""
        entries = list(self.newest_commits())
        if entries and entries[-1].previous != sha256_digest(self._identity.to_bytes()):
            raise IntegrityError(
                f"log of {self.store.url}: entry 1 belongs to another shardkit.json; restore it from a copy of "
                "the root"
            )
        return entries

    def newest_commits(self) -> Iterator[LogEntry]:
        """Yield commits, newest first, and verify the chain of the commits yielded."""
        later: LogEntry | None = None
        for number in range(self._last_number(), 0, -1):
            entry, data = self._entry(number)
            if later is not None:
                check_succession(entry, data, later, self.store.url)
            yield entry
            later = entry

    def _last_number(self) -> int:
        """Return the number of the newest entry, after checking that all entries before it exist.

        A listing that is made during commits may have a later entry and lack an earlier one, and a network file system
        may return an old listing. So an entry that is not listed is looked up by name before it counts as missing.
        """
        seen = self._seen  # read before the listing: another thread may commit meanwhile
        listed = entry_numbers(self.store)
        last = max(seen, max(listed, default=0))
        if last == 0:
            check_log_is_not_lost(root_store(self.store), self.id)
        has_lost_many = last > len(listed) + _MAX_UNLISTED
        for number in range(1, last + 1):
            if number not in listed and (has_lost_many or not self._is_there(number)):
                raise IntegrityError(
                    f"log of {self.store.url}: entry {number} is missing; run: "
                    f"shardkit repair {shell_word(self.store.url)}"
                )
        self._seen = max(self._seen, last)
        return last

    def _is_there(self, number: int) -> bool:
        """Return True if an entry that was not listed can be read, from the root or from a copy."""
        if self.store.head(entry_name(number)) is not None:
            return True
        try:
            self._entry(number)
        except NotFoundError:
            return False
        return True

    def _entry(self, number: int) -> tuple[LogEntry, bytes]:
        return read_entry(self.store, number, self.id)

    def find_commit(self, txn: str) -> LogEntry | None:
        """Return the commit of a transaction, None if there is none. Use it after `CommitUnknown`."""
        return next((entry for entry in self.log() if entry.txn == txn), None)

    @property
    def refs(self) -> dict[str, str]:
        """Movable names → manifest ids."""
        return dict(self.head().refs)

    @property
    def tags(self) -> dict[str, str]:
        """Fixed names → manifest ids."""
        return dict(self.head().tags)

    @property
    def versions(self) -> list[str]:
        """Manifest ids that refs and tags name, each once."""
        return self.head().versions

    def resolve(self, ref: str | None = None, head: LogEntry | None = None) -> str:
        """Return the manifest id of a ref, a tag or a digest; None means ``main``. Without `head`, the log is read.

        Raises:
            NotFoundError: There is no such ref or tag.
        """
        name = DEFAULT_REF if ref is None else ref
        if DIGEST.fullmatch(name) is not None:
            return name
        check_ref_name(name)
        head = head or self.head()
        names = {**head.tags, **head.refs}
        if name in head.withdrawn:
            raise NotFoundError(
                f"tag {name!r} of {self.url} was withdrawn: rows of {head.withdrawn[name]} were erased; "
                "shardkit log says when and why"
            )
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
        withdraw: Mapping[str, str] | None = None,
        copies: CommitCopies | None = None,
    ) -> LogEntry:
        """Move refs and add tags in one atomic, durable log entry.

        All objects that the manifests name must have been put before. If other processes committed to other refs
        meanwhile, the commit is rebased. `shardkit.copies.replicate.commit` also makes the copies that the policy's
        mode requires.

        Raises:
            CommitConflict: A ref was moved, a tag exists, or an object is being deleted.
            CommitUnknown: The store did not confirm the entry; ask `find_commit` later.
            NotFoundError: A manifest is not in the repository.
        """
        self._check_writable()
        changes = Changes(set_refs or {}, set_tags or {}, expected or {}, withdraw or {})
        base = self.head()
        try:
            self._check_manifests(changes.manifests)
            follow_up = copies(base, sorted(changes.manifests)) if copies else None
        except ShardkitError as error:
            self._check_not_deleted(self.head(), changes.manifests, error)
            raise

        def change(head: LogEntry) -> Mapping[str, Any]:
            tables = changes.apply(base, head)
            self._check_not_deleted(head, changes.manifests)
            return tables

        entry = self.append(change, base, message, author)
        assert entry is not None
        if follow_up is not None:
            follow_up()
        return entry

    def _check_not_deleted(
        self, head: LogEntry, manifests: Collection[str], problem: ShardkitError | None = None
    ) -> None:
        if head.deletion is not None and manifests:
            opened = self.opened or NO_COMMIT
            commits = self.newest_commits()
            check_not_deleted(self.store, commits, opened, head.deletion, manifests, problem)

    def _check_manifests(self, manifests: Collection[str]) -> None:
        for manifest in sorted(manifests):
            if self.store.head(object_name(manifest, "manifest")) is None:
                raise NotFoundError(
                    f"manifest {manifest} is not in {self.url}: expected its objects to be put before the commit"
                )

    def append(self, change: EntryChange, head: LogEntry, message: str, author: str = "") -> LogEntry | None:
        """Append one entry after the newest.

        Returns:
            The entry, durably in the log, or None if `change` returned None.
        """
        self._check_writable()
        txn = uuid.uuid4().hex
        for attempt in range(_ATTEMPTS):
            changed = change(head)
            if changed is None:
                return None
            entry = self._entry_after(
                head, {**changed, "txn": txn, "message": redact(message, {}), "author": redact(author, {})}
            )
            if put_entry(self.store, entry):
                self._seen = max(self._seen, entry.n)
                return entry
            time.sleep(_JITTER.uniform(0, min(_LONGEST_PAUSE_S, 0.001 * 2 ** min(attempt, 10))))
            head = self.head()
        raise CommitConflict(
            f"{self.store.url}: {_ATTEMPTS} other commits came first each time; commit less often, or try again later"
        )

    def _entry_after(self, head: LogEntry, fields: Mapping[str, Any]) -> LogEntry:
        entry = msgspec.structs.replace(
            head,
            n=head.n + 1,
            repository=self._identity.id,
            previous=sha256_digest((head if head.n else self._identity).to_bytes()),
            time=utc_text(),
            software=f"shardkit {_version()}",
            **fields,
        )
        try:
            # do not write entries that readers reject
            return LogEntry.from_bytes(entry.to_bytes(), "this commit")
        except FormatError as error:
            raise UsageError(f"the commit cannot be written: {error}") from error

    def _check_writable(self) -> None:
        if self._read_only:
            raise StoreReadOnlyError(f"{self.url} was opened for reading only; open it for writing")


def _refuse_copy(store: Store, identity: Identity) -> None:
    """Raise StoreReadOnlyError if a store is a copy: commits go to the root, so that the log does not fork."""
    mark = read_mark(root_store(store))
    if mark is not None:
        table = read_table(store, identity.id)
        raise StoreReadOnlyError(
            f"{store.url} is the copy {mark.location!r} of {table.root.url if table else 'another root'}; write there"
        )


def _there_is(name: str, names: Mapping[str, str]) -> str:
    if not names:
        return "nothing was committed yet; build a version first"
    import difflib  # slow to import, and rarely needed

    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(names)[:10])}"


def _version() -> str:
    import importlib.metadata  # slow to import, and needed only by writers

    try:
        return importlib.metadata.version("shardkit")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _for_one_writer(store: Store) -> Store:
    """Return the store in single-writer mode. A local directory needs no such mode."""
    if isinstance(store, LocalStore):
        return store
    from shardkit.stores.remote.object_store import ObjectStore  # slow to import

    return store.for_one_writer() if isinstance(store, ObjectStore) else store
