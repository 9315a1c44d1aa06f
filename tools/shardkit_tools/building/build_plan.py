"""Between the passes: all rows checked, and where each of them goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardkit.dataset.appending import Base, pooling_of
from shardkit.dataset.committing import NewVersion, StratumNumbers, check_about, split_rows
from shardkit.dataset.layout import Layout, lay_out
from shardkit.dataset.row_table import AllRows, check_unique_keys, describe_row
from shardkit_tools.building.job_directory import JobDirectory
from shardkit_tools.building.packing import PackReport
from shardkit_tools.building.reading import TaskFacts

__all__ = ["BuildPlan", "plan_build"]


@dataclass(frozen=True, slots=True, eq=False)
class BuildPlan:
    """All rows, the scratch parts that they are in, and where they go.

    Attributes:
        rows: of the new version, without those of the base. first_ordinal: of the first of them.
        layout, numbers: of these rows. splits: name → rows.
        parts: what the rows' ``part`` indexes.
        duplicates: rows left out because an earlier one has the same value.
        packed: what packing did, or None.
    """

    rows: AllRows
    first_ordinal: int
    layout: Layout
    numbers: StratumNumbers
    splits: Mapping[str, int]
    parts: Sequence[TaskFacts]
    duplicates: int
    packed: PackReport | None


def plan_build(
    rows: AllRows,
    parts: Sequence[TaskFacts],
    version: NewVersion,
    base: Base | None,
    job: JobDirectory | None,
    *,
    duplicates: int = 0,
    packed: PackReport | None = None,
) -> BuildPlan:
    """Check the rows against each other and those of the base, and lay them out.

    Args:
        rows: that are to be written.
        parts: the scratch that they are in.
        version: what is to be made.
        base: what it is appended to, or None.
        job: where the scratch is, so that rows can be named in messages; None where rows were counted only.
        duplicates: see `BuildPlan`.
        packed: see `BuildPlan`.

    Raises:
        SampleError: two rows have the same key.
        UsageError, ConfigurationError: strata, splits or `about` do not fit the rows.
    """
    first = base.first_ordinal if base else 0
    _check_keys(rows, parts, version, base, job)
    check_about(version, rows, base)
    index = split_rows(version, rows, allow_empty=base is not None)
    splits: dict[str, int] = {}
    if version.split is not None and index is not None:
        splits = {
            name: int(np.count_nonzero(index == number)) for number, name in enumerate(version.split.names)
        }
    layout = lay_out(rows.table, len(rows.strata), version.settings, pooling_of(rows.strata, base))
    numbers = StratumNumbers(rows.strata, layout.pooled, base.manifest.strata if base else ())
    return BuildPlan(rows, first, layout, numbers, splits, parts, duplicates, packed)


def _check_keys(
    rows: AllRows,
    parts: Sequence[TaskFacts],
    version: NewVersion,
    base: Base | None,
    job: JobDirectory | None,
) -> None:
    held = base.keys if base else None
    first = base.first_ordinal if base else 0
    if job is None:
        check_unique_keys(rows, lambda place: f"row {place}", first_ordinal=first, held=held)
        return
    files = job.folder.parts([task.part for task in parts])
    try:
        check_unique_keys(
            rows,
            lambda place: describe_row(rows, files, place, len(version.schema), first),
            first_ordinal=first,
            held=held,
        )
    finally:
        files.close()
