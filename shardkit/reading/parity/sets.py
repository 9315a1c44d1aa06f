"""Parity sets: their members, headers, documents and parity objects (SPEC.md §2, §3)."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.formats.canonical_json import DIGEST, Fields, dumps, parse_digest, read_document, sha256_digest
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
_HEADER: Final = "shardkit-parity/1"
_SET: Final = "shardkit-parity-set/1"
_PREFIX: Final = struct.Struct("<8sII")
_MAGIC: Final = b"SKPARITY"
_ALIGNMENT: Final = 64


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
        return sha256_digest(dumps({"code": _CODE, "members": _listed(self.members)}))

    @property
    def record_name(self) -> str:
        """Name of the set's document in a root."""
        return f"parity/sets/{parse_digest(self.id)}.json"

    def header(self, row: int) -> bytes:
        """Return the header of P (row 0) or Q (row 1); it depends only on the set."""
        document = dumps(
            {
                "format": _HEADER,
                "code": _CODE,
                "members": _listed(self.members),
                "row": row,
                "size": self.length,
            }
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
        return dumps(
            {"format": _SET, "code": _CODE, "members": _listed(self.set.members), "parity": list(self.parity)}
        )

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> SetRecord:
        """Parse a set's document."""
        fields = read_document(data, where, _SET, ("code", "members", "parity"), MAX_RECORD_BYTES)
        if fields.text("code", maximum=100) != _CODE:
            fields.refuse("has another code")
        parity = fields.texts("parity", maximum=2, longest=71)
        if len(parity) != 2 or not all(DIGEST.fullmatch(digest) for digest in parity):
            fields.refuse("expected the digests of P and Q")
        return cls(ParitySet(_members(fields)), (parity[0], parity[1]))


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
    fields = read_document(document, where, _HEADER, ("code", "members", "row", "size"), MAX_HEADER_BYTES)
    row = fields.integer("row", maximum=1)
    found = ParitySet(_members(fields))
    expected = found.header(row)
    if data[: len(expected)] != expected or object_bytes != found.parity_bytes:
        fields.refuse(f"is not the header of a parity object of {object_bytes} bytes")
    return found, row


def _listed(members: Sequence[Descriptor]) -> list[list[str | int]]:
    return [[member.digest, member.extension, member.size] for member in members]


def _members(fields: Fields) -> tuple[Descriptor, ...]:
    found: list[Descriptor] = []
    for item in fields.items("members", maximum=MAX_MEMBERS):
        match item:
            case [str(digest), str(extension), int(size)] if (
                DIGEST.fullmatch(digest)
                and extension in EXTENSIONS
                and not isinstance(size, bool)
                and 0 <= size <= MAX_MEMBER_BYTES
            ):
                found.append(Descriptor(digest, size, extension))
            case _:
                fields.refuse("has a member that is no [digest, extension, size]")
    if not found or len({member.digest for member in found}) != len(found):
        fields.refuse("expected members, each once")
    return tuple(found)


SETS: Final = "parity/sets/"
VERSIONS: Final = "parity/versions/"


def sets_of(inventory: Inventory, k: int, small: Iterable[Descriptor] = ()) -> list[ParitySet]:
    """Return all sets of a version (SPEC.md §2).

    Args:
        inventory: objects of the version.
        k: members per set.
        small: `Inventory.small`, or nothing to leave out the sets of these objects.
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


def parity_names(store: Store, inventory: Inventory, *, stores: Sequence[Store] | None = None) -> set[str]:
    """Return the names of all parity objects and documents of a version, for garbage collection to keep.

    Empty for a version without parity. A set that is being encoded is included once its document is written.

    Args:
        store: store of the root.
        inventory: objects of the version.
        stores: stores to search for records if objects or documents are damaged; None to raise instead.
    """
    k = read_members(store, inventory.manifest.id)
    if k is None:
        return set()
    found = {version_record_name(inventory.manifest.id)}
    sets = (
        known_sets(store, inventory, k, stores) if stores else sets_of(inventory, k, inventory.small(store))
    )
    for one in sets:
        try:
            record = read_record(store, one)
        except (FormatError, IntegrityError):
            if stores is None:
                raise
            record = None
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
