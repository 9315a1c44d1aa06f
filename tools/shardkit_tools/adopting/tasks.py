"""The pass as work for processes: one tar each; its record appears when index and place are durable in the root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardkit.errors import FormatError
from shardkit.formats import Schema, canonical_json
from shardkit.manifest import ShardRecord
from shardkit.reading.adopted import put_adopted
from shardkit.repository.repository import Repository
from shardkit.stores.store import Descriptor
from shardkit_tools.adopting.scanning import scan_tar
from shardkit_tools.adopting.tar_places import place_of
from shardkit_tools.building.engines import Report
from shardkit_tools.building.job import Job, JobFolder
from shardkit_tools.importers.protocol import SourceFile

_MAX_RECORD_BYTES = 64 << 20
Runs = tuple[tuple[tuple[str, ...], int], ...]


@dataclass(frozen=True, slots=True)
class AdoptTask:
    """A tar and its place in the order."""

    number: int
    file: SourceFile

    def __str__(self) -> str:
        return self.file.path

    @property
    def record_name(self) -> str:
        return f"tar-{self.number:08d}.done"

    @property
    def stamp(self) -> str:
        """Another one when the tar was written to."""
        return f"{self.file.size} {self.file.stamp}"


@dataclass(frozen=True, slots=True)
class AdoptedTar:
    """What the manifest needs to know of one tar.

    Attributes:
        number: of the task.
        digest, size: of the tar. etag: its store's, empty where there is none.
        index_digest, index_size: of its index; empty and 0 in a dry run.
        block_rows, largest_block, raw_bytes: of its blocks.
        runs: (values of the axes, rows) of each run of rows of one label, in order.
    """

    number: int
    digest: str
    size: int
    etag: str
    index_digest: str
    index_size: int
    block_rows: int
    largest_block: int
    raw_bytes: int
    runs: Runs

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.runs)

    def record(self, strata: Mapping[tuple[str, ...], int]) -> ShardRecord:
        """The shard as the manifest lists it."""
        return ShardRecord(
            digest=self.digest,
            size=self.size,
            index_digest=self.index_digest,
            index_size=self.index_size,
            block_rows=self.block_rows,
            largest_block=self.largest_block,
            raw_bytes=self.raw_bytes,
            segment_stratum=[strata[labels] for labels, _ in self.runs],
            segment_rows=[rows for _, rows in self.runs],
        )


@dataclass
class AdoptWorker:
    """Adopts tars; one per process.

    Attributes:
        repository: that adopts them; None to write nothing.
        folder: the job directory.
        schema: of every sample.
        axes: fields by which runs are told apart.
        block_bytes: target size of a block.
    """

    repository: Repository | None
    folder: JobFolder
    schema: Schema
    axes: Sequence[str]
    block_bytes: int

    def close(self) -> None:
        """Nothing is kept open."""

    def work(self, item: AdoptTask, report: Report) -> AdoptedTar:
        """Read a tar, put its index and its place, and leave a record of it.

        Raises:
            SourceError: the tar cannot be adopted.
            StoreError: the root or the scratch disk fails.
        """
        scanned = scan_tar(item.file, self.schema, self.axes, self.block_bytes, report)
        index, sizes = Descriptor("", 0, "index"), scanned.index.block_raw_size
        if self.repository is not None:
            index = self.repository.put_object(scanned.index.to_bytes(), "index")
            put_adopted(self.repository, scanned.digest, place_of(item.file), scanned.etag)
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
    """What an earlier, killed run found of this tar as it is now; None where it has to be read.

    Size and time of change decide whether a tar is read again, never whether its bytes are believed: each block is
    verified whenever it is read.
    """
    data = job.read(item.record_name)
    if data is None:
        return None
    try:
        record: Any = canonical_json.loads(data, _MAX_RECORD_BYTES)
        if record.pop("stamp") != item.stamp:
            return None
        runs = tuple((tuple(labels), rows) for labels, rows in record.pop("runs"))
        found = AdoptedTar(runs=runs, **record)
        repository.get_object(found.index_digest, "index", found.index_size)
        # The tar may have been moved since, and is then at another path: what the root remembers is the last one.
        put_adopted(repository, found.digest, place_of(item.file), found.etag)
    except (FormatError, KeyError, TypeError, ValueError, LookupError):
        return None  # of another release, or not durable after all
    return found
