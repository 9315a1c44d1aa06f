"""`rebuild`: build a version's samples with other strata, shards, blocks, format or compression.

`label_again` changes only its look-ups, costs or about.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

import shardkit
from shardkit.dataset import Dataset
from shardkit.dataset.about import About, about_of, check_strata, given_about
from shardkit.dataset.committing import move_refs
from shardkit.dataset.costs import parse_costs, put_costs
from shardkit.dataset.encoding import CLASS_AXIS
from shardkit.dataset.lookups import parse_lookup, put_lookups
from shardkit.errors import UsageError
from shardkit.formats import Schema
from shardkit.manifest import MIXED, Manifest
from shardkit.repository.log import LogEntry, parse_dataset_url
from shardkit.repository.repository import DEFAULT_REF, Repository
from shardkit.repository.versions import put_manifest
from shardkit.stores.local import open_store
from shardkit.stores.store import object_name
from shardkit_tools.building.build_run import build
from shardkit_tools.building.outcome import BuildResult
from shardkit_tools.importers.protocol import SourceFailure, SourceFile, SourceSample, SourceTask

_BUILT = ("shard_size", "block_size", "seed", "shuffle")  # settings recorded in the manifest


def rebuild(
    url: str | os.PathLike[str],
    to: str | os.PathLike[str] | None = None,
    *,
    ref: str | None = None,
    message: str = "",
    **settings: Any,
) -> BuildResult:
    """Build the samples of a version again; settings that are not given stay the same.

    Samples, keys and sources stay byte for byte the same; rows that the version does not select are left out.
    Like any build, it can be killed and resumed.
    """
    root, named = parse_dataset_url(url)
    dataset = shardkit.open(url)
    return build(
        open_dataset_source(root, dataset),
        to if to is not None else root,
        **_settings(dataset, settings),
        ref=ref or (_ref(root, named) if to is None else DEFAULT_REF),
        message=message or f"rebuilt from {dataset.manifest.id}",
    )


def label_again(
    url: str | os.PathLike[str],
    *,
    about: About | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    lookup: str | Sequence[str] | None = None,
    cost: str | Sequence[str] | None = None,
    ref: str | None = None,
    message: str = "",
    author: str = "",
) -> tuple[Manifest, LogEntry | None]:
    """Commit a version over the same shards with other look-ups, costs or description; None keeps the old value."""
    root, named = parse_dataset_url(url)
    dataset = shardkit.open(url)
    repository, manifest = Repository.open(root), dataset.manifest
    if manifest.parts:
        raise UsageError(
            "a merged dataset takes look-ups, costs and about from its parts; change those, then merge again"
        )
    new = manifest
    if (said := given_about(about)) is not None:
        check_strata(said, {stratum.name for stratum in manifest.strata if not stratum.pooled})
        new = msgspec.structs.replace(new, about=repository.put_object(said.to_bytes(), "about").digest)
    if lookup is not None:
        fields = parse_lookup(lookup, manifest.schema)
        held = {found.field: found for found in manifest.lookups}
        missing = [field for field in fields if field not in held]
        made = put_lookups(repository, dataset.reader, dataset.table, missing)
        held |= {found.field: found for found in made}
        new = msgspec.structs.replace(new, lookups=tuple(held[field] for field in fields))
    if cost is not None:
        texts = parse_costs(cost, manifest.schema)
        known = {found.expression: found for found in manifest.costs}
        wanted = [text for text in texts if text not in known]
        costs = put_costs(repository, dataset.reader, dataset.table, manifest.schema, wanted)
        known |= {found.expression: found for found in costs}
        new = msgspec.structs.replace(new, costs=tuple(known[text] for text in texts))
    if new != manifest:
        new = msgspec.structs.replace(new, parent=manifest.id)
        put_manifest(repository, new, [])
    moving = ref or _ref(root, named)
    expected = {moving: manifest.id} if repository.refs.get(moving) == manifest.id else None
    said_of = message or f"look-ups, costs and about of {manifest.id}"
    return new, move_refs(repository, {moving: new.id}, expected, message=said_of, author=author).entry


def _settings(dataset: Dataset, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the version, updated by the changes."""
    manifest, about = dataset.manifest, about_of(dataset.version)
    held: dict[str, Any] = {name: manifest.build[name] for name in _BUILT if name in manifest.build}
    held |= {
        "stratify": [axis for axis in manifest.axes if axis in dataset.schema or axis == CLASS_AXIS],
        "about": about if about != About() else None,
        "lookup": [one.field for one in manifest.lookups],
        "cost": [one.expression for one in manifest.costs],
        "format": "arrow" if manifest.format == "rows" else manifest.format,
        "compression": manifest.compression,
    }
    if changes.get("format") not in (None, held["format"]):
        del held["compression"]  # each format has its own default
    held |= {name: value for name, value in changes.items() if value is not None}
    for name in ("format", "compression"):
        if held.get(name) == MIXED:
            raise UsageError(
                f"the parts of this merged dataset differ in format or compression; say which: --{name}"
            )
    return held


def _ref(root: str, named: str | None) -> str:
    if named is not None and named not in Repository.open(root, read_only=True).refs:
        raise UsageError(
            f"{named!r} is no ref that could be moved; say which ref the new version gets: --ref"
        )
    return named or DEFAULT_REF


# ---- A version as a source


@dataclass(frozen=True)
class DatasetImporter:
    """A version of a dataset as a source; made by `open_dataset_source`."""

    root: str
    manifest_id: str
    schema: Schema
    classes: tuple[str, ...]
    manifest_file: SourceFile

    def files(self) -> Sequence[SourceFile]:
        """The manifest alone, because its SHA-256 covers every shard."""
        return (self.manifest_file,)

    def tasks(self) -> Sequence[SourceTask]:
        """One task per shard."""
        table = _open(self.root, self.manifest_id).table
        return [
            SourceTask(f"shard {shard}", (self.manifest_file,), size, shard, shard + 1)
            for shard, size in enumerate(table.size.tolist())
        ]

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """Yield the selected rows of a shard with their original keys and sources."""
        dataset = _open(self.root, self.manifest_id)
        shard = task.start
        index = dataset.reader.index(shard)
        rows = dataset.rows.rows_of_shard(shard)
        blocks = np.searchsorted(index.block_start, rows, side="right") - 1
        for number in np.unique(blocks).tolist():
            block = dataset.reader.read(shard, number, "strong")
            first = int(index.block_start[number])
            for row in rows[blocks == number].tolist():
                source = index.source(row) or (self.manifest_file.name, row)
                yield SourceSample(block.sample(row - first), index.original_key(row), *source)

    def describe(self) -> dict[str, object]:
        """Return importer name and manifest id, for the recipe."""
        return {"importer": "shardkit", "manifest": self.manifest_id}


def open_dataset_source(root: str, dataset: Dataset) -> DatasetImporter:
    """Return a version as a source.

    Raises:
        UsageError: The root is not on a local disk.
    """
    identity = dataset.manifest.id
    path = open_store(root, read_only=True).local_path(object_name(identity, "manifest"))
    if path is None:
        raise UsageError(f"{root} is not on a local disk; copy it to one, then rebuild")
    size = path.stat().st_size
    file = SourceFile(f"{identity.removeprefix('sha256:')}.manifest", str(path), size, identity)
    return DatasetImporter(root, identity, dataset.schema, dataset.classes, file)


@functools.lru_cache(maxsize=2)
def _open(root: str, manifest_id: str) -> Dataset:
    """Return the dataset, opened once per process; workers are spawned, so they inherit none."""
    return shardkit.open(f"{root}@{manifest_id}", verify="strong")
