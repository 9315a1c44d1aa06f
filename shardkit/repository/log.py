"""What makes a root a repository: ``shardkit.json``, the entries of its log, and what a commit changes in them.

An entry is one commit, names its predecessor by digest, and has the full table of refs and tags.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from shardkit.errors import CommitConflict, FormatError, IntegrityError, UsageError
from shardkit.formats.canonical_json import dumps
from shardkit.formats.digest import parse_digest, sha256_digest
from shardkit.manifest.json_fields import (
    DIGEST,
    Fields,
    check_spelling,
    sealed,
    unseal,
)
from shardkit.repository.numbered import NUMBERED, Numbered, Row, read_numbered

MAX_ENTRY_BYTES: Final = 16 * 2**20

MAX_NAMES: Final = 50_000
"""Most refs and most tags of one repository: the table is in every entry."""

_FORMAT: Final = "shardkit-log/1"
_REF: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_KEYS: Final = (*NUMBERED, "refs", "tags", "software", "digest")
_OPTIONAL: Final = ("withdrawn", "collected", "collecting")


IDENTITY_NAME: Final = "shardkit.json"
"""Object that makes a root a repository."""

MAX_IDENTITY_BYTES: Final = 64 * 1024

_IDENTITY_FORMAT: Final = "shardkit-repository/1"
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SINGLE_WRITER: Final = "single-writer"
"""Feature of a root on a store without put-if-absent: its writers promised to come one at a time."""
FEATURES: Final[tuple[str, ...]] = (SINGLE_WRITER,)
"""All features that this version knows."""


@dataclass(frozen=True, slots=True)
class Identity:
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
        """Read and check.

        Raises:
            FormatError: Not an identity that this version reads.
            IntegrityError: The digest inside does not match.
        """
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
    collected: int = 0
    """How many collections of garbage were ever begun."""
    collecting: Mapping[str, str] = field(default_factory=dict)
    """Collections that are not finished: id → digest of the list of objects that they take away."""

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
        """Read and check one entry.

        Raises:
            FormatError: Not a log entry that this version reads.
            IntegrityError: The digest inside does not match.
        """
        fields = unseal(data, where, _FORMAT, _KEYS, MAX_ENTRY_BYTES, _OPTIONAL)
        entry = cls(
            **read_numbered(fields, first_has_previous=True),
            refs=_names(fields, "refs"),
            tags=_names(fields, "tags"),
            software=fields.text("software", maximum=1_000),
            withdrawn=_names(fields, "withdrawn") if fields.has("withdrawn") else {},
            collected=fields.integer("collected", minimum=1) if fields.has("collected") else 0,
            collecting=_names(fields, "collecting") if fields.has("collecting") else {},
        )
        check_spelling(data, entry.to_bytes(), fields)
        return entry

    def _body(self) -> dict[str, object]:
        return {
            # Written only where there are some: an entry without has one spelling, the one of old.
            **({"withdrawn": dict(self.withdrawn)} if self.withdrawn else {}),
            **({"collected": self.collected} if self.collected else {}),
            **({"collecting": dict(self.collecting)} if self.collecting else {}),
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


def check_ref_name(name: str) -> None:
    """Refuse what cannot be written as ``root@name``.

    Raises:
        UsageError: Not a name for a ref or tag.
    """
    if _REF.fullmatch(name) is None:
        raise UsageError(
            f"ref or tag {name[:200]!r}: expected 1 to 100 of [A-Za-z0-9._-], starting with a letter or digit; use "
            "another name"
        )


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


def check_succession(earlier: LogEntry, earlier_bytes: bytes, later: LogEntry, where: str) -> None:
    """Whether `later` may follow `earlier`.

    Raises:
        IntegrityError: The chain is broken: an entry was changed, replaced or removed, or a tag was moved, or removed
            without a record of it.
    """
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
    """Refs to set or drop, tags to add or withdraw, and what must hold before."""

    refs: Mapping[str, str | None]
    """Name → manifest id, None to drop the ref."""
    tags: Mapping[str, str]
    expected: Mapping[str, str | None]
    """Name → what the ref must point at when the commit lands, None for "must not exist"."""
    withdraw: Mapping[str, str]
    """Tag → the manifest id that it has: the tag goes, for good, and the log says so."""

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

    def apply(self, base: LogEntry | None, head: LogEntry | None) -> dict[str, dict[str, str]]:
        """The tables of refs, tags and withdrawn tags after this commit.

        Args:
            base: The head when the commit began.
            head: The head now: the commit is rebased onto it where it touches other refs.

        Raises:
            CommitConflict: A ref is not where it was expected, or was moved since `base`; or a tag exists, or is to go
                and names something else, or the name is that of a withdrawn one.
        """
        head = head or NO_COMMIT
        refs, tags, gone = dict(head.refs), dict(head.tags), self._withdrawn(head)
        self._set_refs(refs, (base or NO_COMMIT).refs)
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
            # Where it stands already where it is to go, nobody loses anything: the same version was made twice.
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
