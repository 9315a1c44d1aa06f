"""Lookup of samples (`RowMap`) and reads of verified blocks (`BlockReader`); all sample bytes are read through here.

`RowMap` maps arrays of sample numbers to arrays of shards, rows and blocks. It loads only selection bitmaps.
"""

from __future__ import annotations

import bisect
import copy
import functools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s
from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StoreError, UsageError
from shardkit.formats import Block, ShardIndex, Verify, read_block, read_fields, separate_fields
from shardkit.manifest import Selection, ShardTable
from shardkit.reading.adopted import adopted_place, find_adopted
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import BlockRequest, place_ids
from shardkit.stores.file_operations import read_file
from shardkit.stores.ownership import WriteAccess
from shardkit.stores.store import Store, object_name, read_object

if TYPE_CHECKING:
    from shardkit.reading.cache.supply import BlockFetcher


VerifySetting: TypeAlias = Literal["auto", "fast", "strong"]
"""Checksum for blocks of local files: "fast" is XXH3, "strong" SHA-256, "auto" strong if other users can write them."""


class RowPlaces(NamedTuple):
    """Positions of n samples; all arrays are (n,) int64, in the order of the request."""

    shard: Int64s  # ordinal of the shard in the manifest
    row: Int64s  # row inside the shard
    block: Int64s  # block number counted over the whole dataset
    row_in_block: Int64s


class RowMap:
    """Map from sample numbers to shards, rows and blocks, computed from the pages of a manifest alone.

    A block holds `block_rows` rows, and a new block starts at each segment border (formats/SPEC.md), so no
    index is needed. Construction costs O(segments); looking up n samples costs O(n log segments).

    Args:
        table: columns over all shards and segments.
        load_selection: returns the bitmap of a shard; called at most once per shard with a selection.
    """

    def __init__(self, table: ShardTable, load_selection: Callable[[int], Selection]) -> None:
        self._load_selection = load_selection
        self._selections: dict[int, Selection] = {}
        shards = len(table.rows)
        segment_shard = np.asarray(table.segment_shard, dtype=np.int64)
        rows = np.asarray(table.segment_rows, dtype=np.int64)
        self._segment_shard = segment_shard
        self._block_rows = np.asarray(table.block_rows, dtype=np.int64)
        self._segment_sample = _starts(np.asarray(table.segment_selected, dtype=np.int64))
        self._shard_sample = _starts(np.asarray(table.selected, dtype=np.int64))
        row_starts = _starts(rows)
        first_segment = np.searchsorted(segment_shard, np.arange(shards + 1))
        self._first_segment = first_segment
        self._segment_row = row_starts[:-1] - row_starts[first_segment[:-1]][segment_shard]
        per_block = self._block_rows[segment_shard]
        block_starts = _starts(-(-rows // np.maximum(per_block, 1)))
        self._segment_block = block_starts[:-1]
        self.shard_first_block: Int64s = block_starts[first_segment]  # (shards + 1,)
        self._first_blocks: list[int] = self.shard_first_block.tolist()  # a list is faster to bisect
        self._selected_shards = table.has_selection
        self._any_selection = bool(self._selected_shards.any())

    def __len__(self) -> int:
        return int(self._segment_sample[-1])

    @property
    def blocks(self) -> int:
        return int(self.shard_first_block[-1])

    @property
    def segment_blocks(self) -> Int64s:
        return np.diff(self._segment_block, append=self.blocks)

    def shard_of_block(self, block: int) -> tuple[int, int]:
        """Return (shard, block in that shard) of a dataset-wide block number."""
        shard = bisect.bisect_right(self._first_blocks, block) - 1
        return shard, block - self._first_blocks[shard]

    def locate(self, samples: Int64s) -> RowPlaces:
        """Return the positions of `samples` ((n,) int64, any order).

        Raises:
            NotFoundError: A sample number is out of range.
        """
        samples = np.asarray(samples, dtype=np.int64)
        if samples.size and (int(samples.min()) < 0 or int(samples.max()) >= len(self)):
            bad = int(samples.min()) if int(samples.min()) < 0 else int(samples.max())
            raise NotFoundError(f"sample {bad} does not exist: this dataset has samples 0 to {len(self) - 1}")
        segment = np.searchsorted(self._segment_sample, samples, side="right") - 1
        offset = samples - self._segment_sample[segment]
        if self._any_selection:
            segment, offset = self._through_selections(samples, segment, offset)
        shard = self._segment_shard[segment]
        block_in_segment, row_in_block = np.divmod(offset, self._block_rows[shard])
        return RowPlaces(
            shard,
            self._segment_row[segment] + offset,
            self._segment_block[segment] + block_in_segment,
            row_in_block,
        )

    def _through_selections(self, samples: Int64s, segment: Int64s, offset: Int64s) -> tuple[Int64s, Int64s]:
        """Correct (segment, offset) of samples in shards that have a selection."""
        shard = self._segment_shard[segment]
        segment, offset = segment.copy(), offset.copy()
        for number in np.unique(shard[self._selected_shards[shard]]):
            mine = np.flatnonzero(shard == number)
            ordinals = samples[mine] - self._shard_sample[number]
            rows = np.asarray(self.selection(int(number)).select(ordinals), dtype=np.int64)
            first, last = self._first_segment[number], self._first_segment[number + 1]
            inside = np.searchsorted(self._segment_row[first:last], rows, side="right") - 1
            segment[mine] = first + inside
            offset[mine] = rows - self._segment_row[first + inside]
        return segment, offset

    def selection(self, shard: int) -> Selection:
        """Return the selection bitmap of a shard; loaded once and kept."""
        found = self._selections.get(shard)
        if found is None:
            found = self._selections[shard] = self._load_selection(shard)
        return found

    def rows_of_shard(self, shard: int) -> Int64s:
        """Return the selected rows of a shard, ascending, (selected,) int64."""
        selected = int(self._shard_sample[shard + 1] - self._shard_sample[shard])
        if self._selected_shards[shard]:
            return np.asarray(self.selection(shard).select(np.arange(selected)), dtype=np.int64)
        return np.arange(selected, dtype=np.int64)


def _starts(counts: Int64s) -> Int64s:
    """Exclusive prefix sums: (n + 1,) int64."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


TakeMemory: TypeAlias = Callable[[int], NDArray[np.uint8]]


def fresh_memory(size: int) -> NDArray[np.uint8]:
    """Return new memory of a size in bytes."""
    return np.empty(size, np.uint8)


_readers: weakref.WeakSet[BlockReader] = weakref.WeakSet()

_MAX_INDEX_BYTES = 256 << 20
RESTORE_ADOPTED = "put the file back as it was when it was adopted, or adopt it as it is now: shardkit adopt"
_FIELD_SHIFT = 44  # fields have places after the places of all blocks


class ShardFile(NamedTuple):
    """A shard that is stored on this machine."""

    path: str | None  # None for a group of adopted files
    is_adopted: bool  # True if it belongs to another owner, who may change it; its store reads it


class BlockReader:
    """Reads blocks of one manifest; every block is verified each time it is read.

    The bytes that are checked are the bytes that are used: a block is read into private memory, then hashed and parsed
    there; no file is memory-mapped. Indexes are kept in a least-recently-used table of at most 256 MiB.
    Readers may be shared by threads and used after a fork.

    Args:
        table: columns over all shards.
        stores: store of the root of each part; a dataset that was not merged has one part.
        part_first_shard: first shard of each part, ascending.
        formats: format of each part.
        verify: "fast" compares XXH3 of each block, "strong" SHA-256; "auto" is "strong" for files that another user can
            write, and "fast" for others.

    Raises:
        UsageError: `verify` has another value.
    """

    def __init__(
        self,
        table: ShardTable,
        stores: list[Store],
        part_first_shard: list[int],
        formats: list[str],
        verify: VerifySetting = "auto",
    ) -> None:
        if verify not in get_args(VerifySetting):
            raise UsageError(f"verify={verify!r}: expected 'auto', 'fast' or 'strong'; there is no 'off'")
        self._table = table
        self.stores = stores
        self._part_first_shard = part_first_shard
        self._formats = formats
        self.verify: VerifySetting = verify
        self._open()

    def _open(self) -> None:
        self._lock = threading.Lock()
        self._indexes: OrderedDict[int, tuple[ShardIndex, int]] = OrderedDict()
        self._index_bytes = 0
        self._files: dict[int, ShardFile] = {}
        self._access = WriteAccess()
        self._verify_of: dict[int, Verify] = {}
        self.supply: BlockFetcher | None = None  # not pickled: each process opens its own cache
        _readers.add(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_table", "stores", "_part_first_shard", "_formats", "verify")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def renew_lock(self) -> None:
        """Replace the lock in a forked child: a thread that held it in the parent does not exist in the child."""
        self._lock = threading.Lock()

    @property
    def urls(self) -> list[str]:
        return [store.url for store in self.stores]

    def _part(self, shard: int) -> int:
        return bisect.bisect_right(self._part_first_shard, shard) - 1

    def store_of(self, shard: int) -> Store:
        """Return the store of the root that holds a shard."""
        return self.stores[self._part(shard)]

    def shard_name(self, shard: int) -> str:
        """Return the object name of a shard in its store."""
        return object_name(self._table.digest_text(shard), self._formats[self._part(shard)])

    def raw_size(self, shard: int, block: int) -> int:
        """Return the decompressed size of a block in bytes; reads the shard's index if necessary."""
        return int(self.index(shard).block_raw_size[block])

    def known_sizes(self, shard: int) -> NDArray[np.integer[Any]] | None:
        """Return (blocks,) decompressed sizes in bytes; None if the shard's index is not in memory."""
        with self._lock:
            found = self._indexes.get(shard)
        return None if found is None else found[0].block_raw_size

    def source(self, shard: int, row: int) -> tuple[str, int] | None:
        """Return (file, row in it) from which a row was built or in which it was adopted; None if not recorded.

        A file of an adopted folder is named by the folder and the key of its row.
        """
        index = self.index(shard)
        if (found := index.source(row)) is not None:
            return found
        adopted = find_adopted(self.store_of(shard), self.shard_name(shard))
        if adopted is None:
            return None
        return (f"{adopted.place}/{index.original_key(row)}", 0) if adopted.files else (adopted.place, row)

    def index(self, shard: int) -> ShardIndex:
        """Return the verified index of a shard."""
        with self._lock:
            found = self._indexes.get(shard)
            if found is not None:
                self._indexes.move_to_end(shard)
                return found[0]
        digest = self._table.index_digest_text(shard)
        size = int(self._table.index_size[shard])
        get = functools.partial(read_object, self.store_of(shard), digest, "index", size)
        if self.supply is None or self.located(shard) is None or self.has_file(shard):
            index = ShardIndex.from_bytes(get())
        else:  # indexes are cached too: every start on every node reads them
            sha256 = bytes(self._table.index_digest[shard])
            request = BlockRequest(object_name(digest, "index"), 0, size, sha256, shard=shard)
            index = ShardIndex.from_bytes(self.supply.obtain(request, get))
        with self._lock:
            if shard not in self._indexes:
                self._index_bytes += size
            self._indexes[shard] = (index, size)
            while self._index_bytes > _MAX_INDEX_BYTES and len(self._indexes) > 1:
                self._index_bytes -= self._indexes.popitem(last=False)[1][1]
        return index

    def read(
        self,
        shard: int,
        block: int,
        verify: Verify | None = None,
        *,
        keys: bool = True,
        fields: Sequence[str] | None = None,
        memory: TakeMemory = fresh_memory,
    ) -> Block:
        """Return one verified block, in private memory.

        Args:
            shard: number of the shard in the dataset.
            block: number of the block in the shard.
            verify: checksum to compare; default `verify_of` the shard.
            keys: passed to `read_block`, as is `fields`.
            fields: see `keys`.
            memory: allocates the buffer of the given size for blocks of local files.

        Raises:
            IntegrityError: no location has the right bytes.
        """
        index, verify = self.index(shard), verify or self.verify_of(shard)

        names = separate_fields(index, fields)
        requests = [self.request(shard, block, name) for name in names or (None,)]

        def parsed(stored: Sequence[memoryview], verify: Verify) -> Block:
            if names is None:
                return read_block(stored[0], index, block, verify=verify, keys=keys, fields=fields)
            return read_fields(dict(zip(names, stored, strict=True)), index, block, verify=verify)

        try:
            try:
                return parsed([self._read_stored(request, memory) for request in requests], verify)
            except (IntegrityError, NotFoundError) as error:
                is_gone, store = isinstance(error, NotFoundError), self.store_of(shard)
                ask_others = not is_gone or self._is_adopted(shard)
                self._files.pop(shard, None)  # the file may have been replaced or removed
                self._verify_of.pop(shard, None)
                if isinstance(store, LocatedStore) and ask_others:
                    return parsed([memoryview(store.read_block(request)) for request in requests], "fast")
                return parsed([self._read_stored(request, memory) for request in requests], verify)
        except IntegrityError as error:
            is_adopted = adopted_place(self.store_of(shard), self.shard_name(shard)) is not None
            advice = f"; {RESTORE_ADOPTED}" * is_adopted
            raise IntegrityError(f"{self._where(shard, block)}: {error}{advice}") from None
        except ShardkitError as error:
            raise type(error)(f"{self._where(shard, block)}: {error}") from error

    def _where(self, shard: int, block: int) -> str:
        digest = bytes(self._table.digest[shard]).hex()
        store = self.store_of(shard)
        place = adopted_place(store, self.shard_name(shard)) or store.url
        return f"shard {shard} ({digest[:12]}…) block {block} in {place}"

    def request(self, shard: int, block: int, field: str | None = None) -> BlockRequest:
        """Return the request for a block, or for one field of it: its byte range and its checksums."""
        index = self.index(shard)
        digest = self._table.digest[shard : shard + 1]
        if field is not None:
            found = index.field_range(block, field)
            number = block + ((index.schema.position(field) + 1) << _FIELD_SHIFT)
            place = int(place_ids(digest, np.array([number]))[0])
            return BlockRequest(self.shard_name(shard), found.offset, found.size, found.sha256, found.xxh3,
                                place, shard, block)  # fmt: skip
        offset, size = int(index.block_offset[block]), int(index.block_size[block])
        place = int(place_ids(digest, np.array([block]))[0])
        return BlockRequest(self.shard_name(shard), offset, size, index.block_sha256[block].tobytes(),
                            int(index.block_xxh3[block]), place, shard, block)  # fmt: skip

    def places(self, shards: NDArray[np.int64], blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return `place_ids` of blocks, given by shard and number in the shard; reads no index."""
        return place_ids(self._table.digest[shards], blocks)

    @property
    def stored_bytes(self) -> int:
        return int(self._table.size.sum())

    def located(self, shard: int) -> LocatedStore | None:
        """Return the locations of a shard; None if it is read from one local place only."""
        store = self.store_of(shard)
        return None if self._is_adopted(shard) or not isinstance(store, LocatedStore) else store

    def _is_adopted(self, shard: int) -> bool:
        """Return True if a shard is an adopted file, or a group of them, on this machine."""
        file = self.file(shard)
        return file is not None and file.is_adopted

    def file(self, shard: int) -> ShardFile | None:
        """Return the file of a shard on this machine, of the root or adopted; None if it is read over a network."""
        found = self._files.get(shard)
        if found is None:
            store, name = self.store_of(shard), self.shard_name(shard)
            path = store.local_path(name)
            adopted = None if path is not None else find_adopted(store, name)
            if path is not None:
                found = ShardFile(os.fspath(path), is_adopted=False)
            elif adopted is not None and not adopted.is_far:
                found = ShardFile(None if adopted.files else adopted.place, is_adopted=True)
            else:
                return None  # not kept: the object may be put later
            self._files[shard] = found
        return found

    def verify_of(self, shard: int) -> Verify:
        """Return the checksum to compare for blocks of a shard; remote reads have compared SHA-256 already."""
        if self.verify != "auto":
            return self.verify
        found = self._verify_of.get(shard)
        if found is not None:
            return found
        file = self.file(shard)
        if file is None:
            return "fast"
        # of a group, anybody may own some files
        is_open = file.path is None or self._access.others_can_write(file.path)
        return self._verify_of.setdefault(shard, "strong" if is_open else "fast")

    def has_file(self, shard: int) -> bool:
        """Return True if all bytes of a shard are in files on this machine."""
        return self.file(shard) is not None

    def through(self, supply: BlockFetcher | None) -> BlockReader:
        """Return a copy of this reader that reads remote blocks through `supply`; None to read them directly."""
        reader = copy.copy(self)
        reader.supply = supply
        return reader

    def for_fields(self, fields: Sequence[str]) -> BlockReader:
        """Return a reader of the shards that hold these stored columns.

        This is the reader of the added fields' shards if all columns belong to added fields, otherwise this reader.
        """
        return self

    def verified_file(self, shard: int) -> tuple[str, int] | None:
        """Return (path, bytes) of a shard in a local file; otherwise None.

        For callers that read, verify and decompress several blocks at once. Adopted files may change at any time, so
        they must be read into private memory and verified there.
        """
        file = self.file(shard)
        return None if file is None or file.path is None else (file.path, int(self._table.size[shard]))

    def _read_stored(self, request: BlockRequest, memory: TakeMemory) -> memoryview:
        shard, file = request.shard, self.file(request.shard)
        if not request.length:
            return memoryview(b"")
        if file is not None and file.path is not None and not file.is_adopted:
            found = memory(request.length).data
            try:
                read_file(file.path, int(self._table.size[shard]), request.offset, found)
            except StoreError:
                if self.located(shard) is None:
                    raise  # otherwise the disk is failing, and the read path asks other locations
            else:
                return found
        store = self.located(shard)
        if store is None:
            plain = self.store_of(shard)
            return memoryview(plain.get_range(request.name, request.offset, request.length))
        return memoryview(self.supply.read(store, request) if self.supply else store.read_block(request))


def _renew_locks() -> None:
    for reader in list(_readers):
        reader.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)
