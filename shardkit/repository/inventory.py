"""All objects that a version needs in its root, with their sizes: what copies, scrubs, repairs and parity go by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from shardkit.errors import IntegrityError, NotFoundError, ShardkitError
from shardkit.formats import extension
from shardkit.manifest import MAX_MANIFEST_BYTES, MIXED, Manifest, ShardTable, unpack_page
from shardkit.reading.located_store import LocatedStore
from shardkit.repository.object_access import OpenedRoot
from shardkit.stores.objects import Descriptor, object_name

__all__ = ["Inventory", "shards_and_indexes", "take_inventory", "walk_versions"]


@dataclass(frozen=True)
class Inventory:
    """What a version needs, in rows of like objects; each row in manifest order, a digest may occur twice.

    Attributes:
        manifest: the version.
        shards: of this root; empty where the version was merged, whose parts' roots hold them.
        indexes: likewise.
        rest: pages, look-ups, the manifest: all that is small and of known size.
        unsized: (digest, extension) of selections, sources and abouts, whose size no page says.
        shard_rows: samples of each of `shards`.
    """

    manifest: Manifest
    shards: tuple[Descriptor, ...]
    indexes: tuple[Descriptor, ...]
    rest: tuple[Descriptor, ...]
    unsized: tuple[tuple[str, str], ...]
    shard_rows: tuple[int, ...] = ()

    def names(self) -> Iterator[tuple[str, int | None]]:
        """(object name, size where it is known) of everything."""
        for row in (self.rest, self.indexes, self.shards):
            for member in row:
                yield member.name, member.size
        for digest, kind in self.unsized:
            yield object_name(digest, kind), None

    def sized(self, repository: OpenedRoot) -> tuple[Descriptor, ...]:
        """`unsized` with sizes: of good bytes, for the size of damaged ones would name other sets of parity.

        Raises:
            NotFoundError, IntegrityError: one is gone or damaged in all locations.
        """
        return tuple(
            Descriptor(digest, _good_size(repository, digest, kind), kind) for digest, kind in self.unsized
        )


def _good_size(repository: OpenedRoot, digest: str, kind: str) -> int:
    """Bytes of an object; a checksum that the store keeps spares reading it."""
    stat = repository.store.head(object_name(digest, kind))
    if stat is not None and stat.sha256 is not None and f"sha256:{stat.sha256}" == digest:
        return stat.size
    return len(repository.get_object(digest, kind))


def take_inventory(repository: OpenedRoot, manifest_id: str) -> Inventory:
    """Read a manifest and its pages, verified, and list what they name.

    Raises:
        NotFoundError, IntegrityError, FormatError: the manifest or a page is gone or damaged.
    """
    data = repository.get_object(manifest_id, "manifest", max_bytes=MAX_MANIFEST_BYTES)
    manifest = Manifest.from_bytes(data)
    shards: list[Descriptor] = []
    indexes: list[Descriptor] = []
    rows: list[int] = []
    rest = [Descriptor(manifest_id, len(data), "manifest")]
    unsized = [
        (digest, kind)
        for digest, kind in ((manifest.sources, "sources"), (manifest.about, "about"))
        if digest
    ]
    rest += [
        Descriptor(piece.digest, piece.size, "lookup")
        for lookup in manifest.lookups
        for piece in lookup.pieces
    ]
    if not manifest.parts and MIXED not in (manifest.format, manifest.compression):
        for ref in manifest.pages:
            page = repository.get_object(ref.digest, "page", ref.size)
            rest.append(Descriptor(ref.digest, ref.size, "page"))
            table = unpack_page(page, ref, strata=len(manifest.strata))
            some_shards, some_indexes = shards_and_indexes(manifest, table)
            shards += some_shards
            rows += table.rows.tolist()
            indexes += some_indexes
            selected = np.flatnonzero(table.has_selection).tolist()
            unsized += [(table.selection_digest_text(i) or "", "selection") for i in selected]
    elif manifest.pages:
        raise IntegrityError(f"manifest {manifest_id} is merged and has pages of its own; do not trust it")
    return Inventory(
        manifest, tuple(shards), tuple(indexes), tuple(rest), tuple(dict.fromkeys(unsized)), tuple(rows)
    )


def walk_versions(
    repository: OpenedRoot, versions: Iterable[str], *, optional: bool = False
) -> Iterator[tuple[str, Inventory]]:
    """Versions, and those of their parts that lie in this root, each once; parts elsewhere are their roots' business.

    Args:
        repository: that holds them.
        versions: manifest ids.
        optional: pass over versions that are gone.

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
        yield version, inventory


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


def shards_and_indexes(
    manifest: Manifest, table: ShardTable
) -> tuple[tuple[Descriptor, ...], tuple[Descriptor, ...]]:
    """The shards of a page, or of a whole version that was not merged, and their indexes."""
    suffix = extension(manifest.format, manifest.compression)
    return (
        tuple(Descriptor(table.digest_text(i), int(table.size[i]), suffix) for i in range(len(table))),
        tuple(
            Descriptor(table.index_digest_text(i), int(table.index_size[i]), "index")
            for i in range(len(table))
        ),
    )
