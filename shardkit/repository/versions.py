"""Versions of a dataset in a repository: putting one, and loading one with every byte of it verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkit.errors import FormatError
from shardkit.manifest import (
    Manifest,
    Selection,
    ShardTable,
    check_against,
    max_selection_bytes,
)
from shardkit.reading.adopted import store_of_version, with_adopted_tars
from shardkit.reading.inventory import read_pages, read_root
from shardkit.repository.part_locations import find_part
from shardkit.repository.repository import Repository
from shardkit.stores.store import Descriptor


@dataclass(frozen=True)
class Part:
    """Where some of a version's shards lie; a version that was not merged has one part."""

    name: str
    """Empty for the only part of a version that was not merged."""
    repository: Repository
    manifest: Manifest
    first_shard: int


@dataclass(frozen=True)
class Version:
    """A manifest with its table, loaded and checked."""

    manifest: Manifest
    table: ShardTable
    parts: tuple[Part, ...]
    """In shard order."""

    def part_of(self, shard: int) -> Part:
        firsts = [part.first_shard for part in self.parts]
        return self.parts[int(np.searchsorted(firsts, shard, side="right")) - 1]

    def load_selection(self, shard: int) -> Selection:
        """The selection of a shard that has one, verified against its digest and the shard's segments.

        Raises:
            IntegrityError: Its bytes are not those that the page names.
            FormatError: It selects other numbers of rows than the page says, or the shard has none.
        """
        return load_shard_selection(self.part_of(shard).repository, self.table, shard)


def load_manifest(repository: Repository, manifest_id: str) -> Version:
    """Load a manifest with its pages, verified down to the last column; parts lie where `repository` remembers.

    Raises:
        NotFoundError: The manifest or one of its pages is not there.
        IntegrityError: Bytes are not those that were written.
        FormatError: A root or page contradicts itself or another; the message names it.
    """
    manifest = read_root(repository, manifest_id)
    if not manifest.parts:
        return _load_pages(repository, manifest)
    parts: list[tuple[str, Version]] = []
    for name, part_id in manifest.parts:
        holder = find_part(repository, name, part_id)
        part = read_root(holder, part_id)
        if part.parts:
            raise FormatError(f"manifest {manifest_id}: part {name!r} is merged itself; do not trust it")
        parts.append((name, _load_pages(holder, part)))
    return merged_version(manifest, parts)


def with_adopted(repository: Repository, manifest: Manifest) -> Repository:
    """The repository as a reader of `manifest` needs it: one that finds adopted tars, where the manifest has any."""
    return repository.with_store(with_adopted_tars(repository.store, manifest))


def merged_version(manifest: Manifest, parts: Sequence[tuple[str, Version]]) -> Version:
    """The version that consists of others, which were not merged themselves.

    Raises:
        FormatError: The manifest says something else of them.
    """
    held: list[Part] = []
    offsets: list[int] = []
    first_shard = first_stratum = 0
    for name, version in parts:
        held.append(Part(name, version.parts[0].repository, version.manifest, first_shard))
        offsets.append(first_stratum)
        first_shard += version.manifest.shards
        first_stratum += len(version.manifest.strata)
    table = ShardTable.concatenate([version.table for _, version in parts], stratum_offsets=offsets)
    check_against(manifest, table)
    return Version(manifest, table, tuple(held))


def _load_pages(repository: Repository, manifest: Manifest) -> Version:
    table = ShardTable.concatenate(read_pages(repository, manifest))
    check_against(manifest, table)
    reader = repository.with_store(store_of_version(repository.store, manifest, table))
    return Version(manifest, table, (Part("", reader, manifest, 0),))


def put_manifest(repository: Repository, manifest: Manifest, pages: Sequence[bytes]) -> Descriptor:
    """Put the pages, then the root, durably; `Repository.commit` may then name it.

    Args:
        repository: Where to.
        manifest: The root.
        pages: Bytes of all its pages that are not in the repository yet, in any order.
    """
    for data in pages:
        repository.put_object(data, "page")
    return repository.put_object(manifest.to_bytes(), "manifest")


def load_selection(repository: Repository, digest: str, rows: int) -> Selection:
    """A selection, verified."""
    data = repository.get_object(digest, "selection", max_bytes=max_selection_bytes(rows))
    return Selection.from_bytes(data, rows)


def load_shard_selection(repository: Repository, table: ShardTable, shard: int) -> Selection:
    """The selection of a shard that has one; see `Version.load_selection`."""
    digest = table.selection_digest_text(shard)
    if digest is None:
        raise FormatError(f"shard {shard} has no selection: all its rows are selected")
    selection = load_selection(repository, digest, int(table.rows[shard]))
    segments = slice(int(table.segment_starts[shard]), int(table.segment_starts[shard + 1]))
    borders = np.concatenate([[0], np.cumsum(table.segment_rows[segments])])
    if not np.array_equal(np.diff(selection.rank(borders)), table.segment_selected[segments]):
        raise FormatError(
            f"selection {digest} of shard {shard} selects other numbers of rows than the page says; do not trust it"
        )
    return selection


def put_selection(repository: Repository, selection: Selection) -> Descriptor:
    """Put a selection, durably."""
    return repository.put_object(selection.to_bytes(), "selection")
