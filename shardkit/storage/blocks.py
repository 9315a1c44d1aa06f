"""Verified blocks of a dataset, by number. Everything that reads sample bytes goes through here."""

from __future__ import annotations

import copy
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StoreError
from shardkit.formats import Block, ShardIndex, StoredBlock, Verify, extension, read_block
from shardkit.formats import reading as block_reading
from shardkit.manifest import ShardTable
from shardkit.storage.adopted import AdoptedStore, adopted_place
from shardkit.storage.objects import object_name
from shardkit.storage.reading import BlockRequest, LocatedStore, place_ids
from shardkit.storage.repository import Repository
from shardkit.storage.store import Store

__all__ = ["BlockReader"]


class BlockSupply(Protocol):
    """Between a reader and the locations: a cache, or what reads ahead."""

    def read(self, store: LocatedStore, request: BlockRequest) -> Any:
        """The block's bytes, verified."""


class _Map(NamedTuple):
    """A mapped file and where in memory it begins."""

    view: memoryview
    address: int


_readers: weakref.WeakSet[BlockReader] = weakref.WeakSet()

_MAX_OPEN_MAPS = 512
_MAX_INDEX_BYTES = 256 << 20
_TARS_LOOKED_AT = 64


class BlockReader:
    """Reads blocks of one manifest; every block is verified every time it is read (DESIGN promise 2).

    Uncompressed blocks of local stores are views of a memory map: zero copy until the loader gathers rows. Maps and
    indexes are kept in bounded least-recently-used tables. Safe to call from many threads; after a fork the child
    may go on with it.

    Args:
        table: columns over all shards.
        repositories: one per part; a dataset that was not merged has one part.
        part_first_shard: first shard of each part, ascending.
        formats: (format, compression) of each part.
        verify: "fast" checks XXH3 of each block, "strong" SHA-256.
    """

    def __init__(
        self,
        table: ShardTable,
        repositories: list[Repository],
        part_first_shard: list[int],
        formats: list[tuple[str, str]],
        verify: Verify = "fast",
    ) -> None:
        self._table = table
        self._repositories = repositories
        self._part_first_shard = part_first_shard
        self._formats = formats
        self.verify: Verify = verify
        self._open()

    def _open(self) -> None:
        self._lock = threading.Lock()
        self._indexes: OrderedDict[int, tuple[ShardIndex, int]] = OrderedDict()
        self._index_bytes = 0
        self._maps: OrderedDict[int, _Map] = OrderedDict()
        self.supply: BlockSupply | None = None  # of this process: a cache is opened where it is used
        _readers.add(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_table", "_repositories", "_part_first_shard", "_formats", "verify")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def renew_lock(self) -> None:
        """In a forked child: another thread of the parent may have held the lock, and does not exist here."""
        self._lock = threading.Lock()

    @property
    def urls(self) -> list[str]:
        """Where the parts lie, one URL each."""
        return [repository.url for repository in self._repositories]

    @property
    def repositories(self) -> list[Repository]:
        """That hold the parts."""
        return list(self._repositories)

    def _part(self, shard: int) -> int:
        part = 0
        while part + 1 < len(self._part_first_shard) and shard >= self._part_first_shard[part + 1]:
            part += 1
        return part

    def repository_of(self, shard: int) -> Repository:
        """The repository that holds a shard."""
        return self._repositories[self._part(shard)]

    def shard_name(self, shard: int) -> str:
        """Object name of a shard inside its store."""
        digest = "sha256:" + bytes(self._table.digest[shard]).hex()
        return object_name(digest, extension(*self._formats[self._part(shard)]))

    def raw_size(self, shard: int, block: int) -> int:
        """Bytes of a block, decompressed; reads the shard's index where it is not at hand."""
        return self.index(shard).spans[block].raw_size

    def index(self, shard: int) -> ShardIndex:
        """The verified index of a shard.

        Raises:
            IntegrityError: its bytes are not those that the manifest names.
        """
        with self._lock:
            found = self._indexes.get(shard)
            if found is not None:
                self._indexes.move_to_end(shard)
                return found[0]
        digest = "sha256:" + bytes(self._table.index_digest[shard]).hex()
        size = int(self._table.index_size[shard])
        index = ShardIndex.from_bytes(self.repository_of(shard).get_object(digest, "index", size))
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
        own_memory: bool = False,
    ) -> Block:
        """One verified block.

        Args:
            shard: its number.
            block: counts inside of `shard`.
            verify: how, if not as this reader does.
            keys: as in `formats.read_block`.
            fields: as there.
            own_memory: where it would be a view of a file, copy it first and verify the copy: whatever becomes of the
                file, and of its pages, the block stays what it is.

        Raises:
            IntegrityError: the bytes are not those that were written; names shard, block and store.
            FormatError: the digest is right but the content is not what shardkit writes.
            StoreError: the store does not answer or the object is gone.
        """
        index = self.index(shard)
        try:
            found = self._read(shard, block, index, verify or self.verify, keys, fields, own_memory)
        except IntegrityError as error:
            raise IntegrityError(f"{self._where(shard, block)}: {error}") from None
        except ShardkitError as error:
            raise type(error)(f"{self._where(shard, block)}: {error}") from error
        if index.compression != "none":
            self.forget(shard, block)  # what was decompressed is a copy
        return found

    def _read(
        self,
        shard: int,
        block: int,
        index: ShardIndex,
        verify: Verify,
        keys: bool,
        fields: Sequence[str] | None,
        own_memory: bool,
    ) -> Block:
        try:
            stored = self._stored(shard, block, index)
            if own_memory and index.compression == "none" and isinstance(stored.obj, mmap.mmap):
                stored = self._out_of_file(shard, block, stored)[0]
            return read_block(stored, index, block, verify=verify, keys=keys, fields=fields)
        except (IntegrityError, NotFoundError) as error:
            store = self._elsewhere(shard, error)
            if store is None:
                raise
            with self._lock:
                self._maps.pop(shard, None)  # the file may be healed, and is another one then
            healed = memoryview(store.read_block(self.request(shard, block)))
            return read_block(healed, index, block, keys=keys, fields=fields)

    def is_view(self, shard: int) -> bool:
        """Whether blocks of this shard are views of a memory map: their bytes may leave memory and come back."""
        part = self._part(shard)
        local = self._repositories[part].store.local_path(self.shard_name(shard)) is not None
        return local and self._formats[part][1] == "none"

    def file_version(self, shard: int) -> tuple[int, ...] | None:
        """What differs once somebody has written to the local file of a shard, or put another in its place.

        None where there is no such file. What its disk does to it cannot be seen here.
        """
        path = self.repository_of(shard).store.local_path(self.shard_name(shard))
        if path is None:
            return None
        try:
            found = os.stat(path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def forget(self, shard: int, block: int) -> None:
        """Let go of the pages of a block that nothing uses any more; the file stays mapped."""
        span = self.index(shard).spans[block]
        with self._lock:
            mapped = self._maps.get(shard)
        if mapped is not None:
            _forget(mapped.view, span.offset, span.offset + span.size)

    def _where(self, shard: int, block: int) -> str:
        digest = bytes(self._table.digest[shard]).hex()
        store = self.repository_of(shard).store
        place = adopted_place(store, self.shard_name(shard)) or store.url
        return f"shard {shard} ({digest[:12]}…) block {block} in {place}"

    def request(self, shard: int, block: int) -> BlockRequest:
        """What to ask a location for: a block's place, and the digest by which its bytes are known."""
        index = self.index(shard)
        offset, size = int(index.block_offset[block]), int(index.block_size[block])
        place = int(place_ids(self._table.digest[shard : shard + 1], np.array([block]))[0])
        return BlockRequest(self.shard_name(shard), offset, size, index.block_sha256[block].tobytes(),
                            int(index.block_xxh3[block]), place)  # fmt: skip

    def places(self, shards: NDArray[np.int64], blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
        """`place_ids` of blocks given by shard and number in it, without their indexes."""
        return place_ids(self._table.digest[shards], blocks)

    @property
    def stored_bytes(self) -> int:
        """Of all shards together."""
        return int(self._table.size.sum())

    @property
    def stores(self) -> list[Store]:
        """Stores of the parts, and those by which adopted tars are read over a network, or over several locations."""
        found: list[Store] = []
        for part, repository in enumerate(self._repositories):
            store = repository.store
            if not isinstance(store, AdoptedStore):
                found.append(store)
                continue
            found.append(store.inner)
            if isinstance(store.inner, LocatedStore) or store.any_far(self._some_names(part)):
                found.append(store.located)
        return found

    def _some_names(self, part: int) -> list[str]:
        """Shards by which to tell where the tars of a part lie: those of one adoption mostly lie together."""
        first = self._part_first_shard[part]
        ends = [*self._part_first_shard[1:], len(self._table)]
        return [
            self.shard_name(shard)
            for shard in range(first, ends[part], max(1, (ends[part] - first) // _TARS_LOOKED_AT))
        ]

    def located(self, shard: int) -> LocatedStore | None:
        """The locations that a shard can be read from; None where there is but one place, and it is local."""
        store = self.repository_of(shard).store
        if isinstance(store, AdoptedStore):
            name = self.shard_name(shard)
            if store.is_far(name):
                return store.located
            store = store if store.place(name) else store.inner
        return store if isinstance(store, LocatedStore) else None

    def _elsewhere(self, shard: int, error: ShardkitError) -> LocatedStore | None:
        """Where to look for a block that is wrong, or not, in a file; None where there is no other place."""
        store = self.repository_of(shard).store
        name = self.shard_name(shard)
        if (
            isinstance(store, AdoptedStore)
            and isinstance(store.inner, LocatedStore)
            and not store.is_far(name)
        ):
            return store.located if store.place(name) else store.inner
        return None if isinstance(error, NotFoundError) else self.located(shard)

    def has_file(self, shard: int) -> bool:
        """Whether a shard is a local file."""
        return self.repository_of(shard).store.local_path(self.shard_name(shard)) is not None

    def through(self, supply: BlockSupply | None) -> BlockReader:
        """A reader of the same blocks whose remote ones come through `supply`, such as a cache."""
        reader = copy.copy(self)
        reader.supply = supply
        return reader

    def verified_views(
        self,
        places: Sequence[tuple[int, int]],
        wanted: Callable[[ShardIndex], bool],
        *,
        own_memory: bool = False,
    ) -> list[StoredBlock | None]:
        """The stored bytes of blocks, (shard, block in it) each, that are what was written.

        What `read` does, for those who need no column of them; of blocks that lie in local files without compression.

        Args:
            places: of the blocks.
            wanted: whether the bytes alone are of use, by the shard's index; the others are not verified.
            own_memory: as in `read`.

        Returns:
            None wherever there is more to do or to say, a mismatch among it: `read` then says what is wrong, and looks
            in other places.
        """
        found = [self._stored_in_file(shard, block, wanted, own_memory) for shard, block in places]
        intact = iter(block_reading.are_intact([one for one in found if one is not None]))
        return [one if one is not None and next(intact) else None for one in found]

    def _out_of_file(self, shard: int, block: int, view: memoryview) -> tuple[memoryview, int]:
        """A copy of a view of a block's file, whose pages are not needed any more; its address."""
        copied = _copied(view)
        self.forget(shard, block)
        return copied

    def _stored_in_file(
        self, shard: int, block: int, wanted: Callable[[ShardIndex], bool], own_memory: bool
    ) -> StoredBlock | None:
        if self.verify != "fast":
            return None
        index = self.index(shard)
        if index.compression != "none" or not 0 <= block < index.blocks or not wanted(index):
            return None
        try:
            mapped = self._map(shard)
        except ShardkitError:
            return None
        if mapped is None:
            return None
        span = index.spans[block]
        # shorter where the file is, and then not intact
        view, address = mapped.view[span.offset : span.offset + span.size], mapped.address + span.offset
        if own_memory:
            view, address = self._out_of_file(shard, block, view)
        return StoredBlock(view, address, index, block)

    def _stored(self, shard: int, block: int, index: ShardIndex) -> memoryview:
        mapped = self._map(shard)
        span = index.spans[block]
        offset, size = span.offset, span.size
        if mapped is None:
            store = self.located(shard)
            if store is None:
                plain = self.repository_of(shard).store
                return memoryview(plain.get_range(self.shard_name(shard), offset, size))
            request = self.request(shard, block)
            return memoryview(self.supply.read(store, request) if self.supply else store.read_block(request))
        view = mapped.view
        if offset + size > len(view):
            raise IntegrityError(
                f"{self._where(shard, 0)}: the file ends at byte {len(view)}, a block is expected up to "
                f"{offset + size}; it was truncated. Run: shardkit verify {self.repository_of(shard).store.url}"
            )
        return view[offset : offset + size]

    def _map(self, shard: int) -> _Map | None:
        """A read-only map of a local shard file, or None where there is none and the store has to be asked."""
        with self._lock:
            mapped = self._maps.get(shard)
            if mapped is not None:
                self._maps.move_to_end(shard)
                return mapped
        path = self.repository_of(shard).store.local_path(self.shard_name(shard))
        if path is None:
            return None
        try:
            view = _map_file(os.fspath(path), int(self._table.size[shard]))
        except StoreError:
            if self.located(shard) is None:
                raise
            return None  # gone in this moment, or its disk is failing: there are other places
        mapped = _Map(view, np.frombuffer(view, np.uint8).__array_interface__["data"][0])
        with self._lock:
            self._maps[shard] = mapped
            while len(self._maps) > _MAX_OPEN_MAPS:
                self._maps.popitem(last=False)  # the map closes when the last block that views it is dropped
        return mapped


def _copied(view: memoryview) -> tuple[memoryview, int]:
    """The same bytes in memory that nobody else writes to, given back when the last view of it goes; its address.

    A mapping of its own, not the allocator's: megabytes that stay for hours among what comes and goes would keep that
    from being given back.

    Raises:
        MemoryError: there is none.
    """
    if not len(view):
        return memoryview(b""), 0
    try:
        memory = mmap.mmap(-1, len(view), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a copy of {len(view)} bytes: {error.strerror}") from error
    target = np.frombuffer(memory, np.uint8)
    target[:] = np.frombuffer(view, np.uint8)
    return memoryview(memory).toreadonly(), target.__array_interface__["data"][0]


def _forget(view: memoryview, first: int, last: int) -> None:
    """Drop the whole pages inside [first, last) of a map from this process; the page cache keeps them."""
    first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    mapped = view.obj
    if last > first and isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


def _map_file(path: str, size: int) -> memoryview:
    """Map a whole file whose size must be `size`: reading past the end of a truncated map would kill the process."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        raise StoreError(
            f"{path} cannot be opened: {error.strerror}; run: shardkit verify on its dataset"
        ) from error
    try:
        actual = os.fstat(descriptor).st_size
        if actual != size:
            raise IntegrityError(
                f"{path} holds {actual} bytes, the manifest says {size}; run: shardkit verify"
            )
        return memoryview(mmap.mmap(descriptor, actual, prot=mmap.PROT_READ)) if actual else memoryview(b"")
    finally:
        os.close(descriptor)


def _renew_locks() -> None:
    for reader in list(_readers):
        reader.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)
