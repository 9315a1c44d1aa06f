"""Several versions as one, over the shards that they have (SPEC.md §11)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardkit.dataset.committing import Moved, move_refs, standing_refs
from shardkit.dataset.dataset import open_dataset
from shardkit.errors import UsageError
from shardkit.manifest import Manifest
from shardkit.repository.repository import Repository
from shardkit.repository.versions import put_location, put_manifest


def merge_datasets(
    parts: Mapping[str, str | os.PathLike[str]],
    root: str | os.PathLike[str],
    *,
    ref: str = "main",
    message: str = "",
    author: str = "",
) -> tuple[Manifest, Moved]:
    """Commit a version of ``root`` whose shards are those of the parts, in the order given.

    Merging the same parts again moves nothing but what the root remembers of where they lie: that is how a
    part that has moved is found again.

    Returns:
        The manifest, and what the commit did.
    """
    if not parts:
        raise UsageError("merge: no parts; name at least one dataset")
    merged = open_dataset(parts)  # opens and checks every part, down to its last column
    repository = Repository.create(root)
    expected = standing_refs(repository, [ref])
    for part in merged.version.parts:
        put_location(repository, part.name, part.manifest.id, part.repository)
    put_manifest(repository, merged.manifest, [])
    said = message or f"merge {', '.join(parts)}"
    moved = move_refs(repository, {ref: merged.manifest.id}, expected, message=said, author=author)
    return merged.manifest, moved
