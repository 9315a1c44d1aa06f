"""Scratch: encoded rows before they are written to shards, payloads in files and columns in memory.

A scratch file is an Arrow IPC stream of the stored columns. Rows are buffered and written in *runs*, each
sorted in the order that the layout will use, so that the rows of one shard are neighbours in every run: a
source of any size is read back in a few long ranges per run and shard, not with one seek per row. A build
that fits into one run stays in memory. Nothing here is synced: scratch is worthless after a power failure,
and every record batch is verified when it is read back (SPEC.md §3).
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.encoding import (
    EncodedRow,
    EncodedRows,
    index_array,
    joined_batch,
    spool_schema,
)
from shardkit.dataset.layout import RowTable, order_keys
from shardkit.dataset.scratch_reading import (
    BATCH,
    NO_RECORDS,
    MemoryPart,
    PartFiles,
    Parts,
    Records,
    ScratchReader,
)
from shardkit.errors import StoreError, UsageError
from shardkit.formats import Schema, pack_columns, unpack_columns
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import FOLDER, Directories, active, explained, write_all
from shardkit.stores.local import LocalStore, private_folder

RUN_BYTES = 64 * 2**20
"""Default and maximum size of a run of scratch in memory."""

MIN_RUN_BYTES = 8 * 2**20

_RANGE_BYTES = 2**20
_MAX_BATCH_BYTES = 2**17
_MIN_BATCH_BYTES = 2**14
_FLUSH_ROWS, _FLUSH_BYTES = 4096, 2**20  # rows added singly become a record batch at these limits

_KIND = "scratch-rows"
_MARK = "mark_"
_COLUMNS = ("identity", "stratum", "raw_bytes", "strata", "split", "generated", "marks")
_BATCH = "batch_"
_OF_BATCH = ("offset", "length", "check")  # stored; a spool has one part


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows(RowTable):
    """One entry per row of one part in the order of adding, or of several parts concatenated."""

    strata: tuple[tuple[str, ...], ...]  # texts that `stratum` indexes; sorted after joining parts
    split: NDArray[np.uint64]  # hash that decides the split; zeros if the identity decides
    generated: NDArray[np.bool_]  # True if the key is generated from the ordinal
    records: Records  # zeros if rows are only counted
    marks: Mapping[str, NDArray[np.uint64]] = field(default_factory=dict)  # further columns for a build

    def take(self, places: NDArray[np.int64]) -> Rows:
        """Return the rows at these positions, renumbered; strata without rows are dropped."""
        present, stratum = np.unique(self.stratum[places], return_inverse=True)
        return Rows(
            identity=self.identity[places],
            stratum=stratum.astype(np.int32),
            raw_bytes=self.raw_bytes[places],
            strata=tuple(self.strata[number] for number in present.tolist()),
            split=self.split[places],
            generated=self.generated[places],
            records=self.records[places],
            marks={name: column[places] for name, column in self.marks.items()},
        )

    def to_bytes(self, meta: dict[str, object]) -> bytes:
        """Return the columns of a part as a container, together with `meta`."""
        columns = {
            "identity_high": self.identity[:, 0],
            "identity_low": self.identity[:, 1],
            **{name: getattr(self, name) for name in ("stratum", "raw_bytes", "split")},
            "generated": self.generated.view(np.uint8),
            **{name: getattr(self.records, name) for name in ("batch", "row")},
            **{_BATCH + name: self.records.batches[name] for name in _OF_BATCH},
            **{_MARK + name: column for name, column in self.marks.items()},
        }
        strata = [list(values) for values in self.strata]
        return pack_columns(_KIND, {"strata": strata, "part": meta}, columns, compress=False)

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[Rows, dict[str, object]]:
        """Return the arguments of `to_bytes`."""
        columns = unpack_columns(data, _KIND)
        arrays = columns.arrays
        batches = np.zeros(len(arrays[_BATCH + _OF_BATCH[0]]), BATCH)
        for name in _OF_BATCH:
            batches[name] = arrays[_BATCH + name]
        rows = cls(
            identity=np.stack([arrays["identity_high"], arrays["identity_low"]], axis=1),
            stratum=arrays["stratum"],
            raw_bytes=arrays["raw_bytes"],
            strata=tuple(tuple(values) for values in columns.meta["strata"]),
            split=arrays["split"],
            generated=arrays["generated"].view(np.bool_),
            records=Records(arrays["batch"], arrays["row"], batches),
            marks={n.removeprefix(_MARK): column for n, column in arrays.items() if n.startswith(_MARK)},
        )
        return rows, columns.meta["part"]


@dataclass(frozen=True, slots=True, eq=False)
class ShardRows:
    """Content of one shard; arrays have one entry per row, in row order."""

    number: int  # number of the shard among the new shards
    ordinal: NDArray[np.int64]
    records: Records
    stratum: NDArray[np.int32] | None  # own stratum of each row if the shard has pooled rows
    segment_stratum: NDArray[np.int32]  # numbers in `Rows`, one per segment, in row order
    segment_rows: NDArray[np.int64]
    block_rows: int  # rows per block
    row_bytes: NDArray[np.int64]  # size of each row in the shard, before compression

    @property
    def raw_bytes(self) -> int:
        """Size of all rows in bytes."""
        return int(self.row_bytes.sum())

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal only for shards with the same rows, segments and block size."""
        digest = xxhash.xxh3_128(f"{self.number} {self.block_rows}".encode())
        for column in (self.ordinal, *self.records.identity, self.segment_stratum, self.segment_rows):
            digest.update(np.ascontiguousarray(column).data)
        if self.stratum is not None:
            digest.update(np.ascontiguousarray(self.stratum).data)
        return digest.hexdigest()

    def __str__(self) -> str:
        return f"shard {self.number} ({len(self.ordinal)} rows)"


def join_parts(parts: Sequence[Rows]) -> Rows:
    """Return the rows of parts, concatenated; equal strata of several parts become one."""
    strata = tuple(sorted({values for part in parts for values in part.strata}))
    number = {values: index for index, values in enumerate(strata)}

    def joined(arrays: Iterable[NDArray[Any]], dtype: type, *shape: int) -> NDArray[Any]:
        return np.concatenate([*arrays, np.zeros((0, *shape), dtype)]).astype(dtype, copy=False)

    numbers = [np.array([number[values] for values in part.strata], np.int32) for part in parts]
    stratum = (of[part.stratum] for of, part in zip(numbers, parts, strict=True) if len(part))
    return Rows(
        identity=joined((part.identity for part in parts), np.uint64, 2),
        stratum=joined(stratum, np.int32),
        raw_bytes=joined((part.raw_bytes for part in parts), np.int64),
        strata=strata,
        split=joined((part.split for part in parts), np.uint64),
        generated=joined((part.generated for part in parts), np.bool_),
        records=Records.join([part.records for part in parts]),
        marks={
            name: np.concatenate([part.marks[name] for part in parts])
            for name in (parts[0].marks if parts else ())
        },
    )


def describe_row(rows: Rows, reader: ScratchReader | None, place: int, first_ordinal: int) -> str:
    """Describe a row by key and source, for messages; without a reader, by its position."""
    if reader is None:
        return f"row {place}"
    ordinal = first_ordinal + place
    held = reader.read(rows.records[place : place + 1], np.array([ordinal]))
    block = held.block(0, 1, payloads=False)
    name = f"sample {dict(block.originals).get(0, block.keys[0])!r}"
    if not block.source_names or block.source_row is None:
        return f"{name} (number {ordinal})"
    return f"{name} ({block.source_names[0]} row {block.source_row[0]})"


# ---- Writing rows to scratch


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
    """Collects encoded rows, keeps their columns, and writes their payloads in sorted runs of record batches.

    Not thread-safe: the caller locks.
    """

    folder: str  # folder of the scratch file if memory does not suffice; "": only count rows
    name: str  # name of the scratch file
    schema: Schema  # schema of the dataset
    _: KW_ONLY
    seed: int | None  # seed of the shuffle, None to keep the order of adding
    run_bytes: int | None = None  # bytes in memory before a run is written; None: `RUN_BYTES`
    batch_bytes: int = _MAX_BATCH_BYTES  # bytes of a record batch; a shard reads whole batches
    always_file: bool = False  # write even a single run to the file
    marks: Sequence[str] = ()  # names of additional uint64 columns

    def __post_init__(self) -> None:
        self._arrow = spool_schema(self.schema)
        self._tables: list[Rows] = []  # columns of the rows in `_run` and before
        self._count = 0  # rows in all tables
        self._written = 0  # number of tables whose rows are in written runs
        self._rows: list[EncodedRow] = []
        self._identities = array("Q")  # (high, low) of each of `_rows`
        self._rows_bytes = 0
        self._run: list[Any] = []  # record batches
        self._run_bytes = 0
        self._batches: list[tuple[int, int, int, int]] = []  # part, offset, length, check; see `BATCH`
        self._places: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []  # batch and row, run by run
        self._broken = False
        self._file: ScratchFile | None = None
        self._part: Parts | None = None

    def __len__(self) -> int:
        return self._count + len(self._rows)

    def append(self, row: EncodedRow, identity: tuple[int, int]) -> None:
        """Add a row; ``identity`` is used if `EncodedRow.identity` is None."""
        size = sum(map(len, row.payloads))
        self._make_room(size)
        self._rows.append(row)
        self._identities.extend(identity)
        self._rows_bytes += size

    def append_rows(self, rows: EncodedRows) -> None:
        """Add rows that were encoded together."""
        self._flush_rows()
        batch = rows.spool_batch(self.schema, self._arrow) if self.folder else None
        self._make_room(batch.nbytes if batch is not None else 0)
        self._add(rows, batch)

    def _add(self, rows: EncodedRows, batch: Any) -> None:
        columns = {name: getattr(rows, name) for name in _COLUMNS}
        self._tables.append(Rows(**columns, records=NO_RECORDS))
        self._count += len(rows)
        if batch is not None:
            self._run.append(batch)
            self._run_bytes += batch.nbytes

    def finish(self) -> tuple[Rows, Parts | None]:
        """Return the columns, and the part with the records, or None if rows were only counted."""
        if self.folder:
            pieces = self._run_messages()
            if self.always_file or self._file is not None:
                self._write(pieces)
                assert self._file is not None
                self._file.write(_END_OF_STREAM)
                self._file.close()
                self._file = None
                self._part = PartFiles(self.folder, [self.name])
            else:
                self._part = MemoryPart(b"".join(pieces))
        else:
            self._flush_rows()
            self._places.append((np.zeros(len(self), np.int32), np.zeros(len(self), np.int32)))
        batch, row = (np.concatenate(places) for places in zip(*self._places, strict=True))
        rows = join_parts(self._tables)
        records = Records(batch, row, np.array(self._batches, BATCH))
        marks = rows.marks or {name: np.zeros(0, np.uint64) for name in self.marks}
        return replace(rows, records=records, marks=marks), self._part

    def drop(self) -> None:
        """Discard the rows and remove the scratch file."""
        self._rows, self._run, self._run_bytes, self._rows_bytes = [], [], 0, 0
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._part is not None:
            self._part.close()
            self._part = None
        if self.folder:
            # if it cannot be removed, it is left to the sweep
            with contextlib.suppress(OSError), Directories(self.folder).opened(()) as opened:
                active().unlink(opened, self.name)

    def _make_room(self, size: int) -> None:
        """Write the run if ``size`` more bytes would not fit into it."""
        if self._broken:
            raise StoreError(
                f"scratch file {self.folder}/{self.name}: an earlier write failed, so rows are missing; start again"
            )
        if self._rows and (self._rows_bytes + size > _FLUSH_BYTES or len(self._rows) >= _FLUSH_ROWS):
            self._flush_rows()
        held = self._run_bytes + self._rows_bytes
        if self.folder and held and held + size > (RUN_BYTES if self.run_bytes is None else self.run_bytes):
            self._write(self._run_messages())

    def _flush_rows(self) -> None:
        """Turn the rows that were added singly into a record batch."""
        if self._rows:
            identity = np.array(self._identities, np.uint64).reshape(-1, 2)
            rows = EncodedRows.of(self._rows, identity)
            self._rows, self._identities, self._rows_bytes = [], array("Q"), 0
            self._add(rows, rows.spool_batch(self.schema, self._arrow) if self.folder else None)

    def _write(self, messages: Iterable[bytes | memoryview]) -> None:
        self._broken = True
        if self._file is None:
            self._file = ScratchFile(self.folder, self.name)
        for message in messages:
            self._file.write(message)
        self._broken = False

    def _run_messages(self) -> Iterator[bytes | memoryview]:
        """Yield the run as IPC messages, in the order of the layout, and record where its rows are."""
        offset = 0 if self._file is None else self._file.size
        if not offset:
            head = self._arrow.serialize()
            offset += len(head)
            yield memoryview(head)
        self._flush_rows()
        run, self._run, self._run_bytes = joined_batch(self._run, self._arrow), [], 0
        order = self._order(run.num_rows)
        self._written = len(self._tables)
        number, row = (np.empty(run.num_rows, np.int32) for _ in range(2))
        for start, stop in self._row_spans(run.nbytes, run.num_rows):
            piece = (
                run.slice(start, stop - start)
                if self.seed is None
                else run.take(index_array(order[start:stop]))
            )
            message = memoryview(piece.serialize())
            places = order[start:stop]
            number[places], row[places] = len(self._batches), np.arange(stop - start)
            self._batches.append((0, offset, len(message), xxhash.xxh3_64_intdigest(message)))
            offset += len(message)
            yield message
        self._places.append((number, row))

    def _row_spans(self, size: int, rows: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of rows of about `batch_bytes`."""
        step = max(1, min(_FLUSH_ROWS, rows * self.batch_bytes // max(1, size)))
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
