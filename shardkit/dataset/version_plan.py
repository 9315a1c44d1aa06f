"""Plan a version before its shards are written: settings, schema, and the place of every row.

An append puts new rows in new shards after the base's, whose pages stay as they are (SPEC.md §7).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.about import About, check_strata, given_about
from shardkit.dataset.costs import parse_costs
from shardkit.dataset.encoding import RowEncoder, key_identity
from shardkit.dataset.layout import (
    BLOCK_BYTES,
    Layout,
    LayoutSettings,
    Split,
    folder_split,
    lay_out,
    parse_split,
    split_of,
)
from shardkit.dataset.lookups import parse_lookup
from shardkit.dataset.rows import Rows, ShardRows
from shardkit.dataset.scratch import ScratchReader, describe_row
from shardkit.errors import ConfigurationError, SampleError, UsageError
from shardkit.extras import shell_word
from shardkit.formats import FieldType, Schema, ShardIndex, generated_key, normalise_compression
from shardkit.manifest import POOL, Manifest, Stratum
from shardkit.ranges import names_of, parse_size
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version, load_manifest

LEAST_FILE_BYTES = 4096
"""Mean bytes of a row's files from which a tar's headers and padding no longer matter."""

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """Description of a new version, apart from its rows."""

    schema: Schema
    format: str
    compression: str  # normalised
    axes: tuple[str, ...]  # fields to stratify by
    classes: tuple[str, ...]  # names of the values of `label`
    settings: LayoutSettings
    split: Split | None = None
    # further settings that decide the bytes: plain JSON
    recipe: Mapping[str, Any] = field(default_factory=dict)
    sources: str | None = None  # digest of the object that lists the source files
    about: About | None = None  # licence, source and contact; None: as in the base
    # fields with look-ups; an append keeps its base's, also for costs
    lookups: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()  # cost expressions

    def refs(self, ref: str) -> tuple[str, ...]:
        """Return all refs that the version moves; ``ref`` names all rows."""
        return (ref, *(self.split.names if self.split else ()))

    def build_settings(self) -> dict[str, Any]:
        """Return the manifest's `build` entry."""
        return {
            **self.recipe,
            "seed": self.settings.seed,
            "shuffle": self.settings.shuffle,
            "shard_size": self.settings.shard_size,
            "block_size": self.settings.block_size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSettings:
    """Settings of a version, shared by `create`, `build`, `rebuild` and parts; validated when made.

    Raises:
        ConfigurationError, UsageError: A setting is invalid.
    """

    stratify: str | Sequence[str] | None = None
    format: str | None = None  # None, as for compression: see `for_rows`
    compression: str | None = None
    shard_size: int | str = "256MiB"
    block_size: int | str | None = None
    seed: int = 0
    shuffle: bool = True
    split: Mapping[str, float | str] | None = None
    split_by: str | None = None
    about: About | Mapping[str, Any] | str | os.PathLike[str] | None = None
    lookup: str | Sequence[str] = ()
    cost: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.split_by is not None and self.split is None:
            raise UsageError(f"split_by={self.split_by!r} without split; give the shares too")
        if self.format is not None:
            normalise_compression(self.format, "none" if self.compression is None else self.compression)
        self.layout()

    def for_rows(
        self,
        schema: Mapping[str, FieldType],
        base: Manifest | None = None,
        *,
        file_bytes: float | None = None,
    ) -> Self:
        """Return the settings with format and compression, where these are None.

        Rows that hold files (fields of type bytes, together `LEAST_FILE_BYTES` or more in a row) go into tar shards:
        media are compressed already, and any tool opens a tar. All others go into Arrow shards with zstd, in which
        small fields need neither header nor padding.

        Args:
            schema: Fields of the rows.
            base: The version that the rows are appended to, which decides instead.
            file_bytes: Mean size of a row's fields of type bytes; None: they are files of any size.
        """
        format, compression = self.format, self.compression
        if compression is not None:
            compression = normalise_compression(format or "arrow", compression)
        if format is None and base is not None:
            format, compression = base.format, compression or base.compression
        if format is None:
            holds_files = any(kind.kind == "bytes" for kind in schema.values())
            is_media = holds_files and (file_bytes is None or file_bytes >= LEAST_FILE_BYTES)
            format = "tar" if is_media and compression in (None, "none") else "arrow"
            compression = compression or ("none" if format == "tar" else "zstd")
        return replace(self, format=format, compression=normalise_compression(format, compression or "none"))

    @property
    def axes(self) -> tuple[str, ...]:
        if isinstance(self.stratify, str):
            return (self.stratify,)
        return () if self.stratify is None else tuple(names_of(self.stratify, "stratify"))

    def layout(self) -> LayoutSettings:
        """Return the layout settings."""
        return LayoutSettings(
            seed=self.seed,
            shuffle=self.shuffle,
            shard_size=parse_size(self.shard_size),
            block_size=BLOCK_BYTES if self.block_size is None else parse_size(self.block_size),
        )

    def encoder(
        self, schema: Schema, classes: Sequence[str], folders: Mapping[str, str] = _NONE
    ) -> RowEncoder:
        """Return the encoder of the rows, as they are before packing."""
        return RowEncoder(
            schema,
            self.format or "",
            stratify=self.axes,
            classes=classes,
            split_by=self.split_by,
            split_folders=folders,
        )

    def version(
        self,
        schema: Schema,
        classes: Sequence[str],
        *,
        ref: str,
        folders: Mapping[str, str] = _NONE,
        recipe: Mapping[str, Any] = _NONE,
    ) -> NewVersion:
        """Return the description of the new version."""
        return NewVersion(
            schema=schema,
            format=self.format or "",
            compression=normalise_compression(self.format or "", self.compression),
            axes=self.axes,
            classes=tuple(classes),
            settings=self.layout(),
            split=self._split(folders, ref),
            recipe=dict(recipe),
            about=None if self.about is None else given_about(self.about),
            lookups=parse_lookup(self.lookup, schema),
            costs=parse_costs(self.cost, schema),
        )

    def _split(self, folders: Mapping[str, str], ref: str) -> Split | None:
        """Return the split by folders of the source if these are splits, otherwise by shares."""
        if not folders:
            return parse_split(self.split, self.split_by, ref=ref) if self.split is not None else None
        if self.split is not None:
            raise UsageError(
                f"the folders {', '.join(folders)} of the source are splits already, and become refs; leave out "
                "--split (split=), or pass --no-split-folders (split_folders=False) to take them as classes"
            )
        return folder_split(folders.values(), ref=ref)


@dataclass(frozen=True, slots=True, eq=False)
class VersionPlan:
    """A version before its shards are written; made by `plan_version`."""

    version: NewVersion  # description of the version
    base: Base | None  # version to append to
    rows: Rows  # all new rows
    layout: Layout  # layout of these rows
    listed: Sequence[Stratum]  # strata of the manifest, with the rows of the base
    # number of a stratum in `rows` (last: the pool) → number in the manifest
    of_stratum: NDArray[np.int32]
    # (n,) split of each row in ordinal order, -1 for none; None without splits
    split: NDArray[np.int16] | None

    def shards(self) -> Iterator[ShardRows]:
        """Yield the content of each new shard, in shard order."""
        rows, layout = self.rows, self.layout
        first_ordinal = self.base.first_ordinal if self.base else 0
        for shard in range(layout.shards):
            ordinal = self.rows_of(shard)
            segments = layout.segments_of(shard)
            segment_stratum = layout.segment_stratum[segments]
            has_pool = bool((segment_stratum == len(layout.pooled)).any())
            yield ShardRows(
                number=shard,
                ordinal=first_ordinal + ordinal,
                records=rows.records.only(ordinal),
                stratum=self.of_stratum[rows.stratum[ordinal]] if has_pool else None,
                segment_stratum=segment_stratum,
                segment_rows=np.diff(layout.segment_start[segments.start : segments.stop + 1]),
                block_rows=int(layout.block_rows[shard]),
                row_bytes=rows.raw_bytes[ordinal],
            )

    def split_rows(self) -> dict[str, int]:
        names = self.version.split.names if self.version.split else ()
        return {name: int(np.count_nonzero(self.split == number)) for number, name in enumerate(names)}

    def strata(self) -> tuple[Stratum, ...]:
        """Return the manifest's strata with the rows of base and new shards; all new rows are selected."""
        total = [0] * len(self.listed)
        counts = np.bincount(self.rows.stratum, minlength=len(self.rows.strata)).tolist()
        for number, count in zip(self.of_stratum.tolist(), counts, strict=False):
            total[number] += count
            if self.listed[number].in_pool:
                total[self.of_stratum[-1]] += count
        return tuple(
            msgspec.structs.replace(stratum, rows=stratum.rows + new, selected=stratum.selected + new)
            for stratum, new in zip(self.listed, total, strict=True)
        )

    def rows_of(self, shard: int) -> NDArray[np.int64]:
        """Return the positions in ``rows`` of the rows of a new shard."""
        return self.layout.rows[self.layout.shard_start[shard] : self.layout.shard_start[shard + 1]]


def plan_version(
    version: NewVersion, rows: Rows, base: Base | None, reader: ScratchReader | None
) -> VersionPlan:
    """Check the rows against each other and against the base, and plan their shards.

    Raises:
        SampleError: Two samples have the same key.
        ConfigurationError: A split is empty, or `about` names an unknown stratum.
    """
    before = base.manifest.strata if base else ()
    _check_unique_keys(rows, base, reader)
    if version.about is not None:
        names = {Stratum(values, 0, 0).name for values in rows.strata}
        check_strata(version.about, names | {stratum.name for stratum in before if not stratum.pooled})
    split = _split_rows(version, rows, allow_empty=base is not None)
    known = {stratum.values: 1 if stratum.in_pool else -1 for stratum in before}
    pooling = np.array([known.get(values, 0) for values in rows.strata], dtype=np.int8)
    # lanes keep more blocks open if batches are balanced, and a split would read all rows of a block for a few
    large_blocks = version.split is None and not version.axes
    layout = lay_out(rows, len(rows.strata), version.settings, pooling, large_blocks=large_blocks)
    listed, of_stratum = _number_strata(rows.strata, layout.pooled, before)
    return VersionPlan(version, base, rows, layout, listed, of_stratum, split)


def _number_strata(
    strata: Sequence[tuple[str, ...]], pooled: NDArray[np.bool_], before: Sequence[Stratum]
) -> tuple[list[Stratum], NDArray[np.int32]]:
    """Number the strata of the manifest.

    Strata of the base keep their numbers; then come new strata with segments of their own, the pool if it is
    new, and new strata in the pool.

    Returns:
        The strata in the manifest's order, with the rows of the base; and (strata + 1,) int32, number in
        `Rows` (last: the pool) → number in the manifest.
    """
    inside = pooled.tolist()
    new = [Stratum(values, 0, 0) for values, is_in in zip(strata, inside, strict=True) if not is_in]
    new += [Stratum((POOL,), 0, 0, pooled=True)] if any(inside) else []
    new += [
        Stratum(values, 0, 0, in_pool=True) for values, is_in in zip(strata, inside, strict=True) if is_in
    ]
    known = {stratum.values for stratum in before}
    listed = [*before, *(stratum for stratum in new if stratum.values not in known)]
    number = {stratum.values: place for place, stratum in enumerate(listed)}
    pool = number.get((POOL,), 0)
    return listed, np.array([*(number[values] for values in strata), pool], dtype=np.int32)


def _split_rows(version: NewVersion, rows: Rows, *, allow_empty: bool) -> NDArray[np.int16] | None:
    """Return (n,) int16, the split of each row in ordinal order; None without a split."""
    split = version.split
    if split is None:
        return None
    index = split_of(split, rows.identity, rows.split if split.is_noted else None)
    for number, name in enumerate(split.names):
        if not allow_empty and not split.folders and not (index == number).any():
            what = f"groups of equal {split.by!r}" if split.by else "rows"
            raise ConfigurationError(
                f"split {name!r} with the share {split.shares[number]} holds none of the {len(rows)} rows: "
                f"there are too few {what}; give it a larger share"
            )
    return index


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """The version to append to."""

    ref: str  # ref that names it
    version: Version
    keys: NDArray[np.uint64]  # (rows, 2) identities of its keys, to find duplicates
    row_strata: Mapping[int, NDArray[np.int32]]  # shard → own strata of its rows, for shards with pooled rows
    splits: Mapping[str, Version]  # split → its version over the same shards

    @property
    def manifest(self) -> Manifest:
        return self.version.manifest

    @property
    def first_ordinal(self) -> int:
        """Ordinal of the first appended row; erased rows keep their ordinals, and so their keys."""
        return self.manifest.rows + int(self.manifest.build.get("erased", 0))

    @property
    def expected(self) -> dict[str, str | None]:
        """Where the refs must still be when the longer version is committed."""
        refs: dict[str, str | None] = {name: split.manifest.id for name, split in self.splits.items()}
        return {**refs, self.ref: self.manifest.id}


def load_base(repository: Repository, ref: str, new: NewVersion) -> Base:
    """Load the base of a new version and check that schema and settings match.

    All indexes are read for their keys, about 100 bytes per row.

    Raises:
        UsageError: The base is merged or differs in schema or settings.
    """
    version = load_manifest(repository, repository.resolve(ref))
    manifest = version.manifest
    if manifest.parts:
        raise UsageError(f"{ref} is merged from other datasets; append to one of its parts, then merge again")
    if manifest.added:
        raise UsageError(
            f"{ref} has fields in shards of their own, which an append cannot continue; write them into one first: "
            f"shardkit rebuild {shell_word(repository.url)}@{ref}"
        )
    kind = "append rows of the same kind, or build a dataset of their own"
    if difference := _schema_difference(manifest.schema, new.schema):
        raise UsageError(f"cannot append to {ref}, whose schema is another: {difference}; {kind}")
    first = "leave them out, or rebuild it with others first"
    lookups = [lookup.field for lookup in manifest.lookups]
    costs = [one.expression for one in manifest.costs]
    for what, found, given, advice in (
        ("format", manifest.format, new.format, kind),
        ("compression", manifest.compression, new.compression, kind),
        ("stratify", list(manifest.axes), list(new.axes), kind),
        ("classes", list(manifest.classes), list(new.classes), kind),
        ("lookup", lookups, list(new.lookups) or lookups, first),
        ("cost", costs, list(new.costs) or costs, first),
    ):
        if found != given:
            raise UsageError(
                f"cannot append to {ref}: its {what} is {found}, that of the new rows {given}; {advice}"
            )
    keys = []
    row_strata = {}
    for shard in range(len(version.table)):
        digest, size = version.table.index_digest_text(shard), int(version.table.index_size[shard])
        index = ShardIndex.from_bytes(repository.get_object(digest, "index", size))
        keys += [key_identity(key) for key in index.keys()]  # noqa: SIM118 (an index is no dict)
        if index.row_stratum is not None:
            row_strata[shard] = index.row_stratum
    return Base(
        ref=ref,
        version=version,
        keys=np.array(keys, dtype=np.uint64).reshape(-1, 2),
        row_strata=row_strata,
        splits=_splits(repository, version, new.split),
    )


def _schema_difference(held: Schema, new: Schema) -> str:
    """Return how the schema of new rows differs from the base's; "" if it does not."""
    if held.to_json() == new.to_json():
        return ""
    names = {name: (held.get(name), new.get(name)) for name in (*held, *new)}
    found = [
        f"the new rows have no {name} ({old})" if kind is None
        else f"the new rows have {name} ({kind}) in addition" if old is None
        else f"{name} is {old}, and {kind} in the new rows"
        for name, (old, kind) in names.items() if old != kind
    ]  # fmt: skip
    return "; ".join(found) or f"its fields are {', '.join(held)}, the new rows have {', '.join(new)}"


def _splits(repository: Repository, version: Version, split: Split | None) -> dict[str, Version]:
    if split is None:
        return {}
    splits = {}
    for name in split.names:
        found = load_manifest(repository, repository.resolve(name))
        noted = {**split.to_json(), "name": name}
        if found.manifest.build.get("split") != noted or not np.array_equal(
            found.table.digest, version.table.digest
        ):
            raise UsageError(
                f"cannot append with this split: the ref {name!r} is not this share of the same version; give the "
                "shares and the field that it was built with, or append without --split"
            )
        splits[name] = found
    return splits


def _check_unique_keys(rows: Rows, base: Base | None, reader: ScratchReader | None) -> None:
    """Refuse keys, given or generated, that two rows or a row and the base share."""
    identity = rows.identity
    first_ordinal, before = (base.first_ordinal, len(base.keys)) if base else (0, 0)
    if rows.generated.all() and not before:
        return  # ordinals differ
    if rows.generated.any():
        identity = identity.copy()
        for place in np.flatnonzero(rows.generated).tolist():
            identity[place] = key_identity(generated_key(first_ordinal + place))
    if base is not None:
        identity = np.concatenate([base.keys, identity])
    high = np.sort(identity[:, 0])
    if not (high[1:] == high[:-1]).any():
        return
    # stable: among equal keys the earlier row comes first
    order = np.lexsort((identity[:, 1], identity[:, 0]))
    ranked = identity[order]
    equal = np.flatnonzero((ranked[1:] == ranked[:-1]).all(axis=1))
    if len(equal):
        first = int(order[equal].min())
        second = int(order[equal[int(order[equal].argmin())] + 1])
        one, other = (
            describe_row(rows, reader, place - before, first_ordinal)
            if place >= before
            else "a sample that is there already"
            for place in (second, first)
        )
        raise SampleError(
            f"{one} has the key of {other}; keys are unique in a dataset: leave one out, give it "
            "another key, or give no keys (build: --keys none, or --keys prefixed if they are in different files)"
        )
