"""Inventory of the objects that a version needs in its root; readers of manifests and parity records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final, TypeVar

import numpy as np
from msgspec import Meta

from shardkit.documents import Digest, Document, parse_digest, seal, unseal
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.manifest import MAX_MANIFEST_BYTES, MIXED, Manifest, PageRef, ShardTable, unpack_page
from shardkit.reading.located_store import LocatedStore
from shardkit.stores.store import Descriptor, Store, find_checked, object_name, read_object

_READERS: Final = 8

Unreadable = Callable[[str, str, ShardkitError], None]
"""Called with (object name, digest, error) of a page that could not be read."""


@dataclass(frozen=True)
class Inventory:
    """Objects that a version needs, by kind; in manifest order, and a digest may occur twice.

    Attributes:
        manifest: manifest of the version.
        tables: its pages; empty for a merged version, whose shards are in the roots of its parts.
    """

    manifest: Manifest
    tables: tuple[ShardTable, ...]

    @cached_property
    def shards(self) -> tuple[Descriptor, ...]:
        suffix = self.manifest.format if self.tables else ""
        return tuple(
            Descriptor(table.digest_text(i), int(table.size[i]), suffix)
            for table in self.tables
            for i in range(len(table))
        )

    @cached_property
    def indexes(self) -> tuple[Descriptor, ...]:
        return tuple(
            Descriptor(table.index_digest_text(i), int(table.index_size[i]), "index")
            for table in self.tables
            for i in range(len(table))
        )

    @property
    def shard_rows(self) -> list[int]:
        return [rows for table in self.tables for rows in table.rows.tolist()]

    @cached_property
    def rest(self) -> tuple[Descriptor, ...]:
        """The small objects of known size: manifest, look-ups, costs and pages."""
        manifest = self.manifest
        return (
            Descriptor(manifest.id, len(manifest.to_bytes()), "manifest"),
            *(
                Descriptor(digest, size, kind)
                for digest, kind, size in side_objects(manifest)
                if size is not None
            ),
            *(Descriptor(ref.digest, ref.size, "page") for ref in manifest.pages),
        )

    @cached_property
    def unsized(self) -> tuple[tuple[str, str], ...]:
        """(digest, extension) of sources, abouts and selections, whose sizes the manifest does not record."""
        found = [(digest, kind) for digest, kind, size in side_objects(self.manifest) if size is None]
        for table in self.tables:
            selected = np.flatnonzero(table.has_selection).tolist()
            found += [(table.selection_digest_text(i) or "", "selection") for i in selected]
        return tuple(dict.fromkeys(found))

    def names(self) -> Iterator[tuple[str, int | None]]:
        """Yield (object name, size, or None if unknown) of every object."""
        for row in (self.rest, self.indexes, self.shards):
            for member in row:
                yield member.name, member.size
        for digest, kind in self.unsized:
            yield object_name(digest, kind), None

    def small(self, store: Store) -> tuple[Descriptor, ...]:
        """Return the objects of `rest`, and of `unsized` with the sizes of their good copies.

        A parity set is named after sizes too, so a wrong size would name another set.
        """
        sized = (Descriptor(digest, _good_size(store, digest, kind), kind) for digest, kind in self.unsized)
        return (*self.rest, *sized)


def side_objects(manifest: Manifest) -> Iterator[tuple[str, str, int | None]]:
    """Yield (digest, extension, size or None) of the objects in a manifest other than pages and shards."""
    if manifest.sources is not None:
        yield manifest.sources, "sources", None
    if manifest.about is not None:
        yield manifest.about, "about", None
    for lookup in manifest.lookups:
        for piece in lookup.pieces:
            yield piece.digest, "lookup", piece.size
    for costs in manifest.costs:
        for part in costs.pieces:
            yield part.digest, "cost", part.size


def _good_size(store: Store, digest: str, kind: str) -> int:
    """Return the size of an object in bytes; reads the object only if the store keeps no matching checksum."""
    stat = store.head(object_name(digest, kind))
    if stat is not None and stat.sha256 is not None and f"sha256:{stat.sha256}" == digest:
        return stat.size
    return len(read_object(store, digest, kind))


def version_record_name(manifest_id: str) -> str:
    """Return the name of the document that records how a version is divided into parity sets."""
    return f"parity/versions/{parse_digest(manifest_id)}.json"


MAX_RECORD_BYTES: Final = 64 * 2**10
"""Maximum size of a parity document."""
MAX_MEMBERS: Final = 128
"""Maximum number of members of a parity set."""
_Found = TypeVar("_Found")


class _VersionRecord(Document, frozen=True, kw_only=True, tag="shardkit-parity-version/1"):
    manifest: Digest
    members_per_set: Annotated[int, Meta(ge=1, le=MAX_MEMBERS)]


def version_record(manifest_id: str, members: int) -> bytes:
    """Return the bytes of the document that records the members per parity set of a version."""
    return seal(_VersionRecord(manifest=manifest_id, members_per_set=members))


def parse_version_record(data: bytes, where: str) -> tuple[str, int]:
    """Parse a version record and return (manifest id, members per set)."""
    record = unseal(_VersionRecord, data, where, max_bytes=MAX_RECORD_BYTES)
    return record.manifest, record.members_per_set


def read_members(store: Store, manifest_id: str) -> int | None:
    """Return the members per parity set of a version, or None if it has no parity."""
    name = version_record_name(manifest_id)
    found = read_matching(store, name, parse_version_record, lambda found: found[0] == manifest_id)
    return None if found is None else found[1]


def read_matching(
    store: Store, name: str, parse: Callable[[bytes, str], _Found], is_wanted: Callable[[_Found], bool]
) -> _Found | None:
    """Return the parsed parity document, or None if it does not exist.

    Raises:
        FormatError: `is_wanted` rejects the document.
    """

    def parse_with_size(data: bytes, where: str) -> _Found:
        found = parse(data, where)
        if not is_wanted(found):
            raise FormatError(f"{where} is of another version or set; do not trust it")
        return found

    return find_checked(store, name, parse_with_size, max_bytes=MAX_RECORD_BYTES)


def first_good(stores: Sequence[Store], ask: Callable[[Store], _Found | None]) -> _Found | None:
    """Return the first result of `ask` that is neither None nor an error; None if there is no such result."""
    for store in stores:
        with contextlib.suppress(ShardkitError):
            found = ask(store)
            if found is not None:
                return found
    return None


def read_root(store: Store, manifest_id: str) -> Manifest:
    """Read and verify a manifest, without its pages."""
    return Manifest.from_bytes(read_object(store, manifest_id, "manifest", max_bytes=MAX_MANIFEST_BYTES))


def read_pages(
    store: Store, manifest: Manifest, *, unreadable: Unreadable | None = None
) -> tuple[ShardTable, ...]:
    """Read and verify the pages of a manifest.

    `unreadable` is called for each page that cannot be read, which is then left out; without it, the error is raised.

    Returns:
        The pages, in order.
    """

    def read(ref: PageRef) -> ShardTable | ShardkitError:
        try:
            data = read_object(store, ref.digest, "page", ref.size)
            return unpack_page(data, ref, strata=len(manifest.strata))
        except ShardkitError as error:
            return error

    if len(manifest.pages) < 2:
        found = list(map(read, manifest.pages))
    else:
        with ThreadPoolExecutor(_READERS, thread_name_prefix="shardkit-pages") as pool:
            found = list(pool.map(read, manifest.pages))
    for number, (ref, page) in enumerate(zip(manifest.pages, found, strict=True)):
        if isinstance(page, ShardkitError):
            if unreadable is None:
                told = f"page {number} of manifest {manifest.id} in {store.url}: {page}"
                raise type(page)(told) from page
            unreadable(object_name(ref.digest, "page"), ref.digest, page)
    return tuple(page for page in found if isinstance(page, ShardTable))


def take_inventory(store: Store, manifest_id: str, *, unreadable: Unreadable | None = None) -> Inventory:
    """Read a manifest and its pages; see `read_root` and `read_pages`.

    Raises:
        IntegrityError: the version is merged but has pages.
    """
    manifest = read_root(store, manifest_id)
    if manifest.parts or MIXED in (manifest.format, manifest.compression):
        if manifest.pages:
            raise IntegrityError(
                f"manifest {manifest_id} is merged and has pages of its own; do not trust it"
            )
        return Inventory(manifest, ())
    return Inventory(manifest, read_pages(store, manifest, unreadable=unreadable))


def walk_versions(
    store: Store, versions: Iterable[str], *, lost: dict[str, str] | None = None
) -> Iterator[Inventory]:
    """Yield the inventories of versions, of their added fields, and of their parts in this root, each once.

    If no location has the manifest and all pages of a version, the version is skipped and added to `lost` with the
    reason; without `lost`, the error is raised.
    """
    waiting, seen = sorted(versions), set[str]()
    while waiting:
        version = waiting.pop()
        if version in seen:
            continue
        seen.add(version)
        try:
            inventory = take_inventory(store, version)
        except (NotFoundError, IntegrityError, FormatError) as error:
            if lost is None:
                raise
            lost[version] = str(error)
            continue
        waiting += [one for one in inventory.manifest.added if one not in seen]
        waiting += [
            part for _, part in inventory.manifest.parts if part not in seen and _is_here(store, part)
        ]
        yield inventory


def _is_here(store: Store, part: str) -> bool:
    """Return True if this root, or a copy of it, holds the manifest of a part."""
    name = object_name(part, "manifest")
    if store.head(name) is not None:
        return True
    for location in store.locations[1:] if isinstance(store, LocatedStore) else ():
        with contextlib.suppress(ShardkitError):
            if location.store.head(name) is not None:
                return True
    return False
