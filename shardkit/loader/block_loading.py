"""Blocks of a dataset, read and verified some at a time, as a gather wants them."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from ctypes import string_at
from typing import NamedTuple

import numpy as np

from shardkit.errors import FormatError, IntegrityError, ShardkitError
from shardkit.formats import BlockSpan, ShardIndex, fixed_places
from shardkit.loader import plain_rows
from shardkit.loader.block_memory import BlockMemory, Loan
from shardkit.loader.gather import DECIMALS, GatherColumns, block_rows
from shardkit.loader.settings import Sources
from shardkit.reading.blocks import BlockReader
from shardkit.stores.open_files import open_files
from shardkit.telemetry.slow_blocks import BlockTimes

__all__ = ["BlockLoading", "placer_of", "read_together"]

_SHORT_BYTES = 240  # XXH3 hashes longer blocks in another way
_MOST_SHARDS = 256  # known at a time


class _LocalShard(NamedTuple):
    """An uncompressed shard in a local file, (path, size)."""

    file: tuple[str, int]
    spans: list[BlockSpan]
    placer: ArrowPlacer | TarPlacer


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
        self._fields = fields
        self._shards: dict[int, _LocalShard | None] = {}
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
                self._times.note(shard, inside, each, self._reader.raw_size(shard, inside), number=block)
        return found

    def _load(self, places: Sequence[tuple[int, int]]) -> list[GatherColumns]:
        found: list[GatherColumns | None] = [None] * len(places)
        plain = []
        for number, (shard, inside) in enumerate(places):
            local = self._local(shard)
            if local is not None:
                plain.append((number, local, inside))
        together = read_together(
            [(local.file, local.spans[inside]) for _, local, inside in plain], self._memory
        )
        for (number, local, inside), memory in zip(plain, together, strict=True):
            if memory is not None:
                found[number] = local.placer.place(inside, memory)
        return [self._read(*place) if one is None else one for place, one in zip(places, found, strict=True)]

    def _local(self, shard: int) -> _LocalShard | None:
        """A shard whose blocks are read together; None where `BlockReader.read` has to find and verify them."""
        if shard in self._shards:
            return self._shards[shard]
        index = self._reader.index(shard)
        file, placer = self._reader.plain_file(shard, index), placer_of(index, self._fields)
        if len(self._shards) >= _MOST_SHARDS:
            self._shards.clear()
        found = None if file is None or placer is None else _LocalShard(file, index.spans, placer)
        self._shards[shard] = found
        return found

    def _read(self, shard: int, inside: int) -> GatherColumns:
        block = self._reader.read(shard, inside, keys=False, fields=self._fields, memory=self._memory.take)
        return GatherColumns(block, self._fields)


def read_together(
    blocks: Sequence[tuple[tuple[str, int], BlockSpan]], memory: BlockMemory
) -> list[Loan | None]:
    """The bytes of blocks that are what was written; each is given as its file, (path, size), and where it lies there.

    None wherever there is more to do or to say, a mismatch among it: `BlockReader.read` then says what is wrong, and
    looks in other places.
    """
    if not blocks:
        return []
    offsets, sizes, _, hashes, _, _ = zip(*(span for _, span in blocks), strict=True)
    into = memory.lend(sizes)
    rows = plain_rows if min(sizes) <= _SHORT_BYTES else block_rows
    try:
        with open_files.borrowed([file for file, _ in blocks]) as files:
            states = rows.load_blocks(
                np.array(files, np.int64),
                np.array(offsets, np.int64),
                np.array([one.address for one in into], np.int64),
                np.array(sizes, np.int64),
                np.array(hashes, np.uint64),
            )
    except ShardkitError:
        return [None] * len(blocks)
    return [None if state else one for state, one in zip(states, into, strict=True)]


def placer_of(shard: ShardIndex, fields: Sequence[str]) -> ArrowPlacer | TarPlacer | None:
    """Finds where the rows of verified, uncompressed blocks of a shard lie, without making columns of them.

    A gather by address needs a few integers of each block. `read_block` finds them by way of a block and its columns,
    forty objects and as many microseconds; what is the same for every block of a shard is known after the first one.
    This is a shorter way to the same integers, never to others: whatever it has not seen to be the same, it leaves to
    `read_block`. None where the index tells that the bytes of all blocks need a closer look.

    Args:
        shard: its index.
        fields: to be gathered, in order.
    """
    return (ArrowPlacer if shard.format == "arrow" else TarPlacer).of(shard, fields)


class ArrowPlacer:
    """Messages of equal metadata, length, rows and raw size have equal layouts, as has a block verified again."""

    def __init__(self, shard: ShardIndex, pitches: dict[str, int]) -> None:
        self._shard, self._pitches = shard, pitches
        self._facts = struct.Struct(f"={1 + 4 * len(pitches)}q")
        # rows, raw size, length → metadata of the last such message; of each field its offset, and bytes between rows
        self._layouts: dict[tuple[int, int, int], tuple[bytes, list[tuple[int, int]]]] = {}
        # by block: its rows, and the same of its fields
        self._known: list[tuple[int, list[tuple[int, int]]] | None] = [None] * shard.blocks

    @classmethod
    def of(cls, shard: ShardIndex, fields: Sequence[str]) -> ArrowPlacer | None:
        kinds = {name: shard.schema.stored[name] for name in fields}
        # of others offsets and text are checked; bits are unpacked
        pitches = {name: kind.item_bytes for name, kind in kinds.items() if kind.item_bytes is not None}
        if len(pitches) < len(fields) or any(kind.dtype == "bool" for kind in kinds.values()):
            return None
        return cls(shard, pitches)

    def place(self, block: int, memory: Loan) -> GatherColumns | None:
        """Where the rows of a block lie; None where only `read_block` can tell."""
        address = memory.address
        known = self._known[block] or self._find(block, memory)
        if known is None or address % 8:  # what is not aligned is read from a copy that is
            return None
        facts = [known[0]]
        for offset, pitch in known[1]:
            facts += (address + offset, 0, 0, pitch)
        return GatherColumns.of_facts(self._facts.pack(*facts), (memory, self._shard))

    def _find(self, block: int, memory: Loan) -> tuple[int, list[tuple[int, int]]] | None:
        span = self._shard.spans[block]
        rows = span.end_row - span.first_row
        known = self._layouts.get((rows, span.raw_size, memory.size))
        if known is None or string_at(memory.address, len(known[0])) != known[0]:
            view = np.asarray(memory).data
            try:
                body, places = fixed_places(view, self._shard.schema, rows, span.raw_size)
            except FormatError:
                return None  # `read_block` says so
            layout = [(body + places[name].offset, pitch) for name, pitch in self._pitches.items()]
            known = self._layouts[rows, span.raw_size, memory.size] = bytes(view[:body]), layout
        found = self._known[block] = rows, known[1]
        return found


class TarPlacer:
    """The index has seen that all members lie inside their blocks."""

    def __init__(self, shard: ShardIndex, members: list[tuple[int, int, int]]) -> None:
        self._shard = shard
        self._members = members  # of each field, where starts and ends lie in memory, and the pitch
        self._facts = struct.Struct(f"={1 + 4 * len(members)}q")

    @classmethod
    def of(cls, shard: ShardIndex, fields: Sequence[str]) -> TarPlacer | None:
        members = []
        for name in fields:
            if shard.schema.stored[name].optional or name not in shard.schema:
                return None  # some have no member
            kind, number = shard.schema[name], shard.schema.position(name)
            if shard.is_adopted or not (kind.is_whole or kind.kind == "bytes" or kind.is_packed):
                return None  # text is checked, arrays have headers
            starts, ends = (  # contiguous, and kept by the index
                one.__array_interface__["data"][0]
                for one in (shard.member_places(number)[0], shard.member_ends(number))
            )
            members.append((starts, ends, DECIMALS if kind.is_whole else 8))
        return cls(shard, members)

    def place(self, block: int, memory: Loan) -> GatherColumns | None:
        """Where the rows of a block lie; None where only `read_block` can tell."""
        span = self._shard.spans[block]
        if memory.size != span.raw_size:
            return None
        first = 8 * span.first_row
        facts = [span.end_row - span.first_row]
        for starts, ends, pitch in self._members:
            facts += (starts + first, ends + first, memory.address, pitch)
        return GatherColumns.of_facts(self._facts.pack(*facts), (memory, self._shard))
