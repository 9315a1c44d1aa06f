"""What is asked of a build, how far it is, what it answers, and whether it fits on the disks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from shardkit.dataset.version_plan import NewVersion, VersionSettings
from shardkit.errors import ConfigurationError, StoreFullError, UsageError
from shardkit.manifest import Manifest
from shardkit.repository.log import LogEntry
from shardkit.stores.file_operations import explained
from shardkit_tools.building.engines import Engine
from shardkit_tools.console import bytes_text
from shardkit_tools.importers import Importer, ImportOptions

_INTERVAL_S = 0.1
Phase: TypeAlias = Literal["read", "pack", "write", "commit"]


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a build."""

    # "read" (source to scratch), "pack" (documents to rows), "write" (scratch to shards), "commit"
    phase: Phase
    rows: int  # rows done in this phase, those of an earlier, killed run included
    done_bytes: int  # bytes done in this phase: of the source while reading, of the rows while writing
    total_bytes: int  # bytes of this phase
    seconds: float  # since this phase began in this run
    rate: float  # bytes per second since then, work of earlier runs not counted
    scratch_bytes: int  # estimate of the scratch space that the build takes
    reused: int  # finished units (tasks or shards) of an earlier, killed run

    @property
    def seconds_left(self) -> float | None:
        """At this rate; None while there is none."""
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate > 0 else None


ProgressCallback = Callable[[Progress], None]
"""Is told how far a build is."""


@dataclass(frozen=True)
class BuildSettings(VersionSettings):
    """Everything that a build is told; of the version itself see `VersionSettings`.

    Attributes:
        source: a file, folder, glob or URL, or an importer.
        root: where the dataset is or is to be.
        from_: name of the importer; by default it is detected.
        options: of the importer.
        apply: a function of a module, or its name ``"package.module:function"``: sample → sample, list of samples or
            None; every process imports it. Its name and the SHA-256 of its file are part of the recipe.
        tokenizer: a ``tokenizer.json``; the text field becomes ``tokens``. Its SHA-256 is part of the recipe.
        text_field: the field to tokenise, where several are text.
        eos: token that ends each document; None: the tokenizer's own, "none": no token. The report says which.
        output_schema: field → type of what ``apply`` and ``tokenizer`` make, in place of the inferred types.
        unique: field; of rows whose values of it are equal to the last byte the first of the source stays.
        pack: ragged field → length, such as ``{"tokens": 2048}``: the samples are documents that are put together
            into rows of this length, with their borders in ``boundaries``; of other fields only those by which the
            dataset is stratified stay. Rows are filled up with zeros.
        append: put the rows behind those of the version that ``ref`` names; the rest must be as it was built.
            Appending the very files that the last version appended changes nothing.
        ref: the ref that is moved. By default blocks aim at the size of those of the version that it names.
        replace: whatever the refs name, another schema and what others commit meanwhile included.
        single_writer: for a new root on a store that does not keep put-if-absent: nobody else writes it meanwhile.
        message, author: of the commit.
        jobs: processes; with more than 1 a script that calls `build` needs ``if __name__ == "__main__":``. None for
            one per processor, of the cluster where there is one.
        engine: ``"local"``, ``"ray"``, or an `Engine` of your own that runs the tasks elsewhere.
        address: of a running Ray cluster; without it ``"ray"`` starts one here.
        scratch: directory for encoded rows, about as large as the source, that all workers see; by default inside
            ``root``.
        on_error: ``"raise"``, or ``"skip"`` to leave out rows that cannot be read or do not fit, empty folders, and
            files of another kind than most are.
        skipped_file: where rows left out are listed as JSON lines; by default beside the scratch.
        dry_run: read and lay out everything, write nothing.
        progress: called with a `Progress` a few times a second.
    """

    source: str | os.PathLike[str] | Importer
    root: str | os.PathLike[str]
    _: KW_ONLY
    from_: str | None = None
    options: ImportOptions | None = None
    apply: str | Callable[..., Any] | None = None
    tokenizer: str | os.PathLike[str] | None = None
    text_field: str | None = None
    eos: str | None = None
    output_schema: Mapping[str, str] | None = None
    unique: str | None = None
    pack: Mapping[str, int] | None = None
    append: bool = False
    ref: str = "main"
    replace: bool = False
    single_writer: bool = False
    message: str = ""
    author: str = ""
    jobs: int | None = 1
    engine: str | Engine = "local"
    address: str | None = None
    scratch: str | os.PathLike[str] | None = None
    on_error: str = "raise"
    skipped_file: str | os.PathLike[str] | None = None
    dry_run: bool = False
    progress: ProgressCallback | None = None

    def __post_init__(self) -> None:
        VersionSettings.__post_init__(self)
        if self.on_error not in ("raise", "skip"):
            raise ConfigurationError(f'on_error is {self.on_error!r}; expected "raise" or "skip"')
        if self.unique is not None and self.append:
            raise UsageError(
                f"unique={self.unique!r} with append: the rows that are there are not compared; build into a ref of "
                "its own, then merge, or build all of it anew"
            )
        if self.text_field is not None and self.tokenizer is None:
            raise UsageError(f"text_field={self.text_field!r} without tokenizer; give the tokenizer too")
        if self.eos is not None and self.tokenizer is None:
            raise UsageError(f"eos={self.eos!r} without tokenizer; give the tokenizer too")
        if self.pack is not None and len(self.pack) != 1:
            raise ConfigurationError(
                f"pack names {len(self.pack)} fields ({', '.join(self.pack)}); give one field and its length"
            )

    @property
    def skips(self) -> bool:
        """Whether rows that cannot be read are left out."""
        return self.on_error == "skip"


class ProgressMeter:
    """Adds up what workers report and tells a callback, ten times a second at most."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback: ProgressCallback | None = None
        self._now = Progress("read", 0, 0, 0, 0.0, 0.0, 0, 0)
        self.begin("read")  # which nobody is told of: nothing has begun
        self._callback = callback

    def begin(
        self,
        phase: Phase,
        *,
        total_bytes: int = 0,
        done_rows: int = 0,
        done_bytes: int = 0,
        reused: int = 0,
        scratch_bytes: int | None = None,
    ) -> None:
        """Start a phase, with what an earlier run has done of it."""
        scratch = self._now.scratch_bytes if scratch_bytes is None else scratch_bytes
        self._now = Progress(phase, done_rows, done_bytes, total_bytes, 0.0, 0.0, scratch, reused)
        self._before, self._started, self._told = done_bytes, time.monotonic(), 0.0
        self._tell(force=True)

    def add(self, rows: int, size: int) -> None:
        now = self._now
        self._now = replace(now, rows=now.rows + rows, done_bytes=now.done_bytes + size)
        self._tell()

    def end(self) -> None:
        self._now = replace(self._now, done_bytes=self._now.total_bytes)
        self._tell(force=True)

    def _tell(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if self._callback is None or (not force and now - self._told < _INTERVAL_S):
            return
        self._told, seconds = now, now - self._started
        rate = (self._now.done_bytes - self._before) / seconds if seconds > 0 else 0.0
        self._callback(replace(self._now, seconds=seconds, rate=rate))


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that was left out with ``on_error="skip"``; row -1 stands for the rest of a task."""

    source_name: str
    source_row: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class PackReport:
    """What packing did."""

    documents: int  # packed
    tokens: int  # of all of them
    rows: int  # that they fill
    padding: int  # items of rows that hold none


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What a build did."""

    manifest: Manifest | None  # of all rows; None for a dry run
    splits: Mapping[str, Manifest] = field(default_factory=dict)  # split → its manifest; empty for a dry run
    split_rows: Mapping[str, int] = field(default_factory=dict)  # split → rows
    # the log entry; None where every ref pointed there already, and for a dry run
    commit: LogEntry | None = None
    # ref → (from, to) of those that moved; from None: it is new
    moved: Mapping[str, tuple[str | None, str]] = field(default_factory=dict)
    rows: int  # of the dataset
    raw_bytes: int  # in shards, before compression
    shards: int  # number of them
    strata: Mapping[str, int]  # name → rows, without the pool
    pooled: int  # how many of them share the pool
    classes: Mapping[str, int] = field(default_factory=dict)  # class folder → its samples in the source
    notes: tuple[str, ...] = ()  # what is unusual about the source
    source_bytes: int  # read from the source
    scratch_bytes: int  # of encoded rows
    skipped: tuple[SkippedRow, ...] = ()  # rows left out
    skipped_file: str | None = None  # where they are listed, or None
    duplicates: int = 0  # rows left out because an earlier one has the same value
    packed: PackReport | None = None  # what packing did, or None
    reused_tasks: int = 0  # of an earlier, killed run
    reused_shards: int = 0  # likewise
    # what a dry run says the build will need on its disks, and what is free there
    space: tuple[SpaceNeed, ...] = ()
    seconds: float = 0.0  # wall clock


# ---- Room: estimated from below, so that nothing is refused that would have fitted. A full disk in the middle of a
# build is an error as well, and costs no finished work.


# Numbers in text take a multiple of what they take in a shard, and transforms may leave anything.
_OF_TEXT = 0.25
_OF_DATA = 0.9
_TEXT_IMPORTERS = frozenset({"csv", "jsonl", "text"})


@dataclass(frozen=True, slots=True)
class SpaceNeed:
    """What one folder needs."""

    what: str  # "scratch" or "shards"
    folder: str  # where
    need_bytes: int  # about
    free_bytes: int  # there now
    device: int  # of the file system


def least_bytes(version: NewVersion, source_bytes: int) -> int:
    """What so many bytes of the source at least become as encoded rows."""
    described = version.recipe.get("source", {})
    importer = described.get("importer") if isinstance(described, dict) else None
    is_changed = bool(set(version.recipe) - {"source"})
    return int(source_bytes * (_OF_TEXT if is_changed or importer in _TEXT_IMPORTERS else _OF_DATA))


def space_needs(
    version: NewVersion, scratch: str | None, scratch_bytes: int, root: str | None, raw_bytes: int
) -> tuple[SpaceNeed, ...]:
    """What the folders of a build need, and have; None for a folder that is none of this machine.

    Shards that are compressed count for nothing: nobody knows how well they will be.
    """
    needs = []
    shard_bytes = raw_bytes if version.compression == "none" else 0
    for what, folder, need in (("scratch", scratch, scratch_bytes), ("shards", root, shard_bytes)):
        if folder is None:
            continue
        there = os.path.abspath(folder)
        while not os.path.isdir(there) and os.path.dirname(there) != there:  # the nearest that exists
            there = os.path.dirname(there)
        with explained(f"see how much room is in {there}"):
            needs.append(SpaceNeed(what, folder, need, shutil.disk_usage(there).free, os.stat(there).st_dev))
    return tuple(needs)


def check_space(needs: Sequence[SpaceNeed]) -> None:
    """Refuse to begin what cannot end; folders on one file system share its room."""
    for need in needs:
        together = [other for other in needs if other.device == need.device]
        total = sum(other.need_bytes for other in together)
        if total > need.free_bytes:
            parts = " and ".join(f"{bytes_text(one.need_bytes)} of {one.what}" for one in together)
            raise StoreFullError(
                f"{need.folder}: {bytes_text(need.free_bytes)} free, but the build needs at least "
                f"{bytes_text(total)} there ({parts}); make room, or name a folder on another disk with --scratch"
            )
