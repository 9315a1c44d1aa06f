"""`adopt`: commit a version over existing tars; they are not copied.

Each tar is read by one process; its record appears when its index and location are durable in the root.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardkit.dataset.committing import NOT_MOVED, Moved, block_size_for, move_refs, standing_refs
from shardkit.errors import FormatError, IntegrityError, SourceError, UsageError
from shardkit.formats import Schema, canonical_json
from shardkit.manifest import Manifest, ShardRecord, ShardTable, Stratum, check_against, compose
from shardkit.reading.adopted import put_adopted
from shardkit.repository.log import LogEntry
from shardkit.repository.repository import Repository
from shardkit.repository.versions import put_manifest
from shardkit.stores.store import Descriptor
from shardkit_tools.adopting.scanning import TarScan, find_tars, place_of, stat_tar
from shardkit_tools.building.engines import Engine, is_small, open_engine
from shardkit_tools.building.job import NO_FOLDER, Job, JobFolder, clear_temporaries
from shardkit_tools.building.outcome import ProgressCallback, ProgressMeter
from shardkit_tools.building.worker import Report
from shardkit_tools.importers.protocol import ImportOptions, Source, SourceFile
from shardkit_tools.importers.webdataset import open_webdataset

_MAX_RECORD_BYTES = 64 << 20
Runs = tuple[tuple[tuple[str, ...], int], ...]


_SHARD_FACTS = ("digest", "size", "index_digest", "index_size", "block_rows", "largest_block", "raw_bytes")


@dataclass(frozen=True, slots=True)
class AdoptTask:
    """A tar and its number in the order."""

    number: int
    file: SourceFile

    def __str__(self) -> str:
        return self.file.path

    @property
    def record_name(self) -> str:
        return f"tar-{self.number:08d}.done"

    @property
    def stamp(self) -> str:
        """Text that changes when the tar is written to."""
        return f"{self.file.size} {self.file.stamp}"


@dataclass(frozen=True, slots=True)
class AdoptedTar:
    """Facts about one tar for the manifest."""

    number: int  # number of the task
    digest: str  # digest of the tar
    size: int
    etag: str  # ETag of its store, empty if there is none
    index_digest: str  # digest of its index; empty in a dry run
    index_size: int  # 0 in a dry run
    block_rows: int  # rows per block
    largest_block: int
    raw_bytes: int
    runs: Runs  # (values of the axes, rows) of each run of rows with equal values, in order

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


@dataclass
class AdoptWorker:
    """Adopts tars; one per process."""

    repository: Repository | None  # the adopting root; None to write nothing
    folder: JobFolder  # the job directory
    schema: Schema  # schema of every sample
    axes: Sequence[str]  # fields to stratify by
    block_bytes: int  # target size of a block

    def close(self) -> None:
        """Do nothing."""

    def work(self, item: AdoptTask, report: Report) -> AdoptedTar:
        """Read a tar, put its index and location, and write its record."""
        scanned = TarScan(item.file, self.schema, self.axes, self.block_bytes, report).run()
        index, sizes = Descriptor("", 0, "index"), scanned.index.block_raw_size
        if self.repository is not None:
            index = self.repository.put_object(scanned.index.to_bytes(), "index")
            put_adopted(self.repository.store, scanned.digest, place_of(item.file), scanned.etag)
        adopted = AdoptedTar(
            number=item.number,
            digest=scanned.digest,
            size=scanned.index.shard_size,
            etag=scanned.etag,
            index_digest=index.digest,
            index_size=index.size,
            block_rows=scanned.index.block_rows,
            largest_block=int(sizes.max()),
            raw_bytes=int(sizes.sum()),
            runs=scanned.runs,
        )
        if self.repository is not None:
            runs = [[list(labels), rows] for labels, rows in adopted.runs]
            record = {**asdict(adopted), "runs": runs, "stamp": item.stamp}
            self.folder.put_record(item.record_name, canonical_json.dumps(record))
        return adopted


def finished_tar(job: Job, repository: Repository, item: AdoptTask) -> AdoptedTar | None:
    """Return the result of an earlier run for the unchanged tar, or None if it must be read.

    Size and modification time decide only whether a tar is read again; every read of a block verifies its
    bytes.
    """
    data = job.folder.read(item.record_name)
    if data is None:
        return None
    try:
        record: Any = canonical_json.loads(data, _MAX_RECORD_BYTES)
        if record.pop("stamp") != item.stamp:
            return None
        runs = tuple((tuple(labels), rows) for labels, rows in record.pop("runs"))
        found = AdoptedTar(runs=runs, **record)
        repository.get_object(found.index_digest, "index", found.index_size)
        # The tar may have moved since; the root keeps its latest location.
        put_adopted(repository.store, found.digest, place_of(item.file), found.etag)
    except (FormatError, KeyError, TypeError, ValueError, LookupError):
        return None  # written by another release, or not durable
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """Result of `adopt`."""

    manifest: Manifest | None  # manifest of the version; None for a dry run
    commit: LogEntry | None  # log entry; None if the ref named this version already, and for a dry run
    moved: Mapping[str, tuple[str | None, str]]  # moved ref → (from, to); from is None for a new ref
    schema: Schema  # schema of the samples
    tars: int  # number of them
    rows: int  # number of samples
    stored_bytes: int  # size of the tars
    strata: Mapping[str, int]  # name → rows
    promises: Mapping[str, str]  # guarantees that do not hold, see `broken_promises`
    reused: int  # number of tars that an earlier, killed run had read
    read_bytes: int  # bytes read by this run
    seconds: float  # wall-clock time


def adopt(
    tars: Sequence[str | os.PathLike[str]],
    root: str | os.PathLike[str],
    *,
    field_types: Mapping[str, str] | None = None,
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
    """Make a version of ``root`` whose shards are existing WebDataset tars, which stay where they are.

    The manifest depends only on the tars' bytes, their order and the settings. After a kill, Ctrl-C or an
    error, the same call continues. Adopting tars that have moved updates their locations in the root.

    Args:
        tars: paths, globs and URLs of tars, in order.
        root: directory or URL of the dataset, new or existing.
        field_types: field → type that replaces the inferred one.
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
        SourceError: A tar cannot be adopted; the message names tar and member.
        UsageError: A setting is invalid, or the ref names samples of another schema.
        CommitConflict: Another commit moved the ref meanwhile.
    """
    doing = open_engine(engine, jobs, address)
    files = find_tars(tars)
    schema = _schema(files, field_types or {})
    axes = (stratify,) if isinstance(stratify, str) else tuple(stratify or ())
    _check_axes(axes, schema)
    adopting = _Adopting(files, schema, axes, block_size_for(root, ref, block_size), doing, progress)
    if dry_run:
        return adopting.result(adopting.read(), None, NOT_MOVED)
    repository = Repository.create(root)
    expected = standing_refs(repository, [ref], schema, replace=replace)
    job = Job(repository, scratch, adopting.digest(root), is_remote=doing.is_remote)
    with job.held():
        found = adopting.read(repository, job)
        manifest = adopting.make(repository, found)
        said = message or f"adopt {len(found)} tar{'' if len(found) == 1 else 's'}"
        moved = move_refs(repository, {ref: manifest.id}, expected, message=said, author=author)
    clear_temporaries(repository)
    return adopting.result(found, manifest, moved)


@dataclass
class _Adopting:
    """One adoption."""

    files: Sequence[SourceFile]
    schema: Schema
    axes: tuple[str, ...]
    block_bytes: int
    engine: Engine
    progress: ProgressCallback | None

    def __post_init__(self) -> None:
        self._tasks = [AdoptTask(number, file) for number, file in enumerate(self.files)]
        self._meter, self._started = ProgressMeter(self.progress), time.monotonic()
        self._reused = self._read_bytes = 0

    def read(self, repository: Repository | None = None, job: Job | None = None) -> list[AdoptedTar]:
        """Read the tars that no earlier run has read; return all in order. Without a root, write nothing."""
        found: dict[int, AdoptedTar] = {}
        if repository is not None and job is not None:
            finished = ((task.number, finished_tar(job, repository, task)) for task in self._tasks)
            found = {number: tar for number, tar in finished if tar is not None}
        folder = job.folder if job is not None else NO_FOLDER
        self._reused = len(found)
        todo = [task for task in self._tasks if task.number not in found]
        self._read_bytes = sum(task.file.size for task in todo)
        done = sum(tar.size for tar in found.values())
        self._meter.begin(
            "read",
            total_bytes=self._read_bytes + done,
            done_rows=sum(tar.rows for tar in found.values()),
            done_bytes=done,
            reused=len(found),
        )
        make = functools.partial(AdoptWorker, repository, folder, self.schema, self.axes, self.block_bytes)
        with self.engine as engine:
            here = len(todo) < 2 or is_small(engine, self._read_bytes)
            for tar in engine.run(make, todo, self._meter.add, here=here):
                found[tar.number] = tar
        self._meter.end()
        seen: dict[str, AdoptTask] = {}
        for task in self._tasks:
            first = seen.setdefault(found[task.number].digest, task)
            if first is not task:
                raise SourceError(
                    f"{task}: the same bytes as {first}, its samples would be there twice; name one of them"
                )
        return [found[task.number] for task in self._tasks]

    def make(self, repository: Repository, found: Sequence[AdoptedTar]) -> Manifest:
        self._meter.begin("commit")
        for task, tar in zip(self._tasks, found, strict=True):
            if stat_tar(task.file).size != tar.size:
                raise IntegrityError(f"{task}: it changed while it was adopted; adopt what nobody writes to")
        strata = self._strata(found)
        numbers = {labels: number for number, labels in enumerate(strata)}
        table = ShardTable.from_records(tar.record(numbers) for tar in found)
        manifest, pages = compose(
            table,
            schema=self.schema,
            format="tar",
            compression="none",
            axes=self.axes,
            strata=list(strata),
            build={"source": {"importer": "adopt"}, "block_size": self.block_bytes},
            adopted=True,
        )
        check_against(manifest, table)
        put_manifest(repository, manifest, pages)
        self._meter.end()
        return manifest

    def _strata(self, found: Sequence[AdoptedTar]) -> dict[tuple[str, ...], int]:
        """Return values of the axes → rows, sorted; integers are sorted as numbers, not as text."""
        counts: Counter[tuple[str, ...]] = Counter()
        for tar in found:
            for labels, rows in tar.runs:
                counts[labels] += rows
        kinds = [self.schema[axis] for axis in self.axes]
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
            "tars": [place_of(task.file) for task in self._tasks],
            "schema": self.schema.to_json(),
            "axes": list(self.axes),
            "block_size": self.block_bytes,
            "root": os.path.abspath(root) if "://" not in os.fspath(root) else os.fspath(root),
        }
        return hashlib.sha256(canonical_json.dumps(recipe)).hexdigest()

    def result(self, found: Sequence[AdoptedTar], manifest: Manifest | None, moved: Moved) -> Adoption:
        strata = self._strata(found)
        largest = max(tar.largest_block for tar in found)
        return Adoption(
            manifest=manifest,
            commit=moved.entry,
            moved=moved.refs,
            schema=self.schema,
            tars=len(found),
            rows=sum(tar.rows for tar in found),
            stored_bytes=sum(tar.size for tar in found),
            strata={Stratum(labels, 0, 0).name: rows for labels, rows in strata.items()},
            promises=broken_promises(self.axes, len(strata), largest, self.block_bytes),
            reused=self._reused,
            read_bytes=self._read_bytes,
            seconds=time.monotonic() - self._started,
        )


def _schema(files: Sequence[SourceFile], field_types: Mapping[str, str]) -> Schema:
    source = Source(files[0].path, tuple(files))
    return open_webdataset(source, ImportOptions(field_types=field_types)).schema


def _check_axes(axes: Sequence[str], schema: Schema) -> None:
    for axis in axes:
        fits = [name for name, kind in schema.items() if kind.kind == "str" or kind.is_whole]
        if axis not in fits:
            raise UsageError(
                f"stratify by {axis!r}: expected whole numbers or text ({', '.join(fits) or 'no field is such'})"
            )


def broken_promises(axes: Sequence[str], strata: int, largest_block: int, block_bytes: int) -> dict[str, str]:
    """Return the guarantees that do not hold for adopted tars.

    Returns:
        Stable name of the guarantee, for programs → explanation, for users.
    """
    balance = (
        f"{strata} strata of {'/'.join(axes)} lie where the tars have them; a shard need not hold all of them, so "
        "batches are balanced over more shards than a build would need"
        if axes
        else "all samples are one stratum: batches are not balanced by any field"
    )
    return {
        "strata": balance,
        "order": "samples were not shuffled over all tars: they lie in the tars' order, so a plan mixes what its "
        "window of blocks holds; choose a larger window where neighbours are alike",
        "blocks": f"blocks are cut at samples as the tars have them: the largest has {largest_block} bytes, the "
        f"target is {block_bytes}; memory is budgeted by the largest",
        "keys": "keys are unique inside a tar only, and JSON and media stay byte for byte as they are",
        "custody": "the tars stay their owner's: shardkit notices every change when it reads, and names the tar, but "
        "nothing keeps them from being changed, moved or deleted; a change cannot be healed from the root",
        "erasure": "remove takes samples out of versions; --erase cannot take their bytes out of the tars",
    }
