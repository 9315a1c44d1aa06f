"""Rows of the same key and content as some others, in any other shard that a repository holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from shardkit.dataset.rewriting import shard_pair, version_reader
from shardkit.dataset.store_survey import StoreSurvey
from shardkit.errors import FormatError, IntegrityError, NotFoundError
from shardkit.formats import Schema
from shardkit.reading.blocks import BlockReader
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version
from shardkit.stores.store import parse_object_name

_SHARD_KINDS = ("tar", "tar.zst", "arrow")
_SHOWN = 5

Places = dict[tuple[str, str], tuple[int, ...]]
"""(hex of the shard, hex of its index) → rows, ascending."""


def find_equal_rows(
    repository: Repository, version: Version, rows: Mapping[int, list[int]]
) -> tuple[Places, list[str]]:
    """All rows of a repository that are equal to some rows of a version in key and content.

    Other shards of the version itself are not searched: keys are unique in a dataset. Every other index is read, and of
    the shards the blocks that hold one of the keys.

    Returns:
        Where they lie, those asked for among them; and notes of what may hold the rows and could not be looked at, or
        must not be touched.
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
            notes.append(f"version {manifest.id} cannot be searched ({error})"[:500])
    if others:
        shown = "; ".join(sorted(others)[:_SHOWN])
        note = f"{len(others)} samples of the same key and other content stay (derived ones?): {shown}"
        notes.append(note[:800])
    return shards, notes + _orphans(survey)


def _content(reader: BlockReader, schema: Schema, shard: int, row: int) -> bytes:
    """SHA-256 over the fields of a row with their names, types and lengths: equal in every format and compression."""
    block, inside = reader.index(shard).block_of(row)
    payloads = zip(schema.stored.items(), reader.read(shard, block).payloads(inside), strict=True)
    digest = hashlib.sha256()
    for (name, kind), payload in sorted(payloads, key=lambda one: one[0][0]):
        digest.update(f"{name} {kind} {len(payload)}\n".encode())
        digest.update(payload)
    return digest.digest()


def _orphans(survey: StoreSurvey) -> list[str]:
    """Shards and indexes that nothing names: of builds that are under way, or were killed."""
    live = survey.live(without=set())
    orphans = sorted(
        name for name in survey.names - live if parse_object_name(name)[1] in (*_SHARD_KINDS, "index")
    )
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
