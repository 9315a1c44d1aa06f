"""The two passes of a build, and the commit."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardkit.dataset.appending import Base, pooling_of
from shardkit.dataset.committing import (
    MadeVersion,
    NewVersion,
    StratumNumbers,
    check_about,
    commit_version,
    make_manifest,
    split_rows,
)
from shardkit.dataset.create import load_base_of, scratch_folder
from shardkit.dataset.encoding import RowEncoder
from shardkit.dataset.layout import Layout, lay_out
from shardkit.dataset.row_table import AllRows, check_unique_keys, describe_row, join_parts, rows_of_shards
from shardkit.dataset.scratch import RUN_BYTES, RowColumns
from shardkit.dataset.scratch_parts import PartFiles
from shardkit.dataset.shard_writing import GATHER_BYTES, ShardRows, WrittenShard
from shardkit.dataset.sources import SourceDigest, SourcesObject, joined_sources, pack_sources, unpack_sources
from shardkit.dataset.splits import split_of
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats import canonical_json, sha256_digest
from shardkit.manifest import Manifest
from shardkit.storage import LogEntry, Repository
from shardkit.storage.os_errors import explained
from shardkit_tools.building.job_directory import JobDirectory
from shardkit_tools.building.packing import (
    Documents,
    PackReport,
    PackSettings,
    PackWorker,
    cut_documents,
    packed_record,
)
from shardkit_tools.building.progress import ProgressCallback, ProgressMeter
from shardkit_tools.building.reading import ReadTask, ReadWorker, SkippedRow, TaskFacts, TaskRows, digest_file
from shardkit_tools.building.resuming import finished_rows, finished_tasks
from shardkit_tools.building.row_marks import ITEMS, RowMarks, first_of_equals
from shardkit_tools.building.workers import Processes
from shardkit_tools.building.writing import WriteWorker, finished_shard
from shardkit_tools.importers.protocol import Importer, SourceTask

__all__ = ["BuildResult", "Engine", "EngineSettings"]

# Below this a process costs more to start than it saves.
SMALL_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What does not decide the bytes.

    Attributes:
        root: of the dataset.
        source: absolute path of the source, so that builds of different sources do not share scratch.
        scratch: directory, or None for one inside the root.
        skipped_file: where skipped rows are listed, or None for one beside the scratch.
        jobs: processes.
        skip: leave out rows that cannot be read.
        append: to the version that ``ref`` names.
        ref, message, author: of the commit.
        pack: how documents become rows, or None.
        marks: what pass 1 notes of every row: for leaving out equal ones, and for packing.
        run_bytes, gather_bytes: memory for a run of scratch, and for the rows of a shard at a time, per process.
    """

    root: str
    source: str
    scratch: str | None
    skipped_file: str | None
    jobs: int
    skip: bool
    append: bool
    ref: str
    message: str
    author: str
    pack: PackSettings | None = None
    marks: RowMarks = field(default_factory=RowMarks)
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
        rows: of the dataset. raw_bytes: in shards, before compression. shards: number of them.
        strata: name → rows, without the pool. pooled: how many of them share the pool.
        source_bytes: read from the source. scratch_bytes: of encoded rows.
        skipped: rows left out. skipped_file: where they are listed, or None.
        duplicates: rows left out because an earlier one has the same value.
        packed: what packing did, or None.
        reused_tasks, reused_shards: work of an earlier, killed run.
        seconds: wall clock.
    """

    manifest: Manifest | None
    splits: Mapping[str, Manifest] = field(default_factory=dict)
    split_rows: Mapping[str, int] = field(default_factory=dict)
    commit: LogEntry | None = None
    rows: int
    raw_bytes: int
    shards: int
    strata: Mapping[str, int]
    pooled: int
    source_bytes: int
    scratch_bytes: int
    skipped: tuple[SkippedRow, ...] = ()
    skipped_file: str | None = None
    duplicates: int = 0
    packed: PackReport | None = None
    reused_tasks: int = 0
    reused_shards: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """All rows, the scratch parts that they are in, and where they go."""

    rows: AllRows
    layout: Layout
    numbers: StratumNumbers
    splits: Mapping[str, int]
    parts: Sequence[TaskFacts]
    duplicates: int
    packed: PackReport | None


class Engine:
    """One build; made by `shardkit_tools.build`.

    Args:
        importer: of the source.
        encoder: of the rows.
        version: what is to be made.
        settings: see `EngineSettings`.
        progress: callback, or None.
    """

    def __init__(
        self,
        importer: Importer,
        encoder: RowEncoder,
        version: NewVersion,
        settings: EngineSettings,
        progress: ProgressCallback | None,
    ) -> None:
        self._importer = importer
        self._encoder = encoder
        self._version = version
        self._settings = settings
        self._meter = ProgressMeter(progress)
        self._tasks = list(importer.tasks())
        self._started = time.monotonic()
        self._base: Base | None = None
        self._processes = Processes(settings.jobs)

    def count(self) -> BuildResult:
        """The dry run: everything but writing.

        Raises:
            SourceError, SampleError, ConfigurationError: as `build` would.
        """
        if self._settings.append:
            self._load_base(Repository.open(self._settings.root, read_only=True))
        with self._processes:
            found, columns = self._read("", {})
            plan = self._plan(found, columns, None)
        return self._result(found, plan, None, None, None, 0, 0)

    def build(self) -> BuildResult:
        """Both passes and the commit.

        Raises:
            ShardkitError: see `shardkit_tools.build`.
            KeyboardInterrupt: with a text that says how to go on.
        """
        if self._settings.append:
            repository = Repository.open(self._settings.root)
            self._load_base(repository)
        else:
            repository = Repository.create(self._settings.root)
        parent = scratch_folder(repository, self._settings.scratch)
        job = JobDirectory(parent, self._digest())
        try:
            with self._processes:
                result = self._build(repository, parent, job)
        except KeyboardInterrupt:
            job.release()
            raise KeyboardInterrupt(
                f"interrupted; finished work is kept in {job.path}: run the same command again to go on"
            ) from None
        except BaseException:
            job.release_or_discard()
            raise
        job.discard()
        return result

    def _build(self, repository: Repository, parent: str, job: JobDirectory) -> BuildResult:
        reused = finished_tasks(job, self._tasks)
        reused_tasks = len(reused)
        found, columns = self._read(job.path, reused)
        skipped = _skipped(found)
        sources = self._sources(found, skipped)
        if self._base is not None and self._is_appended(self._base, sources):
            made = MadeVersion(
                self._base.manifest, {name: split.manifest for name, split in self._base.splits.items()}
            )
            self._base = None  # its rows are these rows: they are counted by themselves
            return self._result(found, self._plan(found, columns, job), made, None, None, reused_tasks, 0)
        plan = self._plan(found, columns, job)
        shards, reused_shards = self._write(repository, job, plan)
        self._meter.begin("commit")
        version = self._final_version(repository, sources)
        made = make_manifest(repository, version, plan.rows, plan.layout, shards, self._base)
        listed = self._list_skipped(parent, skipped)
        entry = self._commit(repository, made)
        self._meter.end()
        return self._result(found, plan, made, entry, listed, reused_tasks, reused_shards)

    def _load_base(self, repository: Repository) -> None:
        self._base = load_base_of(repository, self._version, self._settings.ref)

    def _is_appended(self, base: Base, sources: SourcesObject) -> bool:
        """Whether the base was itself made by appending these very files in this very way.

        So a build that is killed between its commit and its end does not append twice.
        """
        last = dict(base.manifest.build.get("append", {}))
        last.pop("rows", None)
        return last == {**self._version.build_settings(), "sources": sha256_digest(pack_sources(sources))}

    def _read(self, folder: str, found: dict[int, TaskRows]) -> tuple[list[TaskFacts], list[RowColumns]]:
        """Pass 1: every task that is not in ``found`` yet; facts and columns of all, in source order."""
        todo = [ReadTask(number, task) for number, task in enumerate(self._tasks) if number not in found]
        total = sum(task.size for task in self._tasks)
        left = sum(item.task.size for item in todo)
        self._meter.begin(
            "read",
            total_bytes=total,
            done_rows=sum(len(rows.columns) for rows in found.values()),
            done_bytes=total - left,
            reused=len(found),
            scratch_bytes=total if folder else 0,
        )
        layout = self._version.settings
        make = functools.partial(
            ReadWorker,
            self._importer,
            self._encoder,
            seed=layout.seed if layout.shuffle else None,
            folder=folder,
            skip=self._settings.skip,
            run_bytes=self._settings.run_bytes,
            marks=self._settings.marks,
        )
        for rows in self._processes.run(make, todo, self._meter.add, here=left < SMALL_BYTES):
            found[rows.facts.number] = rows
        self._meter.end()
        tasks = [found.pop(number) for number in range(len(self._tasks))]
        return [task.facts for task in tasks], [task.columns for task in tasks]

    def _plan(self, found: Sequence[TaskFacts], columns: list[RowColumns], job: JobDirectory | None) -> _Plan:
        rows = join_parts(columns)
        columns.clear()  # copied: two row tables of 10⁸ rows do not fit where one does
        if not len(rows):
            skipped = len(_skipped(found))
            raise SourceError(
                f"{self._settings.source or 'the source'}: no samples in it"
                + (f" ({skipped} rows were skipped)" if skipped else "")
                + "; give a source with at least one"
            )
        read = len(rows)
        if self._settings.marks.unique is not None:
            rows = rows.take(first_of_equals(rows.marks))
        duplicates = read - len(rows)
        parts, packed = found, None
        if self._settings.pack is not None:
            rows, parts, packed = self._pack(self._settings.pack, rows, found, job)
        self._check_keys(rows, parts, job)
        check_about(self._version, rows, self._base)
        index = split_rows(self._version, rows, allow_empty=self._base is not None)
        splits: dict[str, int] = {}
        if self._version.split is not None and index is not None:
            names = self._version.split.names
            splits = {name: int(np.count_nonzero(index == number)) for number, name in enumerate(names)}
        pooling = pooling_of(rows.strata, self._base)
        layout = lay_out(rows.table, len(rows.strata), self._version.settings, pooling)
        before = self._base.manifest.strata if self._base else ()
        numbers = StratumNumbers(rows.strata, layout.pooled, before)
        return _Plan(rows, layout, numbers, splits, parts, duplicates, packed)

    def _pack(
        self, settings: PackSettings, documents: AllRows, found: Sequence[TaskFacts], job: JobDirectory | None
    ) -> tuple[AllRows, list[TaskFacts], PackReport]:
        """Documents → rows of a fixed length, in new parts of the scratch."""
        split = self._version.split
        by = split_of(split, documents.table.identity, documents.split) if split and split.by else None
        total = int(documents.table.raw_bytes.sum())
        self._meter.begin("pack", total_bytes=total)
        made: dict[int, TaskRows] = {}

        def unfinished() -> Iterator[Documents]:
            for item in cut_documents(documents, by):
                rows = finished_rows(job, item.number, packed_record(item)) if job is not None else None
                if rows is None:
                    yield item
                else:
                    made[item.number] = rows
                    self._meter.add(len(rows.columns), item.raw_bytes)

        layout = self._version.settings
        make = functools.partial(
            PackWorker,
            settings,
            seed=layout.seed if layout.shuffle else None,
            folder=job.path if job is not None else "",
            parts=[task.part for task in found],
            run_bytes=self._settings.run_bytes,
        )
        for rows in self._processes.run(make, unfinished(), self._meter.add, here=total < SMALL_BYTES):
            made[rows.facts.number] = rows
        self._meter.end()
        packed = join_parts([made[number].columns for number in range(len(made))])
        tokens = int(documents.marks[ITEMS].sum())
        if not len(packed):
            raise SourceError(f"field {settings.field!r} is empty in every sample; there is nothing to pack")
        report = PackReport(len(documents), tokens, len(packed), len(packed) * settings.length - tokens)
        return packed, [made[number].facts for number in range(len(made))], report

    def _check_keys(self, rows: AllRows, found: Sequence[TaskFacts], job: JobDirectory | None) -> None:
        held = self._base.keys if self._base else None
        first = self._first_ordinal
        if job is None:
            check_unique_keys(rows, lambda place: f"row {place}", first_ordinal=first, held=held)
            return
        parts = PartFiles(job.path, [task.part for task in found])
        fields = len(self._version.schema)
        try:
            check_unique_keys(
                rows,
                lambda place: describe_row(rows, parts, place, fields, first),
                first_ordinal=first,
                held=held,
            )
        finally:
            parts.close()

    @property
    def _first_ordinal(self) -> int:
        return self._base.first_ordinal if self._base else 0

    def _write(
        self, repository: Repository, job: JobDirectory, plan: _Plan
    ) -> tuple[list[WrittenShard], int]:
        """Pass 2: every shard, in shard order, and how many of them an earlier run had written."""
        total = int(plan.rows.length.sum())
        self._meter.begin("write", total_bytes=total)
        written: dict[int, WrittenShard] = {}
        reused = 0

        def unfinished() -> Iterator[ShardRows]:
            nonlocal reused
            for item in rows_of_shards(plan.rows, plan.layout, plan.numbers.of_stratum, self._first_ordinal):
                shard = finished_shard(job, repository, item)
                if shard is None:
                    yield item
                else:
                    reused += 1
                    written[item.number] = shard
                    self._meter.add(len(item.ordinal), int(item.length.sum()))

        make = functools.partial(
            WriteWorker,
            repository,
            self._version,
            job.path,
            [task.part for task in plan.parts],
            self._settings.gather_bytes,
        )
        try:
            for shard in self._processes.run(make, unfinished(), self._meter.add, here=total < SMALL_BYTES):
                written[shard.number] = shard
        except IntegrityError:
            job.discard()  # damaged scratch must not be used again
            raise
        self._meter.end()
        return [written[number] for number in range(plan.layout.shards)], reused

    def _sources(self, found: Sequence[TaskFacts], skipped: Sequence[SkippedRow]) -> SourcesObject:
        digests: dict[str, SourceDigest] = {file.name: file for task in found for file in task.files}
        for file in self._importer.files():
            if file.name not in digests:  # a file that no task begins with, such as a list of classes
                digests[file.name] = digest_file(file)
        return SourcesObject(
            tuple(digests[name] for name in sorted(digests)),
            tuple((row.source_name, row.source_row, row.kind) for row in skipped),
        )

    def _final_version(self, repository: Repository, sources: SourcesObject) -> NewVersion:
        version = self._version
        if self._base is not None:
            # What the next append is compared with; the object itself lists the files of the base as well.
            own = sha256_digest(pack_sources(sources))
            version = dataclasses.replace(version, recipe={**version.recipe, "sources": own})
            if self._base.manifest.sources is not None:
                before = repository.get_object(self._base.manifest.sources, "sources")
                sources = joined_sources(unpack_sources(before), sources)
        descriptor = repository.put_object(pack_sources(sources), "sources")
        return dataclasses.replace(version, sources=descriptor.digest)

    def _commit(self, repository: Repository, made: MadeVersion) -> LogEntry | None:
        wanted = {name: manifest.id for name, manifest in made.splits.items()}
        wanted[self._settings.ref] = made.manifest.id
        now = repository.refs
        if all(now.get(name) == manifest for name, manifest in wanted.items()):
            return None  # built before: by a run that was killed after its commit, or by hand
        return commit_version(
            repository,
            made,
            ref=self._settings.ref,
            message=self._settings.message,
            author=self._settings.author,
        )

    def _list_skipped(self, parent: str, skipped: Sequence[SkippedRow]) -> str | None:
        if not skipped:
            return None
        path = self._settings.skipped_file or f"{parent}/skipped-{self._digest()[:16]}.jsonl"
        lines = [json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n" for row in skipped]
        with explained(f"write {path}", writing=True), open(path, "w", encoding="utf-8") as stream:
            stream.writelines(lines)
        return path

    def _digest(self) -> str:
        """What must be equal for the work of an earlier run to be of use."""
        version = self._version
        recipe = {
            "release": 1,
            "source": self._settings.source or os.path.commonpath([f.path for f in self._importer.files()]),
            "schema": version.schema.to_json(),
            "format": version.format,
            "compression": version.compression,
            "axes": list(version.axes),
            "classes": list(version.classes),
            "split_by": version.split.by if version.split else None,
            "skip": self._settings.skip,
            "build": version.build_settings(),
        }
        return hashlib.sha256(canonical_json.dumps(recipe)).hexdigest()

    def _result(
        self,
        found: Sequence[TaskFacts],
        plan: _Plan,
        made: MadeVersion | None,
        entry: LogEntry | None,
        listed: str | None,
        reused_tasks: int,
        reused_shards: int,
    ) -> BuildResult:
        rows = plan.rows
        counts = np.bincount(rows.table.stratum, minlength=len(rows.strata)).tolist()
        return BuildResult(
            manifest=made.manifest if made else None,
            splits=dict(made.splits) if made else {},
            split_rows=dict(plan.splits),
            commit=entry,
            rows=len(rows),
            raw_bytes=int(rows.table.raw_bytes.sum()),
            shards=plan.layout.shards,
            strata={"/".join(values) or "all": n for values, n in zip(rows.strata, counts, strict=True)},
            pooled=int(plan.layout.pooled.sum()),
            source_bytes=_source_bytes(self._tasks),
            scratch_bytes=sum(task.part_bytes for task in {*found, *plan.parts}),
            skipped=tuple(_skipped(found)),
            skipped_file=listed,
            duplicates=plan.duplicates,
            packed=plan.packed,
            reused_tasks=reused_tasks,
            reused_shards=reused_shards,
            seconds=time.monotonic() - self._started,
        )


def _skipped(found: Sequence[TaskFacts]) -> list[SkippedRow]:
    return [row for task in found for row in task.skipped]


def _source_bytes(tasks: Sequence[SourceTask]) -> int:
    return sum(task.size for task in tasks)
