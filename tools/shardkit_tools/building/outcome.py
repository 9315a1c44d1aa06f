"""Settings, progress and result of a build, and the check of disk space."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, ParamSpec, TypeAlias

from shardkit.dataset.committing import block_size_for, version_of_ref
from shardkit.dataset.version_plan import NewVersion, VersionSettings
from shardkit.errors import ConfigurationError, ShardkitError, SourceError, StoreFullError, UsageError
from shardkit.formats import FieldType, Schema
from shardkit.formats.block import payload_column, sizes_of
from shardkit.manifest import Manifest
from shardkit.repository.log import LogEntry
from shardkit.stores.file_operations import explained
from shardkit_tools.building.engines import Engine
from shardkit_tools.console import bytes_text, count_text
from shardkit_tools.importers import Importer, ImportOptions, source_kinds
from shardkit_tools.importers.protocol import (
    DecodedRows,
    FileImporter,
    SourceSchema,
    SourceTask,
    decode,
    ignore_file,
)
from shardkit_tools.transforms import AppliedFunction, TextTokenizer, TransformedImporter

_INTERVAL_S = 0.1
Phase: TypeAlias = Literal["read", "pack", "write", "commit"]


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a build at one moment."""

    # "read" (source to scratch), "pack" (documents to rows), "write" (scratch to shards), "commit"
    phase: Phase
    rows: int  # rows done in this phase, including rows of an earlier, killed run
    done_bytes: int  # bytes done in this phase, of the source while reading, of the rows while writing
    total_bytes: int  # bytes of this phase
    seconds: float  # seconds since this phase began in this run
    rate: float  # bytes per second in this phase, without work of earlier runs
    scratch_bytes: int  # estimated scratch space of the build
    reused: int  # finished tasks or shards of an earlier, killed run

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end of the phase; None without a rate."""
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate > 0 else None


ProgressCallback = Callable[[Progress], None]
"""Called with the progress of a build."""


@dataclass(frozen=True)
class BuildSettings(VersionSettings):
    """All settings of a build, including `VersionSettings`.

    Attributes:
        source: a file, folder, glob or URL, or an importer.
        root: directory or URL of the dataset, new or existing.
        from_: name of the importer; by default it is detected.
        options: options of the importer.
        apply: a function of a module, or its name ``"package.module:function"``: sample → sample, list of
            samples or None; every process imports it. Its name and the SHA-256 of its file are part of the
            recipe.
        tokenizer: a ``tokenizer.json``; the text field becomes ``tokens``. Its SHA-256 is part of the recipe.
        text_field: the field to tokenise, if several are text.
        eos: token that ends each document; None: the tokenizer's own, "none": no token. The report names it.
        output_schema: field → type of the output of ``apply`` and ``tokenizer``, instead of the inferred
            types.
        unique: field; of rows with equal values, byte for byte, only the first of the source is kept.
        pack: ragged field → length, such as ``{"tokens": 2048}``: documents are packed into rows of this
            length, with their borders in ``boundaries``. Only the stratify fields are kept besides. Rows are
            padded with zeros.
        append: add the rows to the version that ``ref`` names; schema, format, compression, stratify and
            classes must be the same. Appending exactly the files of the last append changes nothing.
        ref: the ref that is moved; the version that it names sets the default block size.
        replace: move the refs even from another schema, and over concurrent commits.
        single_writer: for a new root on a store without put-if-absent: promise that there is no other writer.
        message: message of the commit.
        author: author of the commit.
        jobs: number of processes; with more than 1, a script that calls `build` needs ``if __name__ ==
            "__main__":``. None: one per processor, of the cluster if there is one.
        engine: ``"local"``, ``"ray"``, or another `Engine`.
        address: address of a running Ray cluster; without it, ``"ray"`` starts one on this machine.
        scratch: directory for encoded rows, about as large as the source, that all workers see; by default
            inside ``root``.
        on_error: ``"raise"``, or ``"skip"`` to leave out rows that cannot be read or do not fit, empty
            folders, and files of another kind than most.
        skipped_file: file that lists skipped rows as JSON lines; by default next to the scratch.
        dry_run: read the source and arrange the rows, but write nothing.
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
        """True if rows that cannot be read are left out."""
        return self.on_error == "skip"


class ProgressMeter:
    """Sums up the reports of workers and calls a callback at most ten times a second."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback: ProgressCallback | None = None
        self._now = Progress("read", 0, 0, 0, 0.0, 0.0, 0, 0)
        self.begin("read")  # not reported: the callback is set afterwards
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
        """Start a phase, with the work that an earlier run has done."""
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
    """A row left out with ``on_error="skip"``; row -1 stands for the rest of a file or task."""

    source_name: str
    source_row: int
    kind: str
    message: str


def list_skipped(path: str, skipped: Sequence[SkippedRow]) -> str | None:
    """Write skipped rows to a file as JSON lines and return its path; None if there are none."""
    if not skipped:
        return None
    lines = [json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n" for row in skipped]
    with explained(f"write {path}", writing=True), open(path, "w", encoding="utf-8") as stream:
        stream.writelines(lines)
    return path


_MESSAGES = 20  # of samples in an error


def refuse_failures(messages: Sequence[str]) -> None:
    """Raise SourceError if there are messages of samples that cannot be read; it has the first of them."""
    if len(messages) < 2:
        for message in messages:
            raise SourceError(message)
        return
    shown = "; ".join(messages[:_MESSAGES]) + ("; …" if len(messages) > _MESSAGES else "")
    raise SourceError(
        f"{count_text(len(messages), 'sample')} cannot be read: {shown}; fix these, or leave them out: --on-error skip"
    )


@dataclass(frozen=True, slots=True)
class PackReport:
    """Result of packing."""

    documents: int  # number of documents packed
    tokens: int  # number of items in all documents
    rows: int  # number of rows that they fill
    padding: int  # number of padding items


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """Result of a build."""

    manifest: Manifest | None  # manifest of all rows; None for a dry run
    splits: Mapping[str, Manifest] = field(default_factory=dict)  # split → its manifest; empty for a dry run
    split_rows: Mapping[str, int] = field(default_factory=dict)  # split → rows
    # log entry; None if every ref named its version already, and for a dry run
    commit: LogEntry | None = None
    # moved ref → (from, to); from is None for a new ref
    moved: Mapping[str, tuple[str | None, str]] = field(default_factory=dict)
    # names of the objects that were damaged and that the build replaced
    healed: tuple[str, ...] = ()
    rows: int  # rows of the dataset
    raw_bytes: int  # size in shards, before compression
    shards: int  # number of shards
    strata: Mapping[str, int]  # name → rows, without the pool
    pooled: int  # number of strata in the pool
    schema: Schema  # fields of the samples
    importer: str  # name of the importer that read the source
    format: str  # format of the shards
    compression: str  # their compression
    classes: Mapping[str, int] = field(default_factory=dict)  # class folder → its samples in the source
    notes: tuple[str, ...] = ()  # remarks on unusual properties of the source
    source_bytes: int  # size of the source
    scratch_bytes: int  # size of the encoded rows
    skipped: tuple[SkippedRow, ...] = ()  # rows that were left out
    skipped_file: str | None = None  # file that lists them, or None
    duplicates: int = 0  # rows left out because an earlier row has the same value
    packed: PackReport | None = None  # result of packing, or None
    reused_tasks: int = 0  # tasks of an earlier, killed run
    reused_shards: int = 0  # shards of an earlier, killed run
    # of a dry run: disk space that the build will need, and free space
    space: tuple[SpaceNeed, ...] = ()
    seconds: float = 0.0  # wall-clock time


# ---- Disk space: estimated from below, so that no build is refused that would fit. A full disk during a
# build is an error as well, and loses no finished work.


# Numbers in text take several times their size in a shard, and transforms may reduce rows to any size.
_OF_TEXT = 0.25
_OF_DATA = 0.9
_TEXT_IMPORTERS = frozenset({"csv", "jsonl", "text"})


@dataclass(frozen=True, slots=True)
class SpaceNeed:
    """Disk space that one folder needs."""

    what: str  # "scratch" or "shards"
    folder: str  # path of the folder
    need_bytes: int  # estimate
    free_bytes: int  # free space now
    device: int  # device number of the file system


def least_bytes(version: NewVersion, source_bytes: int) -> int:
    """Return the least size as encoded rows of this many bytes of the source."""
    described = version.recipe.get("source", {})
    importer = described.get("importer") if isinstance(described, dict) else None
    is_changed = bool(set(version.recipe) - {"source"})
    return int(source_bytes * (_OF_TEXT if is_changed or importer in _TEXT_IMPORTERS else _OF_DATA))


def space_needs(
    version: NewVersion, scratch: str | None, scratch_bytes: int, root: str | None, raw_bytes: int
) -> tuple[SpaceNeed, ...]:
    """Return the needed and free space of a build's local folders; None stands for a remote one.

    Compressed shards count as 0 bytes, because their size is unknown.
    """
    needs = []
    shard_bytes = raw_bytes if version.compression == "none" else 0
    for what, folder, need in (("scratch", scratch, scratch_bytes), ("shards", root, shard_bytes)):
        if folder is None:
            continue
        there = os.path.abspath(folder)
        while not os.path.isdir(there) and os.path.dirname(there) != there:  # nearest existing folder
            there = os.path.dirname(there)
        with explained(f"see how much room is in {there}"):
            needs.append(SpaceNeed(what, folder, need, shutil.disk_usage(there).free, os.stat(there).st_dev))
    return tuple(needs)


def check_space(needs: Sequence[SpaceNeed]) -> None:
    """Refuse a build that cannot fit; folders on one file system share its free space.

    Raises:
        StoreFullError: A file system has too little free space.
    """
    for need in needs:
        together = [other for other in needs if other.device == need.device]
        total = sum(other.need_bytes for other in together)
        if total > need.free_bytes:
            parts = " and ".join(f"{bytes_text(one.need_bytes)} of {one.what}" for one in together)
            raise StoreFullError(
                f"{need.folder}: {bytes_text(need.free_bytes)} free, but the build needs at least "
                f"{bytes_text(total)} there ({parts}); make room, or name a folder on another disk with --scratch"
            )


# ---- Settings as arguments, and the source that they name

_P = ParamSpec("_P")


def of_settings(
    settings: Callable[_P, BuildSettings],
) -> Callable[[Callable[[BuildSettings], BuildResult]], Callable[_P, BuildResult]]:
    """Return a decorator: a function of settings is called with their fields instead."""

    def spread(function: Callable[[BuildSettings], BuildResult]) -> Callable[_P, BuildResult]:
        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> BuildResult:
            return function(settings(*args, **kwargs))

        shown = inspect.signature(settings).replace(return_annotation=BuildResult)
        wrapper.__signature__ = shown  # type: ignore[attr-defined]  # what `help` and tools show
        return wrapper

    return spread


def open_source(settings: BuildSettings) -> Importer:
    """Return the importer of the source; if the build appends to a version, with the types of its fields."""
    if isinstance(settings.source, Importer):
        return settings.source
    options = settings.options or ImportOptions(skip_bad_rows=settings.skips)
    options = dataclasses.replace(options, unchecked=settings.apply is not None)
    source = os.fspath(settings.source)
    importer = source_kinds.open_source(source, settings.from_, options)
    held = version_of_ref(settings.root, settings.ref) if settings.append else None
    is_changed = settings.apply or settings.tokenizer or settings.output_schema or settings.pack
    if held is None or is_changed:
        return importer
    types = _stored_types(importer, held.schema)
    if types:
        options = dataclasses.replace(options, field_types={**types, **options.field_types})
        importer = source_kinds.open_source(source, settings.from_, options)
    absent = {
        name: kind
        for name, kind in held.schema.items()
        if kind.optional and name not in importer.schema and name not in importer.fields
    }
    if absent:
        importer = replace(importer, fields=SourceSchema({**importer.fields, **absent}))
        importer.source.notes.append(
            f"the source has no {', '.join(absent)}, so the new samples have no value there"
        )
    return importer.in_order(held.schema)


def _stored_types(importer: FileImporter, held: Schema) -> dict[str, str]:
    """Return the types of a version for the fields of a source whose inferred types differ; rows must fit them.

    In sources whose rows name their fields, an optional field of the version may first appear in any row.
    """
    stored = {importer.options.rename.get(name, name): name for name in importer.fields}
    types = {
        stored[name]: str(kind)
        for name, kind in held.items()
        if name in stored and importer.fields[stored[name]] != kind
    }
    if importer.has_own_fields:
        types |= {name: str(kind) for name, kind in held.items() if name not in stored and kind.optional}
    return types


def apply_transforms(importer: Importer, settings: BuildSettings) -> Importer:
    """Return the source with its function and tokenizer applied, if any."""
    if settings.apply is None and settings.tokenizer is None and not settings.output_schema:
        return importer
    return TransformedImporter(
        importer,
        AppliedFunction.find(settings.apply) if settings.apply is not None else None,
        TextTokenizer.open(settings.tokenizer, settings.eos) if settings.tokenizer is not None else None,
        text_field=settings.text_field,
        output_types=settings.output_schema,
        skip=settings.skips,
    )


_HOLD_FILES = frozenset({"folder", "webdataset"})


def with_defaults(settings: BuildSettings, importer: Importer, tasks: Sequence[SourceTask]) -> BuildSettings:
    """Return the settings with block size, format and compression decided; see `VersionSettings.for_rows`.

    The size of a row's files is the mean of the first rows of the source; a folder and a tar hold files of any size.
    """
    held = version_of_ref(settings.root, settings.ref)
    settings = replace(settings, block_size=block_size_for(held, settings.block_size))
    if settings.format is not None and settings.compression is not None:
        return settings
    base = held if settings.append else None
    stored: Mapping[str, FieldType] = importer.schema
    for packed in settings.pack or ():
        stored = {packed: stored[packed]} if packed in stored else stored
    fields = [name for name, kind in stored.items() if kind.kind == "bytes"]
    size = None
    if tasks and fields and base is None and importer.describe().get("importer") not in _HOLD_FILES:
        size = _mean_bytes(importer, tasks[0], fields)
    return settings.for_rows(stored, base, file_bytes=size)


def _mean_bytes(importer: Importer, task: SourceTask, fields: Sequence[str]) -> float | None:
    with contextlib.suppress(ShardkitError):  # an error is reported when the source is read
        for found in decode(importer, task, ignore_file):
            if isinstance(found, DecodedRows) and len(found.batch):
                columns = [payload_column(importer.schema[name], found.batch[name]) for name in fields]
                return sum(int(sizes_of(column).sum()) for column in columns) / len(found.batch)
    return None
