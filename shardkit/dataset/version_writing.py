"""From rows in scratch to a committed version, in one process."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.dataset.appending import Base, pooling_of
from shardkit.dataset.committing import (
    NewVersion,
    StratumNumbers,
    check_about,
    commit_version,
    make_manifest,
    split_rows,
)
from shardkit.dataset.layout import lay_out
from shardkit.dataset.ref_moves import Standing
from shardkit.dataset.row_table import check_unique_keys, describe_row, join_parts, rows_of_shards
from shardkit.dataset.scratch import RowColumns
from shardkit.dataset.scratch_blocks import ScratchReader
from shardkit.dataset.scratch_parts import Parts
from shardkit.dataset.shard_writing import write_shard
from shardkit.errors import UsageError
from shardkit.manifest import Manifest
from shardkit.repository.repository import Repository

__all__ = ["write_version"]


def write_version(
    repository: Repository,
    version: NewVersion,
    columns: Sequence[RowColumns],
    parts: Parts,
    *,
    base: Base | None,
    ref: str,
    expected: Standing | None,
    message: str,
    author: str = "",
) -> Manifest:
    """Lay rows out, write their shards and commit them.

    Args:
        repository: where to.
        version: what it is to be.
        columns: of each part, in order.
        parts: their records.
        base: the version that they are appended to, or None.
        ref: the ref that is moved.
        expected: where the refs stood when the version was begun; see `move_refs`.
        message: of the commit.
        author: of the commit.

    Raises:
        UsageError: there are no rows.
        SampleError: two rows have the same key.
        StoreError: the root or the scratch disk failed; nothing was committed.
        CommitConflict: another commit moved the ref meanwhile.
    """
    rows = join_parts(columns)
    if not len(rows):
        raise UsageError("no sample was added; a dataset holds at least one")
    first = base.first_ordinal if base else 0
    fields = len(version.schema)
    check_unique_keys(
        rows,
        lambda place: describe_row(rows, parts, place, fields, first),
        first_ordinal=first,
        held=base.keys if base else None,
    )
    # What cannot be split, or is said of strata that are not there, is known before anything is written.
    check_about(version, rows, base)
    split_rows(version, rows, allow_empty=base is not None)
    layout = lay_out(rows.table, len(rows.strata), version.settings, pooling_of(rows.strata, base))
    numbers = StratumNumbers(rows.strata, layout.pooled, base.manifest.strata if base else ())
    reader = ScratchReader(parts, version.schema)
    shards = [
        write_shard(
            repository,
            reader,
            shard,
            schema=version.schema,
            format=version.format,
            compression=version.compression,
        )
        for shard in rows_of_shards(rows, layout, numbers.of_stratum, first)
    ]
    made = make_manifest(repository, version, rows, layout, shards, base)
    commit_version(repository, made, ref=ref, expected=expected, message=message, author=author)
    return made.manifest
