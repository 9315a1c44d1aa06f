"""Manifests and their pages: made of a table of written shards, read back, and merged from others as their parts.

A page holds at most 4,096 shards of the table; an append adds new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError, SchemaError, UsageError
from shardkit.formats.canonical_json import dumps
from shardkit.formats.columns import pack_columns, unpack_columns
from shardkit.formats.digest import sha256_digest
from shardkit.formats.schema import Schema
from shardkit.manifest.manifest import (
    MAX_SEGMENTS_PER_PAGE,
    MIXED,
    SHARDS_PER_PAGE,
    Manifest,
    PageRef,
    Stratum,
)
from shardkit.manifest.shard_table import SEGMENT_COLUMNS, SHARD_COLUMNS, ShardTable


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
        shards=len(table),
        rows=sum(table.rows.tolist()),
        selected=sum(table.selected.tolist()),
        raw_bytes=sum(table.raw_bytes.tolist()),
        stored_bytes=sum(table.size.tolist()),
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


def check_against(manifest: Manifest, table: ShardTable) -> None:
    """Compare a root with its whole table.

    Raises:
        FormatError: Totals differ, or segments name strata that are not there or have none of their own.
    """
    rows, selected = stratum_counts(table, len(manifest.strata))
    # A manifest made from the table must say the same; its own checks compare the rest.
    for number, stratum in enumerate(manifest.strata):
        expected = (0, 0) if stratum.in_pool else (stratum.rows, stratum.selected)
        if (int(rows[number]), int(selected[number])) != expected:
            _refuse(
                manifest,
                f"stratum {stratum.name!r} has {rows[number]} rows, {selected[number]} selected, expected {expected}",
            )
    totals = (sum(table.raw_bytes.tolist()), sum(table.size.tolist()), len(table))
    if totals != (manifest.raw_bytes, manifest.stored_bytes, manifest.shards):
        _refuse(manifest, f"its pages hold (raw bytes, stored bytes, shards) {totals}")


def stratum_counts(table: ShardTable, strata: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(strata,) rows and (strata,) selected rows of each stratum, counted from the segments.

    Raises:
        FormatError: A segment names a stratum outside 0 … strata - 1.
    """
    if len(table.segment_stratum) and int(table.segment_stratum.max()) >= strata:
        raise FormatError(
            f"a segment belongs to stratum {int(table.segment_stratum.max())}, there are {strata}; do not trust it"
        )
    rows, selected = np.zeros(strata, dtype=np.int64), np.zeros(strata, dtype=np.int64)
    np.add.at(rows, table.segment_stratum, table.segment_rows)  # exact, unlike a weighted bincount
    np.add.at(selected, table.segment_stratum, table.segment_selected)
    return rows, selected


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


def _refuse(manifest: Manifest, why: str) -> None:
    raise FormatError(f"manifest {manifest.id} and its pages contradict each other: {why}; do not trust it")


_KIND: Final = "page"
# segment_shard is not stored: the number of segments of each shard says the same, is shorter, and cannot be
# out of order.
_STORED: Final = {
    **SHARD_COLUMNS,
    "segments": np.uint32,
    **{k: v for k, v in SEGMENT_COLUMNS.items() if k != "segment_shard"},
}
_SHARD_BYTES: Final = 3 * 32 + 7 * 8 + 4
_SEGMENT_BYTES: Final = 4 + 8 + 8


def pack_page(table: ShardTable) -> bytes:
    """The bytes of one page: the same for the same shards.

    Raises:
        UsageError: Too many shards or segments for one page.
    """
    segments = np.diff(table.segment_starts)
    if not 1 <= len(table) <= SHARDS_PER_PAGE or int(segments.sum()) > MAX_SEGMENTS_PER_PAGE:
        raise UsageError(
            f"page of {len(table)} shards and {int(segments.sum())} segments: expected 1 to {SHARDS_PER_PAGE} shards "
            f"and at most {MAX_SEGMENTS_PER_PAGE} segments; order rows by stratum inside a shard"
        )
    columns = {name: segments if name == "segments" else getattr(table, name) for name in _STORED}
    meta = {"shards": len(table), "segments": int(segments.sum())}
    return pack_columns(
        _KIND, meta, {name: np.asarray(columns[name], dtype=_STORED[name]) for name in _STORED}
    )


def unpack_page(data: bytes, ref: PageRef | None = None, *, strata: int | None = None) -> ShardTable:
    """Read a page whose digest has been checked.

    Args:
        data: The page.
        ref: What the root says of it, compared where given.
        strata: How many strata the root has; no segment may name another, where given.

    Raises:
        FormatError: Not what `pack_page` writes, or not what the root says.
    """
    where = f"page {sha256_digest(data)}"
    try:
        most = (SHARDS_PER_PAGE if ref is None else ref.shards) * _SHARD_BYTES
        most += MAX_SEGMENTS_PER_PAGE * _SEGMENT_BYTES
        columns = unpack_columns(data, _KIND, max_raw_bytes=most)
        arrays = dict(columns.arrays)
        shards = len(arrays.get("segments", ()))
        for name, dtype in _STORED.items():
            if name not in arrays or arrays[name].dtype != dtype:
                raise FormatError(f"column {name} is missing or not {np.dtype(dtype)}")
        counts = arrays.pop("segments")
        if len(arrays) != len(_STORED) - 1 or counts.ndim != 1:
            raise FormatError(f"unexpected columns: {sorted(arrays.keys() - _STORED.keys())[:5]}")
        segments = int(counts.sum(dtype=np.int64))
        if dumps(columns.meta) != dumps({"shards": shards, "segments": segments}) or segments != len(
            arrays["segment_rows"]
        ):
            raise FormatError(
                f"{shards} shards and {segments} segments, the header and the columns say otherwise"
            )
        shard = np.repeat(np.arange(shards, dtype=np.int32), counts)
        table = ShardTable(**arrays, segment_shard=shard)
        if ref is not None and (len(table) != ref.shards or int(table.rows.sum()) != ref.rows):
            raise FormatError(
                f"{len(table)} shards and {int(table.rows.sum())} rows, the root says {ref.shards} and {ref.rows}"
            )
        highest = int(table.segment_stratum.max(initial=0))
        if strata is not None and highest >= strata:
            raise FormatError(f"a segment belongs to stratum {highest}, the root has {strata}")
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error
    return table


def paginate(table: ShardTable) -> list[tuple[PageRef, bytes]]:
    """Cut a table into pages, in order.

    Returns:
        Each page with its reference for the root.
    """
    pages = []
    for start in range(0, len(table), SHARDS_PER_PAGE):
        piece = table.slice(start, min(start + SHARDS_PER_PAGE, len(table)))
        data = pack_page(piece)
        pages.append((PageRef(sha256_digest(data), len(data), len(piece), int(piece.rows.sum())), data))
    return pages
