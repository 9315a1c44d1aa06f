"""A shardkit dataset as a source: what `rebuild` reads, shard by shard, every block verified."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import shardkit
from shardkit.dataset import Dataset
from shardkit.errors import UsageError
from shardkit.formats import Schema
from shardkit.stores.store import object_name
from shardkit.stores.urls import open_store
from shardkit_tools.importers.protocol import SourceFailure, SourceFile, SourceSample, SourceTask


@dataclass(frozen=True)
class DatasetImporter:
    """One version of a dataset as a source; made by `open_dataset_source`."""

    root: str
    manifest_id: str
    schema: Schema
    classes: tuple[str, ...]
    manifest_file: SourceFile

    def files(self) -> Sequence[SourceFile]:
        """The manifest alone: its SHA-256 vouches for every shard."""
        return (self.manifest_file,)

    def tasks(self) -> Sequence[SourceTask]:
        """The shards, one by one."""
        table = _open(self.root, self.manifest_id).table
        return [
            SourceTask(f"shard {shard}", (self.manifest_file,), size, shard, shard + 1)
            for shard, size in enumerate(table.size.tolist())
        ]

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """The selected rows of a shard, by the keys and sources that they came with."""
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
        """Name and manifest, for the recipe."""
        return {"importer": "shardkit", "manifest": self.manifest_id}


def open_dataset_source(root: str, dataset: Dataset) -> DatasetImporter:
    """A version as a source.

    Raises:
        UsageError: its root is not on a local disk.
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
    """One open dataset per process; workers are spawned, so that none is inherited."""
    return shardkit.open(f"{root}@{manifest_id}", verify="strong")
