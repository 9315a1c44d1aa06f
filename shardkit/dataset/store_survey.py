"""Survey a repository: all manifests, named or not, the objects that they refer to, and equal rows.

Two rows are equal if they have the same key and the same content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import NoReturn

from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.extras import shell_word
from shardkit.formats import Schema
from shardkit.manifest import Manifest, PageRef, ShardTable, unpack_page
from shardkit.reading.blocks import BlockReader
from shardkit.reading.inventory import Inventory, read_root
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version
from shardkit.stores.store import object_name, parse_object_name

_OBJECTS = "objects/"


class StoreSurvey:
    """A listing of a repository's objects, with all manifests among them loaded.

    Objects are listed in the root, and read from any location with a good copy: a damaged manifest or page in
    the root must not make a version look as if it needed no objects.

    Attributes:
        repository: reads the root and all its locations.
        names: names of all objects.
        manifests: id → manifest of all readable manifests, named by a ref or tag or not.
        unreadable: names of damaged manifests; the objects that they refer to are unknown.
    """

    def __init__(self, repository: Repository) -> None:
        self.repository = Repository.open(repository.url, read_only=True)
        self.names: set[str] = set()
        self.manifests: dict[str, Manifest] = {}
        self.unreadable: list[str] = []
        self._pages: dict[str, ShardTable] = {}
        for name in repository.store.list_after(_OBJECTS):
            try:
                digest, kind = parse_object_name(name)
            except FormatError:
                continue  # a foreign file
            self.names.add(name)
            if kind == "manifest":
                self._load(digest, name)
        self._named = frozenset(repository.head().versions)
        # missing in the root, perhaps in another location
        for digest in sorted(self._named - self.manifests.keys()):
            self._load(digest, object_name(digest, "manifest"))

    def _load(self, digest: str, name: str) -> None:
        try:
            self.manifests[digest] = read_root(self.repository.store, digest)
        except (IntegrityError, FormatError):
            self.unreadable.append(name)
        except NotFoundError:
            self.names.discard(name)  # deleted since the listing

    def pages(self, manifest: Manifest) -> list[ShardTable]:
        """Return the pages of a manifest as tables."""
        return [self._page(ref, len(manifest.strata)) for ref in manifest.pages]

    def table(self, manifest: Manifest) -> ShardTable:
        return ShardTable.concatenate(self.pages(manifest))

    def _page(self, ref: PageRef, strata: int) -> ShardTable:
        found = self._pages.get(ref.digest)
        if found is None:
            data = self.repository.get_object(ref.digest, "page", ref.size)
            found = self._pages[ref.digest] = unpack_page(data, ref, strata=strata)
        return found

    def references(self, manifest: Manifest) -> Iterator[str]:
        """Return the names of the manifest and of all objects that it needs; parts are not followed."""
        return (name for name, _ in Inventory(manifest, tuple(self.pages(manifest))).names())

    def live(self, without: set[str]) -> set[str]:
        """Return the names that manifests other than ``without`` (ids) need.

        Raises:
            IntegrityError: A named version cannot be read.
        """
        for identity in sorted(self._named - without - self.manifests.keys()):
            self._refuse(identity, "its manifest is good nowhere")
        needed: set[str] = set()
        for identity, manifest in self.manifests.items():
            if identity not in without:
                try:
                    needed.update(self.references(manifest))
                except (NotFoundError, IntegrityError, FormatError) as error:
                    self.pass_over(identity, error)
        return needed

    def pass_over(self, identity: str, error: ShardkitError) -> None:
        """Return for a version that no ref or tag names: it is broken already, and nothing more can be lost.

        Raises:
            IntegrityError: A ref or tag names the version.
        """
        if identity in self._named:
            self._refuse(identity, str(error))

    def _refuse(self, identity: str, why: str) -> NoReturn:
        url = self.repository.url
        raise IntegrityError(
            f"version {identity} of {url} cannot be read, so that it is not known what it needs ({why}); nothing was "
            f"deleted; run: shardkit repair {shell_word(url)}, then: shardkit remove {shell_word(url)} --resume"
        )


ROW_KINDS = ("tar", "arrow", "rows", "index")
"""Kinds of objects that hold rows or keys."""

_SHOWN = 5

Places = dict[tuple[str, str], tuple[int, ...]]
"""(hex of the shard, hex of its index) → rows, ascending."""


def find_equal_rows(
    repository: Repository, version: Version, rows: Mapping[int, list[int]]
) -> tuple[Places, list[str]]:
    """Return all rows of a repository that are equal to some rows of a version.

    Other shards of the version itself are not searched, because keys are unique in a dataset. All other
    indexes are read, and of their shards the blocks with one of the keys.

    Returns:
        The rows, including the given ones; and notes on data that may hold the rows but could not be
        searched, or must stay.
    """
    wanted: dict[str, bytes] = {}  # key → digest of the content
    shards: Places = {}
    reader = version_reader(repository, version.manifest, version.table)
    for shard, numbers in sorted(rows.items()):
        index = reader.index(shard)
        for row in numbers:
            wanted[index.key(row)] = _content(reader, version.manifest.schema, shard, row)
        shards[shard_pair(version.table, shard)] = tuple(sorted(numbers))
    seen = {shard_pair(version.table, shard) for shard in range(len(version.table))}
    survey = StoreSurvey(repository)
    notes = [f"{name} is damaged: what it refers to is not known" for name in survey.unreadable]
    notes += _source_names(version, reader, rows)
    others: set[str] = set()
    for manifest in survey.manifests.values():
        try:
            table = survey.table(manifest)
            foreign = version_reader(repository, manifest, table)
            for shard in range(len(table)):
                if (pair := shard_pair(table, shard)) in seen:
                    continue
                seen.add(pair)
                found = {
                    row: _content(foreign, manifest.schema, shard, row) == wanted[key]
                    for row, key in enumerate(foreign.index(shard).keys())
                    if key in wanted
                }
                if any(found.values()):
                    shards[pair] = tuple(row for row, is_equal in found.items() if is_equal)
                keys = foreign.index(shard).key_texts
                others |= {f"{keys[row]} in {manifest.id}" for row, is_equal in found.items() if not is_equal}
        except (NotFoundError, IntegrityError, FormatError) as error:
            survey.pass_over(manifest.id, error)
            notes.append(f"version {manifest.id} cannot be searched ({error})"[:500])
    if others:
        shown = "; ".join(sorted(others)[:_SHOWN])
        note = f"{len(others)} samples of the same key and other content stay (derived ones?): {shown}"
        notes.append(note[:800])
    return shards, notes + _orphans(survey)


def _content(reader: BlockReader, schema: Schema, shard: int, row: int) -> bytes:
    """Return the SHA-256 of a row's fields, names, types and lengths: the same in every format."""
    block, inside = reader.index(shard).block_of(row)
    payloads = zip(schema.stored.items(), reader.read(shard, block).payloads(inside), strict=True)
    digest = hashlib.sha256()
    for (name, kind), payload in sorted(payloads, key=lambda one: one[0][0]):
        digest.update(f"{name} {kind} {len(payload)}\n".encode())
        digest.update(payload)
    return digest.digest()


def _orphans(survey: StoreSurvey) -> list[str]:
    """Return a note on shards and indexes that nothing names, from builds that are running or were killed."""
    live = survey.live(without=set())
    orphans = sorted(name for name in survey.names - live if parse_object_name(name)[1] in ROW_KINDS)
    if not orphans:
        return []
    shown = ", ".join(orphans[:_SHOWN]) + (" …" if len(orphans) > _SHOWN else "")
    return [
        f"{len(orphans)} objects that no version names may hold the rows (a build under way, or a killed one): {shown}"
    ]


def _source_names(version: Version, reader: BlockReader, rows: Mapping[int, list[int]]) -> Iterator[str]:
    if version.manifest.sources is None:
        return
    names = {
        source[0]
        for shard, numbers in rows.items()
        for row in numbers
        if (source := reader.index(shard).source(row)) is not None
    }
    if names:
        yield (
            f"the list of sources still has the names, sizes and SHA-256 of {len(names)} files that the rows came from"
        )


def shard_pair(table: ShardTable, shard: int) -> tuple[str, str]:
    """Return (hex of the shard, hex of its index), which identifies a shard in an erasure."""
    return bytes(table.digest[shard]).hex(), bytes(table.index_digest[shard]).hex()


def version_reader(repository: Repository, manifest: Manifest, table: ShardTable) -> BlockReader:
    """Return a reader of a version's shards, or of one of its pages, that verifies SHA-256."""
    return BlockReader(table, [repository.store], [0], [manifest.format], "strong")
