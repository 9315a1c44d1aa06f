"""Add fields to a version in shards of their own, aligned row by row; nothing is rewritten (SPEC.md §16)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.encoding import joined_batch
from shardkit.dataset.shard_writing import publish_shard
from shardkit.formats import RowBlock, Schema
from shardkit.formats.arrow_writing import arrow_schema, index_array
from shardkit.formats.block import stored_columns
from shardkit.formats.compression import normalise_compression
from shardkit.manifest import Manifest, ShardTable, compose, extend
from shardkit.manifest.composition import check_extension
from shardkit.repository.repository import Repository
from shardkit.repository.versions import put_manifest

_COMPRESSION: Final = normalise_compression("arrow", "zstd")
_SMALL_ROWS: Final = 1 << 14  # threads pay only for larger shards


class NewFields(Protocol):
    """Values of new fields for the samples of a version."""

    @property
    def schema(self) -> Schema:
        """The new fields."""

    def batch(self, shard: int, block: int, rows: NDArray[np.int64], first: int) -> Any:
        """Return the values of some selected rows of a block.

        Args:
            shard: number of the shard in the version.
            block: number of the block in the shard.
            rows: (n,) rows inside the block, ascending; at least one.
            first: number of selected rows of the shard before them.

        Returns:
            A record batch of `arrow_schema` of the schema, without keys.
        """


def extend_version(
    repository: Repository,
    dataset: Dataset,
    fields: NewFields,
    *,
    note: Mapping[str, Any],
    sources: str | None,
) -> Manifest:
    """Put the version with the new fields, and the version that extends the dataset by them; commit neither.

    Args:
        repository: the dataset's repository, open for writing.
        dataset: the version to extend.
        fields: the new fields.
        note: origin of the new fields, for the manifest.
        sources: digest of the object that lists the imported files, or None.

    Returns:
        The manifest of the extended version.

    Raises:
        UsageError: a new field exists already, or the version is merged.
    """
    own, table = dataset.manifest, dataset.table
    check_extension(own, fields.schema)  # before anything is written
    blocks = _Blocks(dataset, fields)
    records = []
    for shard in range(len(table)):
        segments = table.segments_of(shard)
        block_rows = int(table.block_rows[shard])
        written = publish_shard(
            repository,
            blocks.of_shard(shard),
            format="arrow",
            compression=_COMPRESSION,
            schema=fields.schema,
            block_rows=block_rows,
            is_small=int(table.rows[shard]) < _SMALL_ROWS,
        )
        segment_stratum, segment_rows = table.segment_stratum[segments], table.segment_rows[segments]
        records.append(written.record(block_rows, segment_stratum, segment_rows))
    added, pages = compose(
        ShardTable.from_records(records),
        schema=fields.schema,
        format="arrow",
        compression=_COMPRESSION,
        axes=own.axes,
        strata=tuple(msgspec.structs.replace(stratum, selected=stratum.rows) for stratum in own.strata),
        sources=sources,
        build=dict(note),
    )
    extended = extend(own, added, parent=own.id)
    put_manifest(repository, added, pages)
    put_manifest(repository, extended, [])
    return extended


class _Blocks:
    """The blocks of the new shards: rows, keys and borders of the version's own blocks.

    A row that the version does not select gets the values of the first sample, so that every row has valid ones.
    """

    def __init__(self, dataset: Dataset, fields: NewFields) -> None:
        self._dataset, self._fields = dataset, fields
        self._filler: Any = None  # a batch of one row

    def of_shard(self, shard: int) -> Iterator[RowBlock]:
        index = self._dataset.reader.index(shard)
        selected = self._dataset.rows.rows_of_shard(shard)
        for block, (start, end) in enumerate(pairwise(index.block_start.tolist())):
            first, last = np.searchsorted(selected, [start, end]).tolist()
            batch = self._batch(shard, block, selected[first:last] - start, first, end - start)
            keys = [index.key(row) for row in range(start, end)]
            yield RowBlock(keys, stored_columns(self._fields.schema, batch))

    def _batch(self, shard: int, block: int, rows: NDArray[np.int64], first: int, count: int) -> Any:
        found = [self._fields.batch(shard, block, rows, first)] if len(rows) else []
        if self._filler is None and found:
            self._filler = found[0].slice(0, 1)
        if len(rows) == count:
            return found[0]
        places = np.full(count, len(rows), np.int64)
        places[rows] = np.arange(len(rows))
        kinds = arrow_schema(self._fields.schema, keys=False)
        return joined_batch([*found, self._first_sample()], kinds).take(index_array(places))

    def _first_sample(self) -> Any:
        if self._filler is None:
            shard = int(np.argmax(self._dataset.table.selected > 0))
            row = self._dataset.rows.rows_of_shard(shard)[:1]
            block, inside = self._dataset.reader.index(shard).block_of(int(row[0]))
            self._filler = self._fields.batch(shard, block, np.array([inside]), 0)
        return self._filler
