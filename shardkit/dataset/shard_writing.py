"""Writing one shard: records from scratch, block by block, into a published object and its index."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import pairwise
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.scratch import MIN_RUN_BYTES, ShardRows
from shardkit.dataset.scratch_reading import ScratchReader
from shardkit.dataset.version_plan import NewVersion
from shardkit.formats import Row, RowBlock, Schema, ShardWriter, Sink, block_starts, extension
from shardkit.manifest import ShardRecord
from shardkit.repository.repository import Repository

# Below this starting threads costs more than it saves.
_SMALL_BYTES = 4 * 2**20

# Reads of this size cost a disk little more than longer ones do. From few runs they need little memory, and memory
# that is touched for the first time costs more than a copy.
_RANGE_BYTES = 128 * 2**10
_MIN_GATHER_BYTES = 8 * 2**20

GATHER_BYTES = 128 * 2**20
"""Records held in memory at a time, at most; a block that is larger is held whole."""


def write_shard(
    repository: Repository,
    reader: ScratchReader,
    rows: ShardRows,
    version: NewVersion,
    *,
    gather_bytes: int = GATHER_BYTES,
    on_block: Callable[[int, int], None] | None = None,
) -> ShardRecord:
    """Write and publish one shard and its index; what is published already is left as it is.

    `gather_bytes` of scratch are in memory at a time; `on_block` is told (rows, payload bytes) after each block.

    Raises:
        StoreError: the store or the scratch disk fails; nothing torn is published.
        IntegrityError: a scratch record changed.
    """

    def blocks() -> Iterator[RowBlock]:
        for block, size in _blocks(reader, rows, gather_bytes):
            yield block
            if on_block is not None:
                on_block(len(block), size)

    return publish_shard(
        repository,
        blocks(),
        format=version.format,
        compression=version.compression,
        schema=version.schema,
        block_rows=rows.block_rows,
        segments=(rows.segment_stratum, rows.segment_rows),
        is_small=rows.raw_bytes < _SMALL_BYTES,
    )


def publish_shard(
    repository: Repository,
    blocks: Iterable[RowBlock | Sequence[Row]],
    *,
    format: str,
    compression: str,
    schema: Schema,
    block_rows: int,
    segments: tuple[Sequence[int] | NDArray[np.int32], Sequence[int] | NDArray[np.int64]],
    is_small: bool = False,
) -> ShardRecord:
    """Publish blocks of rows as a shard and its index; what is published already is left as it is.

    `segments` are stratum and rows of each run of rows of one stratum, in row order.

    A block is hashed and written by other threads while the next one is read and encoded, unless there is so little to
    come that threads would not pay (`is_small`).

    Raises:
        StoreError: the store fails; nothing torn is published.
    """
    with (
        repository.stage_object(extension(format, compression)) as staged,
        WriteBehind(staged, staged.sync, is_small=is_small) as behind,
    ):
        writer = ShardWriter(
            behind,
            format=format,
            compression=compression,
            schema=schema,
            block_rows=block_rows,
            executor=behind.hashing,
        )
        for block in blocks:
            writer.write_block(block)
        index = writer.finish()
        behind.flush()
        # Each waits for the disk a few times; nothing names either yet, so they may come in any order.
        put_index = behind.beside(lambda: repository.put_object(index.to_bytes(), "index"))
        shard, sidecar = staged.finish(), put_index()
    return ShardRecord(
        digest=shard.digest,
        size=shard.size,
        index_digest=sidecar.digest,
        index_size=sidecar.size,
        block_rows=block_rows,
        largest_block=int(index.block_raw_size.max()),
        raw_bytes=int(index.block_raw_size.sum()),
        segment_stratum=segments[0],
        segment_rows=segments[1],
    )


def _blocks(reader: ScratchReader, rows: ShardRows, gather_bytes: int) -> Iterator[tuple[RowBlock, int]]:
    """The rows of each block in turn, and the bytes of their payloads; blocks restart at segment borders."""
    borders = block_starts(rows.segment_rows.tolist(), rows.block_rows)
    gather_bytes = min(gather_bytes, max(_MIN_GATHER_BYTES, _num_runs(rows) * _RANGE_BYTES))
    size_before = np.concatenate([[0], np.cumsum(rows.records.length)])[borders]
    first = 0
    while first < len(borders) - 1:
        limit = int(size_before[first]) + gather_bytes
        last = max(first + 1, int(np.searchsorted(size_before, limit, side="right")) - 1)
        begin, end = int(borders[first]), int(borders[last])
        held = reader.read(rows.records[begin:end], rows.ordinal[begin:end])
        for start, stop in pairwise(borders[first : last + 1].tolist()):
            stratum = rows.stratum[start:stop] if rows.stratum is not None else None
            inside = (start - begin, stop - begin)
            yield held.block(*inside, stratum), held.payload_bytes(*inside)
        del held  # the reader may need another buffer
        first = last


def _num_runs(rows: ShardRows) -> int:
    """At most so many runs of scratch the rows are spread over."""
    part, offset = rows.records.part.astype(np.int64), rows.records.offset
    return len(np.unique((part << 32) + offset // MIN_RUN_BYTES))


T = TypeVar("T")
_MAX_UNWRITTEN = 4
_SYNC_BYTES = 32 * 2**20


class WriteBehind:
    """A sink that hands on what it is given, in order, from a thread of its own; a context manager.

    hashlib, xxhash and write(2) let go of the interpreter lock. Buffers are borrowed until they are written; `flush`
    before the bytes are counted on. Leaving waits for the threads, so that nothing is written to a sink that was
    dropped.

    Args:
        sink: that everything goes to.
        sync: makes durable what the sink has; called now and then, so that the disk works while there is more to come.
        is_small: there is so little to come that threads would not pay: then it is written at once.

    Attributes:
        hashing: runs the hashes of blocks; None where they are made at once.
    """

    def __init__(self, sink: Sink, sync: Callable[[], None], *, is_small: bool) -> None:
        self._sink = sink
        self._sync = sync
        self._syncing = None if is_small else ThreadPoolExecutor(1, "sync")
        self._unsynced = 0
        self._synced: Future[None] | None = None
        self._writing = None if is_small else ThreadPoolExecutor(1, "write")
        self._unwritten: deque[Future[None]] = deque()
        self.hashing: Executor | None = None if is_small else ThreadPoolExecutor(1, "hash")

    def write(self, data: bytes | memoryview, /) -> None:
        """Take bytes.

        Raises:
            StoreError: an earlier piece could not be written.
        """
        if self._writing is None:
            self._put(data)
            return
        while len(self._unwritten) >= _MAX_UNWRITTEN:
            self._unwritten.popleft().result()
        self._unwritten.append(self._writing.submit(self._put, data))
        self._begin_sync(len(data))

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin other work, in a thread where there are any; what is returned waits for it, and raises what it does."""
        if self.hashing is None:
            return work
        return self.hashing.submit(work).result

    def flush(self) -> None:
        """Wait until everything is with the sink.

        Raises:
            StoreError: a piece could not be written.
        """
        while self._unwritten:
            self._unwritten.popleft().result()
        if self._synced is not None:
            self._synced.result()

    def _begin_sync(self, size: int) -> None:
        """Sync once in a while, unless that is still going on; its errors are the writer's."""
        self._unsynced += size
        if self._syncing is None or self._unsynced < _SYNC_BYTES:
            return
        if self._synced is not None:
            if not self._synced.done():
                return
            self._synced.result()
        self._synced, self._unsynced = self._syncing.submit(self._sync), 0

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for executor in (self._writing, self.hashing, self._syncing):
            if executor is not None:
                executor.shutdown(wait=True, cancel_futures=True)

    def _put(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            taken = self._sink.write(rest)
            rest = rest[len(rest) if taken is None else taken :]
