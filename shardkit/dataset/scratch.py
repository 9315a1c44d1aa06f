"""Write scratch: encoded rows before they are written to shards, payloads in files and columns in memory.

A scratch file is an Arrow IPC stream of the stored columns. Rows are buffered and written in *runs*, each
sorted in the order that the layout will use, so that the rows of one shard are neighbours in every run: a
source of any size is read back in a few long ranges per run and shard, not with one seek per row.
Nothing here is synced: scratch is worthless after a power failure, and every record batch is verified when it
is read back (SPEC.md §3).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.encoding import index_array, joined_batch, spool_schema
from shardkit.dataset.layout import order_keys
from shardkit.dataset.rows import BATCH, Records, Rows
from shardkit.errors import StoreError, UsageError
from shardkit.formats import Schema
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import FOLDER, Directories, active, explained, write_all
from shardkit.stores.local import LocalStore, private_folder

RUN_BYTES = 64 * 2**20
"""Default and maximum size of a run of scratch in memory."""

MIN_RUN_BYTES = 8 * 2**20

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
        self._file.write(_END_OF_STREAM)
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


_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


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
