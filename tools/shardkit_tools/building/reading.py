"""Pass 1: the rows of a task, encoded into a scratch part; journaled when the part is whole, and found again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import xxhash

from shardkit.dataset.encoding import RowEncoder, encode_columns
from shardkit.dataset.extents import ExtentColumn, file_state
from shardkit.dataset.row_table import Rows
from shardkit.dataset.scratch import RowSpool, RunBuffer
from shardkit.dataset.scratch_reading import FilePart
from shardkit.dataset.sources import SourceDigest
from shardkit.errors import FormatError, SampleError, ShardkitError, SourceError, StoreError
from shardkit_tools.building.engine import Report
from shardkit_tools.building.job import Job, JobFolder, write_record
from shardkit_tools.building.row_marks import RowMarks
from shardkit_tools.building.source_digests import TaskDigests, check_unchanged, digest_record
from shardkit_tools.importers.protocol import (
    ColumnImporter,
    ExtentImporter,
    Importer,
    SampleColumns,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
    WholeFileImporter,
)

_MAX_SKIPPED = 10_000
_REPORT_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that was left out with ``on_error="skip"``; row -1 stands for the rest of a task."""

    source_name: str
    source_row: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class ReadTask:
    """A task, its place in the order of the source, and whether it makes the digests of its files."""

    number: int
    task: SourceTask
    digests: bool = True

    def __str__(self) -> str:
        return f"the source {self.task.name}"


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What pass 1 found in a task, apart from its rows.

    Attributes:
        number: of the task.
        part: name of the scratch file, "" where nothing was kept.
        part_bytes: its size.
        files: digests of the task's files, where it made them.
        skipped: rows left out.
        extents: whether payloads are in the task's files instead of in the part.
        states: of these files, see `file_state`, where they are watched until the rows are written.
    """

    number: int
    part: str
    part_bytes: int
    files: tuple[SourceDigest, ...]
    skipped: tuple[SkippedRow, ...]
    extents: bool = False
    states: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TaskRows:
    """A task that was read: facts, and columns with one entry per row."""

    facts: TaskFacts
    columns: Rows


def _record_name(task: SourceTask) -> str:
    """Name of the record of a task: another one as soon as a file of it has changed."""
    digest = xxhash.xxh3_128(f"{task.name}\0{task.start}\0{task.stop}\0{task.size}".encode())
    for file in task.files:
        digest.update(f"\0{file.name}\0{file.size}\0{file.stamp}".encode())
    return f"task-{digest.hexdigest()}.rows"


class _HasToBeLookedAt(Exception):
    """Rows whose payloads were left in the source have to be looked at one by one."""


class ReadWorker:
    """Reads tasks; one per process.

    Args:
        importer: of the source.
        encoder: of the dataset.
        seed: of the shuffle, None where rows keep their order.
        folder: the job directory.
        skip: leave out rows that cannot be read instead of failing.
        run_bytes: of `RowSpool`.
        marks: what else is noted of every row.
        extents: leave payloads in the source where the importer can.
    """

    def __init__(
        self,
        importer: Importer,
        encoder: RowEncoder,
        *,
        seed: int | None,
        folder: JobFolder,
        skip: bool,
        run_bytes: int,
        marks: RowMarks,
        extents: bool = False,
    ) -> None:
        self._importer = importer
        self._encoder = encoder
        self._seed = seed
        self._folder = folder
        self._skip = skip
        self._marks = marks
        self._extents = extents and isinstance(importer, ExtentImporter | WholeFileImporter)
        self._buffer = RunBuffer(run_bytes)

    def close(self) -> None:
        """Nothing is held between tasks."""

    def work(self, item: ReadTask, report: Report) -> TaskRows:
        """Read a task; in a job directory, leave its record there.

        Raises:
            SourceError, SampleError: a row cannot be read, or does not fit the schema.
            StoreError: the scratch disk fails.
        """
        try:
            return self._work(item, report, extents=self._extents)
        except _HasToBeLookedAt:
            return self._work(item, report, extents=False)

    def _work(self, item: ReadTask, report: Report, *, extents: bool) -> TaskRows:
        part = self._folder.new_part("part")
        is_watched = extents and isinstance(self._importer, ExtentImporter)
        states = tuple(file_state(file.path) for file in item.task.files) if is_watched else ()
        spool = RowSpool(
            self._folder.path,
            part,
            seed=self._seed,
            always_file=bool(part),
            marks=self._marks.names,
            buffer=self._buffer,
        )
        try:
            with ThreadPoolExecutor(1, "digest") as digesting:
                whole = isinstance(self._importer, WholeFileImporter)
                digests = TaskDigests(item.task.files if item.digests else (), digesting, whole=whole)
                found = self._rows(item.task, digests, states, extents=extents)
                skipped = self._read(item.task, found, spool, _Throttle(report, item.task.size))
                files = digests.results()
            for file in item.task.files:
                check_unchanged(file)
            columns, kept = spool.finish()
            if kept is not None:
                kept.close()
        except BaseException:
            spool.drop()
            raise
        size = self._folder.keep(part)
        rows = TaskRows(TaskFacts(item.number, part, size, files, tuple(skipped), extents, states), columns)
        if part:
            write_record(self._folder, _record_name(item.task), encode_task(rows))
        return rows

    def _read(
        self,
        task: SourceTask,
        rows: Iterator[SampleColumns | SourceSample | SourceFailure],
        spool: RowSpool,
        throttle: _Throttle,
    ) -> list[SkippedRow]:
        paths = {file.name: file.path for file in task.files}
        skipped: list[SkippedRow] = []
        for found in self._samples(rows, spool, throttle):
            error: ShardkitError | None = None
            if isinstance(found, SourceFailure):
                error = found.error
            else:
                error = self._take(found, paths, spool, throttle)
            if error is not None and not self._skip:
                raise error
            if error is not None:
                skipped.append(_skipped(found.source_name, found.source_row, error))
            if len(skipped) > _MAX_SKIPPED:
                raise SourceError(
                    f"{task.name}: more than {_MAX_SKIPPED} rows cannot be read, the last is {skipped[-1].message}; "
                    "this is not a few bad rows: mend the source or the schema"
                )
        throttle.finish()
        return skipped

    def _samples(
        self,
        rows: Iterator[SampleColumns | SourceSample | SourceFailure],
        spool: RowSpool,
        throttle: _Throttle,
    ) -> Iterator[SourceSample | SourceFailure]:
        """The rows of a task that have to be taken one by one; the others are taken here."""
        for found in rows:
            if not isinstance(found, SampleColumns):
                yield found
                continue
            encoded = None
            if not self._marks.names:  # marks are made of payloads one by one
                encoded = encode_columns(self._encoder, found.columns, found.source_name, found.first_row)
            if encoded is None:
                if any(isinstance(column, ExtentColumn) for column in found.columns.values()):
                    raise _HasToBeLookedAt
                yield from found.samples()
                continue
            spool.append_rows(encoded)
            throttle.add(encoded.raw_bytes * len(encoded), rows=len(encoded))

    def _rows(
        self, task: SourceTask, digests: TaskDigests, states: Sequence[int], *, extents: bool
    ) -> Iterator[SampleColumns | SourceSample | SourceFailure]:
        """The rows of a task; an error of the source itself ends it, as a failure of row -1."""
        importer = self._importer
        try:
            if isinstance(importer, WholeFileImporter):
                yield from importer.read_files(task, digests.add, extents=extents)
            elif states and isinstance(importer, ExtentImporter):
                yield from importer.read_extents(task, states)
            elif isinstance(importer, ColumnImporter):
                yield from importer.read_columns(task)
            else:
                yield from importer.read(task)
        except SourceError as error:
            yield SourceFailure(task.name, -1, error)

    def _take(
        self, found: SourceSample, paths: dict[str, str], spool: RowSpool, throttle: _Throttle
    ) -> SampleError | None:
        source = (found.source_name, found.source_row)
        try:
            row = self._encoder.encode(found.sample, found.key, source, where="")
        except SampleError:
            # Named only now: making up a name for every good row would cost more than encoding some.
            where = f"{paths.get(found.source_name, found.source_name)} row {found.source_row}"
            if found.key is not None:
                where += f" (key {found.key!r})"
            try:
                row = self._encoder.encode(found.sample, found.key, source, where=where)
            except SampleError as error:
                return error
        assert row.identity is not None, "a row with a source has an identity"
        identity = row.identity
        if found.piece and found.key is None:
            identity = _identity_of_piece(identity, found.piece)
        spool.append(row, identity, self._marks.marks(row.payloads))
        throttle.add(row.raw_bytes)
        return None


def _identity_of_piece(identity: tuple[int, int], piece: int) -> tuple[int, int]:
    """Pieces of one row lie apart in the shuffle, as other rows do."""
    text = b"p%d:%d:%d" % (*identity, piece)
    return divmod(xxhash.xxh3_128_intdigest(text), 2**64)


class _Throttle:
    """Reports rows and bytes a few times a second, and never more bytes than the task has."""

    def __init__(self, report: Report, limit: int) -> None:
        self._report = report
        self._left = limit
        self._rows = 0
        self._bytes = 0
        self._last = time.monotonic()

    def add(self, size: int, *, rows: int = 1) -> None:
        self._rows += rows
        self._bytes += size
        if (rows > 1 or self._rows % 16 == 0) and time.monotonic() - self._last > _REPORT_INTERVAL_S:
            self._send(min(self._bytes, self._left))

    def finish(self) -> None:
        self._send(self._left)

    def _send(self, size: int) -> None:
        self._report(self._rows, size)
        self._left -= size
        self._rows = self._bytes = 0
        self._last = time.monotonic()


def _decode_task(number: int, data: bytes) -> TaskRows:
    """What `ReadWorker.work` left in the record of a task.

    Raises:
        FormatError, KeyError: the record is of another version.
    """
    columns, meta = Rows.from_bytes(data)
    files: Any = meta["files"]
    skipped: Any = meta["skipped"]
    states: Any = meta["states"]
    facts = TaskFacts(
        number=number,
        part=str(meta["part"]),
        part_bytes=int(str(meta["part_bytes"])),
        files=tuple(SourceDigest(*entry) for entry in files),
        skipped=tuple(SkippedRow(*entry) for entry in skipped),
        extents=bool(meta["extents"]),
        states=tuple(int(state, 16) for state in states),
    )
    return TaskRows(facts, columns)


def encode_task(rows: TaskRows) -> bytes:
    """The record of a task, or of packed documents."""
    return rows.columns.to_bytes(
        {
            "part": rows.facts.part,
            "part_bytes": rows.facts.part_bytes,
            "files": [[file.name, file.size, file.sha256] for file in rows.facts.files],
            "extents": rows.facts.extents,
            "states": [f"{state:x}" for state in rows.facts.states],
            "skipped": [[s.source_name, s.source_row, s.kind, s.message] for s in rows.facts.skipped],
        }
    )


def _skipped(name: str, row: int, error: ShardkitError) -> SkippedRow:
    # A message may quote bytes of the source that are not text.
    message = str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    return SkippedRow(name, row, error.kind, message[:1_000])


def finished_tasks(job: Job, tasks: Sequence[SourceTask], files: Iterable[SourceFile]) -> dict[int, TaskRows]:
    """Tasks whose rows are in scratch, by number; everything else of pass 1 is removed from the directory.

    What was packed stays: its records are named by what they were made of. So do digests of ``files`` as they are now.
    """
    finished: dict[int, TaskRows] = {}
    keep = {"lock", "boot", *map(digest_record, files)}
    for number, task in enumerate(tasks):
        name = _record_name(task)
        rows = finished_rows(job, number, name)
        if rows is not None and _is_watched_well(task, rows):
            finished[number] = rows
            keep |= {name, rows.facts.part}
    for name in job.folder.names():
        packed = name.startswith("packed-") and not job.may_have_lost_pages
        if name not in keep and not packed and not name.endswith(".done"):
            job.folder.remove(name)
    job.note_verified()  # only now: a kill before this must not pass unverified parts off as good
    return finished


def finished_rows(job: Job, number: int, name: str) -> TaskRows | None:
    """The rows that a record tells of; None where there is none, or its scratch file is not whole."""
    data = job.read(name)
    if data is None:
        return None
    try:
        rows = _decode_task(number, data)
    except (FormatError, KeyError, TypeError, ValueError):
        return None  # of another release
    if job.folder.size_of(rows.facts.part) != rows.facts.part_bytes:
        return None
    # The page cache survives the death of any process, but not of the machine.
    return rows if not job.may_have_lost_pages or _is_whole(job, rows) else None


def _is_whole(job: Job, rows: TaskRows) -> bool:
    part = FilePart(job.path, rows.facts.part)
    records = rows.columns.records
    buffer = memoryview(bytearray(int(records.length.max(initial=0))))
    try:
        for offset, length, check in zip(
            records.offset.tolist(), records.length.tolist(), records.check.tolist(), strict=True
        ):
            part.read_into(offset, buffer[:length])
            if xxhash.xxh3_64_intdigest(buffer[:length]) != check:
                return False
    except StoreError:
        return False
    finally:
        part.close()
    return True


def _is_watched_well(task: SourceTask, rows: TaskRows) -> bool:
    """Whether the files that rows are still to be read from are what they were."""
    states = rows.facts.states
    return not states or states == tuple(file_state(file.path) for file in task.files)
