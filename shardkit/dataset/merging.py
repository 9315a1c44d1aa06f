"""Merge versions: a version over the shards of several others (SPEC.md §11)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardkit.dataset.committing import Moved, move_refs, standing_refs
from shardkit.dataset.opening import open_dataset
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
    """Commit a version of ``root`` over the shards of all parts, in the given order.

    Merging the same parts again changes only the locations of the parts that the root records; this is how to
    record a part that has moved.

    Returns:
        The manifest, and the result of the commit.
    """
    if not parts:
        raise UsageError("merge: no parts; name at least one dataset")
    merged = open_dataset(parts)  # checks every part, including its pages
    repository = Repository.create(root)
    expected = standing_refs(repository, [ref])
    for part in merged.version.parts:
        put_location(repository, part.name, part.manifest.id, part.repository)
    put_manifest(repository, merged.manifest, [])
    said = message or f"merge {', '.join(parts)}"
    moved = move_refs(repository, {ref: merged.manifest.id}, expected, message=said, author=author)
    return merged.manifest, moved
