"""Where a sample comes from: its shard, the source file and row, and how that was imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardkit.dataset import Dataset
from shardkit.dataset.sources import unpack_sources
from shardkit.errors import NotFoundError
from shardkit.reading.inventory import read_root
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Part


def version_lineage(dataset: Dataset) -> dict[str, Any]:
    """How a version came to be: its parts, each with its ancestors, build settings, sources and first commit."""
    parts = dataset.version.parts
    return {"id": dataset.manifest.id, "parts": [_part_lineage(part) for part in parts]}


def sample_lineage(dataset: Dataset, sample: int) -> dict[str, Any]:
    """A sample's way from the source into its shard.

    Returns:
        ``sample``, ``key``; ``shard`` with digest, object name, row, block and its offset and size; ``source`` with
        file, row and the file's SHA-256 where the build recorded them; ``version`` as in `version_lineage`, of the
        sample's part alone.

    Raises:
        NotFoundError: there is no such sample.
    """
    if not 0 <= sample < len(dataset):
        raise NotFoundError(
            f"sample {sample} does not exist: this dataset has samples 0 to {len(dataset) - 1}"
        )
    where = dataset.rows.locate(np.array([sample], dtype=np.int64))
    shard, row = int(where.shard[0]), int(where.row[0])
    index, part = dataset.reader.index(shard), dataset.version.part_of(shard)
    block, _ = index.block_of(row)
    source, lineage = index.source(row), _part_lineage(part)
    files = {one["name"]: one["sha256"] for one in (lineage["sources"] or {"files": ()})["files"]}
    return {
        "sample": sample,
        "key": index.original_key(row),
        "stored_key": index.key(row),
        "shard": {
            "digest": dataset.table.digest_text(shard),
            "name": dataset.reader.shard_name(shard),
            "row": row,
            "block": block,
            "offset": int(index.block_offset[block]),
            "size": int(index.block_size[block]),
        },
        "source": None
        if source is None
        else {"name": source[0], "row": source[1], "sha256": files.get(source[0])},
        "version": {"id": dataset.manifest.id, "parts": [lineage]},
    }


def _part_lineage(part: Part) -> dict[str, Any]:
    manifest, repository = part.manifest, part.repository
    ancestors: list[dict[str, Any]] = []
    parent = manifest.parent
    while parent is not None and len(ancestors) < 1000:
        try:
            root = read_root(repository, parent)
        except NotFoundError:
            ancestors.append({"id": parent, "missing": True})
            break
        ancestors.append(
            {"id": parent, "samples": root.selected, "build": dict(root.build), "sources": root.sources}
        )
        parent = root.parent
    return {
        "name": part.name,
        "id": manifest.id,
        "build": dict(manifest.build),
        "sources": _sources(part),
        "commit": _commit(repository, manifest.id),
        "ancestors": ancestors,
    }


def _sources(part: Part) -> dict[str, Any] | None:
    if part.manifest.sources is None:
        return None
    found = unpack_sources(part.repository.get_object(part.manifest.sources, "sources"))
    files = [{"name": one.name, "size": one.size, "sha256": one.sha256} for one in found.files]
    return {"digest": part.manifest.sources, "files": files, "rows_left_out": len(found.skipped)}


def _commit(repository: Repository, manifest_id: str) -> dict[str, Any] | None:
    """The first commit that named the manifest, with the versions of the software that made it."""
    for entry in reversed(repository.log()):
        if manifest_id in (*entry.refs.values(), *entry.tags.values()):
            return {"n": entry.n, "time": entry.time, "author": entry.author, "message": entry.message,
                    "software": entry.software}  # fmt: skip
    return None
