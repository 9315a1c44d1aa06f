"""Load jobs for the C module, computed from the indexes of local shards, and loading of other blocks in Python."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s
from shardkit.errors import FormatError, IntegrityError, ShardkitError
from shardkit.formats import ShardIndex, message_layout
from shardkit.formats.compression import MAX_RATIO
from shardkit.formats.tar_members import npy_header
from shardkit.loader import gather
from shardkit.loader.gather import DECIMALS, FACTS, OBJECTS, PLACED, GatherColumns
from shardkit.loader.load_queue import (
    BLOCK,
    DIGEST,
    FILE,
    HASH,
    JOB,
    LAYOUT,
    OFFSET,
    RAW_SIZE,
    ROOM,
    SIZE,
    LoadQueue,
)
from shardkit.loader.settings import Sources
from shardkit.reading.blocks import BlockReader, TakeMemory
from shardkit.stores.file_operations import read_file

if TYPE_CHECKING:
    from shardkit.telemetry.recorder import BlockTimes

__all__ = [
    "BlockLoading",
    "LocalShard",
    "give_way",
    "layout_of",
]

_NICER: Final = 3  # niceness: a loading thread gets half as much of a contested processor as another thread
_SHORT_BYTES: Final = 240  # XXH3 uses another algorithm up to this size
_LONG_BYTES: Final = 1 << 14  # mean size from which rows are read one by one into bytes objects
_MOST_OBJECTS: Final = 256  # per block; the same as in block_rows.c
_MOST_SHARDS: Final = 256  # shards kept, unless planned steps need more
_HEAD_BYTES: Final = 1 << 16  # first bytes of an Arrow message, which contain its metadata


def layout_of(index: ShardIndex, fields: Sequence[str], head: NDArray[np.uint8]) -> Int64s | None:
    """Return the `message_layout` of messages that begin with `head`; None if only `read_block` can parse them."""
    with contextlib.suppress(FormatError):  # `read_block` raises it again
        return message_layout(head.data, index.schema, fields, index.compression.partition(":")[0])
    return None


class LocalShard:
    """A shard in a local file whose blocks are loaded without the interpreter.

    Gathering needs a few integers per block, its *facts* (see `GatherColumns`). Deriving them from a block and its
    columns takes about forty Python objects and forty microseconds. Here they follow from the index, or block_rows.c
    reads them from the message. Both ways give the same integers. Blocks that do not match the expected form go through
    `read_block`.
    """

    def __init__(self, index: ShardIndex, fields: Sequence[str], file: int, *, strong: bool) -> None:
        self.index, self._file, self._strong = index, file, strong
        self.sizes: Int64s = index.block_size.astype(np.int64)
        self.raw_sizes: Int64s = index.block_raw_size.astype(np.int64)
        self._rows: Int64s = np.diff(index.block_start)
        self._width = 1 + FACTS * len(fields)
        self._offsets, self._hashes = index.block_offset.astype(np.int64), index.block_xxh3.view(np.int64)
        self._digests = np.ascontiguousarray(index.block_sha256)  # (blocks, 32)
        self._layout: Int64s | None = None  # positions of fields in messages, or headers of tar members
        self._headers: list[NDArray[np.uint8]] = []  # kept alive: `_layout` holds their addresses
        self.own_sizes = self.raw_sizes  # bytes of memory per block, without its bytes objects
        self._members: list[tuple[Int64s, Int64s, int]] = []  # per field of located rows: starts, ends, pitch
        self._places: list[int] = []  # per field of an array of rows: its offset in a row

    @classmethod
    def of(
        cls,
        index: ShardIndex,
        fields: Sequence[str],
        file: int,
        layout: Int64s | None,
        *,
        strong: bool = False,
    ) -> LocalShard | None:
        """Return the shard; None if its blocks have to go through `read_block`."""
        self = cls(index, fields, file, strong=strong)
        if index.format == "arrow":
            if layout is None:
                return None
            self._layout = layout
            if self._is_compressed:
                self.own_sizes = self.raw_sizes + int(layout[1])
            return self
        if any(name not in index.schema or not _is_served(index, name) for name in fields):
            return None
        if index.row_bytes:
            sizes = [kind.item_bytes or 0 for kind in index.schema.values()]
            self._places = [sum(sizes[: index.schema.position(name)]) for name in fields]
            return self
        return self if self._locate(fields) else None

    def _locate(self, fields: Sequence[str]) -> bool:
        """Note where the index locates the rows of these fields; return False if a size does not fit the type."""
        index = self.index
        headers: dict[int, NDArray[np.uint8]] = {}  # headers of members by index of the field
        for name in fields:
            kind, number = index.schema[name], index.schema.position(name)
            # contiguous; the index has checked that members are inside their blocks
            starts, ends = index.member_places[number][0], index.member_ends[number]
            pitch = DECIMALS if kind.is_whole else 8
            if _is_payload(index, number) and kind.item_bytes is not None:
                pitch = PLACED
                if bool((ends - starts != kind.item_bytes).any()):
                    return False
            elif kind.kind == "ragged" and bool(((ends - starts) % kind.numpy_dtype.itemsize != 0).any()):
                return False
            elif kind.item_bytes is not None and not kind.is_whole:
                header = np.frombuffer(npy_header(kind), np.uint8)
                if bool((ends - starts != len(header) + kind.item_bytes).any()):
                    return False
                headers[len(self._members)] = header
                starts, pitch = starts + len(header), PLACED
            self._members.append((starts, ends, pitch))
        self._choose_objects([index.schema[name].kind == "bytes" for name in fields])
        if headers:
            self._headers = list(headers.values())
            numbers = [-len(headers), _address(self._members[0][0])]
            for member, header in headers.items():
                numbers += (_address(self._members[member][0]), _address(header), len(header))
            self._layout = np.array(numbers, np.int64)
        return True

    @property
    def _is_compressed(self) -> bool:
        return self.index.compression != "none"

    def _choose_objects(self, is_bytes: list[bool]) -> None:
        """Read the field of the longest rows into objects if they are long, and shift the positions of other fields."""
        members, rows = self._members, max(1, int(self._rows.sum()))
        means = [
            int((ends - starts).sum()) // rows if own else -1
            for own, (starts, ends, _) in zip(is_bytes, members, strict=True)
        ]
        longest = max(means, default=-1)
        if longest < _LONG_BYTES or int(self._rows.max()) > _MOST_OBJECTS:
            return
        # positions in the concatenation of all raw blocks
        begins = np.cumsum(self.raw_sizes) - self.raw_sizes
        begin = np.repeat(begins, self._rows)
        spans = [(starts + begin, ends + begin) for starts, ends, _ in members]
        chosen = means.index(longest)
        gone = _Cuts(*spans[chosen])
        places = [None if n == chosen else gone.places_of(*span) for n, span in enumerate(spans)]
        own_sizes = self.raw_sizes - np.diff(gone.bytes_before(np.append(begins, self.raw_sizes.sum())))
        if gone.overlap or any(one is False for one in places) or int(own_sizes.min()) <= 0:
            return
        self.own_sizes = own_sizes
        before = begin - np.repeat(gone.bytes_before(begins), self._rows)
        self._members = [
            (starts, ends, OBJECTS)
            if place is None
            else (place - before, place - before + ends - starts, pitch)
            for (starts, ends, pitch), place in zip(members, places, strict=True)
        ]

    @property
    def is_fit(self) -> NDArray[np.bool_]:
        """(blocks,) bool: True if the block may be loaded without the interpreter."""
        fits: NDArray[np.bool_] = self.sizes > _SHORT_BYTES
        if self._is_compressed:
            fits &= self.raw_sizes // MAX_RATIO < self.sizes
        else:
            fits &= self.raw_sizes == self.sizes
        return fits

    def jobs(self, inside: Int64s) -> Int64s:
        """Return (n, JOB + facts) jobs that load blocks; the window fills AFTER, SLOT and BLOCK.

        Facts that are addresses in the block are counted from its start.
        """
        jobs = np.zeros((len(inside), JOB + self._width), np.int64)
        jobs[:, FILE], jobs[:, OFFSET], jobs[:, SIZE] = self._file, self._offsets[inside], self.sizes[inside]
        jobs[:, ROOM], jobs[:, HASH] = self.own_sizes[inside], self._hashes[inside]
        if self._strong:
            jobs[:, DIGEST] = _address(self._digests) + 32 * inside
        if self._is_compressed:
            jobs[:, RAW_SIZE] = self.raw_sizes[inside]
        facts = jobs[:, JOB:]
        facts[:, 0] = self._rows[inside]
        if self._layout is not None:
            jobs[:, LAYOUT] = _address(self._layout)
        first = 8 * self.index.block_start[inside]
        for number, (*spans, pitch) in enumerate(self._members):
            starts, ends = map(_address, spans)
            own = facts[:, 1 + FACTS * number :]
            own[:, 0], own[:, 1], own[:, 3] = starts + first, ends + first, pitch
        for number, place in enumerate(self._places):
            own = facts[:, 1 + FACTS * number :]
            own[:, 0], own[:, 3] = place, self.index.row_bytes
        return jobs


def _is_payload(index: ShardIndex, number: int) -> bool:
    """Return True if a field's offsets locate its payloads, without header."""
    return index.field_is_payload is not None and bool(index.field_is_payload[number])


def _is_served(index: ShardIndex, name: str) -> bool:
    """Return True if rows of a field can be copied from where the index locates them, without a look at the values."""
    kind, number = index.schema[name], index.schema.position(name)
    if index.encoding is not None:
        return False
    if kind.optional or (kind.dtype == "bool" and (index.row_bytes or _is_payload(index, number))):
        return False  # not every row has a member, or the values need a check
    if kind.is_opaque or kind.is_whole:
        return True
    # headers of an adopted tar vary, but its arrays are located after them
    is_located = kind.item_bytes is not None or (kind.kind == "ragged" and _is_payload(index, number))
    return is_located and kind.dtype != "bool"


def _address(array: NDArray[Any]) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


class _Cuts:
    """Positions of bytes after some spans of the sequence have been removed."""

    def __init__(self, starts: Int64s, ends: Int64s) -> None:
        self._starts, self._ends = starts, ends
        self._before = np.append(0, np.cumsum(ends - starts))
        self.overlap = bool((starts[1:] < ends[:-1]).any())  # or they do not ascend

    def bytes_before(self, places: Int64s) -> Int64s:
        """Return the number of bytes removed by spans that begin before these positions."""
        before: Int64s = self._before[np.searchsorted(self._starts, places)]
        return before

    def places_of(self, starts: Int64s, ends: Int64s) -> Int64s | Literal[False]:
        """Return the positions of spans after the removal; False if a removed span overlaps one of them."""
        number = np.searchsorted(self._starts, starts)
        past = np.append(0, self._ends)[number] > starts
        if bool(past.any()) or bool((np.searchsorted(self._starts, ends) != number).any()):
            return False
        found: Int64s = starts - self._before[number]
        return found


class BlockLoading:
    """Loads blocks by their numbers in the dataset.

    `memory` allocates memory for blocks that are read in Python; `queue` gets the files of local shards.
    """

    def __init__(
        self,
        sources: Sources,
        reader: BlockReader,
        fields: Sequence[str],
        memory: TakeMemory,
        queue: LoadQueue,
    ) -> None:
        self._sources, self._reader, self._memory, self._queue = sources, reader, memory, queue
        self._fields = fields
        self._files: dict[tuple[str, int], int] = {}
        self._shards: dict[int, LocalShard | None] = {}
        self._layouts: dict[bytes, Int64s] = {}  # equal layouts once; jobs hold their addresses
        self._needed: dict[int, int] = {}  # shard → last step whose jobs refer to its `LocalShard`
        self._first_block: Int64s = sources.rows.shard_first_block
        self._lock = threading.Lock()  # guards verification_failures; several threads read
        self.verification_failures = 0  # blocks that failed verification in all locations

    def sizes(self, blocks: Int64s, until: int, now: int) -> tuple[Int64s, Int64s]:
        """Return (n,) expected block sizes and (n,) bytes of their jobs' memory, 0 for blocks read in Python.

        The `LocalShard` of each block's shard is kept until a call with `now >= until`.
        """
        if len(self._shards) > _MOST_SHARDS:
            for shard in [shard for shard, step in self._needed.items() if step <= now]:
                del self._needed[shard], self._shards[shard]
        sizes, own = np.zeros((2, len(blocks)), np.int64)
        for shard, places, inside in self._by_shard(blocks):
            found = self._shard(shard)
            self._needed[shard] = until
            if found is not None:
                sizes[places] = found.raw_sizes[inside]
                own[places] = np.where(found.is_fit[inside], found.own_sizes[inside], 0)
                continue
            known = self._reader.known_sizes(shard)
            sizes[places] = (
                [self._size(shard, one) for one in inside.tolist()] if known is None else known[inside]
            )
        return _whole_pages(sizes), own

    def _by_shard(self, blocks: Int64s) -> list[tuple[int, Int64s, Int64s]]:
        """Return, for each shard, its number, indices into `blocks`, and block numbers inside the shard."""
        shards = np.searchsorted(self._first_block, blocks, side="right") - 1
        order = np.argsort(shards, kind="stable")
        begins = np.flatnonzero(np.diff(shards[order], prepend=-1))
        return [
            (shard := int(shards[places[0]]), places, blocks[places] - self._first_block[shard])
            for places in np.split(order, begins[1:])
            if len(places)
        ]

    def _size(self, shard: int, inside: int) -> int:
        with contextlib.suppress(ShardkitError):  # loading the block raises it again
            if self._reader.has_file(shard):
                return self._reader.raw_size(shard, inside)
        return self._sources.block_bytes(int(self._first_block[shard]) + inside)

    def _shard(self, shard: int) -> LocalShard | None:
        if shard not in self._shards:
            found = None
            with contextlib.suppress(ShardkitError):
                if hasattr(gather.block_rows, "load_blocks") and self._reader.has_file(shard):
                    found = self._local_shard(shard, self._reader.index(shard))
            self._shards[shard] = found
        return self._shards[shard]

    def _local_shard(self, shard: int, index: ShardIndex) -> LocalShard | None:
        file, strong = self._reader.verified_file(shard), self._reader.verify_of(shard) == "strong"
        if file is None or (index.compression != "none" and not gather.block_rows.opens_zstd()):
            return None
        if strong and not gather.block_rows.hashes_sha256():
            return None
        layout = None
        if index.format == "arrow":
            head = np.empty(min(_HEAD_BYTES, int(index.block_size[0])), np.uint8)
            read_file(*file, int(index.block_offset[0]), head.data)
            layout = layout_of(index, self._fields, head)
            if layout is not None:
                layout = self._layouts.setdefault(layout.tobytes(), layout)
        return LocalShard.of(index, self._fields, self._number_of(file), layout, strong=strong)

    def _number_of(self, file: tuple[str, int]) -> int:
        number = self._files.get(file)
        if number is None:
            number = self._files[file] = self._queue.add_file(*file)
        return number

    def jobs(self, blocks: Int64s, own: Int64s) -> Int64s:
        """Return (n, JOB + facts) jobs for the window, after a call of `sizes` for these blocks."""
        jobs = np.zeros((len(blocks), JOB + 1 + FACTS * len(self._fields)), np.int64)
        jobs[:, FILE] = -1
        plain = np.flatnonzero(own)
        for shard, places, inside in self._by_shard(blocks[plain]):
            chosen, found = plain[places], self._shards[shard]
            assert found is not None
            jobs[chosen] = found.jobs(inside)
        jobs[:, BLOCK] = blocks
        return jobs

    def read(self, block: int) -> tuple[GatherColumns, int, int]:
        """Read and verify a block in Python.

        Returns:
            Its columns, its raw size, and the bytes of memory that it takes.
        """
        shard, inside = self._sources.rows.shard_of_block(block)
        try:
            found = self._reader.read(shard, inside, keys=False, fields=self._fields, memory=self._memory)
        except IntegrityError:
            with self._lock:
                self.verification_failures += 1
            raise
        size = self._reader.raw_size(shard, inside)
        return GatherColumns(found, self._fields), size, _whole_pages(found.nbytes)

    def watch(self) -> BlockTimes:
        """Return statistics to which each load is added from now on."""
        from shardkit.telemetry.recorder import BlockTimes  # most loaders are not watched

        times = BlockTimes(lambda shard: self._reader.shard_name(shard)[18:30], self._reader.has_file)

        def note(block: int, seconds: float) -> None:
            shard, inside = self._sources.rows.shard_of_block(block)
            times.note(shard, inside, seconds, self._reader.raw_size(shard, inside), number=block)

        self._queue.note = note
        return times


def _whole_pages(size: Any) -> Any:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def give_way() -> None:
    """Lower the priority of this thread below the program's other threads.

    Blocks are loaded ahead, while the work of other threads is needed now. A trainer that waits for a block does not
    compete.
    """
    if sys.platform == "linux":  # other systems have no priority per thread
        own = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICER)
