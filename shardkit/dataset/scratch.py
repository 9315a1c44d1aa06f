"""Scratch: encoded rows between their source and the shards, payloads in files and columns in memory.

A scratch file is an Arrow IPC stream of the stored columns, without nulls, and of four more: key (null: generated),
original key, source name and row in the source (null: none). Rows are buffered and written in *runs*, each
sorted in the order that the layout will use, so that the rows of one shard are neighbours in every run: a
source of any size is read back in a few long ranges per run and shard, not with one seek per row.
Nothing here is synced: scratch is worthless after a power failure, and every record batch is verified when it
is read back (SPEC.md §3).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.encoding import joined_batch, numbers_of, spool_schema
from shardkit.dataset.layout import order_keys
from shardkit.dataset.rows import BATCH, Records, Rows
from shardkit.errors import IntegrityError, StoreError, UsageError
from shardkit.formats import RowBlock, Schema, generated_key, generated_keys
from shardkit.formats.arrow_message import END_OF_STREAM
from shardkit.formats.arrow_writing import index_array
from shardkit.formats.block import payload_column
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import (
    FOLDER,
    Directories,
    Handle,
    active,
    explained,
    read_exactly,
    write_all,
)
from shardkit.stores.local import LocalStore, private_folder

RUN_BYTES = 64 * 2**20
"""Default and maximum size of a run of scratch in memory."""

MIN_RUN_BYTES = 8 * 2**20

_CHECK_BYTES = 8  # size of the XXH3-64 in front of a record of finished work
_MAX_OPEN = 128
_RANGE_BYTES = 2**20
_MAX_BATCH_BYTES = 2**17
_MIN_BATCH_BYTES = 2**14
_MAX_BATCH_ROWS = 4096


def sized_run(source_bytes: int, shard_size: int) -> int:
    """Return the bytes of a run: short, but long enough for a shard to read 1 MiB of each.

    Touching memory for the first time costs more than a copy, and a short run stays in the processor's cache.
    """
    shards = -(-source_bytes // max(1, shard_size))
    return min(RUN_BYTES, max(MIN_RUN_BYTES, shards * _RANGE_BYTES))


def sized_batch(run_bytes: int, source_bytes: int, shard_size: int) -> int:
    """Return the bytes of a record batch, small for many shards: a shard reads whole batches."""
    shards = -(-source_bytes // max(1, shard_size))
    return min(_MAX_BATCH_BYTES, max(_MIN_BATCH_BYTES, run_bytes // max(1, 4 * shards)))


@dataclass(eq=False)
class RowSpool:
    """Collects record batches of rows, and writes them in sorted runs to a scratch file.

    Not thread-safe: the caller locks.
    """

    folder: str  # folder of the scratch file; "": only count rows
    name: str  # name of the scratch file, which appears at the first write
    schema: Schema  # schema of the dataset
    _: KW_ONLY
    seed: int | None  # seed of the shuffle, None to keep the order of adding
    run_bytes: int = RUN_BYTES  # bytes in memory before a run is written
    batch_bytes: int = _MAX_BATCH_BYTES  # bytes of a record batch; a shard reads whole batches

    def __post_init__(self) -> None:
        self._tables: list[Rows] = []  # rows in `_run` and before
        self._count = 0  # rows in all tables
        self._written = 0  # number of tables whose rows are in written runs
        self._run: list[Any] = []  # record batches
        self._run_bytes = 0
        self._batches: list[tuple[int, int, int, int]] = []  # part, offset, length, check; see `BATCH`
        self._places: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []  # batch and row, run by run
        self._broken = False
        self._file: ScratchFile | None = None

    def __len__(self) -> int:
        return self._count

    def append(self, rows: Rows, batch: Any) -> None:
        """Add rows and their record batch (`spool_batch`), which is not needed if rows are only counted."""
        if self._broken:
            raise StoreError(
                f"scratch file {self.folder}/{self.name}: an earlier write failed, so rows are missing; start again"
            )
        if self.folder:
            if self._run and self._run_bytes + batch.nbytes > self.run_bytes:
                self._write_run()
            self._run.append(batch)
            self._run_bytes += batch.nbytes
        self._tables.append(rows)
        self._count += len(rows)

    def finish(self) -> Rows:
        """Return all rows; unless they were only counted, the scratch file is complete."""
        rows = Rows.join(self._tables)
        if not self.folder:
            return rows
        self._write_run()
        assert self._file is not None
        self._file.write(END_OF_STREAM)
        self._file.close()
        self._file = None
        batch, row = (np.concatenate(places) for places in zip(*self._places, strict=True))
        return replace(rows, records=Records(batch, row, np.array(self._batches, BATCH)))

    def drop(self) -> None:
        """Discard the rows and remove the scratch file."""
        self._run, self._run_bytes = [], 0
        if self._file is not None:
            self._file.close()
            self._file = None
        if self.folder:
            # if it cannot be removed, it is left to the sweep
            with contextlib.suppress(OSError), Directories(self.folder).opened(()) as opened:
                active().unlink(opened, self.name)

    def _write_run(self) -> None:
        """Write the run as IPC messages, in the order of the layout, and record where its rows are."""
        self._broken = True
        schema = spool_schema(self.schema)
        if self._file is None:
            self._file = ScratchFile(self.folder, self.name)
            self._file.write(memoryview(schema.serialize()))
        run, self._run, self._run_bytes = joined_batch(self._run, schema), [], 0
        order = self._order(run.num_rows)
        self._written = len(self._tables)
        number, row = (np.empty(run.num_rows, np.int32) for _ in range(2))
        for start, stop in self._row_spans(run.nbytes, run.num_rows):
            places = order[start:stop]
            piece = run.slice(start, stop - start) if self.seed is None else run.take(index_array(places))
            message = memoryview(piece.serialize())
            number[places], row[places] = len(self._batches), np.arange(stop - start)
            self._batches.append((0, self._file.size, len(message), xxhash.xxh3_64_intdigest(message)))
            self._file.write(message)
        self._places.append((number, row))
        self._broken = False

    def _row_spans(self, size: int, rows: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of rows of about `batch_bytes`."""
        step = max(1, min(_MAX_BATCH_ROWS, rows * self.batch_bytes // max(1, size)))
        for start in range(0, rows, step):
            yield start, min(rows, start + step)

    def _order(self, count: int) -> NDArray[np.int64]:
        """Return the rows of the run in the order of writing."""
        if self.seed is None or not count:
            return np.arange(count)
        identity = np.concatenate([table.identity for table in self._tables[self._written :]])
        return np.argsort(order_keys(identity, self.seed), kind="stable")


class ScratchFile:
    """A scratch file being written."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder = folder
        self.name = name
        self.size = 0
        doing = f"create scratch file {folder}/{name}"
        with explained(doing, writing=True), Directories(folder).opened(()) as opened:
            self._file = active().create_file(opened, name)
        # the lock shows the sweep of a store's tmp/ that the writer is alive
        with contextlib.suppress(OSError):
            active().try_lock(self._file)

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        with explained(f"write scratch file {self.folder}/{self.name}", writing=True):
            write_all(self._file, memoryview(data).cast("B"))
        self.size += len(data)

    def close(self) -> None:
        active().close(self._file)


def scratch_folder(repository: Repository, scratch: str | os.PathLike[str] | None) -> str:
    """Return the folder for the scratch files of a build."""
    if scratch is not None:
        folder = os.fspath(scratch)
        if not os.path.isdir(folder):
            raise UsageError(f"scratch directory {folder} does not exist; make it, or name another")
        return folder
    store = repository.store
    folder = os.path.join(store.url, FOLDER) if isinstance(store, LocalStore) else private_folder(store.url)
    with explained(f"make {folder}", writing=True):
        os.makedirs(folder, exist_ok=True)
    return folder


# ---- Reading


class Parts(Protocol):
    """The records of spools, by the number of the spool."""

    def read_into(self, number: int, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from a part; beyond the end of the part, it is filled with zeros."""

    def close(self) -> None:
        """Close open files."""


class PartFiles:
    """Scratch files, opened at the first read; at most `_MAX_OPEN` are open at a time."""

    def __init__(self, folder: str, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = names
        self._open: OrderedDict[int, Handle] = OrderedDict()

    def read_into(self, number: int, offset: int, buffer: memoryview) -> None:
        with explained(f"read scratch file {self._folder}/{self._names[number]}"):
            file = self._file(number)
            while len(buffer):
                size = active().read_into(file, buffer, offset)
                if not size:
                    buffer[:] = bytes(len(buffer))
                    return
                buffer, offset = buffer[size:], offset + size

    def _file(self, number: int) -> Handle:
        file = self._open.pop(number, None)
        if file is None:
            with Directories(self._folder).opened(()) as folder:
                file = active().open_file(folder, self._names[number])
        self._open[number] = file
        if len(self._open) > _MAX_OPEN:
            active().close(self._open.popitem(last=False)[1])
        return file

    def close(self) -> None:
        while self._open:
            active().close(self._open.popitem()[1])


def pack_record(data: bytes) -> bytes:
    """Return the stored form of a record of finished work: its XXH3-64, then its content."""
    return xxhash.xxh3_64_digest(data) + data


def unpack_record(stored: bytes) -> bytes | None:
    """Return the content of a stored record, or None if it is damaged."""
    data = stored[_CHECK_BYTES:]
    return data if stored[:_CHECK_BYTES] == xxhash.xxh3_64_digest(data) else None


class ScratchFolder:
    """A folder of scratch files, and of records of finished work; "" stores nothing.

    A record appears by rename once it is complete.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def new_part(self, kind: str) -> str:
        """Return an unused name for a scratch file, or "" if nothing is stored."""
        return f"{kind}-{os.getpid()}-{secrets.token_hex(8)}" if self.path else ""

    def keep(self, part: str) -> int:
        """Take over a complete scratch file and return its size in bytes."""
        return os.stat(f"{self.path}/{part}").st_size if part else 0

    def size_of(self, name: str) -> int | None:
        """Return the size of a file, or None if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(f"{self.path}/{name}").st_size
        return None

    def parts(self, names: Sequence[str]) -> PartFiles:
        """Return scratch files, numbered in the order of `names`."""
        return PartFiles(self.path, names)

    def put_record(self, name: str, data: bytes, *, is_durable: bool = False) -> None:
        """Publish a record atomically; if `is_durable`, the folder's earlier entries become durable first."""
        temporary = f"{name}.{os.getpid()}-{secrets.token_hex(4)}.new"
        with self.opened(f"write {self.path}/{name}", writing=True) as folder:
            try:
                file = active().create_file(folder, temporary)
                try:
                    write_all(file, pack_record(data))
                    if is_durable:
                        active().fsync(file)
                finally:
                    active().close(file)
                if is_durable:
                    active().fsync_directory(folder)
                active().rename(folder, temporary, folder, name)
            except OSError:
                with contextlib.suppress(OSError):
                    active().unlink(folder, temporary)
                raise
            if is_durable:
                active().fsync_directory(folder)

    def read(self, name: str) -> bytes | None:
        """Return the content of a record, or None if it does not exist or is damaged."""
        with self.opened(f"read {self.path}/{name}") as folder, contextlib.suppress(FileNotFoundError):
            file = active().open_file(folder, name)
            try:
                return unpack_record(read_exactly(file, 0, active().stat_open(file).st_size))
            finally:
                active().close(file)
        return None

    def names(self) -> list[str]:
        """Return the names of all files in the folder."""
        with self.opened(f"read {self.path}") as folder:
            return [name for name, _ in active().names(folder)]

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with (
            self.opened(f"write {self.path}", writing=True) as folder,
            contextlib.suppress(FileNotFoundError),
        ):
            active().unlink(folder, name)

    @contextlib.contextmanager
    def opened(self, doing: str, *, writing: bool = False) -> Iterator[Handle]:
        """Open the folder; errors say what `doing` was."""
        with explained(doing, writing=writing), Directories(self.path).opened(()) as folder:
            yield folder


class ScratchReader:
    """Reads the records of many rows into one reused buffer; not thread-safe."""

    def __init__(self, parts: Parts, schema: Schema) -> None:
        self._parts = parts
        self._schema = schema.stored
        self._arrow = spool_schema(schema)
        self._buffer = np.empty(0, np.uint8)

    def read(self, records: Records, ordinal: NDArray[np.int64]) -> SpooledRows:
        """Return records in the given order; this overwrites the result of the previous call."""
        used, batch = np.unique(records.batch, return_inverse=True)
        batches = records.batches[used]
        held = [
            pa.ipc.read_record_batch(pa.py_buffer(message), self._arrow)
            for message in self._messages(batches, records, ordinal)
        ]
        first = np.cumsum([0, *(len(one) for one in held)])
        places = (first[batch] + records.row).astype(np.int64, copy=False)
        return SpooledRows(self._schema, joined_batch(held, self._arrow), places, ordinal)

    def _messages(
        self, batches: NDArray[np.void], records: Records, ordinal: NDArray[np.int64]
    ) -> list[memoryview]:
        total = int(batches["length"].sum())
        if len(self._buffer) < total:
            self._buffer = np.empty(0, np.uint8)  # frees the old buffer before the new one is allocated
            self._buffer = np.empty(total, np.uint8)
        view = self._buffer.data
        stops = np.cumsum(batches["length"])
        starts = stops - batches["length"]
        for first, last in _neighbours(batches):
            span = slice(int(starts[first]), int(stops[last - 1]))
            self._parts.read_into(int(batches["part"][first]), int(batches["offset"][first]), view[span])
        messages = [view[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        for place, (message, check) in enumerate(zip(messages, batches["check"].tolist(), strict=True)):
            if xxhash.xxh3_64_intdigest(message) != check:
                used = np.unique(records.batch)
                row = int(ordinal[np.flatnonzero(records.batch == used[place])[0]])
                raise IntegrityError(
                    f"scratch record of row {row} changed between being written and being read; the scratch disk or "
                    "memory is faulty: use another --scratch, then run it again"
                )
        return messages


def _neighbours(batches: NDArray[np.void]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of adjacent batches, to read at once; batches are sorted by part and offset."""
    ends = batches["offset"] + batches["length"]
    apart = (batches["part"][1:] != batches["part"][:-1]) | (batches["offset"][1:] != ends[:-1])
    borders = [0, *(np.flatnonzero(apart) + 1).tolist(), len(batches)]
    yield from (pair for pair in itertools.pairwise(borders) if pair[0] < pair[1])


class SpooledRows:
    """Verified rows in memory, as they were spooled; their blocks are copies in the order of `ordinal`."""

    def __init__(
        self, schema: Schema, rows: Any, places: NDArray[np.int64], ordinal: NDArray[np.int64]
    ) -> None:
        self._schema = schema
        self._rows = rows  # a record batch
        self._places = places  # position of each row in it
        self._ordinal = ordinal

    def block(
        self,
        start: int,
        stop: int,
        stratum: NDArray[np.int32] | None = None,
        *,
        ends: Sequence[int] = (),
    ) -> RowBlock:
        """Return rows ``start`` … ``stop`` − 1 with the stratum of each, if given.

        `ends`, counted from `start`, are the ends of their blocks if there are several.
        """
        # Not all rows at once: touching memory for the first time costs more than a copy.
        rows = self._rows.take(index_array(self._places[start:stop]))
        keys, originals, sources, source_rows = rows.columns[len(self._schema) :]
        names = sources.dictionary_encode()
        return RowBlock(
            keys=_block_keys(keys, self._ordinal[start:stop].tolist()),
            columns=[payload_column(kind, rows.column(n)) for n, kind in enumerate(self._schema.values())],
            originals=[
                (place, text.decode("utf-8", "surrogatepass"))
                for place, text in enumerate(
                    originals.to_pylist() if originals.null_count < stop - start else []
                )
                if text is not None
            ],
            source_names=tuple(names.dictionary.to_pylist()),
            source_id=numbers_of(names.indices, -1).astype(np.int32),
            source_row=numbers_of(source_rows, 0),
            stratum=stratum,
            ends=ends,
        )


def _block_keys(keys: Any, ordinals: list[int]) -> list[str]:
    if keys.null_count == len(keys):
        return generated_keys(ordinals)
    return [
        generated_key(ordinal) if key is None else key
        for key, ordinal in zip(keys.to_pylist(), ordinals, strict=True)
    ]


def describe_row(rows: Rows, reader: ScratchReader | None, place: int, first_ordinal: int) -> str:
    """Describe a row by key and source, for messages; without a reader, by its position."""
    if reader is None:
        return f"row {place}"
    ordinal = first_ordinal + place
    held = reader.read(rows.records[place : place + 1], np.array([ordinal]))
    block = held.block(0, 1)
    name = f"sample {dict(block.originals).get(0, block.keys[0])!r}"
    if not block.source_names or block.source_row is None:
        return f"{name} (number {ordinal})"
    return f"{name} ({block.source_names[0]} row {block.source_row[0]})"
