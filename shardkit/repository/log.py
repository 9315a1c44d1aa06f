"""The log, read with its chain verified (SPEC.md §5), the identity before it, and what numbered documents are.

Those are put if absent, never changed, each naming its predecessor. An entry of the log is one commit and has the full
table of refs and tags.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, NoReturn, TypeVar

from shardkit.credentials import refuse_credentials
from shardkit.errors import (
    CommitUnknown,
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    UsageError,
)
from shardkit.formats.canonical_json import (
    DIGEST,
    TIME,
    Fields,
    check_spelling,
    dumps,
    sealed,
    sha256_digest,
    unseal,
)
from shardkit.stores.store import Store, find_checked, read_checked

MAX_ENTRY_BYTES: Final = 16 * 2**20

MAX_NAMES: Final = 50_000
"""Most refs and most tags of one repository: the table is in every entry."""

_DIGITS: Final = re.compile(r"[0-9]{20}")
_TXN: Final = re.compile(r"[0-9a-f]{32}")
_PUT_ATTEMPTS: Final = 3
_MAX_UNLISTED: Final = 1_000


@dataclass(frozen=True, slots=True)
class Numbered(abc.ABC):
    """What all numbered documents say."""

    n: int
    """1 for the first; a row is numbered without gaps."""
    repository: str
    """Id of the repository, so that a document of another one is refused."""
    previous: str
    """SHA-256 of the predecessor's bytes."""
    txn: str
    """Random id, by which its writer knows it again after a lost answer."""
    time: str
    """UTC, for people: nothing depends on it."""
    author: str
    message: str

    @abc.abstractmethod
    def to_bytes(self) -> bytes:
        """Canonical JSON with the digest of the rest of it inside."""

    def numbered(self) -> dict[str, object]:
        """These fields as JSON."""
        return {name: getattr(self, name) for name in NUMBERED}


NUMBERED: Final = tuple(field.name for field in fields(Numbered))


def read_numbered(given: Fields, *, first_has_previous: bool) -> dict[str, Any]:
    """The fields of `Numbered`; the first of a row either has a `previous` as all others, or an empty one."""
    return {
        "n": given.integer("n", minimum=1),
        "repository": given.text("repository", maximum=36),
        "previous": given.digest("previous") if first_has_previous else given.text("previous", maximum=80),
        "txn": given.text("txn", pattern=_TXN),
        "time": given.text("time", pattern=TIME),
        "author": given.text("author", maximum=1_000),
        "message": given.text("message"),
    }


Document_co = TypeVar("Document_co", bound=Numbered, covariant=True)


@dataclass(frozen=True, slots=True)
class Row(Generic[Document_co]):
    """A folder of numbered documents.

    Attributes:
        prefix: the folder, with a slash at its end.
        parse: (bytes, how messages name them) → the document.
        max_bytes: longest document accepted.
    """

    prefix: str
    parse: Callable[[bytes, str], Document_co]
    max_bytes: int

    def name(self, number: int) -> str:
        """``<prefix><20 digits>.json``: byte order is number order."""
        return f"{self.prefix}{number:020d}.json"

    def number(self, name: str) -> int | None:
        """The number in a document's name, None for any other name."""
        digits = name[len(self.prefix) : -len(".json")]
        is_ours = _DIGITS.fullmatch(digits) is not None and self.name(int(digits)) == name
        return int(digits) if is_ours else None

    def read(self, store: Store, number: int, repository: str | None) -> tuple[Document_co, bytes]:
        """A document and its bytes, read as `read_checked` does."""

        def parse(data: bytes, where: str) -> tuple[Document_co, bytes]:
            found = self.parse(data, where)
            if found.n != number or repository not in (None, found.repository):
                raise IntegrityError(
                    f"{where} is number {found.n} of repository {found.repository}, expected {number} of {repository}; "
                    f"run: shardkit repair {store.url}"
                )
            return found, data

        return read_checked(store, self.name(number), parse, max_bytes=self.max_bytes)

    def put(self, store: Store, document: Numbered, *, what: str, then: str) -> bool:
        """Put the next document durably. Return False if another document has its number.

        After an error, it is read back and compared. Ours is put again: if it exists then, it is also durable.
        """
        name, data = self.name(document.n), document.to_bytes()
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
                found = self.read(store, document.n, document.repository)[1]
            except NotFoundError:
                found = None
            except (StoreError, IntegrityError, FormatError) as error:
                raise CommitUnknown(
                    f"{what}: writing {name} failed ({failure}) and it cannot be read back ({error}); look at the "
                    f"store, then {then}"
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


_FORMAT: Final = "shardkit-log/1"
_REF: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_KEYS: Final = (*NUMBERED, "refs", "tags", "software", "digest")
_OPTIONAL: Final = ("withdrawn", "deletion")


class Deletion(NamedTuple):
    """The newest deletion of garbage that the log announced.

    Attributes:
        begun: Number of the entry that announced it.
        names: Digest of the list of objects that it takes away.
        is_ended: True if all of them were deleted.
    """

    begun: int
    names: str
    is_ended: bool = False

    @classmethod
    def read(cls, fields: Fields) -> Deletion | None:
        """Read the field `deletion` of an entry."""
        if not fields.has("deletion"):
            return None
        found = Fields(
            fields.table("deletion", maximum=3), f"deletion of {fields.where}", ("begun", "names", "ended")
        )
        return cls(
            found.integer("begun", minimum=1), found.digest("names"), bool(found.integer("ended", maximum=1))
        )

    def to_json(self) -> dict[str, object]:
        return {"begun": self.begun, "names": self.names, "ended": int(self.is_ended)}


@dataclass(frozen=True, slots=True)
class LogEntry(Numbered):
    """One commit."""

    refs: Mapping[str, str]
    """All refs after this commit: name → manifest id."""
    tags: Mapping[str, str]
    """All tags after this commit; never moved, and removed only by being withdrawn."""
    software: str
    withdrawn: Mapping[str, str] = field(default_factory=dict)
    """All tags that were ever withdrawn, because what they named was erased: name → manifest id."""
    deletion: Deletion | None = None
    """The newest deletion of garbage that was announced; None before the first."""

    @property
    def digest(self) -> str:
        """SHA-256 of the entry without this field, so that damage to the newest entry is found too."""
        return sha256_digest(dumps(self._body()))

    def to_bytes(self) -> bytes:
        return sealed(self._body())

    def __reduce__(self) -> tuple[Callable[[bytes, str], LogEntry], tuple[bytes, str]]:
        """Repositories remember an entry and travel to other processes; a read-only view of a dict does not."""
        return LogEntry.from_bytes, (self.to_bytes(), "a log entry of another process")

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> LogEntry:
        """Read and check one entry."""
        fields = unseal(data, where, _FORMAT, _KEYS, MAX_ENTRY_BYTES, _OPTIONAL)
        entry = cls(
            **read_numbered(fields, first_has_previous=True),
            refs=_names(fields, "refs"),
            tags=_names(fields, "tags"),
            software=fields.text("software", maximum=1_000),
            withdrawn=_names(fields, "withdrawn") if fields.has("withdrawn") else {},
            deletion=Deletion.read(fields),
        )
        check_spelling(data, entry.to_bytes(), fields)
        return entry

    def _body(self) -> dict[str, object]:
        return {
            **({"withdrawn": dict(self.withdrawn)} if self.withdrawn else {}),
            **({"deletion": self.deletion.to_json()} if self.deletion else {}),
            "format": _FORMAT,
            **self.numbered(),
            "refs": dict(self.refs),
            "tags": dict(self.tags),
            "software": self.software,
        }


NO_COMMIT: Final = LogEntry(0, "", "", "", "", "", "", {}, {}, "")
"""What stands before the first commit: no refs, no tags."""


LOG: Final = Row("log/", LogEntry.from_bytes, MAX_ENTRY_BYTES)
"""The first entry's `previous` is the SHA-256 of ``shardkit.json``."""


IDENTITY_NAME: Final = "shardkit.json"
"""Object that makes a root a repository."""

MAX_IDENTITY_BYTES: Final = 64 * 1024

_IDENTITY_FORMAT: Final = "shardkit-repository/1"
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SINGLE_WRITER: Final = "single-writer"
"""Feature of a root on a store without put-if-absent: its writers promised to come one at a time."""
FEATURES: Final[tuple[str, ...]] = (SINGLE_WRITER,)
"""All features that this version knows."""


class Identity(NamedTuple):
    """Which repository a root holds, and what a program must know to use it."""

    id: str
    """Random UUID: tells two repositories apart, whatever their paths."""
    features: tuple[str, ...] = ()

    @classmethod
    def new(cls, features: tuple[str, ...] = ()) -> Identity:
        """An identity that no other repository has."""
        return cls(str(uuid.uuid4()), features)

    def to_bytes(self) -> bytes:
        """Canonical JSON with the digest of the rest of it inside."""
        return sealed({"format": _IDENTITY_FORMAT, "id": self.id, "features": list(self.features)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Identity:
        """Read and check."""
        fields = unseal(
            data,
            f"{IDENTITY_NAME} of {where}",
            _IDENTITY_FORMAT,
            ("id", "features", "digest"),
            MAX_IDENTITY_BYTES,
        )
        identity = cls(fields.text("id", pattern=_UUID), fields.features(FEATURES))
        check_spelling(data, identity.to_bytes(), fields)
        return identity


def identity_in(store: Store) -> Identity:
    """``shardkit.json`` of one place; raises as `read_identity` does."""
    return read_checked(
        store,
        IDENTITY_NAME,
        lambda data, _where: Identity.from_bytes(data, store.url),
        max_bytes=MAX_IDENTITY_BYTES,
    )


def first_identity(store: Store, features: tuple[str, ...]) -> Identity:
    """The identity to put where there may be none: a new one, or that of the log that lies there without one."""
    if store.head(LOG.name(1)) is None:
        return Identity.new(features)
    with contextlib.suppress(ShardkitError):
        first = find_checked(store, LOG.name(1), LogEntry.from_bytes, max_bytes=MAX_ENTRY_BYTES)
        found = identity_named_by(first) if first else None
        if found is not None:
            return found
    if store.head(IDENTITY_NAME) is None:
        raise IntegrityError(
            f"{store.url} has a log and no {IDENTITY_NAME}: it was a dataset and has lost its identity; "
            f"run: shardkit repair {store.url}"
        )
    return Identity.new(features)


def identity_named_by(first: LogEntry) -> Identity | None:
    """The identity that the first entry of a log follows.

    The entry names the repository, and the SHA-256 of the identity's bytes: of the few identities that a repository of
    that id may have, it is the one with this digest.
    """
    for features in ((), *((one,) for one in FEATURES)):
        identity = Identity(first.repository, features)
        if sha256_digest(identity.to_bytes()) == first.previous:
            return identity
    return None


def check_ref_name(name: str) -> None:
    """Refuse what cannot be written as ``root@name``."""
    if _REF.fullmatch(name) is None:
        raise UsageError(
            f"ref or tag {name[:200]!r}: expected 1 to 100 of [A-Za-z0-9._-], starting with a letter or digit; use "
            "another name"
        )


def check_succession(earlier: LogEntry, earlier_bytes: bytes, later: LogEntry, where: str) -> None:
    """Whether `later` may follow `earlier`."""
    found = sha256_digest(earlier_bytes)
    if later.previous != found or later.n != earlier.n + 1:
        raise IntegrityError(
            f"log of {where}: entry {later.n} follows one with digest {later.previous}, "
            f"entry {earlier.n} has {found}; restore the log from a copy of the root"
        )
    # A withdrawn name stays withdrawn, so that no tag ever names a second manifest.
    moved = [
        tag
        for tag, manifest in earlier.tags.items()
        if {later.tags.get(tag), later.withdrawn.get(tag)} != {manifest, None}
    ]
    moved += [
        tag
        for tag, manifest in earlier.withdrawn.items()
        if later.withdrawn.get(tag) != manifest or tag in later.tags
    ]
    if moved:
        raise IntegrityError(
            f"log of {where}: entry {later.n} moves or removes the tag {moved[0]!r}, which cannot be; "
            "restore the log from a copy of the root"
        )


def _names(fields: Fields, key: str) -> Mapping[str, str]:
    names: dict[str, str] = {}
    for name, manifest in fields.table(key, maximum=MAX_NAMES).items():
        if (
            _REF.fullmatch(name) is None
            or not isinstance(manifest, str)
            or DIGEST.fullmatch(manifest) is None
        ):
            raise FormatError(f"{fields.where}: {key} hold {name[:100]!r}, expected names of manifest ids")
        names[name] = manifest
    return MappingProxyType(names)


class CommitLog:
    """Log entries of one repository; the first one follows the bytes of its identity, whose digest is `origin`."""

    def __init__(self, store: Store, repository: str, origin: str) -> None:
        self.store, self._repository, self._origin = store, repository, origin
        self._seen = 0  # number of the newest entry met so far: a log never gets shorter

    def head(self) -> LogEntry | None:
        """The newest commit, None before the first. Lists names and reads one entry."""
        number = self._last_number()
        return None if number == 0 else self._entry(number)[0]

    def log(self) -> list[LogEntry]:
        """All commits, newest first, with the whole chain verified down to ``shardkit.json``."""
        entries = list(self.newest_commits())
        if entries and entries[-1].previous != self._origin:
            raise IntegrityError(
                f"log of {self.store.url}: entry 1 belongs to another shardkit.json; restore it from a copy of "
                "the root"
            )
        return entries

    def newest_commits(self) -> Iterator[LogEntry]:
        """Commits one by one, newest first, the chain verified as far as it is walked."""
        later: LogEntry | None = None
        for number in range(self._last_number(), 0, -1):
            entry, data = self._entry(number)
            if later is not None:
                check_succession(entry, data, later, self.store.url)
            yield entry
            later = entry

    def _last_number(self) -> int:
        """Number of the newest entry; all before it are there.

        A directory that is listed while others commit may show a later entry and not an earlier one, and a network
        file system may show an old listing: what a listing lacks is looked up by name before it counts as missing.
        """
        seen = self._seen  # before the listing: another thread may commit while it is made
        listed = {n for n in map(LOG.number, self.store.list_after(LOG.prefix)) if n is not None}
        last = max(seen, max(listed, default=0))
        if last == 0:
            self._check_log_is_not_lost()
        if last > len(listed) + _MAX_UNLISTED:
            self._refuse_log(next(n for n in itertools.count(1) if n not in listed))
        for number in sorted(set(range(1, last + 1)) - listed):
            if not self._is_there(number):
                self._refuse_log(number)
        self._seen = max(self._seen, last)
        return last

    def _check_log_is_not_lost(self) -> None:
        """Raise IntegrityError if an empty log cannot be that of a repository without commits."""

    def _refuse_log(self, missing: int) -> NoReturn:
        raise IntegrityError(
            f"log of {self.store.url}: entry {missing} is missing; run: shardkit repair {self.store.url}"
        )

    def _is_there(self, number: int) -> bool:
        """Whether an entry that was not listed can be read, from the root or from a copy of it."""
        if self.store.head(LOG.name(number)) is not None:
            return True
        try:
            self._entry(number)
        except NotFoundError:
            return False
        return True

    def _entry(self, number: int) -> tuple[LogEntry, bytes]:
        return LOG.read(self.store, number, self._repository)


def parse_dataset_url(url: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Split ``ROOT[@REF]``.

    Only an ``@`` in the last component separates; a root whose own name holds one is written with a slash at
    its end (``data/cats@home/``).

    Returns:
        The root, and the ref, tag or ``sha256:<hex>`` behind the ``@``, None where there is none.

    Raises:
        UsageError: What follows the ``@`` is neither a name nor a digest, or there is no root.
    """
    text = os.fspath(url)
    refuse_credentials(text, "the dataset's URL")
    folder, slash, last = text.rpartition("/")
    name, at, ref = last.rpartition("@")
    if not at:
        root, found = text, None
    else:
        root, found = folder + slash + name, ref
        if DIGEST.fullmatch(ref) is None:
            check_ref_name(ref)
    if not root:
        raise UsageError(f"dataset {text!r} has no root: expected ROOT or ROOT@REF, such as data/cats@val")
    return root, found
