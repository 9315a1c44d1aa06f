"""Store and load versions of a dataset, with every byte of their metadata verified.

The location of a part of a merged version is not in the manifest but in a small document of the root,
``locations/<hex of the part's manifest>.json``. It is configuration, not data: it is replaced when a part moves, and
everything that is read from a part is verified against the merged manifest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shardkit.credentials import refuse_credentials
from shardkit.documents import Digest, Document, Name, decode, encode
from shardkit.errors import FormatError, NotFoundError, ShardkitError
from shardkit.extras import shell_word
from shardkit.manifest import (
    MIXED,
    Manifest,
    Selection,
    ShardTable,
    check_against,
    check_alignment,
    max_selection_bytes,
)
from shardkit.reading.adopted import AdoptedStore, with_adopted_files
from shardkit.reading.adopted_places import location_name, resolved
from shardkit.reading.inventory import read_pages, read_root, version_record_name
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import ROOT_NAME, Location
from shardkit.repository.repository import Repository
from shardkit.stores.store import Descriptor, Store, find_checked, object_name, put_over, scheme_of


class Part(NamedTuple):
    """Consecutive shards of a version that are stored in one repository."""

    name: str
    """Name in the merge; empty for the only part of a version that was not merged."""
    repository: Repository
    manifest: Manifest
    first_shard: int


@dataclass(frozen=True)
class Version:
    """A manifest with its table of shards, loaded and validated."""

    manifest: Manifest
    table: ShardTable
    parts: tuple[Part, ...]
    """Parts in the order of their shards."""
    added: tuple[Version, ...] = ()
    """Versions with further fields of the same rows (manifest/SPEC.md §5)."""
    selections: Mapping[int, Selection] | None = None
    """Selections by shard, of a version that is not stored; None: they are in the repository."""

    def part_of(self, shard: int) -> Part:
        firsts = [part.first_shard for part in self.parts]
        return self.parts[int(np.searchsorted(firsts, shard, side="right")) - 1]

    def load_selection(self, shard: int) -> Selection:
        """Load the selection of a shard, verified against its digest and the shard's segments.

        Raises:
            FormatError: The shard has no selection, or the selection does not fit the segments.
        """
        if self.selections is not None:
            return self.selections[shard]
        return load_shard_selection(self.part_of(shard).repository, self.table, shard)

    def mask(self, shard: int) -> NDArray[np.bool_]:
        """Return (rows,) bool, True for the selected rows of a shard."""
        if self.table.has_selection[shard]:
            return self.load_selection(shard).mask()
        return np.ones(int(self.table.rows[shard]), dtype=np.bool_)


def load_manifest(repository: Repository, manifest_id: str) -> Version:
    """Load and validate a manifest with its pages. Parts are found by the location documents of `repository`.

    Raises:
        NotFoundError: The manifest, a page or a part is missing.
        IntegrityError: An object does not have the bytes that its digest names.
        FormatError: A manifest or page is inconsistent in itself or with another.
    """
    manifest = read_root(repository.store, manifest_id)
    if not manifest.parts:
        return _load_pages(repository, manifest)
    parts: list[tuple[str, Version]] = []
    for name, part_id in manifest.parts:
        holder = find_part(repository, name, part_id)
        part = read_root(holder.store, part_id)
        if part.parts:
            raise FormatError(f"manifest {manifest_id}: part {name!r} is merged itself; do not trust it")
        parts.append((name, _load_pages(holder, part)))
    return merged_version(manifest, parts)


def merged_version(manifest: Manifest, parts: Sequence[tuple[str, Version]]) -> Version:
    """Return the version that consists of other versions, which must not be merged themselves."""
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
    table = ShardTable.concatenate(read_pages(repository.store, manifest))
    check_against(manifest, table)
    reader = repository.with_store(_store_of(repository.store, manifest, table))
    others = [read_root(repository.store, other) for other in manifest.added]
    if any(other.added for other in others):  # hostile roots could name ever more versions
        raise FormatError(f"manifest {manifest.id}: its added fields have added fields; do not trust it")
    added = tuple(_load_pages(repository, other) for other in others)
    check_alignment(manifest, table, [(one.manifest, one.table) for one in added])
    return Version(manifest, table, (Part("", reader, manifest, 0),), added)


# shards sampled to learn whether files are remote: files adopted together are mostly in one place
_ASKED: Final = 64


def _store_of(store: Store, manifest: Manifest, table: ShardTable) -> Store:
    """Return a store for reading a version: it finds adopted files and rebuilds lost objects from parity.

    A local root without parity, copies and remote files is returned as it is, or with its adopted files.
    """
    if manifest.adopted:
        store = with_adopted_files(store, manifest)
    if not isinstance(store, LocatedStore):
        is_far = False
        if isinstance(store, AdoptedStore):
            shards = range(0, len(table), max(1, len(table) // _ASKED))
            is_far = store.any_far(object_name(table.digest_text(shard), manifest.format) for shard in shards)
        if is_far or store.local_path(version_record_name(manifest.id)) is not None:
            store = LocatedStore([Location(name=ROOT_NAME, store=store, domain=store.url)])
    if isinstance(store, LocatedStore) and MIXED not in (manifest.format, manifest.compression):
        from shardkit.reading.parity.rebuilding import ParityReads  # imported late: few readers need it

        holders = [one.store for one in store.locations]
        return store.with_parity(ParityReads(holders, manifest, table, attempt_s=store.settings.attempt_s))
    return store


def put_manifest(repository: Repository, manifest: Manifest, pages: Sequence[bytes]) -> Descriptor:
    """Store the pages, then the manifest, durably. `Repository.commit` may then name the manifest."""
    for data in pages:
        repository.put_object(data, "page")
    return repository.put_object(manifest.to_bytes(), "manifest")


def load_selection(repository: Repository, digest: str, rows: int) -> Selection:
    """Load and verify a selection."""
    data = repository.get_object(digest, "selection", max_bytes=max_selection_bytes(rows))
    return Selection.from_bytes(data, rows)


def load_shard_selection(repository: Repository, table: ShardTable, shard: int) -> Selection:
    """Load the selection of a shard; see `Version.load_selection`."""
    digest = table.selection_digest_text(shard)
    if digest is None:
        raise FormatError(f"shard {shard} has no selection: all its rows are selected")
    selection = load_selection(repository, digest, int(table.rows[shard]))
    segments = table.segments_of(shard)
    borders = np.concatenate([[0], np.cumsum(table.segment_rows[segments])])
    if not np.array_equal(np.diff(selection.rank(borders)), table.segment_selected[segments]):
        raise FormatError(
            f"selection {digest} of shard {shard} selects other numbers of rows than the page says; do not trust it"
        )
    return selection


def put_selection(repository: Repository, selection: Selection) -> Descriptor:
    """Store a selection durably."""
    return repository.put_object(selection.to_bytes(), "selection")


_MAX_BYTES: Final = 64 * 2**10


class PartLocation(Document, frozen=True, tag="shardkit-location/1"):
    """Location of a part at the time of the merge."""

    manifest: Digest  # manifest id of the part
    part: Annotated[str, Meta(max_length=100)]  # name of the part in the merge
    repository: Annotated[str, Meta(max_length=36)]  # UUID of the part's repository
    # URLs to try, in order. A relative URL is relative to the root of the merged dataset, so that both may
    # move together.
    urls: Annotated[tuple[Name, ...], Meta(max_length=16)]

    def to_bytes(self) -> bytes:
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> PartLocation:
        return decode(cls, data, where, max_bytes=_MAX_BYTES)


def put_location(
    repository: Repository, name: str, manifest_id: str, holder: Repository
) -> PartLocation | None:
    """Record the location of a part. If the part is in `repository` itself, write nothing and return None."""
    if holder.url == repository.url:
        return None
    refuse_credentials(holder.url, f"the URL of part {name!r}")
    urls: tuple[str, ...] = (holder.url,)
    if not scheme_of(repository.url) and not scheme_of(holder.url):
        # The relative path first: if both roots were copied, the copy of the part is used, not the original.
        urls = (os.path.relpath(holder.url, repository.url), holder.url)
    location = PartLocation(manifest_id, name, holder.id, urls)
    put_over(repository.store, location_name(manifest_id), location.to_bytes())
    return location


def find_part(repository: Repository, name: str, manifest_id: str) -> Repository:
    """Return the repository of a part of a merged dataset: `repository` or the one in its location document.

    Raises:
        NotFoundError: No location document names the part, or the part is at none of its URLs.
    """
    if repository.store.head(object_name(manifest_id, "manifest")) is not None:
        return repository
    place_name = location_name(manifest_id)
    location = find_checked(repository.store, place_name, PartLocation.from_bytes, max_bytes=_MAX_BYTES)
    if location is None:
        raise NotFoundError(
            f"part {name!r} (manifest {manifest_id}) is not in {repository.url}, which does not say where it lies; "
            f"merge again with the place where it is: shardkit merge {name}=PLACE … {shell_word(repository.url)}"
        )
    tried = list(dict.fromkeys(resolved(repository.url, url) for url in location.urls))
    for place in tried:
        with contextlib.suppress(ShardkitError):
            found = Repository.open(place, read_only=True)
            if found.store.head(object_name(manifest_id, "manifest")) is not None:
                return found
    raise NotFoundError(
        f"part {name!r} (manifest {manifest_id}) of {repository.url} is gone from where it was: {', '.join(tried)}; "
        f"put it back, or merge again with the place where it is now: "
        f"shardkit merge {name}=PLACE … {shell_word(repository.url)}"
    )
