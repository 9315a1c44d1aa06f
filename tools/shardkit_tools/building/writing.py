"""Pass 2: the rows of a shard, from scratch into the store; journaled when the shard is durable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardkit.dataset.extents import ExtentReader
from shardkit.dataset.row_table import ShardRows
from shardkit.dataset.scratch_reading import ScratchReader
from shardkit.dataset.shard_writing import WrittenShard, write_shard
from shardkit.dataset.version_settings import NewVersion
from shardkit.errors import FormatError
from shardkit.formats import canonical_json
from shardkit.repository.repository import Repository
from shardkit.stores.store import Descriptor
from shardkit_tools.building.engines import Report
from shardkit_tools.building.job import Job, JobFolder, write_record

__all__ = ["WriteWorker", "finished_shard"]

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
        """Close the files."""
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
