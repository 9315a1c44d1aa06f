"""The two passes of a build, and the commit."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence

import numpy as np

from shardkit.dataset.appending import Base
from shardkit.dataset.committing import Destination, MadeVersion, commit_version, make_manifest
from shardkit.dataset.creating import scratch_folder
from shardkit.dataset.encoding import RowEncoder
from shardkit.dataset.ref_moves import NOT_MOVED, Moved
from shardkit.dataset.row_table import Rows, describe_row, join_parts
from shardkit.dataset.scratch_reading import ScratchReader
from shardkit.dataset.sources import SourceDigest, SourcesObject, joined_sources, pack_sources, unpack_sources
from shardkit.dataset.version_plan import plan_version
from shardkit.dataset.version_settings import NewVersion
from shardkit.errors import NotFoundError, SourceError
from shardkit.formats import canonical_json, sha256_digest
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import explained
from shardkit.stores.local import LocalStore
from shardkit_tools.building.engine import Engine
from shardkit_tools.building.job import NO_FOLDER, Job, clear_temporaries, open_job
from shardkit_tools.building.outcome import (
    BuildResult,
    BuildSettings,
    ProgressCallback,
    ProgressMeter,
    check_space,
    fits_page_cache,
    least_bytes,
    space_needs,
)
from shardkit_tools.building.passes import BuildPlan, Passes
from shardkit_tools.building.reading import SkippedRow, TaskFacts, TaskRows, finished_tasks
from shardkit_tools.building.row_marks import first_of_equals
from shardkit_tools.building.source_digests import SourceDigests, digest_file, shared_files
from shardkit_tools.importers.protocol import ExtentImporter, Importer, SourceFile, WholeFileImporter

# Smaller files are hashed by the task that reads them: what is about them would cost more than the hash.
_DIGESTED_BESIDE_BYTES = 2**20


class BuildRun:
    """One build; made by `shardkit_tools.build`.

    Args:
        importer: of the source.
        encoder: of the rows.
        version: what is to be made.
        settings: see `BuildSettings`.
        engine: does the work; entered and left by this build.
        progress: callback, or None.
    """

    def __init__(
        self,
        importer: Importer,
        encoder: RowEncoder,
        version: NewVersion,
        settings: BuildSettings,
        engine: Engine,
        progress: ProgressCallback | None,
    ) -> None:
        self._importer = importer
        self._encoder = encoder
        self._version = version
        self._settings = settings
        self._meter = ProgressMeter(progress)
        self._tasks = list(importer.tasks())
        self._started = time.monotonic()
        self._engine = engine
        self._passes = Passes(engine, self._meter, version, settings)
        self._is_cached = not engine.is_remote and fits_page_cache(importer.files())
        self._in_place = self._bytes_in_place()

    def count(self) -> BuildResult:
        """The dry run: everything but writing.

        Raises:
            SourceError, SampleError, ConfigurationError: as `build` would.
        """
        base = None
        with contextlib.ExitStack() as missing:
            if not self._settings.append:
                missing.enter_context(contextlib.suppress(NotFoundError))  # a root that is to be made
            base = self._begin(Repository.open(self._settings.root, read_only=True)).base
        with self._engine:
            every = {file.name for file in self._importer.files()}  # nobody asks for digests
            found, columns = self._passes.read(self._importer, self._encoder, NO_FOLDER, {}, digested=every)
            plan = self._plan(found, columns, base, None)
        result = self._result(found, plan, None, NOT_MOVED, None, 0, 0)
        root = None if "://" in self._settings.root else self._settings.root
        # Remote roots: in a folder of this machine, which is only made when it is needed.
        scratch = self._settings.scratch or root or tempfile.gettempdir()
        return dataclasses.replace(
            result,
            space=tuple(
                space_needs(
                    scratch,
                    max(0, result.raw_bytes - self._in_place),
                    root,
                    self._shard_bytes(result.raw_bytes),
                )
            ),
        )

    def _bytes_in_place(self) -> int:
        """Bytes of the source that pass 2 reads from there instead of from scratch."""
        importer, settings = self._importer, self._settings
        if not self._is_cached or settings.pack is not None or settings.marks.names:
            return 0
        if not isinstance(importer, ExtentImporter | WholeFileImporter):
            return 0
        return sum(map(importer.bytes_in_place, self._tasks))

    def build(self) -> BuildResult:
        """Both passes and the commit.

        Raises:
            ShardkitError: see `shardkit_tools.build`.
            KeyboardInterrupt: with a text that says how to go on.
        """
        open_or_make = Repository.open if self._settings.append else Repository.create
        repository = open_or_make(self._settings.root)
        to = self._begin(repository)
        parent = scratch_folder(repository, self._settings.scratch)
        job = open_job(repository, self._settings.scratch, self._digest(), is_remote=self._engine.is_remote)
        with job.held(), self._engine:
            result = self._build(to, parent, job)
        clear_temporaries(repository)
        return result

    def _build(self, to: Destination, parent: str, job: Job) -> BuildResult:
        reused = finished_tasks(job, self._tasks, self._importer.files())
        self._check_space(to.repository, parent, job, reused)
        beside = self._digested_beside(reused)
        with SourceDigests(beside, job, self._settings.hash_threads) as digests:
            return self._both_passes(to, parent, job, reused, digests)

    def _digested_beside(self, reused: Mapping[int, TaskRows]) -> list[SourceFile]:
        """The files that no task makes the digest of, because it would have to wait for that."""
        files = shared_files(self._tasks)
        if self._is_cached and not isinstance(self._importer, WholeFileImporter):
            shared = {file.name for file in files}
            files = [
                file
                for file in self._importer.files()
                if file.name in shared or file.size >= _DIGESTED_BESIDE_BYTES
            ]
        known = {file.name for rows in reused.values() for file in rows.facts.files}
        return [file for file in files if file.name not in known]

    def _both_passes(
        self,
        to: Destination,
        parent: str,
        job: Job,
        reused: dict[int, TaskRows],
        digests: SourceDigests,
    ) -> BuildResult:
        reused_tasks = len(reused)
        found, columns = self._passes.read(
            self._importer,
            self._encoder,
            job.folder,
            reused,
            in_place=self._in_place,
            digested={file.name for file in digests.files},
        )
        digests.check()
        skipped = _skipped(found)
        base = to.base
        sources = self._sources(found, skipped, digests) if base is not None else None
        if base is not None and sources is not None and self._is_appended(base, sources):
            made = MadeVersion(base.manifest, {name: split.manifest for name, split in base.splits.items()})
            plan = self._plan(
                found, columns, None, job
            )  # its rows are these rows: they are counted by themselves
            return self._result(found, plan, made, NOT_MOVED, None, reused_tasks, 0)
        plan = self._plan(found, columns, base, job)
        final = digests.beside(
            lambda: self._final_version(to, sources or self._sources(found, skipped, digests))
        )
        shards, reused_shards = self._passes.write(to.repository, job, plan, self._tasks)
        self._meter.begin("commit")
        made = make_manifest(to.repository, dataclasses.replace(plan.plan, version=final()), shards)
        listed = self._list_skipped(parent, skipped)
        moved = commit_version(to, made)
        self._meter.end()
        return self._result(found, plan, made, moved, listed, reused_tasks, reused_shards)

    def _check_space(
        self, repository: Repository, parent: str, job: Job, reused: Mapping[int, TaskRows]
    ) -> None:
        """That what is left to do fits on the disks."""
        left = sum(task.size for number, task in enumerate(self._tasks) if number not in reused)
        left = max(0, left - self._in_place)
        rows = least_bytes(self._version, sum(task.size for task in self._tasks))
        store = repository.store
        # Shards of an earlier run are there already, and how large they are is not worth finding out.
        is_begun = any(name.endswith(".done") for name in job.folder.names())
        root = store.url if isinstance(store, LocalStore) and not is_begun else None
        here = parent if job.is_local else None
        check_space(space_needs(here, least_bytes(self._version, left), root, self._shard_bytes(rows)))

    def _shard_bytes(self, raw_bytes: int) -> int:
        """What the shards of so many bytes at least take: nobody knows how well they compress."""
        return raw_bytes if self._version.compression == "none" else 0

    def _begin(self, repository: Repository) -> Destination:
        """Where the refs stand now is where the commit must find them."""
        settings = self._settings
        return Destination.begin(
            repository,
            self._version,
            settings.ref,
            append=settings.append,
            replace=settings.replace,
            message=settings.message,
            author=settings.author,
        )

    def _is_appended(self, base: Base, sources: SourcesObject) -> bool:
        """Whether the base was itself made by appending these very files in this very way.

        So a build that is killed between its commit and its end does not append twice.
        """
        last = dict(base.manifest.build.get("append", {}))
        last.pop("rows", None)
        return last == {**self._version.build_settings(), "sources": sha256_digest(pack_sources(sources))}

    def _plan(
        self,
        found: Sequence[TaskFacts],
        columns: list[Rows],
        base: Base | None,
        job: Job | None,
    ) -> BuildPlan:
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
            rows, parts, packed = self._passes.pack(self._settings.pack, rows, found, job)
        # Rows that were counted only have no names.
        files = (job.folder if job else NO_FOLDER).parts([part.part for part in parts])
        with contextlib.closing(files):
            reader = ScratchReader(files, self._version.schema.stored)
            plan = plan_version(
                self._version,
                rows,
                base,
                lambda place, first: describe_row(rows, reader, place, first) if job else f"row {place}",
            )
        return BuildPlan(plan, parts, duplicates, packed)

    def _sources(
        self, found: Sequence[TaskFacts], skipped: Sequence[SkippedRow], digests: SourceDigests
    ) -> SourcesObject:
        known: dict[str, SourceDigest] = {file.name: file for task in found for file in task.files}
        known |= {file.name: file for file in digests.results()}
        for file in self._importer.files():
            if file.name not in known:  # a file that no task begins with, such as a list of classes
                known[file.name] = digest_file(file)
        return SourcesObject(
            tuple(known[name] for name in sorted(known)),
            tuple((row.source_name, row.source_row, row.kind) for row in skipped),
        )

    def _final_version(self, to: Destination, sources: SourcesObject) -> NewVersion:
        version = self._version
        if to.base is not None:
            # What the next append is compared with; the object itself lists the files of the base as well.
            own = sha256_digest(pack_sources(sources))
            version = dataclasses.replace(version, recipe={**version.recipe, "sources": own})
            if to.base.manifest.sources is not None:
                before = to.repository.get_object(to.base.manifest.sources, "sources")
                sources = joined_sources(unpack_sources(before), sources)
        descriptor = to.repository.put_object(pack_sources(sources), "sources")
        return dataclasses.replace(version, sources=descriptor.digest)

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
        plan: BuildPlan,
        made: MadeVersion | None,
        moved: Moved,
        listed: str | None,
        reused_tasks: int,
        reused_shards: int,
    ) -> BuildResult:
        rows, layout = plan.plan.rows, plan.plan.layout
        counts = np.bincount(rows.stratum, minlength=len(rows.strata)).tolist()
        return BuildResult(
            manifest=made.manifest if made else None,
            splits=dict(made.splits) if made else {},
            split_rows=plan.plan.split_rows(),
            commit=moved.entry,
            moved=moved.refs,
            rows=len(rows),
            raw_bytes=int(rows.raw_bytes.sum()),
            shards=layout.shards,
            strata={"/".join(values) or "all": n for values, n in zip(rows.strata, counts, strict=True)},
            pooled=int(layout.pooled.sum()),
            classes=self._settings.classes,
            notes=self._settings.notes,
            source_bytes=sum(task.size for task in self._tasks),
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
