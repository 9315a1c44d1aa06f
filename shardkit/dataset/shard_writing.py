"""Writing one shard: records from scratch, block by block, into a published object and its index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.scratch import MIN_RUN_BYTES
from shardkit.dataset.scratch_blocks import ScratchReader
from shardkit.dataset.write_behind import WriteBehind
from shardkit.formats import RowBlock, Schema, block_starts, extension, open_writer
from shardkit.repository.repository import Repository
from shardkit.stores.objects import Descriptor

__all__ = ["GATHER_BYTES", "ShardRows", "WrittenShard", "write_shard"]

# Below this starting threads costs more than it saves.
_SMALL_BYTES = 4 * 2**20

# Reads of this size cost a disk little more than longer ones do. From few runs they need little memory, and memory
# that is touched for the first time costs more than a copy.
_RANGE_BYTES = 128 * 2**10
_MIN_GATHER_BYTES = 8 * 2**20

GATHER_BYTES = 128 * 2**20
"""Records held in memory at a time, at most; a block that is larger is held whole."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardRows:
    """What one shard is to hold; arrays have one entry per row, in row order.

    Attributes:
        number: of the shard in the manifest.
        ordinal: int64. part: int32. offset, length: int64. check: uint64; see `AllRows`.
        stratum: int32 number of each row's own stratum where the shard has pooled rows, else None.
        segment_stratum: int32 and segment_rows: int64, one entry per segment, in row order.
        block_rows: rows per block. raw_bytes: of all rows.
    """

    number: int
    ordinal: NDArray[np.int64]
    part: NDArray[np.int32]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    check: NDArray[np.uint64]
    stratum: NDArray[np.int32] | None
    segment_stratum: NDArray[np.int32]
    segment_rows: NDArray[np.int64]
    block_rows: int
    raw_bytes: int

    def fingerprint(self) -> str:
        """32 hex digits that are equal only where the shard holds the same rows in the same way."""
        digest = xxhash.xxh3_128(f"{self.number} {self.block_rows}".encode())
        for column in (self.ordinal, self.check, self.length, self.segment_stratum, self.segment_rows):
            digest.update(np.ascontiguousarray(column).data)
        if self.stratum is not None:
            digest.update(np.ascontiguousarray(self.stratum).data)
        return digest.hexdigest()

    def __str__(self) -> str:
        return f"shard {self.number} ({len(self.ordinal)} rows)"


@dataclass(frozen=True, slots=True, eq=False)
class WrittenShard:
    """A published shard, as the manifest's pages describe it."""

    number: int
    shard: Descriptor
    index: Descriptor
    rows: int
    block_rows: int
    largest_block: int
    raw_bytes: int
    segment_stratum: NDArray[np.int32]
    segment_rows: NDArray[np.int64]


def write_shard(
    repository: Repository,
    reader: ScratchReader,
    rows: ShardRows,
    *,
    schema: Schema,
    format: str,
    compression: str,
    gather_bytes: int = GATHER_BYTES,
    on_block: Callable[[int, int], None] | None = None,
) -> WrittenShard:
    """Write and publish one shard and its index; what is published already is left as it is.

    A block is hashed and written by other threads while the next one is read and encoded.

    Args:
        repository: where to.
        reader: of the scratch that the rows are in.
        rows: what the shard is to hold.
        schema: of the samples.
        format: ``tar`` or ``arrow``.
        compression: normalised.
        gather_bytes: scratch bytes held in memory at a time.
        on_block: called with (rows, payload bytes) after each block.

    Raises:
        StoreError: the store or the scratch disk fails; nothing torn is published.
        IntegrityError: a scratch record changed.
    """
    with (
        repository.stage_object(extension(format, compression)) as staged,
        WriteBehind(staged, staged.sync, is_small=rows.raw_bytes < _SMALL_BYTES) as behind,
    ):
        writer = open_writer(
            behind,
            format=format,
            compression=compression,
            schema=schema,
            block_rows=rows.block_rows,
            executor=behind.hashing,
        )
        for block, size in _blocks(reader, rows, gather_bytes):
            writer.write_block(block)
            if on_block is not None:
                on_block(len(block), size)
        index = writer.finish()
        behind.flush()
        # Each waits for the disk a few times; nothing names either yet, so they may come in any order.
        put_index = behind.beside(lambda: repository.put_object(index.to_bytes(), "index"))
        shard = staged.finish()
        index_descriptor = put_index()
    return WrittenShard(
        number=rows.number,
        shard=shard,
        index=index_descriptor,
        rows=len(rows.ordinal),
        block_rows=rows.block_rows,
        largest_block=int(index.block_raw_size.max()),
        raw_bytes=int(index.block_raw_size.sum()),
        segment_stratum=rows.segment_stratum,
        segment_rows=rows.segment_rows,
    )


def _blocks(reader: ScratchReader, rows: ShardRows, gather_bytes: int) -> Iterator[tuple[RowBlock, int]]:
    """The rows of each block in turn, and the bytes of their payloads; blocks restart at segment borders."""
    borders = block_starts(rows.segment_rows.tolist(), rows.block_rows)
    gather_bytes = min(gather_bytes, max(_MIN_GATHER_BYTES, _num_runs(rows) * _RANGE_BYTES))
    size_before = np.concatenate([[0], np.cumsum(rows.length)])[borders]
    first = 0
    while first < len(borders) - 1:
        limit = int(size_before[first]) + gather_bytes
        last = max(first + 1, int(np.searchsorted(size_before, limit, side="right")) - 1)
        begin, end = int(borders[first]), int(borders[last])
        held = reader.read(
            rows.part[begin:end],
            rows.offset[begin:end],
            rows.length[begin:end],
            rows.check[begin:end],
            rows.ordinal[begin:end],
        )
        for start, stop in pairwise(borders[first : last + 1].tolist()):
            stratum = rows.stratum[start:stop] if rows.stratum is not None else None
            inside = (start - begin, stop - begin)
            yield held.block(*inside, stratum), held.payload_bytes(*inside)
        del held  # the reader may need another buffer
        first = last


def _num_runs(rows: ShardRows) -> int:
    """At most so many runs of scratch the rows are spread over."""
    return len(np.unique((rows.part.astype(np.int64) << 32) + rows.offset // MIN_RUN_BYTES))
