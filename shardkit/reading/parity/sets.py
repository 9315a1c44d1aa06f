"""Parity sets: their members, headers, documents and parity objects (SPEC.md §2, §3)."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final, Literal

from msgspec import Meta

from shardkit.documents import (
    Digest,
    Document,
    Natural,
    decode,
    encode,
    parse_digest,
    seal,
    sha256_digest,
    unseal,
)
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.reading.inventory import (
    MAX_MEMBERS,
    MAX_RECORD_BYTES,
    Inventory,
    read_matching,
    read_members,
    version_record_name,
)
from shardkit.stores.store import (
    EXTENSIONS,
    MAX_OBJECT_BYTES,
    Descriptor,
    Store,
    object_name,
    parse_object_name,
)

MAX_HEADER_BYTES: Final = 64 * 2**10
"""Maximum size of the header of a parity object."""

MAX_MEMBER_BYTES: Final = MAX_OBJECT_BYTES - MAX_HEADER_BYTES
"""Maximum size of a member: the parity of a larger object would exceed what stores accept."""

_CODE: Final = "pq-11d"
_PREFIX: Final = struct.Struct("<8sII")
_MAGIC: Final = b"SKPARITY"
_ALIGNMENT: Final = 64

_Member = tuple[Digest, str, Annotated[int, Meta(ge=0, le=MAX_MEMBER_BYTES)]]
"""Digest, extension and size of a member."""


class _Members(Document, frozen=True, kw_only=True):
    code: Literal["pq-11d"]
    members: Annotated[tuple[_Member, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]

    def __post_init__(self) -> None:
        if any(extension not in EXTENSIONS for _, extension, _ in self.members):
            raise FormatError(f"members: expected the extensions {', '.join(sorted(EXTENSIONS))}")
        if len({digest for digest, _, _ in self.members}) != len(self.members):
            raise FormatError("members: expected each digest once")


class _Header(_Members, frozen=True, kw_only=True, tag="shardkit-parity/1"):
    row: Annotated[int, Meta(ge=0, le=1)]
    size: Natural


class _SetDocument(_Members, frozen=True, kw_only=True, tag="shardkit-parity-set/1"):
    parity: tuple[Digest, Digest]


@dataclass(frozen=True)
class ParitySet:
    """Members of a set: up to 128 objects that share two parity objects."""

    members: tuple[Descriptor, ...]

    @property
    def k(self) -> int:
        """Number of members; P has position k, and Q position k + 1."""
        return len(self.members)

    @cached_property
    def length(self) -> int:
        """Bytes of P and of Q without headers: the size of the largest member."""
        return max(member.size for member in self.members)

    @cached_property
    def id(self) -> str:
        """Identifier of the set: ``sha256:<hex>`` over code and members."""
        return sha256_digest(encode({"code": _CODE, "members": _member_fields(self.members)}))

    @property
    def record_name(self) -> str:
        """Name of the set's document in a root."""
        return f"parity/sets/{parse_digest(self.id)}.json"

    def header(self, row: int) -> bytes:
        """Return the header of P (row 0) or Q (row 1); it depends only on the set."""
        document = encode(
            _Header(code=_CODE, members=_member_fields(self.members), row=row, size=self.length)
        )
        data = _PREFIX.pack(_MAGIC, 1, len(document)) + document
        return data + bytes(-len(data) % _ALIGNMENT)

    @cached_property
    def header_bytes(self) -> int:
        return len(self.header(0))

    @property
    def parity_bytes(self) -> int:
        return self.header_bytes + self.length

    def position(self, digest: str) -> int | None:
        """Return the position of an object in the set, or None if it is not a member."""
        return next((i for i, member in enumerate(self.members) if member.digest == digest), None)


@dataclass(frozen=True)
class SetRecord:
    """A set and the digests of its P and Q, as stored in ``parity/sets/<hex>.json``."""

    set: ParitySet
    parity: tuple[str, str]

    def object_at(self, position: int) -> Descriptor:
        """Return the object at a position: members, then P, then Q."""
        if position < self.set.k:
            return self.set.members[position]
        return Descriptor(self.parity[position - self.set.k], self.set.parity_bytes, "parity")

    def position(self, digest: str) -> int | None:
        """Return the position of a member or parity object, or None if it is neither."""
        if digest in self.parity:
            return self.set.k + self.parity.index(digest)
        return self.set.position(digest)

    def to_bytes(self) -> bytes:
        return seal(_SetDocument(code=_CODE, members=_member_fields(self.set.members), parity=self.parity))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> SetRecord:
        """Parse a set's document."""
        found = unseal(_SetDocument, data, where, max_bytes=MAX_RECORD_BYTES)
        return cls(_set_of(found), found.parity)


def form_sets(row: Iterable[Descriptor], k: int) -> Iterator[ParitySet]:
    """Yield sets of k objects of a row, in order; skips repeated digests and objects that are too large."""
    chosen: dict[str, Descriptor] = {}
    seen: set[str] = set()
    for member in row:
        if member.digest in seen or member.size > MAX_MEMBER_BYTES:
            continue
        seen.add(member.digest)
        chosen[member.digest] = member
        if len(chosen) == k:
            yield ParitySet(tuple(chosen.values()))
            chosen = {}
    if chosen:
        yield ParitySet(tuple(chosen.values()))


def parse_header(data: bytes, object_bytes: int, where: str) -> tuple[ParitySet, int]:
    """Return the set and the row of a parity object, given its first bytes and its size.

    Raises:
        FormatError: the header is not the one of such a parity object.
    """
    if len(data) < _PREFIX.size:
        raise FormatError(f"{where}: {len(data)} bytes are no parity object; do not trust it")
    magic, version, length = _PREFIX.unpack_from(data)
    if (magic, version) != (_MAGIC, 1) or length > MAX_HEADER_BYTES - _PREFIX.size:
        raise FormatError(
            f"{where}: not a parity object of version 1; do not trust it, or use a newer shardkit"
        )
    document = data[_PREFIX.size : _PREFIX.size + length]
    header = decode(_Header, document, where, max_bytes=MAX_HEADER_BYTES)
    found = _set_of(header)
    expected = found.header(header.row)
    if data[: len(expected)] != expected or object_bytes != found.parity_bytes:
        raise FormatError(
            f"{where} is not the header of a parity object of {object_bytes} bytes; do not trust it"
        )
    return found, header.row


def _member_fields(members: Sequence[Descriptor]) -> tuple[_Member, ...]:
    return tuple((member.digest, member.extension, member.size) for member in members)


def _set_of(document: _Members) -> ParitySet:
    return ParitySet(
        tuple(Descriptor(digest, size, extension) for digest, extension, size in document.members)
    )


SETS: Final = "parity/sets/"


def sets_of(inventory: Inventory, k: int, small: Iterable[Descriptor] = ()) -> list[ParitySet]:
    """Return all sets of a version (SPEC.md §2).

    `small` is `Inventory.small`; without it, the sets of these objects are left out.
    """
    rows = (inventory.shards, inventory.indexes, sorted(small, key=lambda member: member.digest))
    return [found for row in rows for found in form_sets(row, k)]


def known_sets(store: Store, inventory: Inventory, k: int, stores: Sequence[Store]) -> list[ParitySet]:
    """Return all sets of a version, even if a small object of unknown size is lost.

    Without its size the sets of small objects cannot be computed. They are then taken from the documents and the
    headers of parity objects.
    """
    try:
        return sets_of(inventory, k, inventory.small(store))
    except (NotFoundError, IntegrityError):
        members = {one.digest for one in inventory.rest} | {digest for digest, _ in inventory.unsized}
    told = (record.set for record in find_records(stores))
    return sets_of(inventory, k) + [
        one for one in told if any(member.digest in members for member in one.members)
    ]


def read_record(store: Store, wanted: ParitySet) -> SetRecord | None:
    """Return the record of a set, or None if it has no document."""
    return read_matching(store, wanted.record_name, SetRecord.from_bytes, lambda found: found.set == wanted)


def parity_names(store: Store, inventory: Inventory) -> set[str]:
    """Return the names of all parity objects and documents of a version, for garbage collection to keep.

    Empty for a version without parity. A set that is being encoded is included once its document is written.
    """
    k = read_members(store, inventory.manifest.id)
    if k is None:
        return set()
    found = {version_record_name(inventory.manifest.id)}
    for one in sets_of(inventory, k, inventory.small(store)):
        record = read_record(store, one)
        if record is not None:
            found.add(one.record_name)
            found.update(object_name(digest, "parity") for digest in record.parity)
    return found


def find_records(stores: Sequence[Store]) -> Iterator[SetRecord]:
    """Yield all sets found without a manifest, from documents and from the headers of parity objects.

    For repairs after the loss of documents or manifests: the header of every parity object is read. Damaged data is
    skipped. A set without a document is found only if both P and Q are stored.
    """
    known: set[str] = set()
    for store in stores:
        for name in _names_below(store, SETS):
            with contextlib.suppress(ShardkitError):
                record = SetRecord.from_bytes(store.get(name, max_bytes=MAX_RECORD_BYTES), name)
                if record.set.record_name == name and record.set.id not in known:
                    known.add(record.set.id)
                    yield record
    rows: dict[str, tuple[ParitySet, dict[int, str]]] = {}
    for store in stores:
        for name in _names_below(store, "objects/"):
            if not name.endswith(".parity"):
                continue
            with contextlib.suppress(ShardkitError):
                found, row = _read_header(store, name)
                rows.setdefault(found.id, (found, {}))[1].setdefault(row, parse_object_name(name)[0])
    for found, parity in rows.values():
        if found.id not in known and len(parity) == 2:
            yield SetRecord(found, (parity[0], parity[1]))


def sets_that_hold(store: Store, digests: set[str]) -> Iterator[SetRecord]:
    """Yield sets with at least one of these members; an erasure must delete their parity too."""
    for record in find_records([store]):
        if any(member.digest in digests for member in record.set.members):
            yield record


def _names_below(store: Store, prefix: str) -> Iterator[str]:
    try:
        yield from store.list_after(prefix)
    except ShardkitError:
        return


def _read_header(store: Store, name: str) -> tuple[ParitySet, int]:
    stat = store.head(name)
    if stat is None:
        raise NotFoundError(f"{name} is not in {store.url}")
    data = store.get_range(name, 0, min(stat.size, MAX_HEADER_BYTES))
    return parse_header(data, stat.size, f"{name} in {store.url}")
