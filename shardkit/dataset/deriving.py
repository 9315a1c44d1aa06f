"""Versions over existing shards: several merged into one (SPEC.md §11), and the version of a view."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from shardkit.dataset.committing import Moved, move_refs, standing_refs
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.opening import open_dataset
from shardkit.dataset.selecting import put_selected
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


def put_version(repository: Repository, dataset: Dataset, view: Dataset, note: Mapping[str, Any]) -> Manifest:
    """Make the version durable that has the samples of a view of a dataset; a commit may name it.

    Args:
        repository: the dataset's repository, open for writing.
        dataset: the dataset, not merged.
        view: result of `Dataset.select`.
        note: how the samples were chosen, for the manifest.

    Raises:
        UsageError: the dataset is merged.
    """
    if dataset.manifest.parts:
        names = ", ".join(name for name, _ in dataset.manifest.parts)
        raise UsageError(
            f"{dataset.manifest.id[:19]}… is merged; select from its parts ({names}), then merge those versions"
        )
    build = {**view.manifest.build, "select": dict(note)}
    manifest = msgspec.structs.replace(view.manifest, build=build)
    put_selected(repository, manifest, view.table, view._selections or {})  # noqa: SLF001
    return manifest
