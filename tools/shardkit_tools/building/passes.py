"""The passes of a build: work lists for an engine, results in the order of the source or of the shards.

A shard is journaled when it is durable.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardkit.dataset.encoding import RowEncoder
from shardkit.dataset.extents import ExtentReader, changed_source, file_state
from shardkit.dataset.row_table import Rows, ShardRows, join_parts
from shardkit.dataset.scratch import sized_run
from shardkit.dataset.scratch_reading import ScratchReader
from shardkit.dataset.shard_writing import WrittenShard, write_shard
from shardkit.dataset.splits import split_of
from shardkit.dataset.version_plan import VersionPlan
from shardkit.dataset.version_settings import NewVersion
from shardkit.errors import FormatError, IntegrityError, SourceError
from shardkit.formats import canonical_json
from shardkit.repository.repository import Repository
from shardkit.stores.store import Descriptor
from shardkit_tools.building.engine import Engine, Report
from shardkit_tools.building.engines import LocalEngine
from shardkit_tools.building.job import NO_FOLDER, Job, JobFolder, write_record
from shardkit_tools.building.outcome import BuildSettings, ProgressMeter
from shardkit_tools.building.packing import (
    Documents,
    PackReport,
    PackSettings,
    PackWorker,
    cut_documents,
    packed_record,
)
from shardkit_tools.building.reading import ReadTask, ReadWorker, TaskFacts, TaskRows, finished_rows
from shardkit_tools.building.row_marks import ITEMS
from shardkit_tools.importers.protocol import Importer, SourceTask

SMALL_BYTES = 8 * 2**20
"""Below this a process costs more to start than it saves."""

# Copying and hashing is done by threads that do not wait for the interpreter: one process keeps some two processors
# busy with it, and has done so many times as much before another one has started.
_LIGHT = 64
_FEW_PROCESSORS = 4
_LIGHT_ROW_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class BuildPlan:
    """What is to be written, and from where.

    Attributes:
        plan: of the version.
        parts: what the ``part`` of its rows indexes.
        duplicates: rows left out because an earlier one has the same value.
        packed: what packing did, or None.
    """

    plan: VersionPlan
    parts: Sequence[TaskFacts]
    duplicates: int
    packed: PackReport | None


class Passes:
    """Reading, packing and writing, each spread over an engine.

    Args:
        engine: does the work.
        meter: is told how far it is.
        version: what is to be made.
        settings: see `BuildSettings`.
    """

    def __init__(
        self, engine: Engine, meter: ProgressMeter, version: NewVersion, settings: BuildSettings
    ) -> None:
        self._engine = engine
        self._meter = meter
        self._version = version
        self._settings = settings

    def read(
        self,
        importer: Importer,
        encoder: RowEncoder,
        folder: JobFolder,
        found: dict[int, TaskRows],
        *,
        in_place: int = 0,
        digested: Collection[str] = (),
    ) -> tuple[list[TaskFacts], list[Rows]]:
        """Pass 1: every task that is not in ``found`` yet; facts and columns of all, in source order.

        Args:
            importer: of the source.
            encoder: of the rows.
            folder: of the job.
            found: tasks that were read before; taken out of it.
            in_place: bytes that stay in the source instead of going to scratch; 0 for none.
            digested: names of the files whose digests others make.
        """
        tasks = importer.tasks()
        todo = [
            ReadTask(number, task, not any(file.name in digested for file in task.files))
            for number, task in enumerate(tasks)
            if number not in found
        ]
        total = sum(task.size for task in tasks)
        left = sum(item.task.size for item in todo)
        self._meter.begin(
            "read",
            total_bytes=total,
            done_rows=sum(len(rows.columns) for rows in found.values()),
            done_bytes=total - left,
            reused=len(found),
            scratch_bytes=total - in_place if folder is not NO_FOLDER else 0,
        )
        layout = self._version.settings
        make = functools.partial(
            ReadWorker,
            importer,
            encoder,
            seed=layout.seed if layout.shuffle else None,
            folder=folder,
            skip=self._settings.skip,
            run_bytes=min(self._settings.run_bytes, sized_run(total, layout.shard_size)),
            marks=self._settings.marks,
            extents=in_place > 0,
        )
        is_light = in_place > total // 2
        for rows in self._engine.run(
            make, todo, self._meter.add, here=self._is_small(left, is_light=is_light)
        ):
            found[rows.facts.number] = rows
        self._meter.end()
        read = [found.pop(number) for number in range(len(tasks))]
        return [task.facts for task in read], [task.columns for task in read]

    def pack(
        self, settings: PackSettings, documents: Rows, found: Sequence[TaskFacts], job: Job | None
    ) -> tuple[Rows, list[TaskFacts], PackReport]:
        """Documents → rows of a fixed length, in new parts of the scratch."""
        split = self._version.split
        by = split_of(split, documents.identity, documents.split) if split and split.is_noted else None
        total = int(documents.raw_bytes.sum())
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
            folder=job.folder if job is not None else NO_FOLDER,
            parts=[task.part for task in found],
            run_bytes=self._settings.run_bytes,
        )
        for rows in self._engine.run(make, unfinished(), self._meter.add, here=total < SMALL_BYTES):
            made[rows.facts.number] = rows
        self._meter.end()
        packed = join_parts([made[number].columns for number in range(len(made))])
        tokens = int(documents.marks[ITEMS].sum())
        if not len(packed):
            raise SourceError(f"field {settings.field!r} is empty in every sample; there is nothing to pack")
        report = PackReport(len(documents), tokens, len(packed), len(packed) * settings.length - tokens)
        return packed, [made[number].facts for number in range(len(made))], report

    def write(
        self, repository: Repository, job: Job, plan: BuildPlan, tasks: Sequence[SourceTask]
    ) -> tuple[list[WrittenShard], int]:
        """Pass 2: every shard, in shard order, and how many of them an earlier run had written."""
        rows = plan.plan.rows
        total = int(rows.raw_bytes.sum())
        self._meter.begin("write", total_bytes=total)
        written: dict[int, WrittenShard] = {}
        reused = 0

        def unfinished() -> Iterator[ShardRows]:
            nonlocal reused
            for item in plan.plan.shards():
                shard = finished_shard(job, repository, item)
                if shard is None:
                    yield item
                else:
                    reused += 1
                    written[item.number] = shard
                    self._meter.add(len(item.ordinal), item.raw_bytes)

        make = functools.partial(
            WriteWorker,
            repository,
            self._version,
            job.folder,
            [task.part for task in plan.parts],
            {
                number: [file.path for file in tasks[part.number].files]
                for number, part in enumerate(plan.parts)
                if part.extents
            },
            self._settings.gather_bytes,
        )
        try:
            is_light = self._version.compression == "none" and total >= _LIGHT_ROW_BYTES * len(rows)
            here = self._is_small(total, is_light=is_light)
            for shard in self._engine.run(make, unfinished(), self._meter.add, here=here):
                written[shard.number] = shard
            _check_watched(plan.parts, tasks)
        except (IntegrityError, SourceError):
            job.discard()  # damaged scratch, or what was noted of a source that has changed, must not be used again
            raise
        self._meter.end()
        return [written[number] for number in range(plan.plan.layout.shards)], reused

    def _is_small(self, size: int, *, is_light: bool) -> bool:
        """Whether work is done sooner in this process than when others are started for it."""
        if not is_light or not isinstance(self._engine, LocalEngine):
            return size < SMALL_BYTES
        return size < SMALL_BYTES * _LIGHT or (SMALL_BYTES > 0 and _processors() < _FEW_PROCESSORS)


def _processors() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_watched(parts: Sequence[TaskFacts], tasks: Sequence[SourceTask]) -> None:
    """Files from which rows were read without being verified are what they were when the rows were noted."""
    now: dict[str, int] = {}
    for part in parts:
        files = tasks[part.number].files if part.states else ()
        for file, state in zip(files, part.states, strict=True):
            if file.path not in now:
                now[file.path] = file_state(file.path)
            if now[file.path] != state:
                raise changed_source(file.path)


_MAX_RECORD_BYTES = 10_000


class WriteWorker:
    """Writes shards; one per process.

    Args:
        repository: where to.
        version: schema, format and compression.
        folder: the job directory.
        parts: names of the scratch files, by number of the part.
        files: number of a part whose payloads are in the source → paths of its task's files.
        gather_bytes: of `write_shard`.
    """

    def __init__(
        self,
        repository: Repository,
        version: NewVersion,
        folder: JobFolder,
        parts: Sequence[str],
        files: Mapping[int, Sequence[str]],
        gather_bytes: int,
    ) -> None:
        self._repository = repository
        self._version = version
        self._folder = folder
        self._parts = folder.parts(parts)
        self._extents = ExtentReader(files)
        self._reader = ScratchReader(self._parts, version.schema.stored, self._extents)
        self._gather_bytes = gather_bytes

    def close(self) -> None:
        self._parts.close()
        self._extents.close()

    def work(self, item: ShardRows, report: Report) -> WrittenShard:
        """Write a shard and leave a record of it.

        Raises:
            StoreError: the store or the scratch disk fails.
            IntegrityError: a scratch record changed.
            SourceError: the source did.
        """
        written = write_shard(
            self._repository,
            self._reader,
            item,
            self._version,
            gather_bytes=self._gather_bytes,
            on_block=report,
        )
        record = {
            "fingerprint": item.fingerprint(),
            "shard": [written.shard.digest, written.shard.size, written.shard.extension],
            "index": [written.index.digest, written.index.size, written.index.extension],
            "largest_block": written.largest_block,
            "raw_bytes": written.raw_bytes,
        }
        write_record(self._folder, _record_name(item), canonical_json.dumps(record))
        return written


def finished_shard(job: Job, repository: Repository, item: ShardRows) -> WrittenShard | None:
    """The shard that an earlier, killed run wrote of the same rows; None where it has to be written."""
    data = job.read(_record_name(item))
    if data is None:
        return None
    try:
        record = canonical_json.loads(data, _MAX_RECORD_BYTES)
        shard, index = Descriptor(*record["shard"]), Descriptor(*record["index"])
        if record["fingerprint"] != item.fingerprint():
            return None
        for descriptor in (shard, index):
            found = repository.store.head(descriptor.name)
            if found is None or found.size != descriptor.size:
                return None
        return WrittenShard(
            number=item.number,
            shard=shard,
            index=index,
            rows=len(item.ordinal),
            block_rows=item.block_rows,
            largest_block=int(record["largest_block"]),
            raw_bytes=int(record["raw_bytes"]),
            segment_stratum=item.segment_stratum,
            segment_rows=item.segment_rows,
        )
    except (FormatError, KeyError, TypeError):
        return None  # a record of another release


def _record_name(item: ShardRows) -> str:
    return f"shard-{item.number:08d}.done"
