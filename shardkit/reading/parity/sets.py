"""Which objects form a parity set, and the two documents and one header that say so (SPEC.md §2, §3)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from shardkit.errors import FormatError
from shardkit.formats.canonical_json import dumps
from shardkit.formats.digest import parse_digest, sha256_digest
from shardkit.manifest.json_fields import DIGEST, Fields, read_document
from shardkit.reading.parity.galois import MAX_MEMBERS
from shardkit.repository.object_access import MAX_OBJECT_BYTES
from shardkit.stores.store import EXTENSIONS, Descriptor

MAX_HEADER_BYTES: Final = 64 * 2**10
"""Of the header of a parity object."""

MAX_RECORD_BYTES: Final = 64 * 2**10
"""Of the document that tells of a set."""

MAX_MEMBER_BYTES: Final = MAX_OBJECT_BYTES - MAX_HEADER_BYTES
"""A larger object has no set: its parity would be larger than any store takes."""

_CODE: Final = "pq-11d"
_HEADER: Final = "shardkit-parity/1"
_SET: Final = "shardkit-parity-set/1"
_VERSION: Final = "shardkit-parity-version/1"
_PREFIX: Final = struct.Struct("<8sII")
_MAGIC: Final = b"SKPARITY"
_ALIGNMENT: Final = 64


@dataclass(frozen=True)
class ParitySet:
    """Up to 128 objects of which any two may be lost."""

    members: tuple[Descriptor, ...]

    @property
    def k(self) -> int:
        """Members; position k is P, k + 1 is Q."""
        return len(self.members)

    @cached_property
    def length(self) -> int:
        """Bytes of P and of Q, without headers: of the largest member."""
        return max(member.size for member in self.members)

    @cached_property
    def id(self) -> str:
        """``sha256:<hex>`` over code and members."""
        return sha256_digest(dumps({"code": _CODE, "members": _listed(self.members)}))

    @property
    def record_name(self) -> str:
        """Where the document of the set lies below the root."""
        return f"parity/sets/{parse_digest(self.id)}.json"

    def header(self, row: int) -> bytes:
        """The bytes before P (row 0) or Q (row 1); a function of the set alone."""
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
        """Where an object stands in the set, None where it is no member."""
        return next((i for i, member in enumerate(self.members) if member.digest == digest), None)


@dataclass(frozen=True)
class SetRecord:
    """What ``parity/sets/<hex>.json`` says: a set, and the digests of its P and Q."""

    set: ParitySet
    parity: tuple[str, str]

    def object_at(self, position: int) -> Descriptor:
        """The object at a position: members, then P, then Q."""
        if position < self.set.k:
            return self.set.members[position]
        return Descriptor(self.parity[position - self.set.k], self.set.parity_bytes, "parity")

    def position(self, digest: str) -> int | None:
        """Where an object stands, parity objects included."""
        if digest in self.parity:
            return self.set.k + self.parity.index(digest)
        return self.set.position(digest)

    def to_bytes(self) -> bytes:
        return dumps(
            {"format": _SET, "code": _CODE, "members": _listed(self.set.members), "parity": list(self.parity)}
        )

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> SetRecord:
        """Read a document.

        Raises:
            FormatError: Not one that shardkit writes.
        """
        fields = read_document(data, where, _SET, ("code", "members", "parity"), MAX_RECORD_BYTES)
        if fields.text("code", maximum=100) != _CODE:
            fields.refuse("has another code")
        parity = fields.texts("parity", maximum=2, longest=71)
        if len(parity) != 2 or not all(DIGEST.fullmatch(digest) for digest in parity):
            fields.refuse("expected the digests of P and Q")
        return cls(ParitySet(_members(fields)), (parity[0], parity[1]))


@dataclass(frozen=True)
class VersionRecord:
    """What ``parity/versions/<hex>.json`` says: how a version was cut into sets."""

    manifest: str
    members_per_set: int

    @property
    def name(self) -> str:
        return version_record_name(self.manifest)

    def to_bytes(self) -> bytes:
        return dumps({"format": _VERSION, "manifest": self.manifest, "members_per_set": self.members_per_set})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> VersionRecord:
        """Read a document.

        Raises:
            FormatError: Not one that shardkit writes.
        """
        fields = read_document(data, where, _VERSION, ("manifest", "members_per_set"), MAX_RECORD_BYTES)
        return cls(
            fields.digest("manifest"), fields.integer("members_per_set", minimum=1, maximum=MAX_MEMBERS)
        )


def version_record_name(manifest_id: str) -> str:
    """Where the document of a version lies below the root."""
    return f"parity/versions/{parse_digest(manifest_id)}.json"


def form_sets(row: Iterable[Descriptor], k: int) -> Iterator[ParitySet]:
    """Sets of k of a row of objects, in order; each digest once, none that is too large."""
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
    """The set and the row of a parity object.

    Args:
        data: The first bytes of the object; `MAX_HEADER_BYTES` of it, or all, are enough.
        object_bytes: Size of the whole object.
        where: How messages name it.

    Raises:
        FormatError: Not a header that shardkit writes, or one of an object of another size.
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
