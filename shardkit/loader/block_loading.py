"""Blocks of a dataset, read and verified some at a time, as a gather wants them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardkit.errors import IntegrityError
from shardkit.loader.gather import GatherColumns
from shardkit.loader.placing import BlockPlacer
from shardkit.loader.settings import Sources
from shardkit.storage import BlockReader
from shardkit.telemetry.slow_blocks import BlockTimes

__all__ = ["BlockLoading"]


class BlockLoading:
    """Loads blocks by their numbers in the dataset; called by several threads at once.

    Blocks that lie in local files as they are used are hashed together and not made into columns; all others, and
    whatever is wrong, go through `BlockReader.read`, block by block.

    Args:
        sources: of the dataset.
        reader: of the blocks.
        fields: to be gathered.
        times: told how long each block took; of blocks that were loaded together, the mean.

    Attributes:
        verification_failures: how many blocks were not what was written, anywhere.
    """

    def __init__(
        self, sources: Sources, reader: BlockReader, fields: Sequence[str], times: BlockTimes | None
    ) -> None:
        self._sources, self._reader, self._times = sources, reader, times
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
        found = []
        stored_blocks = self._reader.verified_blocks(places, self._place.suits)
        for (shard, inside), stored in zip(places, stored_blocks, strict=True):
            one = None if stored is None else self._place(stored)
            if one is None:
                block = self._reader.read(shard, inside, keys=False, fields=self._fields)
                one = GatherColumns(block, self._fields)
            found.append(one)
        return found
