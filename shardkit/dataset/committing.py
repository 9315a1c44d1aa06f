"""From written shards to a version: manifest, pages, selections of splits, and the commit that names them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.about import About, check_strata
from shardkit.dataset.appending import Base
from shardkit.dataset.layout import Layout, LayoutSettings
from shardkit.dataset.lookups import put_lookups
from shardkit.dataset.ref_moves import Moved, Standing, move_refs
from shardkit.dataset.row_table import AllRows
from shardkit.dataset.selecting import put_selected, select_rows
from shardkit.dataset.shard_writing import WrittenShard
from shardkit.dataset.splits import Split, split_of
from shardkit.errors import ConfigurationError
from shardkit.formats import Schema
from shardkit.manifest import (
    POOL,
    Lookup,
    Manifest,
    PageRef,
    ShardRecord,
    ShardTable,
    Stratum,
    check_against,
    paginate,
)
from shardkit.reading.blocks import BlockReader
from shardkit.repository.catalog import Version, put_manifest
from shardkit.repository.repository import Repository

__all__ = [
    "MadeVersion",
    "NewVersion",
    "StratumNumbers",
    "check_about",
    "commit_version",
    "make_manifest",
    "split_rows",
]


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
        about: licence, source and contact; None: what the base says.
        lookups: fields of which sidecars are made; of a base its own are carried on.
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
    about: About | None = None
    lookups: tuple[str, ...] = ()

    def refs(self, ref: str) -> tuple[str, ...]:
        """All refs that it moves, where ``ref`` is to name all rows."""
        return (ref, *(self.split.names if self.split else ()))

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
    """How the manifest numbers the strata.

    Those of the version that is appended to keep their numbers; then come the new ones with segments of their own, the
    pool where there is none yet, and the new ones in the pool.

    Attributes:
        listed: the strata in the manifest's order, with no rows counted.
        of_stratum: int32[strata + 1], from the number in `AllRows` (last: the pool) to that in the manifest.
    """

    def __init__(
        self,
        strata: Sequence[tuple[str, ...]],
        pooled: NDArray[np.bool_],
        before: Sequence[Stratum] = (),
    ) -> None:
        self.listed = [dataclasses.replace(stratum, rows=0, selected=0) for stratum in before]
        number = {stratum.values: place for place, stratum in enumerate(before)}

        def add(values: tuple[str, ...], *, pool: bool = False, in_pool: bool = False) -> None:
            if values not in number:
                number[values] = len(self.listed)
                self.listed.append(Stratum(values, 0, 0, pooled=pool, in_pool=in_pool))

        for values, inside in zip(strata, pooled.tolist(), strict=True):
            if not inside:
                add(values)
        if pooled.any():
            add((POOL,), pool=True)
        for values, inside in zip(strata, pooled.tolist(), strict=True):
            if inside:
                add(values, in_pool=True)
        pool = number.get((POOL,), 0)
        self.of_stratum = np.array([*(number[values] for values in strata), pool], dtype=np.int32)

    def counted(self, rows: AllRows, before: Sequence[Stratum] = ()) -> tuple[Stratum, ...]:
        """The strata with their rows, all of the new ones selected, those of ``before`` added."""
        counts = np.bincount(rows.table.stratum, minlength=len(rows.strata)).tolist()
        total = [0] * len(self.listed)
        for stratum, count in enumerate(counts):
            total[self.of_stratum[stratum]] += count
            if self.listed[self.of_stratum[stratum]].in_pool:
                total[self.of_stratum[-1]] += count
        base = [(stratum.rows, stratum.selected) for stratum in before]
        base += [(0, 0)] * (len(total) - len(base))
        return tuple(
            dataclasses.replace(stratum, rows=old + new, selected=selected + new)
            for stratum, new, (old, selected) in zip(self.listed, total, base, strict=True)
        )


def split_rows(version: NewVersion, rows: AllRows, *, allow_empty: bool = False) -> NDArray[np.int16] | None:
    """int16[n], the split of each row in ordinal order; None without a split.

    Raises:
        ConfigurationError: a split would hold no row (unless `allow_empty`: what is appended may be few).
    """
    split = version.split
    if split is None:
        return None
    index = split_of(split, rows.table.identity, rows.split if split.is_noted else None)
    for number, name in enumerate(split.names):
        if not allow_empty and not split.folders and not (index == number).any():
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
    base: Base | None = None,
) -> MadeVersion:
    """Put the pages and manifests of a version whose shards are published.

    Args:
        repository: where the shards are.
        version: what it is to be.
        rows: all new rows.
        layout: of the rows.
        shards: all new shards, in shard order.
        base: the version that they are appended to, or None.

    Raises:
        StoreError: the store failed; no ref was moved.
    """
    before = base.manifest.strata if base else ()
    numbers = StratumNumbers(rows.strata, layout.pooled, before)
    table = ShardTable.from_records(_record(shard, numbers) for shard in shards)
    pages = paginate(table)
    manifest = _root(version, numbers.counted(rows, before), table, [ref for ref, _ in pages], base)
    manifest = dataclasses.replace(
        manifest,
        about=_put_about(repository, version, base),
        lookups=_put_lookups(repository, version, table, base),
    )
    if base is not None:
        table = ShardTable.concatenate([base.version.table, table])
    Manifest.from_bytes(manifest.to_bytes())  # nobody may write what nobody will read
    check_against(manifest, table)
    put_manifest(repository, manifest, [data for _, data in pages])
    splits = _put_splits(repository, version, rows, layout, numbers, manifest, table, base)
    return MadeVersion(manifest, splits)


def check_about(version: NewVersion, rows: AllRows, base: Base | None) -> None:
    """Refuse an ``about`` that speaks of strata which the version will not have.

    Raises:
        ConfigurationError: names the nearest stratum.
    """
    if version.about is not None:
        names = {Stratum(values, 0, 0).name for values in rows.strata}
        names |= {stratum.name for stratum in base.manifest.strata if not stratum.pooled} if base else set()
        check_strata(version.about, names)


def _put_about(repository: Repository, version: NewVersion, base: Base | None) -> str | None:
    if version.about is None:
        return base.manifest.about if base else None
    return repository.put_object(version.about.to_bytes(), "about").digest


def _put_lookups(
    repository: Repository, version: NewVersion, table: ShardTable, base: Base | None
) -> tuple[Lookup, ...]:
    """The sidecars: new pieces of the new shards, behind those of the base."""
    held = base.manifest.lookups if base else ()
    fields = tuple(lookup.field for lookup in held) if base else version.lookups
    if not fields:
        return ()
    reader = BlockReader(table, [repository], [0], [(version.format, version.compression)])
    new = put_lookups(repository, reader, table, fields)
    before = {lookup.field: lookup.pieces for lookup in held}
    return tuple(Lookup(lookup.field, before.get(lookup.field, ()) + lookup.pieces) for lookup in new)


def _root(
    version: NewVersion,
    strata: tuple[Stratum, ...],
    table: ShardTable,
    pages: Sequence[PageRef],
    base: Base | None,
) -> Manifest:
    """The manifest of new shards, behind those of the base if there is one, whose pages stay as they are."""
    own = base.manifest if base else None
    rows = sum(table.rows.tolist())
    build = version.build_settings()
    return Manifest(
        schema=version.schema,
        format=version.format,
        compression=version.compression,
        axes=version.axes,
        strata=strata,
        shards=len(table) + (own.shards if own else 0),
        rows=rows + (own.rows if own else 0),
        selected=rows + (own.selected if own else 0),
        raw_bytes=sum(table.raw_bytes.tolist()) + (own.raw_bytes if own else 0),
        stored_bytes=sum(table.size.tolist()) + (own.stored_bytes if own else 0),
        pages=(*(own.pages if own else ()), *pages),
        classes=version.classes,
        sources=version.sources or (own.sources if own else None),
        build={**own.build, "append": {**build, "rows": rows}} if own else build,
        parent=own.id if own else None,
        features=own.features if own else (),
    )


def commit_version(
    repository: Repository,
    made: MadeVersion,
    *,
    ref: str,
    expected: Standing | None,
    message: str = "",
    author: str = "",
) -> Moved:
    """Move ``ref``, and one ref per split, to a version.

    Args:
        repository: where its objects are.
        made: the version.
        ref: that names all rows.
        expected: where the refs stood when the version was begun; see `move_refs`.
        message: of the commit.
        author: of the commit.

    Raises:
        CommitConflict, CommitUnknown, StoreError: see `move_refs`.
    """
    wanted = {name: manifest.id for name, manifest in made.splits.items()} | {ref: made.manifest.id}
    said = message or f"{made.manifest.rows} rows"
    return move_refs(repository, wanted, expected, message=said, author=author)


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
    base: Base | None,
) -> dict[str, Manifest]:
    split = version.split
    index = split_rows(version, rows, allow_empty=base is not None)
    if split is None or index is None:
        return {}
    first = len(base.version.table) if base else 0

    def row_strata(shard: int) -> NDArray[np.int32] | None:
        if base is not None and shard < first:
            return base.row_strata.get(shard)
        return numbers.of_stratum[rows.table.stratum[_places(layout, shard - first)]]

    manifests = {}
    for number, name in enumerate(split.names):
        masks = {first + shard: index[_places(layout, shard)] == number for shard in range(layout.shards)}
        masks |= {shard: _mask(base.splits[name], shard) for shard in range(first)} if base else {}
        noted = {"split": {**split.to_json(), "name": name}}
        selected, new_table, selections = select_rows(
            manifest, table, masks, row_strata=row_strata, build=noted
        )
        put_selected(repository, selected, new_table, selections)
        manifests[name] = selected
    return manifests


def _mask(version: Version, shard: int) -> NDArray[np.bool_]:
    if version.table.has_selection[shard]:
        return version.load_selection(shard).mask()
    return np.ones(int(version.table.rows[shard]), dtype=np.bool_)


def _places(layout: Layout, shard: int) -> NDArray[np.int64]:
    """Places in `AllRows` of the rows of a shard."""
    return layout.rows[layout.shard_start[shard] : layout.shard_start[shard + 1]]
