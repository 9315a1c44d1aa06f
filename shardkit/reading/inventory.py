"""All objects that a version needs in its root, with their sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from shardkit.errors import IntegrityError, NotFoundError, ShardkitError
from shardkit.formats import extension
from shardkit.formats.canonical_json import parse_digest
from shardkit.manifest import MAX_MANIFEST_BYTES, MIXED, Manifest, PageRef, ShardTable, unpack_page
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import OpenedRoot
from shardkit.stores.store import Descriptor, object_name

_READERS: Final = 8

Unreadable = Callable[[str, str, ShardkitError], None]
"""(object name, digest, error): told of a page that could not be read."""


@dataclass(frozen=True)
class Inventory:
    """What a version needs, in rows of like objects; each row in manifest order, a digest may occur twice.

    Attributes:
        manifest: the version.
        tables: its pages; none where the version was merged: the roots of its parts hold the shards.
    """

    manifest: Manifest
    tables: tuple[ShardTable, ...]

    @cached_property
    def shards(self) -> tuple[Descriptor, ...]:
        suffix = extension(self.manifest.format, self.manifest.compression) if self.tables else ""
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
        """The manifest, look-ups and pages: all that is small and of known size."""
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
        """(digest, extension) of sources, abouts and selections, whose size no page says."""
        found = [(digest, kind) for digest, kind, size in side_objects(self.manifest) if size is None]
        for table in self.tables:
            selected = np.flatnonzero(table.has_selection).tolist()
            found += [(table.selection_digest_text(i) or "", "selection") for i in selected]
        return tuple(dict.fromkeys(found))

    def names(self) -> Iterator[tuple[str, int | None]]:
        """(object name, size where it is known) of everything."""
        for row in (self.rest, self.indexes, self.shards):
            for member in row:
                yield member.name, member.size
        for digest, kind in self.unsized:
            yield object_name(digest, kind), None

    def small(self, repository: OpenedRoot) -> tuple[Descriptor, ...]:
        """`rest` and `unsized` with sizes: of good bytes, for the size of damaged ones would name other sets of parity.

        Raises:
            NotFoundError, IntegrityError: one is gone or damaged in all locations.
        """
        sized = (
            Descriptor(digest, _good_size(repository, digest, kind), kind) for digest, kind in self.unsized
        )
        return (*self.rest, *sized)


def side_objects(manifest: Manifest) -> Iterator[tuple[str, str, int | None]]:
    """(digest, extension, size where it is known) of what a manifest names beside its pages and shards."""
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


def _good_size(repository: OpenedRoot, digest: str, kind: str) -> int:
    """Bytes of an object; a checksum that the store keeps spares reading it."""
    stat = repository.store.head(object_name(digest, kind))
    if stat is not None and stat.sha256 is not None and f"sha256:{stat.sha256}" == digest:
        return stat.size
    return len(repository.get_object(digest, kind))


def version_record_name(manifest_id: str) -> str:
    """Where the document lies below the root that says how a version was cut into sets of parity."""
    return f"parity/versions/{parse_digest(manifest_id)}.json"


def read_root(repository: OpenedRoot, manifest_id: str) -> Manifest:
    """The root of a manifest, verified; its pages are not read.

    Raises:
        NotFoundError, IntegrityError, FormatError: it is missing, damaged or not a manifest.
    """
    return Manifest.from_bytes(repository.get_object(manifest_id, "manifest", max_bytes=MAX_MANIFEST_BYTES))


def read_pages(
    repository: OpenedRoot, manifest: Manifest, *, unreadable: Unreadable | None = None
) -> tuple[ShardTable, ...]:
    """The pages of a manifest, verified, in order.

    Args:
        repository: that holds them.
        manifest: their root.
        unreadable: told of each page that cannot be read, which is left out.

    Raises:
        NotFoundError, IntegrityError, FormatError: without `unreadable`, one is gone or damaged.
    """

    def read(ref: PageRef) -> ShardTable | ShardkitError:
        try:
            data = repository.get_object(ref.digest, "page", ref.size)
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
                told = f"page {number} of manifest {manifest.id} in {repository.url}: {page}"
                raise type(page)(told) from page
            unreadable(object_name(ref.digest, "page"), ref.digest, page)
    return tuple(page for page in found if isinstance(page, ShardTable))


def take_inventory(
    repository: OpenedRoot, manifest_id: str, *, unreadable: Unreadable | None = None
) -> Inventory:
    """Read a manifest and its pages; see `read_root` and `read_pages`."""
    manifest = read_root(repository, manifest_id)
    if manifest.parts or MIXED in (manifest.format, manifest.compression):
        if manifest.pages:
            raise IntegrityError(
                f"manifest {manifest_id} is merged and has pages of its own; do not trust it"
            )
        return Inventory(manifest, ())
    return Inventory(manifest, read_pages(repository, manifest, unreadable=unreadable))


def walk_versions(
    repository: OpenedRoot, versions: Iterable[str], *, optional: bool = False
) -> Iterator[Inventory]:
    """Versions, and those of their parts that lie in this root, each once; parts elsewhere are their roots' business.

    Raises:
        NotFoundError, IntegrityError, FormatError: a manifest or page is gone or damaged.
    """
    waiting, seen = sorted(versions), set[str]()
    while waiting:
        version = waiting.pop()
        if version in seen:
            continue
        seen.add(version)
        try:
            inventory = take_inventory(repository, version)
        except NotFoundError:
            if optional:
                continue
            raise
        waiting += [
            part for _, part in inventory.manifest.parts if part not in seen and _is_here(repository, part)
        ]
        yield inventory


def _is_here(repository: OpenedRoot, part: str) -> bool:
    """Whether a part lies in this root: its manifest is there, or a copy of the root has it."""
    name, store = object_name(part, "manifest"), repository.store
    if store.head(name) is not None:
        return True
    for location in store.locations[1:] if isinstance(store, LocatedStore) else ():
        with contextlib.suppress(ShardkitError):
            if location.holds == "objects" and location.store.head(name) is not None:
                return True
    return False
