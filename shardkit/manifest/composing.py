"""Manifests: made of a table of written shards, and merged from others as their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.errors import SchemaError, UsageError
from shardkit.formats.schema import Schema
from shardkit.manifest.manifest import (
    MIXED,
    Manifest,
    Stratum,
)
from shardkit.manifest.shard_table import ShardTable, paginate, stratum_counts


def compose(
    table: ShardTable,
    *,
    schema: Schema,
    format: str,
    compression: str,
    axes: Sequence[str] = (),
    strata: Sequence[tuple[str, ...]] = ((),),
    pool: int | None = None,
    in_pool: Sequence[tuple[tuple[str, ...], int, int]] = (),
    classes: Sequence[str] = (),
    sources: str | None = None,
    build: Mapping[str, Any] | None = None,
    parent: str | None = None,
    features: Sequence[str] = (),
) -> tuple[Manifest, list[bytes]]:
    """The manifest of a table, with all totals counted from it, and the pages to put before it.

    Args:
        table: Shards in manifest order.
        schema: Of the samples.
        format: ``tar`` or ``arrow``.
        compression: As `shardkit.formats` normalises it.
        axes: What the strata are made of.
        strata: Values of the strata, in the numbering of `table.segment_stratum`.
        pool: The number of the pool among them, None where there is none.
        in_pool: (values, rows, selected) of the strata whose rows lie in the pool; listed after the others.
        classes: Names of folder classes.
        sources: Digest of the object that lists what was imported.
        build: Settings that decided the bytes.
        parent: Id of the version this one was made from.
        features: What a reader must know to read it.

    Returns:
        The manifest, and its pages as bytes in the order of `Manifest.pages`.
    """
    rows, selected = stratum_counts(table, len(strata))
    listed = [
        Stratum(tuple(values), int(rows[number]), int(selected[number]), pooled=number == pool)
        for number, values in enumerate(strata)
    ]
    listed += [Stratum(tuple(values), n, s, in_pool=True) for values, n, s in in_pool]
    pages = paginate(table)
    manifest = Manifest(
        schema=schema,
        format=format,
        compression=compression,
        axes=tuple(axes),
        strata=tuple(listed),
        **table.totals,
        pages=tuple(ref for ref, _ in pages),
        classes=tuple(classes),
        sources=sources,
        build=dict(build or {}),
        parent=parent,
        features=tuple(features),
    )
    Manifest.from_bytes(manifest.to_bytes())  # nobody may write what nobody will read
    return manifest, [data for _, data in pages]


def merge(parts: Sequence[tuple[str, Manifest]], *, build: Mapping[str, Any] | None = None) -> Manifest:
    """A manifest over the shards of others, without copying a byte.

    The sample order is that of the parts, one after the other; a stratum is a part's name before the values
    of one of its strata.

    Raises:
        SchemaError: The parts have different schemas.
        UsageError: No parts, or parts that are merged themselves.
    """
    if not parts:
        raise UsageError("merge: expected at least one part")
    manifests = [manifest for _, manifest in parts]
    for name, manifest in parts:
        if manifest.schema != manifests[0].schema:
            raise SchemaError(
                f"part {name!r} has the schema {manifest.schema.to_json()}, part {parts[0][0]!r} has "
                f"{manifests[0].schema.to_json()}: expected one schema; rebuild one of them"
            )
        if manifest.parts:
            raise UsageError(
                f"part {name!r} is merged itself; name its parts {[part for part, _ in manifest.parts]} instead"
            )
    merged = Manifest(
        schema=manifests[0].schema,
        format=_one([manifest.format for manifest in manifests]),
        compression=_one([manifest.compression for manifest in manifests]),
        axes=("part", *_common_axes(manifests)),
        strata=tuple(
            Stratum((name, *s.values), s.rows, s.selected, pooled=s.pooled, in_pool=s.in_pool)
            for name, manifest in parts
            for s in manifest.strata
        ),
        shards=sum(manifest.shards for manifest in manifests),
        rows=sum(manifest.rows for manifest in manifests),
        selected=sum(manifest.selected for manifest in manifests),
        raw_bytes=sum(manifest.raw_bytes for manifest in manifests),
        stored_bytes=sum(manifest.stored_bytes for manifest in manifests),
        pages=(),
        classes=manifests[0].classes if len({manifest.classes for manifest in manifests}) == 1 else (),
        build=dict(build or {}),
        parts=tuple((name, manifest.id) for name, manifest in parts),
    )
    return Manifest.from_bytes(merged.to_bytes())


def _one(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else MIXED


def _common_axes(manifests: Sequence[Manifest]) -> tuple[str, ...]:
    """The axes that all parts begin with."""
    common: list[str] = []
    for axes in zip(*(manifest.axes for manifest in manifests), strict=False):
        if len(set(axes)) > 1:
            break
        common.append(axes[0])
    return tuple(common)
