"""Pass 2: shards from scratch, and from what was left in the source; journaled when they are durable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardkit.dataset.encoding import changed_source, file_state
from shardkit.dataset.row_table import ShardRows
from shardkit.dataset.scratch_reading import ExtentReader, ScratchReader
from shardkit.dataset.shard_writing import WrittenShard, write_shard
from shardkit.dataset.version_plan import NewVersion
from shardkit.errors import FormatError
from shardkit.formats import canonical_json
from shardkit.repository.repository import Repository
from shardkit.stores.store import Descriptor
from shardkit_tools.building.engines import Report
from shardkit_tools.building.job import Job, JobFolder
from shardkit_tools.building.reading import TaskFacts
from shardkit_tools.importers.protocol import SourceTask

_MAX_RECORD_BYTES = 10_000


@dataclass
class WriteWorker:
    """Writes shards; one per process.

    Attributes:
        repository: where to.
        version: schema, format and compression.
        folder: the job directory.
        parts: names of the scratch files, by number of the part.
        files: number of a part whose payloads are in the source → paths of its task's files.
    """

    repository: Repository
    version: NewVersion
    folder: JobFolder
    parts: Sequence[str]
    files: Mapping[int, Sequence[str]]

    def __post_init__(self) -> None:
        self._parts, self._extents = self.folder.parts(self.parts), ExtentReader(self.files)
        self._reader = ScratchReader(self._parts, self.version.schema.stored, self._extents)

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
        written = write_shard(self.repository, self._reader, item, self.version, on_block=report)
        record = {
            "fingerprint": item.fingerprint(),
            "shard": [written.shard.digest, written.shard.size, written.shard.extension],
            "index": [written.index.digest, written.index.size, written.index.extension],
            "largest_block": written.largest_block,
            "raw_bytes": written.raw_bytes,
        }
        self.folder.put_record(_record_name(item), canonical_json.dumps(record))
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


def check_watched(parts: Sequence[TaskFacts], tasks: Sequence[SourceTask]) -> None:
    """Files from which rows were read without being verified are what they were when the rows were noted.

    Raises:
        SourceError: one is not.
    """
    now: dict[str, int] = {}
    for part in parts:
        files = tasks[part.number].files if part.states else ()
        for file, state in zip(files, part.states, strict=True):
            if file.path not in now:
                now[file.path] = file_state(file.path)
            if now[file.path] != state:
                raise changed_source(file.path)
