"""`rebuild`: the samples of a version in other strata, shards, blocks, format or compression; or its look-ups alone."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import shardkit
from shardkit.dataset import Dataset
from shardkit.dataset.about import About, about_of
from shardkit.dataset.deriving import relabel
from shardkit.dataset.encoding import CLASS_AXIS
from shardkit.dataset.version_settings import VersionSettings
from shardkit.errors import UsageError
from shardkit.manifest import MIXED, Manifest
from shardkit.repository.log import LogEntry, parse_dataset_url
from shardkit.repository.repository import DEFAULT_REF, Repository
from shardkit_tools.building.outcome import BuildResult, ProgressCallback
from shardkit_tools.building.recipe import build
from shardkit_tools.importers.dataset import open_dataset_source

_BUILT = ("shard_size", "block_size", "seed", "shuffle")  # what a manifest says of how it was built


def rebuild(
    url: str | os.PathLike[str],
    to: str | os.PathLike[str] | None = None,
    *,
    ref: str | None = None,
    message: str = "",
    author: str = "",
    jobs: int = 1,
    scratch: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
    **changes: Any,
) -> BuildResult:
    """Build the samples that a version holds anew; what is not given stays as it is.

    Samples, keys and sources stay to the last byte; rows that the version does not select are left out. Killable and
    resumable as a build is.

    Args:
        url: ``ROOT[@REF]``.
        to: another root; by default the same.
        ref: that is moved; by default the one that was named; ``main`` in another root.
        message: of the commit.
        author: of the commit.
        jobs: processes.
        scratch: directory for encoded rows.
        dry_run: write nothing.
        progress: called with a `Progress` a few times a second.
        changes: fields of `VersionSettings`; None leaves one as it is. Splits are not taken over, and of a merged
            dataset the axis ``part`` goes; an empty list or text takes strata, look-ups and about away.

    Raises:
        UsageError: a digest or tag was named and no ref was given.
    """
    root, named = parse_dataset_url(url)
    dataset = shardkit.open(url)
    manifest = dataset.manifest
    return build(
        open_dataset_source(root, dataset),
        to if to is not None else root,
        **_settings(dataset, changes),
        ref=ref or (_ref(root, named) if to is None else DEFAULT_REF),
        message=message or f"rebuilt from {manifest.id}",
        author=author,
        jobs=jobs,
        scratch=scratch,
        dry_run=dry_run,
        progress=progress,
    )


def label_again(
    url: str | os.PathLike[str],
    *,
    about: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    lookup: str | Sequence[str] | None = None,
    cost: str | Sequence[str] | None = None,
    ref: str | None = None,
    message: str = "",
    author: str = "",
) -> tuple[Manifest, LogEntry | None]:
    """Give a version other look-ups, costs or another about, over the same shards.

    Args:
        url: ``ROOT[@REF]``.
        about: licence, source and contact; None: what it says now.
        lookup: fields; None: those that it has.
        cost: expressions; None: those that it has.
        ref: that is moved; by default the one that was named.
        message: of the commit.
        author: of the commit.
    """
    root, named = parse_dataset_url(url)
    dataset = shardkit.open(url)
    repository = Repository.open(root)
    manifest = relabel(repository, dataset, about=about, lookup=lookup, cost=cost)
    wanted = ref or _ref(root, named)
    if repository.refs.get(wanted) == manifest.id:
        return manifest, None
    expected = {wanted: dataset.manifest.id} if repository.refs.get(wanted) == dataset.manifest.id else None
    said = message or f"look-ups, costs and about of {dataset.manifest.id}"
    return manifest, repository.commit({wanted: manifest.id}, message=said, author=author, expected=expected)


def _settings(dataset: Dataset, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the version, but for what is given."""
    manifest, about = dataset.manifest, about_of(dataset.version)
    held: dict[str, Any] = {name: manifest.build[name] for name in _BUILT if name in manifest.build}
    held |= {
        "stratify": [axis for axis in manifest.axes if axis in dataset.schema or axis == CLASS_AXIS],
        "about": about if about != About() else None,
        "lookup": [one.field for one in manifest.lookups],
        "cost": [one.expression for one in manifest.costs],
        "format": manifest.format,
        "compression": manifest.compression,
    }
    held |= {name: value for name, value in changes.items() if value is not None}
    for name in ("format", "compression"):
        if held[name] == MIXED:
            raise UsageError(
                f"the parts of this merged dataset differ in format or compression; say which: --{name}"
            )
    settings = VersionSettings(**held)
    return {one.name: getattr(settings, one.name) for one in dataclasses.fields(settings)}


def _ref(root: str, named: str | None) -> str:
    if named is not None and named not in Repository.open(root, read_only=True).refs:
        raise UsageError(
            f"{named!r} is no ref that could be moved; say which ref the new version gets: --ref"
        )
    return named or DEFAULT_REF
