"""The two passes as work for processes; results are journaled when complete, and reused.

Pass 1 encodes the rows of a task into a scratch part. Pass 2 writes shards from scratch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.about import SourceDigest
from shardkit.dataset.encoding import RowEncoder
from shardkit.dataset.rows import PublishedShard, Rows, ShardRows
from shardkit.dataset.scratch import RowSpool, ScratchReader
from shardkit.dataset.shard_writing import write_shard
from shardkit.dataset.version_plan import NewVersion
from shardkit.documents import Record, encode
from shardkit.documents import decode as decode_document
from shardkit.errors import (
    ConfigurationError,
    FormatError,
    SourceError,
    StoreError,
)
from shardkit.formats import Schema
from shardkit.formats.block import PayloadColumn, payloads_of, sizes_of, stored_columns
from shardkit.manifest import ShardRecord
from shardkit.repository.repository import Repository
from shardkit.stores.store import object_name
from shardkit_tools.building.engines import Report
from shardkit_tools.building.job import Job, JobFolder
from shardkit_tools.building.outcome import SkippedRow
from shardkit_tools.building.source_digests import TaskDigests, check_unchanged, digest_record
from shardkit_tools.importers.protocol import (
    DecodedRows,
    DecodedStream,
    FileImporter,
    FileObserver,
    Importer,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
    decode,
    row_name,
)

_MAX_SKIPPED = 10_000
_HIGH, _LOW = "unique_high", "unique_low"
ITEMS = "items"
"""Column of `Rows.marks`: number of items in the packed field."""


@dataclass(frozen=True, slots=True)
class RowMarks:
    """Additional columns that pass 1 records: the digest of one field, the number of items of another."""

    unique: int | None = None  # position in the schema of the field that must be unique, or None
    packed: int | None = None  # position of the ragged field whose items are counted, or None
    item_bytes: int = 1  # size of one of its items

    @classmethod
    def of(cls, schema: Schema, *, unique: str | None, packed: str | None) -> RowMarks:
        """Return the marks for these fields.

        Raises:
            ConfigurationError: A field does not exist or has an unsuitable type.
        """
        for option, name in (("--unique", unique), ("--pack", packed)):
            if name is not None and name not in schema:
                raise ConfigurationError(
                    f"{option} {name}: no such field; the fields are {', '.join(schema)}"
                )
            if name is not None and schema[name].optional:
                raise ConfigurationError(
                    f"{option} {name}: it is of type {schema[name]}: rows may have no value; give every row one, and "
                    f"pass --schema {name}={schema[name].required}"
                )
        if packed is not None and schema[packed].kind != "ragged":
            raise ConfigurationError(
                f"--pack {packed}: it is of type {schema[packed]}; expected rows of any length, such as int32[*]"
            )
        return cls(
            schema.stored.position(unique) if unique is not None else None,
            schema.stored.position(packed) if packed is not None else None,
            schema[packed].numpy_dtype.itemsize if packed is not None else 1,
        )

    def marks(self, columns: Sequence[PayloadColumn]) -> dict[str, NDArray[np.uint64]]:
        """Return the marks of rows from the payloads of their stored columns."""
        found: dict[str, NDArray[np.uint64]] = {}
        if self.unique is not None:
            # SHA-256, not XXH3: values come from strangers, who must not be able to construct equal digests.
            digests = b"".join(hashlib.sha256(one).digest()[:16] for one in payloads_of(columns[self.unique]))
            words = np.frombuffer(digests, "<u8").reshape(-1, 2)
            found = {_HIGH: words[:, 1], _LOW: words[:, 0]}
        if self.packed is not None:
            found[ITEMS] = (sizes_of(columns[self.packed]) // self.item_bytes).astype(np.uint64)
        return found


def first_of_equals(marks: Mapping[str, NDArray[np.uint64]]) -> NDArray[np.int64]:
    """Return the indices of first occurrences, ascending."""
    high, low = marks[_HIGH], marks[_LOW]
    order = np.lexsort((low, high))  # stable: equal values stay in source order
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = (high[order[1:]] != high[order[:-1]]) | (low[order[1:]] != low[order[:-1]])
    places: NDArray[np.int64] = np.sort(order[is_new]).astype(np.int64)
    return places


@dataclass(frozen=True, slots=True)
class ReadTask:
    """A task, its number in source order, and whether it computes the digests of its files."""

    number: int
    task: SourceTask
    digests: bool = True

    def __str__(self) -> str:
        return f"the source {self.task.name}"


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """Result of pass 1 for a task, apart from its rows."""

    number: int  # number of the task
    part: str  # name of the scratch file, "" if nothing was stored
    part_bytes: int  # size of the scratch file
    files: tuple[SourceDigest, ...] = ()  # digests of the task's files, if it computed them
    skipped: tuple[SkippedRow, ...] = ()  # rows that were left out


@dataclass(frozen=True, slots=True, eq=False)
class TaskRows:
    """A finished task: facts, and columns with one entry per row."""

    facts: TaskFacts
    columns: Rows

    def to_bytes(self) -> bytes:
        """Return the record of a task, or of packed documents."""
        return self.columns.to_bytes(msgspec.to_builtins(self.facts))

    @classmethod
    def from_bytes(cls, number: int, data: bytes) -> TaskRows:
        """Read a record made by `to_bytes`; the task may have had another number then.

        Raises:
            FormatError, ValueError: the record is of another release.
        """
        columns, facts = Rows.from_bytes(data)
        return cls(dataclasses.replace(msgspec.convert(facts, TaskFacts), number=number), columns)


def spool_part(
    folder: JobFolder,
    kind: str,
    schema: Schema,
    open_spool: Callable[..., RowSpool],
    item: tuple[int, str],
    fill: Callable[[RowSpool], tuple[tuple[SourceDigest, ...], Sequence[SkippedRow]]],
) -> TaskRows:
    """Spool the rows of a task; in a job directory, as a part with a record.

    Args:
        folder: the job directory.
        kind: begin of the part's name.
        schema: schema of the rows.
        open_spool: `RowSpool` with its settings.
        item: number and record name of the task.
        fill: appends the rows to the spool, and returns digests of the task's files and skipped rows.
    """
    part = folder.new_part(kind)
    spool = open_spool(folder.path, part, schema)
    try:
        files, skipped = fill(spool)
        columns = spool.finish()
    except BaseException:
        spool.drop()
        raise
    number, record = item
    rows = TaskRows(TaskFacts(number, part, folder.keep(part), files, tuple(skipped)), columns)
    if part:
        folder.put_record(record, rows.to_bytes())
    return rows


@dataclass
class ReadWorker:
    """Reads tasks; one per process."""

    importer: Importer  # importer of the source
    encoder: RowEncoder  # encoder of the dataset
    _: KW_ONLY
    open_spool: Callable[..., RowSpool]  # `RowSpool` with its settings
    folder: JobFolder  # the job directory
    skip: bool  # leave out unreadable rows instead of failing; those of whole files are returned in any case
    marks: RowMarks  # additional columns

    def __post_init__(self) -> None:
        self._reads_whole = isinstance(self.importer, FileImporter) and self.importer.reads_whole_files

    def close(self) -> None:
        """Do nothing."""

    def work(self, item: ReadTask, report: Report) -> TaskRows:
        """Read a task; in a job directory, also write its record."""

        def fill(spool: RowSpool) -> tuple[tuple[SourceDigest, ...], list[SkippedRow]]:
            with ThreadPoolExecutor(1, "digest") as digesting:
                digested = item.task.files if item.digests else ()
                digests = TaskDigests(digested, digesting, whole=self._reads_whole)
                rows = self._decode(item.task, digests.add)
                skipped = self._read(item.task, rows, spool, report)
                files = digests.results()
            for file in item.task.files:
                check_unchanged(file)
            return files, skipped

        record = item.number, _record_name(item.task)
        return spool_part(self.folder, "part", self.encoder.schema, self.open_spool, record, fill)

    def _decode(self, task: SourceTask, seen: FileObserver) -> DecodedStream:
        """Yield the rows of a task; an error of the source ends it, as a failure of row -1."""
        try:
            yield from decode(self.importer, task, seen)
        except SourceError as error:
            yield SourceFailure(task.name, -1, error)

    def _read(
        self, task: SourceTask, rows: DecodedStream, spool: RowSpool, report: Report
    ) -> list[SkippedRow]:
        paths = {file.name: file.path for file in task.files}
        skipped: list[SkippedRow] = []
        left = task.size  # bytes of the source that are not reported

        def spooled(count: int, size: int) -> None:
            nonlocal left
            left -= (size := min(size, left))
            report(count, size)

        for found in rows:
            failures = (
                [found] if isinstance(found, SourceFailure) else self._take(found, paths, spool, spooled)
            )
            for failure in failures:
                if not (self.skip or self._reads_whole):
                    raise failure.error
                # a message may quote bytes of the source that are not text
                message = str(failure.error).encode("utf-8", "backslashreplace").decode("utf-8")[:1_000]
                row = SkippedRow(failure.source_name, failure.source_row, failure.error.kind, message)
                skipped.append(row)
            if len(skipped) > _MAX_SKIPPED:
                raise SourceError(
                    f"{task.name}: more than {_MAX_SKIPPED} rows cannot be read, the last is {skipped[-1].message}; "
                    "this is not a few bad rows: fix the source or the schema"
                )
        report(0, left)
        return skipped

    def _take(
        self, found: DecodedRows, paths: Mapping[str, str], spool: RowSpool, spooled: Report
    ) -> list[SourceFailure]:
        """Spool rows; return a failure for each row that cannot be stored."""
        names, numbers, keys = found.origin.source_names, found.origin.source_row, found.origin.keys

        def name_of(row: int) -> str:
            key = keys[row] if keys else None
            return row_name(SourceSample({}, key, names[row], int(numbers[row])), paths)

        columns = stored_columns(self.encoder.schema, found.batch)
        encoded = self.encoder.encode_rows(columns, found.origin, name_of)
        if isinstance(encoded, tuple):
            rows, batch = encoded
            spool.append(dataclasses.replace(rows, marks=self.marks.marks(columns)), batch)
            spooled(len(rows), int(rows.raw_bytes.sum()))
            return []
        errors = encoded
        if len(errors) < len(names):
            self._take(found.without(errors), paths, spool, spooled)
        return [SourceFailure(names[row], int(numbers[row]), errors[row]) for row in sorted(errors)]


def _record_name(task: SourceTask) -> str:
    """Return the name of a task's record; it changes with the name, size or stamp of a file."""
    digest = xxhash.xxh3_128(f"{task.name}\0{task.start}\0{task.stop}\0{task.size}".encode())
    for file in task.files:
        digest.update(f"\0{file.name}\0{file.size}\0{file.stamp}".encode())
    return f"task-{digest.hexdigest()}.rows"


def finished_tasks(job: Job, tasks: Sequence[SourceTask], files: Iterable[SourceFile]) -> dict[int, TaskRows]:
    """Return tasks whose rows are in scratch, by number; other files of pass 1 are removed.

    Packed rows stay, because their records are named by their input. Digests of the unchanged ``files`` stay
    as well.
    """
    finished: dict[int, TaskRows] = {}
    keep = {"lock", "boot", *map(digest_record, files)}
    for number, task in enumerate(tasks):
        name = _record_name(task)
        rows = finished_rows(job, number, name)
        if rows is not None:
            finished[number] = rows
            keep |= {name, rows.facts.part}
    for name in job.folder.names():
        packed = name.startswith("packed-") and not job.may_have_lost_pages
        if name not in keep and not packed and not name.endswith(".done"):
            job.folder.remove(name)
    job.note_verified()  # last: a kill before this must not make unverified parts count as verified
    return finished


def finished_rows(job: Job, number: int, name: str) -> TaskRows | None:
    """Return the rows of a record, or None if it is missing or its scratch file is incomplete."""
    data = job.folder.read(name)
    if data is None:
        return None
    try:
        rows = TaskRows.from_bytes(number, data)
    except (FormatError, KeyError, TypeError, ValueError):
        return None  # written by another release
    if job.folder.size_of(rows.facts.part) != rows.facts.part_bytes:
        return None
    # The page cache survives the death of a process, but not of the machine.
    return rows if not job.may_have_lost_pages or _is_whole(job, rows) else None


def _is_whole(job: Job, rows: TaskRows) -> bool:
    part = job.folder.parts([rows.facts.part])
    batches = rows.columns.records.batches
    buffer = memoryview(bytearray(int(batches["length"].max(initial=0))))
    try:
        for offset, length, check in zip(
            batches["offset"].tolist(), batches["length"].tolist(), batches["check"].tolist(), strict=True
        ):
            part.read_into(0, offset, buffer[:length])
            if xxhash.xxh3_64_intdigest(buffer[:length]) != check:
                return False
    except StoreError:
        return False
    finally:
        part.close()
    return True


# ---- Pass 2

_MAX_RECORD_BYTES = 10_000


@dataclass
class WriteWorker:
    """Writes shards; one per process."""

    repository: Repository  # destination
    version: NewVersion  # schema, format and compression
    folder: JobFolder  # the job directory
    parts: Sequence[str]  # names of the scratch files, by part number

    def __post_init__(self) -> None:
        self._parts = self.folder.parts(self.parts)
        self._reader = ScratchReader(self._parts, self.version.schema)

    def close(self) -> None:
        self._parts.close()

    def work(self, item: ShardRows, report: Report) -> tuple[int, ShardRecord]:
        """Write a shard and its record; return its number and the manifest's entry."""
        shard = write_shard(self.repository, self._reader, item, self.version, on_block=report)
        done = _FinishedShard(fingerprint=item.fingerprint(), shard=shard)
        self.folder.put_record(_shard_record_name(item), encode(done))
        return item.number, item.record(shard)


class _FinishedShard(Record, frozen=True, kw_only=True):
    fingerprint: str  # see `ShardRows.fingerprint`
    shard: PublishedShard


def finished_shard(job: Job, repository: Repository, item: ShardRows, extension: str) -> ShardRecord | None:
    """Return the shard that an earlier run wrote of the same rows, or None if it must be written."""
    data = job.folder.read(_shard_record_name(item))
    if data is None:
        return None
    try:
        done = decode_document(_FinishedShard, data, "a finished shard", max_bytes=_MAX_RECORD_BYTES)
    except FormatError:
        return None  # written by another release
    shard = done.shard
    if done.fingerprint != item.fingerprint():
        return None
    for digest, kind, size in (
        (shard.digest, extension, shard.size),
        (shard.index_digest, "index", shard.index_size),
    ):
        found = repository.store.head(object_name(digest, kind))
        if found is None or found.size != size:
            return None
    return item.record(shard)


def _shard_record_name(item: ShardRows) -> str:
    return f"shard-{item.number:08d}.done"
