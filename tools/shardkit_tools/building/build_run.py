"""`shardkit_tools.build`: build a committed version from a source, in parallel and bounded memory.

The first pass reads the source task by task and writes all rows, encoded, to scratch, with a row table.
Packing, if any, follows. The second pass lays out all rows and writes each shard from scratch; then the
version is committed. Each pass journals finished work (SPEC.md of shardkit.dataset §6).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardkit.dataset.about import SourcesObject, joined_sources, pack_sources, unpack_sources
from shardkit.dataset.committing import (
    NOT_MOVED,
    Destination,
    MadeVersion,
    Moved,
    commit_version,
    make_manifest,
)
from shardkit.dataset.layout import split_of
from shardkit.dataset.rows import Rows, ShardRows
from shardkit.dataset.scratch import RowSpool, ScratchReader, scratch_folder, sized_batch, sized_run
from shardkit.dataset.version_plan import Base, NewVersion, VersionPlan, plan_version
from shardkit.documents import encode
from shardkit.errors import IntegrityError, NotFoundError, SourceError
from shardkit.formats import sha256_digest
from shardkit.manifest import ShardRecord
from shardkit.reading.attestations import HealedObjects
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore
from shardkit.stores.store import root_store
from shardkit_tools.building.engines import Engine, is_small, open_engine
from shardkit_tools.building.job import NO_FOLDER, Job, JobFolder, clear_temporaries
from shardkit_tools.building.outcome import (
    BuildResult,
    BuildSettings,
    PackReport,
    ProgressMeter,
    SkippedRow,
    apply_transforms,
    check_space,
    least_bytes,
    list_skipped,
    of_settings,
    open_source,
    refuse_failures,
    space_needs,
    with_defaults,
)
from shardkit_tools.building.packing import Documents, PackSettings, PackWorker, cut_documents
from shardkit_tools.building.passes import (
    ITEMS,
    ReadTask,
    ReadWorker,
    RowMarks,
    TaskFacts,
    TaskRows,
    WriteWorker,
    finished_rows,
    finished_shard,
    finished_tasks,
    first_of_equals,
)
from shardkit_tools.building.source_digests import SourceDigests, shared_files, warn_of_replacement
from shardkit_tools.console import count_text
from shardkit_tools.importers.folder import FolderLayout
from shardkit_tools.importers.numpy_arrays import NumpyImporter
from shardkit_tools.importers.protocol import FileImporter, Importer
from shardkit_tools.transforms import TransformedImporter

_LIGHT_ROW_BYTES = 4096  # larger rows are mostly copied and hashed


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """A version ready to be written, and the parts that hold its rows."""

    plan: VersionPlan
    parts: Sequence[TaskFacts]  # parts that the row records index
    duplicates: int  # rows dropped because an earlier row has the same value
    packed: PackReport | None  # result of packing


class BuildRun:
    """One build; made by `shardkit_tools.build`.

    Args:
        settings: source, transforms and settings of the version.
        engine: runs the tasks; entered and left by this build.
    """

    def __init__(self, settings: BuildSettings, engine: Engine) -> None:
        self._settings, self._engine = settings, engine
        source = open_source(settings)
        layout: FolderLayout | None = getattr(source, "layout", None)
        folders, self._counts = (layout.splits, layout.counts) if layout else ({}, {})
        self._notes = tuple(source.source.notes) if isinstance(source, FileImporter) else ()
        self._importer = importer = apply_transforms(source, settings)
        schema, classes = importer.schema, importer.classes
        self._tasks = list(importer.tasks())
        settings = self._settings = with_defaults(settings, importer, self._tasks)
        self._encoder = settings.encoder(schema, classes, folders)  # encodes the rows as read, before packing
        recipe: dict[str, object] = {"source": importer.describe()}
        if isinstance(importer, TransformedImporter):
            recipe |= importer.transforms()
            self._notes += importer.notes
        if settings.unique is not None:
            recipe["unique"] = settings.unique
        ((packed, length),) = settings.pack.items() if settings.pack else ((None, 0),)
        # columns for removing duplicates and for packing
        self._marks = RowMarks.of(schema, unique=settings.unique, packed=packed)
        self._packing: PackSettings | None = None
        if packed is not None:
            self._packing = PackSettings.of(schema, packed, length, settings.axes, settings.format or "")
            recipe["pack"] = self._packing.describe()
            schema = self._packing.rows
            classes = classes if "label" in schema else ()
        self._version = settings.version(schema, classes, ref=settings.ref, folders=folders, recipe=recipe)
        self._root = os.fspath(settings.root)
        self._meter = ProgressMeter(settings.progress)
        self._source_bytes = sum(task.size for task in self._tasks)
        self._started = time.monotonic()
        layout_settings = self._version.settings
        self._seed = layout_settings.seed if layout_settings.shuffle else None

    def count(self) -> BuildResult:
        """Run all passes without writing shards or a commit, and return the result that a build would have."""
        base = None
        with contextlib.ExitStack() as missing:
            if not self._settings.append:
                missing.enter_context(contextlib.suppress(NotFoundError))  # the root does not exist yet
            base = self._begin(Repository.open(self._root, read_only=True)).base
        with self._engine:
            every = {file.name for file in self._importer.files()}  # a dry run needs no digests
            found, columns = self._read(NO_FOLDER, {}, digested=every)
            laid = self._lay_out(found, columns, base, None)
        result = self._result(found, laid)
        root = None if "://" in self._root else self._root
        # For remote roots, a local folder; it is only created when needed.
        scratch = self._settings.scratch or root or tempfile.gettempdir()
        needs = space_needs(self._version, os.fspath(scratch), result.raw_bytes, root, result.raw_bytes)
        return dataclasses.replace(result, space=needs)

    def build(self) -> BuildResult:
        """Run both passes and commit."""
        open_or_make = Repository.open if self._settings.append else Repository.create
        repository = open_or_make(self._root)
        to = self._begin(repository)
        parent = scratch_folder(repository, self._settings.scratch)
        job = Job(repository, self._settings.scratch, self._digest(), is_remote=self._engine.is_remote)
        healed = HealedObjects(root_store(repository.store))
        with job.hold(), self._engine:
            result = self._build(to, parent, job)
        clear_temporaries(repository)
        return dataclasses.replace(result, healed=tuple(healed.names()))

    def _begin(self, repository: Repository) -> Destination:
        """Record where the refs stand now; the commit requires them to be there still."""
        settings = self._settings
        to = Destination.begin(
            repository,
            self._version,
            settings.ref,
            append=settings.append,
            replace=settings.replace,
            message=settings.message,
            author=settings.author,
        )
        if not settings.replace:
            warn_of_replacement(
                repository, settings.ref, self._importer, self._version, append=settings.append
            )
        return to

    def _build(self, to: Destination, parent: str, job: Job) -> BuildResult:
        finished = finished_tasks(job, self._tasks, self._importer.files())
        # what was refused is read again: its files, or how they are checked, may be others
        read = {n: rows for n, rows in finished.items() if self._settings.skips or not rows.facts.skipped}
        reused = len(read)
        self._check_space(to.repository, parent, job, read)
        known = {file.name for rows in read.values() for file in rows.facts.files}
        beside = [file for file in shared_files(self._tasks) if file.name not in known]
        threads = self._settings.jobs or os.cpu_count() or 1
        with SourceDigests(beside, job, threads) as digests:
            digested = {file.name for file in beside}
            found, columns = self._read(job.folder, read, digested=digested)
            digests.check()
            base = to.base
            sources = self._sources(found, digests) if base is not None else None
            if base is not None and sources is not None and self._is_appended(base, sources):
                splits = {name: split.manifest for name, split in base.splits.items()}
                laid = self._lay_out(found, columns, None, job)  # only counts these rows
                return self._result(found, laid, MadeVersion(base.manifest, splits), reused_tasks=reused)
            laid = self._lay_out(found, columns, base, job)
            shards, reused_shards = self._write(to.repository, job, laid)
            self._meter.begin("commit")
            version = self._final_version(to, sources or self._sources(found, digests))
            made = make_manifest(to.repository, dataclasses.replace(laid.plan, version=version), shards)
            path = self._settings.skipped_file or f"{parent}/skipped-{self._digest()[:16]}.jsonl"
            listed = list_skipped(os.fspath(path), _skips_of(found))
            moved = commit_version(to, made)
            self._meter.end()
        result = self._result(found, laid, made, moved, reused_tasks=reused, reused_shards=reused_shards)
        return dataclasses.replace(result, skipped_file=listed)

    # ---- Passes: work lists for the engine, results in the order of the source or of the shards

    def _read(
        self, folder: JobFolder, found: dict[int, TaskRows], *, digested: Collection[str]
    ) -> tuple[list[TaskFacts], list[Rows]]:
        """Pass 1: read the tasks missing in ``found``; return facts and columns of all, in source order."""
        todo = [
            ReadTask(number, task, not any(file.name in digested for file in task.files))
            for number, task in enumerate(self._tasks)
            if number not in found
        ]
        total, left = self._source_bytes, sum(item.task.size for item in todo)
        self._meter.begin(
            "read",
            total_bytes=total,
            done_rows=sum(len(rows.columns) for rows in found.values()),
            done_bytes=total - left,
            reused=len(found),
            scratch_bytes=total if folder is not NO_FOLDER else 0,
        )
        run_bytes = sized_run(total, self._version.settings.shard_size)
        batch_bytes = sized_batch(run_bytes, total, self._version.settings.shard_size)
        make = functools.partial(
            ReadWorker,
            self._importer,
            self._encoder,
            open_spool=functools.partial(
                RowSpool, seed=self._seed, run_bytes=run_bytes, batch_bytes=batch_bytes
            ),
            folder=folder,
            skip=self._settings.skips,
            marks=self._marks,
        )
        here = is_small(self._engine, left, is_light=_is_copied(self._importer))
        for rows in self._engine.run(make, todo, self._meter.add, here=here):
            found[rows.facts.number] = rows
        self._meter.end()
        read = [found.pop(number) for number in range(len(self._tasks))]
        if not self._settings.skips:  # files that are one sample are refused together
            refuse_failures([row.message for task in read for row in task.facts.skipped])
        return [task.facts for task in read], [task.columns for task in read]

    def _lay_out(
        self, found: Sequence[TaskFacts], columns: list[Rows], base: Base | None, job: Job | None
    ) -> _Draft:
        rows = Rows.join(columns)
        columns.clear()  # frees the copied columns: memory may not hold two row tables of 10⁸ rows
        if not len(rows):
            skipped = _skips_of(found)
            raise SourceError(
                f"{self._source or 'the source'}: no samples in it"
                + (f" ({count_text(len(skipped), 'row')} skipped: {skipped[0].message})" if skipped else "")
                + "; give a source with at least one"
            )
        read = len(rows)
        if self._marks.unique is not None:
            rows = rows.take(first_of_equals(rows.marks))
        duplicates = read - len(rows)
        parts, packed = found, None
        if self._packing is not None:
            rows, parts, packed = self._pack(self._packing, rows, found, job)
        files = (job.folder if job else NO_FOLDER).parts([part.part for part in parts])
        with contextlib.closing(files):
            reader = ScratchReader(files, self._version.schema) if job is not None else None
            plan = plan_version(self._version, rows, base, reader)
        return _Draft(plan, parts, duplicates, packed)

    def _pack(
        self, packing: PackSettings, documents: Rows, found: Sequence[TaskFacts], job: Job | None
    ) -> tuple[Rows, list[TaskFacts], PackReport]:
        """Pack documents into rows of a fixed length, in new parts of the scratch."""
        split = self._version.split
        by = split_of(split, documents.identity, documents.split) if split and split.is_noted else None
        total = int(documents.raw_bytes.sum())
        self._meter.begin("pack", total_bytes=total)
        made: dict[int, TaskRows] = {}

        def unfinished() -> Iterator[Documents]:
            for item in cut_documents(documents, by):
                rows = finished_rows(job, item.number, item.record_name) if job is not None else None
                if rows is None:
                    yield item
                else:
                    made[item.number] = rows
                    self._meter.add(len(rows.columns), item.raw_bytes)

        make = functools.partial(
            PackWorker,
            packing,
            open_spool=functools.partial(RowSpool, seed=self._seed),
            folder=job.folder if job is not None else NO_FOLDER,
            parts=[task.part for task in found],
        )
        for rows in self._engine.run(make, unfinished(), self._meter.add, here=is_small(self._engine, total)):
            made[rows.facts.number] = rows
        self._meter.end()
        packed = Rows.join([made[number].columns for number in range(len(made))])
        if not len(packed):
            raise SourceError(f"field {packing.field!r} is empty in every sample; there is nothing to pack")
        tokens = int(documents.marks[ITEMS].sum())
        report = PackReport(len(documents), tokens, len(packed), len(packed) * packing.length - tokens)
        return packed, [made[number].facts for number in range(len(made))], report

    def _write(self, repository: Repository, job: Job, laid: _Draft) -> tuple[list[ShardRecord], int]:
        """Pass 2: write every shard; return them in order, and how many an earlier run had written."""
        total = int(laid.plan.rows.raw_bytes.sum())
        self._meter.begin("write", total_bytes=total)
        written: dict[int, ShardRecord] = {}
        reused = 0
        suffix = self._version.format

        def unfinished() -> Iterator[ShardRows]:
            nonlocal reused
            for item in laid.plan.shards():
                shard = finished_shard(job, repository, item, suffix)
                if shard is None:
                    yield item
                else:
                    reused += 1
                    written[item.number] = shard
                    self._meter.add(len(item.ordinal), item.raw_bytes)

        parts = [task.part for task in laid.parts]
        make = functools.partial(WriteWorker, repository, self._version, job.folder, parts)
        is_light = self._version.compression == "none" and total >= _LIGHT_ROW_BYTES * len(laid.plan.rows)
        here = is_small(self._engine, total, is_light=is_light)
        try:
            written.update(self._engine.run(make, unfinished(), self._meter.add, here=here))
        except IntegrityError:
            job.discard()  # never use damaged scratch again
            raise
        self._meter.end()
        return [written[number] for number in range(laid.plan.layout.shards)], reused

    # ---- Sources

    def _sources(self, found: Sequence[TaskFacts], digests: SourceDigests) -> SourcesObject:
        by_tasks = (file for task in found for file in task.files)
        skipped = tuple((row.source_name, row.source_row, row.kind) for row in _skips_of(found))
        return SourcesObject(digests.of_all(self._importer.files(), by_tasks), skipped)

    def _is_appended(self, base: Base, sources: SourcesObject) -> bool:
        """Return True if the base was made by appending exactly these files with these settings.

        A build that was killed between its commit and its end then does not append twice.
        """
        last = dict(base.manifest.build.get("append", {}))
        last.pop("rows", None)
        return last == {**self._version.build_settings(), "sources": sha256_digest(pack_sources(sources))}

    def _final_version(self, to: Destination, sources: SourcesObject) -> NewVersion:
        version = self._version
        if to.base is not None:
            # The next append compares this digest; the object itself also lists the files of the base.
            own = sha256_digest(pack_sources(sources))
            version = dataclasses.replace(version, recipe={**version.recipe, "sources": own})
            if to.base.manifest.sources is not None:
                before = to.repository.get_object(to.base.manifest.sources, "sources")
                sources = joined_sources(unpack_sources(before), sources)
        descriptor = to.repository.put_object(pack_sources(sources), "sources")
        return dataclasses.replace(version, sources=descriptor.digest)

    @property
    def _source(self) -> str:
        """Absolute path of the source, so that builds of different sources do not share scratch."""
        source = self._settings.source
        return os.path.abspath(source) if isinstance(source, (str, os.PathLike)) else ""

    def _digest(self) -> str:
        """Return a digest of everything that must be equal for an earlier run's work to be reusable."""
        version = self._version
        files = self._importer.files()
        recipe = {
            "release": 1,
            "source": self._source or os.path.commonpath([file.path for file in files]),
            "schema": version.schema.to_json(),
            "format": version.format,
            "compression": version.compression,
            "axes": list(version.axes),
            "classes": list(version.classes),
            "split_by": version.split.by if version.split else None,
            "skip": self._settings.skips,
            "build": version.build_settings(),
        }
        return hashlib.sha256(encode(recipe)).hexdigest()

    # ---- Disk space and results

    def _check_space(
        self, repository: Repository, parent: str, job: Job, read: Mapping[int, TaskRows]
    ) -> None:
        """Refuse if the remaining work cannot fit on the disks."""
        left = sum(task.size for number, task in enumerate(self._tasks) if number not in read)
        rows = least_bytes(self._version, self._source_bytes)
        store = repository.store
        # Shards of an earlier run exist already; their size is not worth determining.
        is_begun = any(name.endswith(".done") for name in job.folder.names())
        root = store.url if isinstance(store, LocalStore) and not is_begun else None
        here = parent if job.is_local else None
        check_space(space_needs(self._version, here, least_bytes(self._version, left), root, rows))

    def _result(
        self,
        found: Sequence[TaskFacts],
        laid: _Draft,
        made: MadeVersion | None = None,
        moved: Moved = NOT_MOVED,
        *,
        reused_tasks: int = 0,
        reused_shards: int = 0,
    ) -> BuildResult:
        rows, layout = laid.plan.rows, laid.plan.layout
        counts = np.bincount(rows.stratum, minlength=len(rows.strata)).tolist()
        return BuildResult(
            manifest=made.manifest if made else None,
            splits=dict(made.splits) if made else {},
            split_rows=laid.plan.split_rows(),
            commit=moved.entry,
            moved=moved.refs,
            rows=len(rows),
            raw_bytes=int(rows.raw_bytes.sum()),
            shards=layout.shards,
            strata={"/".join(values) or "all": n for values, n in zip(rows.strata, counts, strict=True)},
            pooled=int(layout.pooled.sum()),
            schema=self._version.schema,
            importer=str(self._importer.describe().get("importer", "")),
            format=self._version.format,
            compression=self._version.compression,
            classes=self._counts,
            notes=self._notes,
            source_bytes=self._source_bytes,
            scratch_bytes=sum(task.part_bytes for task in {*found, *laid.parts}),
            skipped=tuple(_skips_of(found)),
            duplicates=laid.duplicates,
            packed=laid.packed,
            reused_tasks=reused_tasks,
            reused_shards=reused_shards,
            seconds=time.monotonic() - self._started,
        )


def _skips_of(found: Sequence[TaskFacts]) -> list[SkippedRow]:
    return [row for task in found for row in task.skipped]


@of_settings(BuildSettings)
def build(settings: BuildSettings) -> BuildResult:
    """Build a version of the dataset at ``root`` from a source.

    The manifest depends only on the source and the settings, not on jobs, scratch, kills or the machine.
    After a kill, Ctrl-C or an error, the same call continues.

    Args:
        settings: the fields of `BuildSettings`: ``build("photos", "data/cats", stratify="label")``.

    Raises:
        NotFoundError, SourceError, SampleError: The source is unusable; the message names file and row.
        SchemaError, ConfigurationError, UsageError: A setting is invalid, or a ref names samples of another
            schema.
        CommitConflict: Another commit moved a ref meanwhile; the message says how to name this version.
        StoreError: The root or the scratch disk failed.
        RunError: A process died, or another one runs the same build.
        KeyboardInterrupt: On Ctrl-C; its text says how to continue.
    """
    engine = open_engine(settings.engine, settings.jobs, settings.address)
    run = BuildRun(settings, engine)
    if settings.dry_run:
        return run.count()
    if settings.single_writer:
        Repository.create(settings.root, single_writer=True)
    return run.build()


def _is_copied(importer: Importer) -> bool:
    """Return True if reading the rows is mostly copying: large rows of arrays."""
    sizes = [kind.item_bytes or 0 for kind in importer.schema.values()]
    return isinstance(importer, NumpyImporter) and sum(sizes) >= _LIGHT_ROW_BYTES
