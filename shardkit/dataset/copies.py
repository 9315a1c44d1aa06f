"""Copies of rows: the same key with the same content, in any other shard that a repository holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shardkit.dataset.store_survey import StoreSurvey
from shardkit.errors import FormatError, IntegrityError, NotFoundError
from shardkit.manifest import Manifest, ShardTable
from shardkit.reading.blocks import BlockReader
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version
from shardkit.stores.store import parse_object_name

_SHARD_KINDS = ("tar", "tar.zst", "arrow")
_SHOWN = 5

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Copies:
    """Where rows lie.

    Attributes:
        shards: (hex of the shard, hex of its index) → rows, ascending; those asked for among them.
        notes: what may hold the rows and could not be looked at, or must not be touched.
    """

    shards: dict[Pair, tuple[int, ...]]
    notes: tuple[str, ...]


def find_copies(repository: Repository, version: Version, rows: Mapping[int, list[int]]) -> Copies:
    """All rows of a repository that are equal to some rows of a version in key and content.

    Other shards of the version itself are not searched: keys are unique in a dataset. Every other index is read, and of
    the shards the blocks that hold one of the keys.

    Args:
        repository: that holds the version.
        version: not merged.
        rows: shard → rows.
    """
    wanted: dict[str, bytes] = {}  # key → digest of the content
    shards: dict[Pair, tuple[int, ...]] = {}
    reader = _reader(repository, version.manifest, version.table)
    for shard, numbers in sorted(rows.items()):
        index = reader.index(shard)
        for row in numbers:
            wanted[index.key(row)] = _content(reader, version.manifest, shard, row)
        shards[_pair(version.table, shard)] = tuple(sorted(numbers))
    own = {_pair(version.table, shard) for shard in range(len(version.table))}
    survey = StoreSurvey(repository)
    notes = [f"{name} is damaged: what it refers to is not known" for name in survey.unreadable]
    notes += [*_source_names(version, reader, rows)]
    others: list[str] = []
    seen = set(own)
    for manifest in survey.manifests.values():
        try:
            table = survey.table(manifest)
            foreign = _reader(repository, manifest, table)
            for shard in range(len(table)):
                pair = _pair(table, shard)
                if pair in seen:
                    continue
                seen.add(pair)
                equal, different = _search(foreign, manifest, shard, wanted)
                if equal:
                    shards[pair] = tuple(equal)
                others += [f"{key} in {manifest.id}" for key in different]
        except (NotFoundError, IntegrityError, FormatError) as error:
            notes.append(f"version {manifest.id} cannot be searched ({error})"[:500])
    if others:
        shown = "; ".join(sorted(set(others))[:_SHOWN])
        notes.append(
            f"{len(set(others))} samples of the same key and other content stay (derived ones?): {shown}"[
                :800
            ]
        )
    notes += _orphans(survey)
    return Copies(shards, tuple(notes))


def _search(
    reader: BlockReader, manifest: Manifest, shard: int, wanted: Mapping[str, bytes]
) -> tuple[list[int], list[str]]:
    """Rows that are equal, and keys of rows that are not."""
    equal: list[int] = []
    different: list[str] = []
    for row, key in enumerate(reader.index(shard).keys()):
        if key in wanted:
            if _content(reader, manifest, shard, row) == wanted[key]:
                equal.append(row)
            else:
                different.append(key)
    return equal, different


def _content(reader: BlockReader, manifest: Manifest, shard: int, row: int) -> bytes:
    """SHA-256 over the fields of a row with their names, types and lengths: equal in every format and compression."""
    block, inside = reader.index(shard).block_of(row)
    digest = hashlib.sha256()
    for (name, kind), payload in zip(
        sorted(manifest.schema.stored.items()),
        _sorted_payloads(reader, manifest, shard, block, inside),
        strict=True,
    ):
        digest.update(f"{name} {kind} {len(payload)}\n".encode())
        digest.update(payload)
    return digest.digest()


def _sorted_payloads(
    reader: BlockReader, manifest: Manifest, shard: int, block: int, inside: int
) -> Iterator[bytes]:
    payloads = dict(zip(manifest.schema.stored, reader.read(shard, block).payloads(inside), strict=True))
    for name in sorted(payloads):
        yield payloads[name]


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


def _reader(repository: Repository, manifest: Manifest, table: ShardTable) -> BlockReader:
    return BlockReader(table, [repository], [0], [(manifest.format, manifest.compression)], "strong")


def _pair(table: ShardTable, shard: int) -> Pair:
    return np.asarray(table.digest[shard]).tobytes().hex(), np.asarray(
        table.index_digest[shard]
    ).tobytes().hex()
