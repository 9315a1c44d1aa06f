"""Select rows of a version: a new version over the same shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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


def select_rows(
    version: Version,
    masks: Sequence[NDArray[np.bool_]],
    *,
    row_strata: RowStrata,
    build: Mapping[str, Any] | None = None,
) -> Version:
    """Return the version that selects some rows of each shard; nothing is written (`put_selected` does).

    Args:
        version: The version to take rows of.
        masks: (rows,) bool of each shard.
        row_strata: Called for every shard if the version has pooled strata.
        build: Entries to add to the manifest's `build`.

    Raises:
        UsageError: No row is selected.
    """
    manifest, table = version.manifest, version.table
    selections: dict[int, Selection] = {}
    digests = np.zeros_like(table.selection_digest)
    segment_selected = table.segment_selected.copy()
    for shard, mask in enumerate(masks):
        segment_selected[table.segments_of(shard)] = table.count_by_segment(shard, mask)
        if not mask.all():
            selections[shard] = Selection.from_mask(mask)
            digest = parse_digest(sha256_digest(selections[shard].to_bytes()))
            digests[shard] = np.frombuffer(bytes.fromhex(digest), dtype=np.uint8)
    selected = np.array([int(mask.sum()) for mask in masks], dtype=np.int64)
    if not selected.any():
        raise UsageError("no row is selected; a dataset holds at least one")
    new_table = dataclasses.replace(
        table, selected=selected, selection_digest=digests, segment_selected=segment_selected
    )
    new_manifest = msgspec.structs.replace(
        manifest,
        strata=_recount_strata(manifest, new_table, _pooled_counts(manifest, masks, row_strata)),
        selected=int(selected.sum()),
        pages=tuple(ref for ref, _ in paginate(new_table)),
        parent=manifest.id,
        parts=(),
        build={**manifest.build, **(build or {})},
    )
    return dataclasses.replace(version, manifest=new_manifest, table=new_table, selections=selections)


def put_selected(repository: Repository, version: Version, note: Mapping[str, Any] | None = None) -> Manifest:
    """Make the result of `select_rows` durable, so that a commit may name it.

    Args:
        repository: The version's repository, open for writing.
        version: The version; not one of a merged version.
        note: How the samples were chosen, for the manifest.

    Returns:
        The manifest, with the note.

    Raises:
        UsageError: The version is one of a merged version.
    """
    manifest = version.manifest
    if version.parts[0].name:
        names = ", ".join(part.name for part in version.parts)
        raise UsageError(
            f"{str(manifest.parent)[:19]}… is merged; select from its parts ({names}), then merge those versions"
        )
    if note is not None:
        manifest = msgspec.structs.replace(manifest, build={**manifest.build, "select": dict(note)})
    for selection in (version.selections or {}).values():
        put_selection(repository, selection)
    put_manifest(repository, manifest, [data for _, data in paginate(version.table)])
    return manifest


def _pooled_counts(
    manifest: Manifest, masks: Sequence[NDArray[np.bool_]], row_strata: RowStrata
) -> NDArray[np.int64]:
    """Return (strata,) int64, the selected rows of each stratum in the pool."""
    counts = np.zeros(len(manifest.strata), dtype=np.int64)
    if not any(stratum.in_pool for stratum in manifest.strata):
        return counts
    for shard, mask in enumerate(masks):
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
