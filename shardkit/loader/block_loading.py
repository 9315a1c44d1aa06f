"""Blocks of a dataset, read and verified some at a time, as a gather wants them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import IntegrityError, ShardkitError
from shardkit.formats import xxh3
from shardkit.loader.block_memory import BlockMemory
from shardkit.loader.gather import GatherColumns
from shardkit.loader.placing import BlockPlacer, StoredBlock
from shardkit.loader.settings import Sources
from shardkit.storage import BlockReader
from shardkit.storage.blocks import LocalBlock
from shardkit.storage.open_files import open_files
from shardkit.telemetry.slow_blocks import BlockTimes

block_rows: Any
try:
    from shardkit.loader import block_rows
except ImportError:  # not compiled where this was installed
    block_rows = None

__all__ = ["BlockLoading"]

_SHORT_BYTES = 240  # XXH3 hashes longer blocks in another way


class BlockLoading:
    """Loads blocks by their numbers in the dataset; called by several threads at once.

    Every block is read into private memory, hashed there, and its rows are copied from there. Blocks that lie in local
    files as they are used are read together and not made into columns; all others, and whatever is wrong, go through
    `BlockReader.read`, block by block.

    Args:
        sources: of the dataset.
        reader: of the blocks.
        fields: to be gathered.
        memory: into which they are read.
        times: told how long each block took; of blocks that were loaded together, the mean.

    Attributes:
        verification_failures: how many blocks were not what was written, anywhere.
    """

    def __init__(
        self,
        sources: Sources,
        reader: BlockReader,
        fields: Sequence[str],
        memory: BlockMemory,
        times: BlockTimes | None,
    ) -> None:
        self._sources, self._reader, self._memory, self._times = sources, reader, memory, times
        self._fields, self._place = fields, BlockPlacer(fields)
        self.verification_failures = 0

    def __call__(self, blocks: Sequence[int]) -> list[GatherColumns]:
        """The blocks, in this order, verified, each in memory of its own.

        Raises:
            IntegrityError: one of them is not what was written, and there is no other place to read it from.
            StoreError: a store does not answer.
        """
        places = [self._sources.rows.shard_of_block(block) for block in blocks]
        started = time.perf_counter()
        try:
            found = self._load(places)
        except IntegrityError:
            self.verification_failures += 1
            raise
        if self._times is not None:
            each = (time.perf_counter() - started) / max(1, len(blocks))
            for block, (shard, inside) in zip(blocks, places, strict=True):
                self._times.note(shard, inside, each, self._sources.block_bytes(block), number=block)
        return found

    def _load(self, places: Sequence[tuple[int, int]]) -> list[GatherColumns]:
        indexes = [self._reader.index(shard) for shard, _ in places]
        plain = [
            self._reader.local_block(shard, inside, index) if self._place.suits(index) else None
            for (shard, inside), index in zip(places, indexes, strict=True)
        ]
        read = iter(read_together([one for one in plain if one is not None], self._memory))
        found = []
        for (shard, inside), index, local in zip(places, indexes, plain, strict=True):
            memory = None if local is None else next(read)
            one = None
            if memory is not None:
                address = memory.__array_interface__["data"][0]
                one = self._place(StoredBlock(memory.data, address, index, inside))
            if one is None:
                block = self._reader.read(
                    shard, inside, keys=False, fields=self._fields, memory=self._memory.take
                )
                one = GatherColumns(block, self._fields)
            found.append(one)
        return found


def read_together(blocks: Sequence[LocalBlock], memory: BlockMemory) -> list[NDArray[np.uint8] | None]:
    """The bytes of blocks that are what was written.

    None wherever there is more to do or to say, a mismatch among it: `BlockReader.read` then says what is wrong, and
    looks in other places.
    """
    into = [memory.take(block.size) for block in blocks]
    try:
        if block_rows is None or any(block.size <= _SHORT_BYTES for block in blocks):
            states = bytes([_read_one(block, one) for block, one in zip(blocks, into, strict=True)])
        else:
            with open_files.borrowed([(block.path, block.file_size) for block in blocks]) as files:
                offsets, sizes = (
                    np.array([getattr(block, name) for block in blocks], np.int64)
                    for name in ("offset", "size")
                )
                addresses = np.array([one.__array_interface__["data"][0] for one in into], np.int64)
                hashes = np.array([block.xxh3 for block in blocks], np.uint64)
                states = block_rows.load_blocks(np.array(files, np.int64), offsets, addresses, sizes, hashes)
    except ShardkitError:
        return [None] * len(blocks)
    return [None if state else one for state, one in zip(states, into, strict=True)]


def _read_one(block: LocalBlock, into: NDArray[np.uint8]) -> int:
    with contextlib.suppress(ShardkitError):
        open_files.read(block.path, block.file_size, block.offset, into.data)
        return int(xxh3(into.data) != block.xxh3)
    return 2
