"""What is asked of a build beside the bytes, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardkit.dataset.scratch import RUN_BYTES
from shardkit.dataset.shard_writing import GATHER_BYTES
from shardkit.manifest import Manifest
from shardkit.repository.log import LogEntry
from shardkit_tools.building.free_space import SpaceNeed
from shardkit_tools.building.packing import PackReport, PackSettings
from shardkit_tools.building.reading import SkippedRow
from shardkit_tools.building.row_marks import RowMarks

__all__ = ["BuildResult", "BuildSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """What does not decide the bytes.

    Attributes:
        root: of the dataset.
        source: absolute path of the source, so that builds of different sources do not share scratch.
        scratch: directory, or None for one inside the root.
        skipped_file: where skipped rows are listed, or None for one beside the scratch.
        skip: leave out rows that cannot be read.
        append: to the version that ``ref`` names.
        ref, message, author: of the commit.
        replace: whatever the refs name, another schema included.
        classes, notes: of the source's folders; see `FolderLayout`.
        pack: how documents become rows, or None.
        marks: what pass 1 notes of every row: for leaving out equal ones, and for packing.
        hash_threads: files whose digests are made at a time.
        run_bytes, gather_bytes: memory for a run of scratch, and for the rows of a shard at a time, per process.
    """

    root: str
    source: str
    scratch: str | None
    skipped_file: str | None
    skip: bool
    append: bool
    ref: str
    message: str
    author: str
    replace: bool = False
    classes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    pack: PackSettings | None = None
    marks: RowMarks = field(default_factory=RowMarks)
    hash_threads: int = 1
    run_bytes: int = RUN_BYTES
    gather_bytes: int = GATHER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What a build did.

    Attributes:
        manifest: of all rows; None for a dry run.
        splits: split → its manifest; empty for a dry run.
        split_rows: split → rows.
        commit: the log entry; None where every ref pointed there already, and for a dry run.
        moved: ref → (from, to) of those that moved; from None: it is new.
        rows: of the dataset. raw_bytes: in shards, before compression. shards: number of them.
        strata: name → rows, without the pool. pooled: how many of them share the pool.
        classes: class folder → its samples in the source. notes: what is unusual about the folders.
        source_bytes: read from the source. scratch_bytes: of encoded rows.
        skipped: rows left out. skipped_file: where they are listed, or None.
        duplicates: rows left out because an earlier one has the same value.
        packed: what packing did, or None.
        reused_tasks, reused_shards: work of an earlier, killed run.
        space: what a dry run says the build will need on its disks, and what is free there.
        seconds: wall clock.
    """

    manifest: Manifest | None
    splits: Mapping[str, Manifest] = field(default_factory=dict)
    split_rows: Mapping[str, int] = field(default_factory=dict)
    commit: LogEntry | None = None
    moved: Mapping[str, tuple[str | None, str]] = field(default_factory=dict)
    rows: int
    raw_bytes: int
    shards: int
    strata: Mapping[str, int]
    pooled: int
    classes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source_bytes: int
    scratch_bytes: int
    skipped: tuple[SkippedRow, ...] = ()
    skipped_file: str | None = None
    duplicates: int = 0
    packed: PackReport | None = None
    reused_tasks: int = 0
    reused_shards: int = 0
    space: tuple[SpaceNeed, ...] = ()
    seconds: float = 0.0
