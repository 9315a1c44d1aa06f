"""`adopt`: commit a version over existing files; they are not copied.

Each file is read by one process; its record appears when its index and location are durable in the root. A process
makes the facts of some files durable at the same time, while it reads the next, because a disk needs about as long for
many as for one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from shardkit.dataset.committing import (
    NOT_MOVED,
    Moved,
    block_size_for,
    move_refs,
    standing_refs,
    version_of_ref,
)
from shardkit.documents import Record, decode, encode
from shardkit.errors import FormatError, SourceError, UsageError
from shardkit.formats import Schema
from shardkit.manifest import Manifest, ShardRecord, ShardTable, Stratum, compose
from shardkit.reading.adopted_places import move_adopted, put_adopted
from shardkit.repository.log import LogEntry
from shardkit.repository.repository import Repository
from shardkit.repository.versions import put_manifest
from shardkit.stores.store import Descriptor
from shardkit_tools.adopting.files import BUILD_INSTEAD, AdoptableFiles, AdoptTask, Runs, ScannedFile
from shardkit_tools.adopting.formats import find_files, open_files, place_of, place_of_folder
from shardkit_tools.building.engines import Engine, Report, is_small, open_engine
from shardkit_tools.building.job import NO_FOLDER, Job, JobFolder, clear_temporaries
from shardkit_tools.building.outcome import ProgressCallback, ProgressMeter, refuse_failures
from shardkit_tools.console import bytes_text, count_text
from shardkit_tools.importers.protocol import ImportOptions
from shardkit_tools.importers.source_files import in_groups

_MAX_RECORD_BYTES = 64 << 20

_GROUP_FILES, _GROUP_BYTES = 64, 16 << 20  # maximum of the files that a process reads before it returns
_WRITERS = 16  # threads that make the facts of files durable

_SHARD_FACTS = ("digest", "size", "index_digest", "index_size", "block_rows", "largest_block", "raw_bytes")


class AdoptedShard(Record, frozen=True, kw_only=True):
    """Facts about one file for the manifest, which are also the record of a finished task."""

    number: int  # number of the task
    stamp: str  # stamp of the task
    digest: str = ""  # digest of the file; empty if no row can be read
    size: int = 0
    etag: str = ""  # ETag of its store, empty if there is none
    index_digest: str = ""  # digest of its index; empty in a dry run
    index_size: int = 0  # 0 in a dry run
    block_rows: int = 1  # rows per block
    largest_block: int = 0
    raw_bytes: int = 0
    runs: Runs = ()  # (values of the axes, rows) of each run of rows with equal values, in order
    failures: tuple[str, ...] = ()  # messages of samples that cannot be read

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.runs)

    def record(self, strata: Mapping[tuple[str, ...], int]) -> ShardRecord:
        """Return the shard's entry in the manifest."""
        return ShardRecord(
            **{name: getattr(self, name) for name in _SHARD_FACTS},
            segment_stratum=[strata[labels] for labels, _ in self.runs],
            segment_rows=[rows for _, rows in self.runs],
        )


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """Tasks that a process takes at a time: one large file, or some small ones."""

    tasks: tuple[AdoptTask, ...]

    def __str__(self) -> str:
        more = f" to {self.tasks[-1]}" if len(self.tasks) > 1 else ""
        return f"{self.tasks[0]}{more}"


def grouped(tasks: Sequence[AdoptTask]) -> Iterator[TaskGroup]:
    """Yield the tasks in groups of limited number and size, in order."""
    return (TaskGroup(tuple(group)) for group in in_groups(tasks, _GROUP_FILES, _GROUP_BYTES))


@dataclass
class AdoptWorker:
    """Adopts files; one per process."""

    repository: Repository | None  # the adopting root; None to write nothing
    folder: JobFolder  # the job directory
    source: AdoptableFiles
    axes: Sequence[str]  # fields to stratify by
    block_bytes: int  # target size of a block

    def close(self) -> None:
        """Do nothing."""

    def work(self, item: TaskGroup, report: Report) -> list[AdoptedShard]:
        """Read the files of a group one after the other; threads write what is known about the files before."""
        # after an error, the facts of files that were read are written before it is raised
        with ThreadPoolExecutor(_WRITERS, thread_name_prefix="shardkit-adopt") as writers:
            adopted = [self.adopt_file(task, report, writers) for task in item.tasks]
        return [one.result() for one in adopted]

    def adopt_file(
        self, task: AdoptTask, report: Report, writers: ThreadPoolExecutor
    ) -> Future[AdoptedShard]:
        """Read a file, and have a thread put its index and location and then its record."""
        scanned = self.source.scan(task, self.axes, self.block_bytes, report)
        return writers.submit(self._put, task, scanned)

    def _put(self, task: AdoptTask, scanned: ScannedFile) -> AdoptedShard:
        if scanned.index is None:
            return AdoptedShard(number=task.number, stamp=task.stamp, failures=scanned.failures)
        index, sizes = Descriptor("", 0, "index"), scanned.index.block_raw_size
        if self.repository is not None:
            index = self.repository.put_object(scanned.index.to_bytes(), "index")
            put_adopted(
                self.repository.store,
                scanned.digest,
                place_of(task.file) if scanned.group is None else place_of_folder(task.files),
                scanned.etag,
                group=scanned.group,
            )
        adopted = AdoptedShard(
            number=task.number,
            stamp=task.stamp,
            digest=scanned.digest,
            size=scanned.index.shard_size,
            etag=scanned.etag,
            index_digest=index.digest,
            index_size=index.size,
            block_rows=scanned.index.block_rows,
            largest_block=int(sizes.max()),
            raw_bytes=int(sizes.sum()),
            runs=scanned.runs,
            failures=scanned.failures,
        )
        if self.repository is not None:
            self.folder.put_record(task.record_name, encode(adopted))
        return adopted


def finished_file(job: Job, repository: Repository, item: AdoptTask) -> AdoptedShard | None:
    """Return the result of an earlier run for the unchanged file, or None if it must be read.

    Size and modification time decide only whether a file is read again; every read of a block verifies its
    bytes.
    """
    data = job.folder.read(item.record_name)
    if data is None:
        return None
    try:
        found = decode(AdoptedShard, data, item.record_name, max_bytes=_MAX_RECORD_BYTES)
        if found.stamp != item.stamp:
            return None
        repository.get_object(found.index_digest, "index", found.index_size)
        # The files may have moved since; the root keeps their latest location.
        if not move_adopted(repository.store, found.digest, place_of_folder(item.files)):
            put_adopted(repository.store, found.digest, place_of(item.file), found.etag)
    except (FormatError, LookupError):
        return None  # written by another release, or not durable
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """Result of `adopt`."""

    manifest: Manifest | None  # manifest of the version; None for a dry run
    commit: LogEntry | None  # log entry; None if the ref named this version already, and for a dry run
    moved: Mapping[str, tuple[str | None, str]]  # moved ref → (from, to); from is None for a new ref
    schema: Schema  # schema of the samples
    classes: tuple[str, ...]  # names of the values of the field `label`
    files: int  # number of files
    rows: int  # number of samples
    skipped: tuple[str, ...]  # message of each sample that was left out, in order
    stored_bytes: int  # size of the files
    strata: Mapping[str, int]  # name → rows
    notes: tuple[str, ...]  # remarks, such as on bytes that fill no row
    promises: Mapping[str, str]  # guarantees that do not hold, see `broken_promises`
    reused: int  # number of files that an earlier, killed run had read
    read_bytes: int  # bytes read by this run
    seconds: float  # wall-clock time


def adopt(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    root: str | os.PathLike[str],
    *,
    from_: str | None = None,
    options: ImportOptions | None = None,
    stratify: str | Sequence[str] | None = None,
    block_size: int | str | None = None,
    ref: str = "main",
    replace: bool = False,
    message: str = "",
    author: str = "",
    jobs: int | None = 1,
    engine: str | Engine = "local",
    address: str | None = None,
    scratch: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> Adoption:
    """Make a version of ``root`` whose shards are existing files, which stay where they are.

    The manifest depends only on the files' bytes, their order and the settings. After a kill, Ctrl-C or an
    error, the same call continues. Adopting files that have moved updates their locations in the root.

    Args:
        sources: a path, folder, glob or URL of files of one format, or several of them, in order.
        root: directory or URL of the dataset, new or existing.
        from_: format of the files, one of `IMPORTERS`; None: by their extensions, otherwise WebDataset tars.
        options: how the files are read, as in a build; samples that cannot be read are left out with
            `ImportOptions.skip_bad_rows`.
        stratify: field or fields to balance batches by.
        block_size: target size of a block in bytes.
        ref: the ref that is moved.
        replace: move the ref even from another schema, and over concurrent commits.
        message: message of the commit.
        author: author of the commit.
        jobs: number of processes; None: one per processor.
        engine: ``"local"``, ``"ray"``, or another `Engine`.
        address: address of a running Ray cluster.
        scratch: directory for records of finished work; by default inside ``root``.
        dry_run: read everything, write nothing.
        progress: called with a `Progress` a few times a second.

    Raises:
        SourceError: A file cannot be adopted; the message names it, and the member of a tar.
        UsageError: A setting is invalid, or the ref names samples of another schema.
        CommitConflict: Another commit moved the ref meanwhile.
    """
    doing = open_engine(engine, jobs, address)
    given = (sources,) if isinstance(sources, str | os.PathLike) else sources
    options = options or ImportOptions()
    for option, is_given in {"flatten": options.flatten, "rename": bool(options.rename)}.items():
        if is_given:
            raise UsageError(
                f"{option}: adopted files have the fields that are stored in them; {BUILD_INSTEAD}"
            )
    source = open_files(find_files(given, options), from_, options)
    schema = source.schema
    axes = (stratify,) if isinstance(stratify, str) else tuple(stratify or ())
    _check_axes(axes, source)
    block_bytes = block_size_for(version_of_ref(root, ref), block_size)
    adopting = _Adopting(source, axes, block_bytes, doing, progress, options)
    if dry_run:
        return adopting.result(adopting.read(), None, NOT_MOVED)
    repository = Repository.create(root)
    expected = standing_refs(repository, [ref], schema, replace=replace)
    job = Job(repository, scratch, adopting.digest(root), is_remote=doing.is_remote)
    with job.hold():
        found = adopting.read(repository, job)
        manifest = adopting.make(repository, found)
        said = message or f"adopt {count_text(adopting.files, 'file')}"
        moved = move_refs(repository, {ref: manifest.id}, expected, message=said, author=author)
    clear_temporaries(repository)
    return adopting.result(found, manifest, moved)


@dataclass
class _Adopting:
    """One adoption."""

    source: AdoptableFiles
    axes: tuple[str, ...]
    block_bytes: int
    engine: Engine
    progress: ProgressCallback | None
    options: ImportOptions

    def __post_init__(self) -> None:
        self._tasks = self.source.tasks()
        self._meter, self._started = ProgressMeter(self.progress), time.monotonic()
        self._reused = self._read_bytes = 0
        self.files = sum(len(task.files) for task in self._tasks)
        self._skipped: tuple[str, ...] = ()

    def read(self, repository: Repository | None = None, job: Job | None = None) -> list[AdoptedShard]:
        """Read the files that no earlier run has read; return all in order. Without a root, write nothing."""
        found: dict[int, AdoptedShard] = {}
        if repository is not None and job is not None:
            finished = ((task.number, finished_file(job, repository, task)) for task in self._tasks)
            found = {number: file for number, file in finished if file is not None}
        folder = job.folder if job is not None else NO_FOLDER
        self._reused = len(found)
        todo = [task for task in self._tasks if task.number not in found]
        self._read_bytes = sum(task.size for task in todo)
        done = sum(file.size for file in found.values())
        self._meter.begin(
            "read",
            total_bytes=self._read_bytes + done,
            done_rows=sum(file.rows for file in found.values()),
            done_bytes=done,
            reused=len(found),
        )
        make = functools.partial(AdoptWorker, repository, folder, self.source, self.axes, self.block_bytes)
        with self.engine as engine:
            groups = list(grouped(todo))
            here = len(groups) < 2 or is_small(engine, self._read_bytes)
            for files in engine.run(make, groups, self._meter.add, here=here):
                found |= {file.number: file for file in files}
        self._meter.end()
        self._skipped = tuple(text for task in self._tasks for text in found[task.number].failures)
        if not self.options.skip_bad_rows:
            refuse_failures(self._skipped)
        seen: dict[str, AdoptTask] = {}
        for task in self._tasks:
            first = seen.setdefault(found[task.number].digest or str(task.number), task)
            if first is not task:
                raise SourceError(
                    f"{task}: the same bytes as {first}, its samples would be there twice; name one of them"
                )
        filled = [found[task.number] for task in self._tasks if found[task.number].rows]
        if not filled:
            why = f" ({self._skipped[0]})" if self._skipped else ""
            raise SourceError(
                f"{self._tasks[0]}: no sample can be read{why}, so there is nothing to adopt; give files with samples"
            )
        return filled

    def make(self, repository: Repository, found: Sequence[AdoptedShard]) -> Manifest:
        self._meter.begin("commit")
        for task in self._tasks:
            task.check_unchanged()
        strata = self._strata(found)
        numbers = {labels: number for number, labels in enumerate(strata)}
        table = ShardTable.from_records(file.record(numbers) for file in found)
        manifest, pages = compose(
            table,
            schema=self.source.schema,
            format=self.source.shard_format,
            compression="none",
            axes=self.axes,
            strata=[Stratum(labels, rows, rows) for labels, rows in strata.items()],
            classes=self.source.classes,
            build={"source": {"importer": "adopt"}, "block_size": self.block_bytes},
            adopted=True,
        )
        put_manifest(repository, manifest, pages)
        self._meter.end()
        return manifest

    def _strata(self, found: Sequence[AdoptedShard]) -> dict[tuple[str, ...], int]:
        """Return values of the axes → rows, sorted; integers are sorted as numbers, not as text."""
        counts: Counter[tuple[str, ...]] = Counter()
        for file in found:
            for labels, rows in file.runs:
                counts[labels] += rows
        kinds = [self.source.schema[axis] for axis in self.axes]
        by_number = [kind.is_whole and kind.dtype != "bool" for kind in kinds]

        def order(labels: tuple[str, ...]) -> tuple[object, ...]:
            return tuple(
                int(text) if number else text for text, number in zip(labels, by_number, strict=True)
            )

        return {labels: counts[labels] for labels in sorted(counts, key=order)}

    def digest(self, root: str | os.PathLike[str]) -> str:
        """Return a digest of everything that must be equal for an earlier run's work to be reusable."""
        recipe = {
            "adopt": 1,
            "files": [task.file.path for task in self._tasks],
            "options": repr(self.options),
            "format": f"{type(self.source).__name__}, {self.source.shard_format}",
            "schema": self.source.schema.to_json(),
            "classes": list(self.source.classes),  # their order numbers the labels
            "axes": list(self.axes),
            "block_size": self.block_bytes,
            "root": os.path.abspath(root) if "://" not in os.fspath(root) else os.fspath(root),
        }
        return hashlib.sha256(encode(recipe)).hexdigest()

    def result(self, found: Sequence[AdoptedShard], manifest: Manifest | None, moved: Moved) -> Adoption:
        strata = self._strata(found)
        largest = max(file.largest_block for file in found)
        return Adoption(
            manifest=manifest,
            commit=moved.entry,
            moved=moved.refs,
            schema=self.source.schema,
            classes=self.source.classes,
            files=self.files,
            rows=sum(file.rows for file in found),
            skipped=self._skipped,
            stored_bytes=sum(file.size for file in found),
            strata={Stratum(labels, 0, 0).name: rows for labels, rows in strata.items()},
            notes=tuple(self.source.importer.source.notes),
            promises=broken_promises(self.source, self.axes, len(strata), largest, self.block_bytes),
            reused=self._reused,
            read_bytes=self._read_bytes,
            seconds=time.monotonic() - self._started,
        )


def _check_axes(axes: Sequence[str], source: AdoptableFiles) -> None:
    if axes and not source.has_strata:
        raise UsageError(
            f"--stratify {axes[0]}: adopted rows of this format are one stratum; {BUILD_INSTEAD}"
        )
    for axis in axes:
        fits = [name for name, kind in source.schema.items() if kind.kind == "str" or kind.is_whole]
        if axis not in fits:
            raise UsageError(
                f"stratify by {axis!r}: expected whole numbers or text ({', '.join(fits) or 'no field is such'})"
            )


def broken_promises(
    source: AdoptableFiles, axes: Sequence[str], strata: int, largest_block: int, block_bytes: int
) -> dict[str, str]:
    """Return the guarantees that do not hold for adopted files.

    Returns:
        Stable name of the guarantee, for programs → explanation, for users.
    """
    balance = (
        f"the {strata} strata of {'/'.join(axes)} are stored as the files have them, so a balanced batch reads more "
        "shards than after a build"
        if axes
        else "batches are not balanced by any field"
    )
    return {
        "strata": balance,
        "order": "samples stay in the files' order, and a plan mixes those in its window of blocks; choose a larger "
        "window if neighbours are alike",
        "blocks": f"sizes of blocks differ: the largest has {bytes_text(largest_block)}, the target is "
        f"{bytes_text(block_bytes)}; memory is budgeted by the largest",
        "keys": source.key_note,
        "custody": "the files still belong to their owner: a read of a changed block is an error that names the file, "
        "and the root cannot repair it",
        "erasure": "shardkit remove --erase does not change the files",
    }
