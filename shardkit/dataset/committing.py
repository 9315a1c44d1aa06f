"""From written shards to a version: manifest, pages, selections of splits, and the commit that names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.layout import Layout, LayoutSettings
from shardkit.dataset.row_table import AllRows
from shardkit.dataset.selecting import put_selected, select_rows
from shardkit.dataset.shard_writing import WrittenShard
from shardkit.dataset.splits import Split, split_of
from shardkit.errors import ConfigurationError
from shardkit.formats import Schema
from shardkit.manifest import POOL, Manifest, ShardRecord, ShardTable, compose
from shardkit.storage import LogEntry, Repository, put_manifest

__all__ = ["MadeVersion", "NewVersion", "StratumNumbers", "commit_version", "make_manifest", "split_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """What a new version is to be, apart from its rows.

    Attributes:
        schema, format, compression: of the samples and shards; the compression normalised.
        axes: fields by which it is stratified.
        classes: names of the values of ``label``.
        settings: of the layout.
        split: named shares, or None.
        recipe: more settings that decide the bytes: JSON of texts, integers and booleans.
        sources: digest of the object that lists the source files, or None.
    """

    schema: Schema
    format: str
    compression: str
    axes: tuple[str, ...]
    classes: tuple[str, ...]
    settings: LayoutSettings
    split: Split | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    sources: str | None = None

    def build_settings(self) -> dict[str, Any]:
        """What the manifest says of how it was built."""
        return {
            **self.recipe,
            "seed": self.settings.seed,
            "shuffle": self.settings.shuffle,
            "shard_size": self.settings.shard_size,
            "block_size": self.settings.block_size,
        }


@dataclass(frozen=True, slots=True)
class MadeVersion:
    """A version whose objects are durable and that no ref names yet.

    Attributes:
        manifest: of all rows.
        splits: split → its manifest.
    """

    manifest: Manifest
    splits: Mapping[str, Manifest]


class StratumNumbers:
    """How the manifest numbers the strata: those with segments of their own, the pool, those in the pool.

    Attributes:
        own: values of the strata that have segments, the pool last where there is one.
        pool: number of the pool, or None.
        inside: values of the strata whose rows lie in the pool.
        of_stratum: int32[strata + 1], from the number in `AllRows` (last: the pool) to that in the manifest.
    """

    def __init__(self, strata: Sequence[tuple[str, ...]], pooled: NDArray[np.bool_]) -> None:
        own = np.flatnonzero(~pooled).tolist()
        inside = np.flatnonzero(pooled).tolist()
        self.pool = len(own) if len(inside) else None
        self.own = [strata[number] for number in own] + ([(POOL,)] if len(inside) else [])
        self.inside = [strata[number] for number in inside]
        self.of_stratum = np.zeros(len(strata) + 1, dtype=np.int32)
        self.of_stratum[own] = np.arange(len(own))
        self.of_stratum[inside] = len(own) + 1 + np.arange(len(inside))
        self.of_stratum[-1] = len(own)


def split_rows(version: NewVersion, rows: AllRows) -> NDArray[np.int16] | None:
    """int16[n], the split of each row in ordinal order; None without a split.

    Raises:
        ConfigurationError: a split would hold no row.
    """
    split = version.split
    if split is None:
        return None
    index = split_of(split, rows.table.identity, rows.split if split.by else None)
    for number, name in enumerate(split.names):
        if not (index == number).any():
            what = f"groups of equal {split.by!r}" if split.by else "rows"
            raise ConfigurationError(
                f"split {name!r} with the share {split.shares[number]} holds none of the {len(rows)} rows: "
                f"there are too few {what}; give it a larger share"
            )
    return index


def make_manifest(
    repository: Repository,
    version: NewVersion,
    rows: AllRows,
    layout: Layout,
    shards: Sequence[WrittenShard],
) -> MadeVersion:
    """Put the pages and manifests of a version whose shards are published.

    Args:
        repository: where the shards are.
        version: what it is to be.
        rows: all rows.
        layout: of the rows.
        shards: all shards, in shard order.

    Raises:
        StoreError: the store failed; no ref was moved.
    """
    numbers = StratumNumbers(rows.strata, layout.pooled)
    table = ShardTable.from_records(_record(shard, numbers) for shard in shards)
    counts = np.bincount(rows.table.stratum, minlength=len(rows.strata))
    in_pool = [int(count) for count in counts[layout.pooled]]
    manifest, pages = compose(
        table,
        schema=version.schema,
        format=version.format,
        compression=version.compression,
        axes=version.axes,
        strata=numbers.own,
        pool=numbers.pool,
        in_pool=[(values, n, n) for values, n in zip(numbers.inside, in_pool, strict=True)],
        classes=version.classes,
        sources=version.sources,
        build=version.build_settings(),
    )
    put_manifest(repository, manifest, pages)
    splits = _put_splits(repository, version, rows, layout, numbers, manifest, table)
    return MadeVersion(manifest, splits)


def commit_version(
    repository: Repository, made: MadeVersion, *, ref: str, message: str = "", author: str = ""
) -> LogEntry:
    """Move ``ref``, and one ref per split, to a version.

    Raises:
        CommitConflict, CommitUnknown, StoreError: see `Repository.commit`.
    """
    refs: dict[str, str | None] = {name: manifest.id for name, manifest in made.splits.items()}
    refs[ref] = made.manifest.id
    return repository.commit(refs, message=message or f"{made.manifest.rows} rows", author=author)


def _record(shard: WrittenShard, numbers: StratumNumbers) -> ShardRecord:
    return ShardRecord(
        digest=shard.shard.digest,
        size=shard.shard.size,
        index_digest=shard.index.digest,
        index_size=shard.index.size,
        block_rows=shard.block_rows,
        largest_block=shard.largest_block,
        raw_bytes=shard.raw_bytes,
        segment_stratum=numbers.of_stratum[shard.segment_stratum],
        segment_rows=shard.segment_rows,
    )


def _put_splits(
    repository: Repository,
    version: NewVersion,
    rows: AllRows,
    layout: Layout,
    numbers: StratumNumbers,
    manifest: Manifest,
    table: ShardTable,
) -> dict[str, Manifest]:
    split = version.split
    index = split_rows(version, rows)
    if split is None or index is None:
        return {}

    def row_strata(shard: int) -> NDArray[np.int32]:
        return numbers.of_stratum[rows.table.stratum[_ordinals(layout, shard)]]

    manifests = {}
    for number, name in enumerate(split.names):
        masks = {shard: index[_ordinals(layout, shard)] == number for shard in range(layout.shards)}
        noted = {"split": {**split.to_json(), "name": name}}
        selected, new_table, selections = select_rows(
            manifest, table, masks, row_strata=row_strata, build=noted
        )
        put_selected(repository, selected, new_table, selections)
        manifests[name] = selected
    return manifests


def _ordinals(layout: Layout, shard: int) -> NDArray[np.int64]:
    return layout.rows[layout.shard_start[shard] : layout.shard_start[shard + 1]]
