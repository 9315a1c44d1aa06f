"""Documents of the commit log, the identity of a repository, and what a commit changes (SPEC.md §5).

A log entry is one commit. It is put if absent, never changed, names its predecessor by digest, and has the full tables
of refs, tags and locations.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shardkit.credentials import refuse_credentials
from shardkit.documents import (
    DIGEST,
    Digest,
    Document,
    Positive,
    Record,
    Text,
    Time,
    encode,
    parse_digest,
    seal,
    sha256_digest,
    unseal,
)
from shardkit.errors import (
    CommitConflict,
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
from shardkit.extras import shell_word
from shardkit.ranges import shown
from shardkit.repository.policy import LocationTable
from shardkit.stores.store import Store, find_checked, place_text, read_checked

MAX_ENTRY_BYTES: Final = 16 * 2**20

MAX_NAMES: Final = 50_000
"""Maximum number of refs, and of tags, of one repository: every entry has the full table."""

_ENTRY_NAME: Final = re.compile(r"log/([0-9]{20})\.json")
_PUT_ATTEMPTS: Final = 3


_REF: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_Names = Annotated[
    Mapping[Annotated[str, Meta(pattern=rf"\A{_REF.pattern}\Z")], Digest], Meta(max_length=MAX_NAMES)
]
"""Name → manifest id."""


class Deletion(Record, frozen=True):
    """The newest deletion of garbage that the log announced."""

    begun: Positive  # Number of the entry that announced it
    names: Digest  # Digest of the list of objects to delete
    is_ended: bool = msgspec.field(name="ended", default=False)  # True if all of them were deleted


class LogEntry(Document, frozen=True, kw_only=True, tag="shardkit-log/1"):
    """One commit."""

    n: Positive
    """Number: 1 for the first entry, without gaps."""
    repository: Annotated[str, Meta(max_length=36)]
    """Id of the repository. An entry of another repository is refused."""
    previous: Digest
    """SHA-256 of the predecessor's bytes; of ``shardkit.json`` for the first entry."""
    txn: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    """Random transaction id, by which the writer finds its entry after a lost response."""
    time: Time
    """Time in UTC, for people only."""
    author: Annotated[str, Meta(max_length=1_000)]
    message: Text
    refs: _Names
    """All refs after this commit: name → manifest id."""
    tags: _Names
    """All tags after this commit: name → manifest id. A tag is never moved, and removed only by being withdrawn."""
    software: Annotated[str, Meta(max_length=1_000)]
    withdrawn: _Names = msgspec.field(default_factory=dict)
    """All tags that were withdrawn because rows of their versions were erased: name → manifest id."""
    deletion: Deletion | None = None
    """Newest deletion of garbage that was announced, None before the first."""
    locations: LocationTable | None = None
    """Locations and policy after this commit; None if the root is the only location."""

    @property
    def digest(self) -> str:
        """SHA-256 of the other fields. It also reveals damage to the newest entry, which no successor names."""
        return sha256_digest(encode(self))

    @property
    def versions(self) -> list[str]:
        """Manifest ids that refs and tags name after this commit, each once."""
        return list(dict.fromkeys([*self.refs.values(), *self.tags.values()]))

    def to_bytes(self) -> bytes:
        """Return canonical JSON with a ``digest`` of the other fields."""
        return seal(self)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> LogEntry:
        """Parse and validate one entry."""
        return unseal(cls, data, where, max_bytes=MAX_ENTRY_BYTES)


NO_COMMIT: Final = LogEntry(
    n=0, repository="", previous="", txn="", time="", author="", message="", refs={}, tags={}, software=""
)
"""Entry before the first commit: no refs, no tags."""


LOG_FOLDER: Final = "log/"


def entry_name(number: int) -> str:
    """Return ``log/<20 digits>.json``: names sort in the order of the numbers."""
    return f"{LOG_FOLDER}{number:020d}.json"


def entry_numbers(store: Store) -> set[int]:
    """Return the numbers of the entries that a store lists."""
    found = (_ENTRY_NAME.fullmatch(name) for name in store.list_after(LOG_FOLDER))
    return {int(match[1]) for match in found if match is not None}


def read_entry(store: Store, number: int, repository: str | None) -> tuple[LogEntry, bytes]:
    """Read an entry with `read_checked` and return it with its bytes; `repository` None accepts any repository."""

    def parse(data: bytes, where: str) -> tuple[LogEntry, bytes]:
        found = LogEntry.from_bytes(data, where)
        if found.n != number or repository not in (None, found.repository):
            raise IntegrityError(
                f"{where} is number {found.n} of repository {found.repository}, expected {number} of {repository}; "
                f"run: shardkit repair {shell_word(store.url)}"
            )
        return found, data

    return read_checked(store, entry_name(number), parse, max_bytes=MAX_ENTRY_BYTES)


def put_entry(store: Store, entry: LogEntry) -> bool:
    """Put the next entry durably. Return False if another entry has its number.

    After an error, the entry is read back and compared. If it is ours, it is put again: the answer "exists" also says
    that it is durable.
    """
    name, data = entry_name(entry.n), entry.to_bytes()
    what = f"commit {entry.txn} to {store.url}"
    then = f"then ask again: Repository.find_commit({entry.txn!r})"
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
            found = read_entry(store, entry.n, entry.repository)[1]
        except NotFoundError:
            found = None
        except (StoreError, IntegrityError, FormatError) as error:
            raise CommitUnknown(
                f"{what}: writing {name} failed ({failure}) and it cannot be read back ({error}); look at the "
                f"store, {then}"
            ) from error
        if found is not None and found != data:
            return False
        if found is not None and failure is None:
            return True
        if found is None and isinstance(failure, (StoreFullError, StoreReadOnlyError)):
            break  # asking again does not help
    if found is None and failure is not None:
        raise failure  # the entry does not exist, so nothing was committed
    raise CommitUnknown(
        f"{what}: {name} is there but may not survive a power cut; look at the disk, {then}"
    ) from failure


IDENTITY_NAME: Final = "shardkit.json"
"""Name of the identity. A root that has it is a repository."""

MAX_IDENTITY_BYTES: Final = 64 * 1024

SINGLE_WRITER: Final = "single-writer"
"""Feature of a root on a store without put-if-absent: the user guarantees that there is one writer at a time."""
FEATURES: Final[tuple[str, ...]] = (SINGLE_WRITER,)
"""All features that this version knows."""


class Identity(Document, frozen=True, tag="shardkit-repository/1"):
    """Id of a repository, and the features that a program must support to use it."""

    id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")]
    """Random UUID: it distinguishes repositories, whatever their paths."""
    features: tuple[str, ...]

    def __post_init__(self) -> None:
        unknown = next((feature for feature in self.features if feature not in FEATURES), None)
        if unknown is not None:
            raise FormatError(
                f"needs the feature {unknown[:100]!r}, which this shardkit does not know: install a newer shardkit"
            )

    @classmethod
    def new(cls, features: tuple[str, ...] = ()) -> Identity:
        """Return an identity with a new UUID."""
        return cls(str(uuid.uuid4()), features)

    def to_bytes(self) -> bytes:
        """Return canonical JSON with a ``digest`` of the other fields."""
        return seal(self)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Identity:
        """Parse and validate an identity."""
        return unseal(cls, data, f"{IDENTITY_NAME} of {where}", max_bytes=MAX_IDENTITY_BYTES)


def identity_in(store: Store) -> Identity:
    """Read ``shardkit.json`` of one store. Raises the same errors as `read_checked`."""
    return read_checked(
        store,
        IDENTITY_NAME,
        lambda data, _where: Identity.from_bytes(data, store.url),
        max_bytes=MAX_IDENTITY_BYTES,
    )


def first_identity(store: Store, features: tuple[str, ...]) -> Identity:
    """Return the identity for a root without one: the identity of its log if it has one, otherwise a new one."""
    if store.head(entry_name(1)) is None:
        return Identity.new(features)
    with contextlib.suppress(ShardkitError):
        first = find_checked(store, entry_name(1), LogEntry.from_bytes, max_bytes=MAX_ENTRY_BYTES)
        found = identity_named_by(first) if first else None
        if found is not None:
            return found
    if store.head(IDENTITY_NAME) is None:
        raise IntegrityError(
            f"{store.url} has a log and no {IDENTITY_NAME}: it was a dataset and has lost its identity; "
            f"run: shardkit repair {shell_word(store.url)}"
        )
    return Identity.new(features)


def identity_named_by(first: LogEntry) -> Identity | None:
    """Return the identity that the first entry of a log follows, None if no known features give its digest.

    The entry has the id of the repository and the SHA-256 of the identity's bytes. Few identities have that id, so all
    of them are tried.
    """
    for features in ((), *((one,) for one in FEATURES)):
        identity = Identity(first.repository, features)
        if sha256_digest(identity.to_bytes()) == first.previous:
            return identity
    return None


def check_ref_name(name: object) -> None:
    """Raise UsageError if a name cannot be written as ``root@name``."""
    if not isinstance(name, str) or _REF.fullmatch(name) is None:
        raise UsageError(
            f"ref or tag {shown(name)}: expected 1 to 100 of [A-Za-z0-9._-], starting with a letter or digit; use "
            "another name"
        )


def check_succession(earlier: LogEntry, earlier_bytes: bytes, later: LogEntry, where: str) -> None:
    """Raise IntegrityError if `later` cannot be the entry after `earlier`."""
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


@dataclass(frozen=True, slots=True)
class Changes:
    """Refs to set or drop, tags to add or withdraw, and the preconditions of the commit."""

    refs: Mapping[str, str | None]
    """Name → manifest id, None to drop the ref."""
    tags: Mapping[str, str]
    expected: Mapping[str, str | None]
    """Name → manifest id that the ref must have at the time of the commit, None if it must not exist."""
    withdraw: Mapping[str, str]
    """Tag → its manifest id. The tag is removed for good, and the log records that."""

    def __post_init__(self) -> None:
        for names in (self.refs, self.tags, self.expected, self.withdraw):
            for name, manifest in names.items():
                check_ref_name(name)
                if manifest is not None:
                    parse_digest(manifest)
        both = sorted(self.refs.keys() & self.tags.keys())
        if both:
            raise UsageError(
                f"{both[0]!r} is to become a ref and a tag: a name can be one of them; use two names"
            )

    @property
    def manifests(self) -> set[str]:
        """Manifests that must be in the repository before the commit."""
        return {manifest for manifest in (*self.refs.values(), *self.tags.values()) if manifest is not None}

    def apply(self, base: LogEntry, head: LogEntry) -> dict[str, dict[str, str]]:
        """Return the tables of refs, tags and withdrawn tags after this commit."""
        refs, tags, gone = dict(head.refs), dict(head.tags), self._withdrawn(head)
        self._set_refs(refs, base.refs)
        self._add_tags(tags)
        again = sorted((tags.keys() | refs.keys()) & gone.keys() - self.withdraw.keys())
        if again:
            raise CommitConflict(
                f"{again[0]!r} was a tag of {gone[again[0]]}, which was withdrawn: its name is never used again; use "
                "another name"
            )
        tags = {name: manifest for name, manifest in tags.items() if name not in self.withdraw}
        both = sorted(refs.keys() & tags.keys())
        if both:
            raise CommitConflict(f"{both[0]!r} would be a ref and a tag at once; use another name")
        if max(len(refs), len(tags)) > MAX_NAMES:
            raise UsageError(
                f"{len(refs)} refs and {len(tags)} tags, expected at most {MAX_NAMES} each; drop some refs"
            )
        return {"refs": refs, "tags": tags, "withdrawn": gone}

    def _set_refs(self, refs: dict[str, str], before: Mapping[str, str]) -> None:
        for name, manifest in self.expected.items():
            # A ref that already points at the new version is no conflict: the same version was made twice.
            if refs.get(name) != manifest and (name not in self.refs or refs.get(name) != self.refs[name]):
                raise CommitConflict(
                    f"ref {name!r} points at {refs.get(name)}, expected {manifest}; "
                    "look at it (shardkit log), then commit again"
                )
        for name, manifest in self.refs.items():
            now = refs.pop(name, None)
            if name not in self.expected and now not in (before.get(name), manifest):
                raise CommitConflict(
                    f"ref {name!r} was moved to {now} by another commit, expected {before.get(name)}; "
                    "look at it (shardkit log), then commit again"
                )
            if manifest is not None:
                refs[name] = manifest

    def _add_tags(self, tags: dict[str, str]) -> None:
        for name, manifest in self.tags.items():
            if tags.setdefault(name, manifest) != manifest:
                raise CommitConflict(
                    f"tag {name!r} exists and points at {tags[name]}: tags are never moved; use another name"
                )

    def _withdrawn(self, head: LogEntry) -> dict[str, str]:
        for name, manifest in self.withdraw.items():
            if head.tags.get(name, head.withdrawn.get(name)) != manifest:
                raise CommitConflict(
                    f"tag {name!r} names {head.tags.get(name)}, expected {manifest}; look at it (shardkit log), then "
                    "try again"
                )
        return {**head.withdrawn, **self.withdraw}


def first_commit(log: Sequence[LogEntry], version: str) -> LogEntry | None:
    """Return the first entry that named a version; None if no entry did. The log is ordered by age, newest first."""
    return next((one for one in reversed(log) if version in one.versions), None)


def parse_dataset_url(url: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Split ``ROOT[@REF]``.

    Only an ``@`` in the last component separates. A root whose own name has an ``@`` is written with a slash at the
    end (``data/cats@home/``).

    Returns:
        The root, and the ref, tag or ``sha256:<hex>`` after the ``@``, None if there is no ``@``.

    Raises:
        UsageError: The text after the ``@`` is neither a name nor a digest, or the root is empty.
    """
    text = place_text(url, "dataset")
    refuse_credentials(text, "the dataset's URL")
    folder, slash, last = text.rpartition("/")
    name, at, ref = last.rpartition("@")
    if not at:
        root, found = text, None
    else:
        root, found = folder + slash + name, ref
        if DIGEST.fullmatch(ref) is None:
            if ref.startswith("sha256:"):
                raise UsageError(
                    f"version {shown(ref)}: expected all 64 hex digits of the id; whole ids: shardkit ls ROOT --json"
                )
            check_ref_name(ref)
    if not root:
        raise UsageError(f"dataset {text!r} has no root: expected ROOT or ROOT@REF, such as data/cats@val")
    return root, found
