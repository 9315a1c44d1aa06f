"""Write blocks of rows from scratch to a published shard and its index."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.rows import PublishedShard, ShardRows
from shardkit.dataset.scratch import MIN_RUN_BYTES, ScratchReader
from shardkit.dataset.version_plan import NewVersion
from shardkit.formats import Row, RowBlock, Schema, ShardWriter, Sink, block_starts
from shardkit.repository.repository import Repository

# Below this size, starting threads costs more than it saves.
_SMALL_BYTES = 4 * 2**20

# Reads of this size cost a disk little more than longer ones. Rows of few runs are gathered with less memory:
# touching memory for the first time costs more than a copy.
_RANGE_BYTES = 128 * 2**10
_MIN_GATHER_BYTES = 6 * 2**20
# Raw bytes; for blocks of a few rows, numpy calls per block would take longer than copying their bytes.
_TOGETHER_BYTES = 2**20

_GATHER_BYTES = 64 * 2**20
"""Most bytes of rows in memory at a time; a larger block is held whole."""


def write_shard(
    repository: Repository,
    reader: ScratchReader,
    rows: ShardRows,
    version: NewVersion,
    *,
    on_block: Callable[[int, int], None] | None = None,
) -> PublishedShard:
    """Write and publish one shard and its index; objects that exist already are kept.

    `on_block` is called with (rows, raw bytes) after every few blocks.
    """

    def blocks() -> Iterator[RowBlock]:
        for block, size in _blocks(reader, rows):
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
    is_small: bool = False,
) -> PublishedShard:
    """Publish blocks of rows as a shard and its index; objects that exist already are kept.

    Other threads hash and write a block while the next one is read and encoded, unless the shard `is_small`:
    then threads would not pay.
    """
    with (
        repository.stage_object(format) as staged,
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
        # Each waits for the disk a few times; nothing names either yet, so their order is free.
        put_index = behind.beside(lambda: repository.put_object(index.to_bytes(), "index"))
        shard, sidecar = repository.publish(staged, format), put_index()
    return PublishedShard(
        shard.digest,
        shard.size,
        sidecar.digest,
        sidecar.size,
        int(index.block_raw_size.max()),
        int(index.block_raw_size.sum()),
    )


def _blocks(reader: ScratchReader, rows: ShardRows) -> Iterator[tuple[RowBlock, int]]:
    """Yield a few encoded blocks at a time and their raw bytes; blocks restart at segment borders."""
    borders = block_starts(rows.segment_rows.tolist(), rows.block_rows)
    before = np.concatenate([[0], np.cumsum(rows.row_bytes)])[borders]  # raw bytes before each block
    gather_bytes = min(_GATHER_BYTES, max(_MIN_GATHER_BYTES, _num_runs(rows) * _RANGE_BYTES))
    for first, last in _groups(before, gather_bytes):
        begin, end = int(borders[first]), int(borders[last])
        held = reader.read(rows.records[begin:end], rows.ordinal[begin:end])
        for low, high in _groups(before[first : last + 1], _TOGETHER_BYTES):
            inside = borders[first + low : first + high + 1]
            start, stop = int(inside[0]), int(inside[-1])
            stratum = rows.stratum[start:stop] if rows.stratum is not None else None
            block = held.block(start - begin, stop - begin, stratum, ends=(inside[1:] - start).tolist())
            yield block, int(before[first + high] - before[first + low])
        del held  # frees the buffer before the reader allocates another


def _groups(before: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of consecutive blocks of at most `most` bytes; a larger block comes alone.

    `before` is (blocks + 1,) bytes before each block.
    """
    first = 0
    while first < len(before) - 1:
        last = max(first + 1, int(np.searchsorted(before, before[first] + most, side="right")) - 1)
        yield first, last
        first = last


def _num_runs(rows: ShardRows) -> int:
    """Return an upper bound of the number of scratch runs that hold the rows."""
    batches = rows.records.batches
    part, offset = batches["part"].astype(np.int64), batches["offset"]
    # not `np.unique`: its first call imports numpy's masked arrays
    runs = np.sort((part << 32) + offset // MIN_RUN_BYTES)
    return int(np.count_nonzero(np.diff(runs, prepend=-1)))


T = TypeVar("T")
_WRITTEN_TOGETHER = 2**20  # bytes; a larger piece is written alone
_MAX_UNWRITTEN = 4
_SYNC_BYTES = 32 * 2**20


class WriteBehind:
    """A sink that writes in order, from its own thread, to another sink; a context manager.

    hashlib, xxhash and write(2) release the interpreter lock.
    Buffers are borrowed until they are written: call `flush` before relying on the bytes.
    Leaving the context waits for the threads, so that nothing is written to a dropped sink.

    Args:
        sink: destination of all bytes.
        sync: makes the bytes in the sink durable; called every 32 MiB, so that the disk works while more is
            written.
        is_small: write at once, without threads.

    Attributes:
        hashing: executor for the hashes of blocks, or None if they are computed at once.
    """

    def __init__(self, sink: Sink, sync: Callable[[], None], *, is_small: bool) -> None:
        self._sink = sink
        self._sync = sync
        self._syncing = None if is_small else ThreadPoolExecutor(1, "sync")
        self._unsynced = 0
        self._synced: Future[None] | None = None
        self._writing = None if is_small else ThreadPoolExecutor(1, "write")
        self._taken: list[bytes | memoryview] = []
        self._taken_bytes = 0
        self._unwritten: deque[Future[None]] = deque()
        self.hashing: Executor | None = None if is_small else ThreadPoolExecutor(1, "hash")

    def write(self, data: bytes | memoryview, /) -> None:
        """Queue bytes for writing."""
        if self._writing is None:
            self._put([data])
            return
        self._taken.append(data)
        self._taken_bytes += len(data)
        if self._taken_bytes >= _WRITTEN_TOGETHER:
            self._hand_over(self._writing)

    def _hand_over(self, writing: Executor) -> None:
        """Queue the collected pieces as one write: waking a thread per piece costs as much as writing it."""
        while len(self._unwritten) >= _MAX_UNWRITTEN:
            self._unwritten.popleft().result()
        self._unwritten.append(writing.submit(self._put, self._taken))
        self._begin_sync(self._taken_bytes)
        self._taken, self._taken_bytes = [], 0

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        """Start other work, in a thread if there are any, and return a function that waits for its result."""
        if self.hashing is None:
            return work
        return self.hashing.submit(work).result

    def flush(self) -> None:
        """Wait until the sink has everything."""
        if self._writing is not None and self._taken:
            self._hand_over(self._writing)
        while self._unwritten:
            self._unwritten.popleft().result()
        if self._synced is not None:
            self._synced.result()

    def _begin_sync(self, size: int) -> None:
        """Start a sync every 32 MiB unless one is running; its errors are raised to the writer."""
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

    def _put(self, pieces: Sequence[bytes | memoryview]) -> None:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                taken = self._sink.write(rest)
                rest = rest[len(rest) if taken is None else taken :]
