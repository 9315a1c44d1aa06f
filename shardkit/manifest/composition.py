"""Make manifests: over new shards, and over the shards of other manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from shardkit.errors import SchemaError, UsageError
from shardkit.formats.schema import Schema
from shardkit.manifest.manifest import MIXED, PART_AXIS, Manifest, Stratum
from shardkit.manifest.shard_table import ShardTable, check_against, paginate

_TOTALS: Final = ("shards", "rows", "selected", "raw_bytes", "stored_bytes")


def compose(
    table: ShardTable,
    *,
    schema: Schema,
    format: str,
    compression: str,
    strata: Sequence[Stratum],
    base: tuple[Manifest, ShardTable] | None = None,
    axes: Sequence[str] = (),
    classes: Sequence[str] = (),
    sources: str | None = None,
    build: Mapping[str, Any] | None = None,
    parent: str | None = None,
    adopted: bool = False,
    **others: Any,
) -> tuple[Manifest, list[bytes]]:
    """Return the manifest of new shards and its pages; totals and pages are made from the table.

    Args:
        table: The new shards in manifest order.
        schema: Schema of the samples.
        format: ``tar``, ``arrow`` or ``rows``.
        compression: Compression as normalised by `shardkit.formats`.
        strata: Strata with their rows, in the numbering of `table.segment_stratum`.
        base: A version whose shards and pages precede them.
        axes: Names of the values of a stratum.
        classes: Names of folder classes.
        sources: Digest of the object that lists the imported files.
        build: Settings that determined the bytes.
        parent: Id of the version from which this one was made.
        adopted: Some shards are files of other owners.
        others: Other fields of `Manifest`: about, lookups, costs.

    Returns:
        The manifest, and the new pages as bytes in the order of `Manifest.pages`. Store the pages before the manifest.

    Raises:
        FormatError: The strata contradict the table.
    """
    pages = paginate(table)
    before, whole = (base[0], ShardTable.concatenate([base[1], table])) if base else (None, table)
    manifest = Manifest(
        schema=schema,
        format=format,
        compression=compression,
        axes=tuple(axes),
        strata=tuple(strata),
        **whole.totals,
        pages=(*(before.pages if before else ()), *(ref for ref, _ in pages)),
        classes=tuple(classes),
        sources=sources,
        build=dict(build or {}),
        parent=parent,
        adopted=adopted,
        **others,
    )
    Manifest.from_bytes(manifest.to_bytes())  # do not write a manifest that readers reject
    check_against(manifest, whole)
    return manifest, [data for _, data in pages]


def merge(parts: Sequence[tuple[str, Manifest]], *, build: Mapping[str, Any] | None = None) -> Manifest:
    """Return a manifest over the shards of other manifests; no data is copied.

    Samples are in the order of the parts. The values of a stratum are the name of its part and its values there.

    Args:
        parts: (name, manifest) of each part.
        build: Settings that determined the bytes.

    Raises:
        SchemaError: The parts have different schemas.
        UsageError: There are no parts, or a part is merged itself.
    """
    if not parts:
        raise UsageError("merge: expected at least one part")
    manifests = [manifest for _, manifest in parts]
    for name, manifest in parts:
        if manifest.schema != manifests[0].schema:
            own, first = (
                ", ".join(f"{field} ({kind})" for field, kind in one.schema.items())
                for one in (manifest, manifests[0])
            )
            raise SchemaError(
                f"part {name!r} has the fields {own}, part {parts[0][0]!r} has {first}: expected one schema; build one "
                "of them again"
            )
        if manifest.added:
            raise UsageError(
                f"part {name!r} has fields in shards of their own; write them into one: shardkit rebuild ROOT"
            )
        if manifest.parts:
            raise UsageError(
                f"part {name!r} is merged itself; name its parts {[part for part, _ in manifest.parts]} instead"
            )
    merged = Manifest(
        schema=manifests[0].schema,
        format=_one([manifest.format for manifest in manifests]),
        compression=_one([manifest.compression for manifest in manifests]),
        axes=(PART_AXIS, *_common_axes(manifests)),
        strata=tuple(
            Stratum((name, *s.values), s.rows, s.selected, pooled=s.pooled, in_pool=s.in_pool)
            for name, manifest in parts
            for s in manifest.strata
        ),
        **{total: sum(getattr(manifest, total) for manifest in manifests) for total in _TOTALS},
        pages=(),
        classes=manifests[0].classes if len({manifest.classes for manifest in manifests}) == 1 else (),
        build=dict(build or {}),
        parts=tuple((name, manifest.id) for name, manifest in parts),
    )
    return Manifest.from_bytes(merged.to_bytes())


def extend(
    manifest: Manifest, added: Manifest, *, parent: str, build: Mapping[str, Any] | None = None
) -> Manifest:
    """Return a manifest with its own fields and then the fields of another version; both keep their shards.

    Args:
        manifest: The version to extend.
        added: The version with the new fields of the same rows.
        parent: Id of the version from which the result is made.
        build: Settings that determined the new fields.

    Raises:
        UsageError: A field exists already, or the version is merged.
    """
    check_extension(manifest, added.schema)
    extended = msgspec.structs.replace(
        manifest,
        schema=Schema({**manifest.schema, **added.schema}),
        added=(*manifest.added, added.id),
        parent=parent,
        build={**manifest.build, **(build or {})},
    )
    return Manifest.from_bytes(extended.to_bytes())  # do not write a manifest that readers reject


def check_extension(manifest: Manifest, fields: Schema) -> None:
    """Raise UsageError if a version is merged, or has one of these fields already."""
    if manifest.parts:
        names = ", ".join(name for name, _ in manifest.parts)
        raise UsageError(f"this version is merged; extend its parts ({names}), then merge them again")
    twice = next((name for name in fields if name in manifest.schema), None)
    if twice is not None:
        raise UsageError(f"the version has a field {twice!r} already; give the new field another name")


def _one(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else MIXED


def _common_axes(manifests: Sequence[Manifest]) -> tuple[str, ...]:
    """Return the leading axes that all parts share."""
    common: list[str] = []
    for axes in zip(*(manifest.axes for manifest in manifests), strict=False):
        if len(set(axes)) > 1:
            break
        common.append(axes[0])
    return tuple(common)
