"""Select rows of a version: a new version over the same shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardkit.errors import UsageError
from shardkit.formats import parse_digest, sha256_digest
from shardkit.manifest import Manifest, Selection, ShardTable, Stratum, paginate, stratum_counts
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version, put_manifest, put_selection

RowStrata = Callable[[int], NDArray[np.int32] | None]
"""Shard → (rows,) int32, the own stratum of each row (`ShardIndex.row_stratum`); None: no row is pooled."""


def selected_rows(version: Version, shard: int) -> NDArray[np.bool_]:
    """Return (rows,) bool, True for rows of a shard that a version selects."""
    if version.table.has_selection[shard]:
        return version.load_selection(shard).mask()
    return np.ones(int(version.table.rows[shard]), dtype=np.bool_)


def select_rows(
    manifest: Manifest,
    table: ShardTable,
    masks: Mapping[int, NDArray[np.bool_]],
    *,
    row_strata: RowStrata,
    build: Mapping[str, Any] | None = None,
) -> tuple[Manifest, ShardTable, dict[int, Selection]]:
    """Return the version that selects the rows of ``masks``; nothing is written (`put_selected` does).

    Returns:
        Its manifest, its table, and the selections of partly selected shards.

    Raises:
        UsageError: No row is selected, or a mask is missing or has the wrong length.
    """
    for shard, rows in enumerate(table.rows.tolist()):
        if shard not in masks or masks[shard].shape != (rows,):
            raise UsageError(f"selecting rows: shard {shard} needs a mask of {rows} rows")
    selections: dict[int, Selection] = {}
    digests = np.zeros_like(table.selection_digest)
    segment_selected = table.segment_selected.copy()
    for shard, mask in sorted(masks.items()):
        segments = slice(int(table.segment_starts[shard]), int(table.segment_starts[shard + 1]))
        starts = np.cumsum(table.segment_rows[segments]) - table.segment_rows[segments]
        segment_selected[segments] = np.add.reduceat(mask.astype(np.int64), starts)
        if not mask.all():
            selections[shard] = Selection.from_mask(mask)
            digest = parse_digest(sha256_digest(selections[shard].to_bytes()))
            digests[shard] = np.frombuffer(bytes.fromhex(digest), dtype=np.uint8)
    selected = np.array([int(masks[shard].sum()) for shard in range(len(table))], dtype=np.int64)
    if not selected.any():
        raise UsageError("no row is selected; a dataset holds at least one")
    new_table = dataclasses.replace(
        table, selected=selected, selection_digest=digests, segment_selected=segment_selected
    )
    strata = _recount_strata(manifest, new_table, _pooled_counts(manifest, masks, row_strata))
    new_manifest = msgspec.structs.replace(
        manifest,
        strata=strata,
        selected=int(selected.sum()),
        pages=tuple(ref for ref, _ in paginate(new_table)),
        parent=manifest.id,
        parts=(),
        build={**manifest.build, **(build or {})},
    )
    return new_manifest, new_table, selections


def put_selected(
    repository: Repository, manifest: Manifest, table: ShardTable, selections: Mapping[int, Selection]
) -> None:
    """Make the result of `select_rows` durable, so that a commit may name it."""
    for selection in selections.values():
        put_selection(repository, selection)
    put_manifest(repository, manifest, [data for _, data in paginate(table)])


def _pooled_counts(
    manifest: Manifest, masks: Mapping[int, NDArray[np.bool_]], row_strata: RowStrata
) -> NDArray[np.int64]:
    """Return (strata,) int64, the selected rows of each stratum in the pool."""
    counts = np.zeros(len(manifest.strata), dtype=np.int64)
    if not any(stratum.in_pool for stratum in manifest.strata):
        return counts
    for shard, mask in masks.items():
        own = row_strata(shard)
        if own is not None:
            inside = own[mask & (own >= 0)]
            counts += np.bincount(inside, minlength=len(counts))
    return counts


def _recount_strata(
    manifest: Manifest, table: ShardTable, pooled_counts: NDArray[np.int64]
) -> tuple[Stratum, ...]:
    _, selected = stratum_counts(table, len(manifest.strata))
    return tuple(
        msgspec.structs.replace(
            stratum, selected=int(pooled_counts[number] if stratum.in_pool else selected[number])
        )
        for number, stratum in enumerate(manifest.strata)
    )
