"""What is asked of a build beside the bytes, how far it is, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardkit.dataset.scratch import RUN_BYTES
from shardkit.dataset.shard_writing import GATHER_BYTES
from shardkit.manifest import Manifest
from shardkit.repository.log import LogEntry
from shardkit_tools.building.free_space import SpaceNeed
from shardkit_tools.building.packing import PackReport, PackSettings
from shardkit_tools.building.reading import SkippedRow
from shardkit_tools.building.row_marks import RowMarks

__all__ = ["BuildResult", "BuildSettings", "Progress", "ProgressCallback", "ProgressMeter"]

_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a build.

    Attributes:
        phase: "read" (source to scratch), "pack" (documents to rows), "write" (scratch to shards), "commit".
        rows: rows done in this phase, those of an earlier, killed run included.
        done_bytes: bytes done in this phase: of the source while reading, of the rows while writing.
        total_bytes: bytes of this phase.
        seconds: since this phase began in this run.
        rate: bytes per second since then, work of earlier runs not counted.
        scratch_bytes: estimate of the scratch space that the build takes.
        reused: finished units (tasks or shards) of an earlier, killed run.
    """

    phase: Literal["read", "pack", "write", "commit"]
    rows: int
    done_bytes: int
    total_bytes: int
    seconds: float
    rate: float
    scratch_bytes: int
    reused: int

    @property
    def seconds_left(self) -> float | None:
        """At this rate; None while there is none."""
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate > 0 else None


ProgressCallback = Callable[[Progress], None]
"""Is told how far a build is."""


class ProgressMeter:
    """Adds up what workers report and tells a callback, ten times a second at most."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback = callback
        self._phase: Literal["read", "pack", "write", "commit"] = "read"
        self._scratch_bytes = 0
        self._begin("read", 0, 0, 0, 0)

    def begin(
        self,
        phase: Literal["read", "pack", "write", "commit"],
        *,
        total_bytes: int = 0,
        done_rows: int = 0,
        done_bytes: int = 0,
        reused: int = 0,
        scratch_bytes: int | None = None,
    ) -> None:
        """Start a phase, with what an earlier run has done of it."""
        if scratch_bytes is not None:
            self._scratch_bytes = scratch_bytes
        self._begin(phase, total_bytes, done_rows, done_bytes, reused)
        self._tell(force=True)

    def add(self, rows: int, size: int) -> None:
        """Work was done."""
        self._rows += rows
        self._done_bytes += size
        self._tell()

    def end(self) -> None:
        """The phase is over."""
        self._done_bytes = self._total_bytes
        self._tell(force=True)

    def _begin(
        self,
        phase: Literal["read", "pack", "write", "commit"],
        total_bytes: int,
        rows: int,
        done_bytes: int,
        reused: int,
    ) -> None:
        self._phase = phase
        self._total_bytes = total_bytes
        self._rows = rows
        self._done_bytes = self._before = done_bytes
        self._reused = reused
        self._started = time.monotonic()
        self._told = 0.0

    def _tell(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if self._callback is None or (not force and now - self._told < _INTERVAL_S):
            return
        self._told = now
        seconds = now - self._started
        self._callback(
            Progress(
                phase=self._phase,
                rows=self._rows,
                done_bytes=self._done_bytes,
                total_bytes=self._total_bytes,
                seconds=seconds,
                rate=(self._done_bytes - self._before) / seconds if seconds > 0 else 0.0,
                scratch_bytes=self._scratch_bytes,
                reused=self._reused,
            )
        )


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
