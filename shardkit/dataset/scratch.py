"""Encoded rows between being added and being written to shards: payloads in scratch files, columns in memory.

A scratch file is an Arrow IPC stream of the stored columns. Rows are buffered and written in *runs*, each sorted by the
order that the layout will use, so that the rows of one shard are neighbours in every run: a source of any size is read
back in a few long ranges per run and shard, not one seek per row. A build that fits into one run stays in memory.
Nothing here is synced to disk: scratch is worth nothing after a power cut, and every record batch is verified when it
is read back (SPEC.md §3). The columns of parts are joined, and handed out by shard.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.arrow_columns import (
    index_array,
    optional_rows,
    origin_arrays,
    spool_array,
    spool_schema,
)
from shardkit.dataset.encoding import EncodedRow, EncodedRows
from shardkit.dataset.layout import RowTable, order_keys
from shardkit.dataset.scratch_reading import (
    Batches,
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
"""Bytes of a run of scratch that is held in memory, at most and by default."""

MIN_RUN_BYTES = 8 * 2**20

_RANGE_BYTES = 2**20
_MAX_BATCH_BYTES = 2**17
_MIN_BATCH_BYTES = 2**14
_FLUSH_ROWS, _FLUSH_BYTES = 4096, 2**20  # added one by one, before they become a record batch

_KIND = "scratch-rows"
_MARK = "mark_"
_BATCH = "batch_"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows(RowTable):
    """One entry per row: of a part in the order of adding, or of all parts, one behind the other."""

    strata: tuple[tuple[str, ...], ...]  # texts that `stratum` indexes; sorted where parts are joined
    split: NDArray[np.uint64]  # the hash that decides the split; zeros where the identity does
    generated: NDArray[np.bool_]  # whether the key is made from the ordinal
    records: Records  # zeros where rows are counted only
    marks: Mapping[str, NDArray[np.uint64]] = field(default_factory=dict)  # what else a build wants to know

    def take(self, places: NDArray[np.int64]) -> Rows:
        """Some of the rows, whose places are their ordinals then; strata without rows go."""
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
        """The columns of a part as a container, with something to remember them by."""
        columns = {
            "identity_high": self.identity[:, 0],
            "identity_low": self.identity[:, 1],
            **{name: getattr(self, name) for name in ("stratum", "raw_bytes", "split")},
            "generated": self.generated.view(np.uint8),
            **{name: getattr(self.records, name) for name in ("batch", "row")},
            **{_BATCH + name: getattr(self.records.batches, name) for name in ("offset", "length", "check")},
            **{_MARK + name: column for name, column in self.marks.items()},
        }
        strata = [list(values) for values in self.strata]
        return pack_columns(_KIND, {"strata": strata, "part": meta}, columns, compress=False)

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[Rows, dict[str, object]]:
        """What `to_bytes` was given."""
        columns = unpack_columns(data, _KIND)
        arrays = columns.arrays
        rows = cls(
            identity=np.stack([arrays["identity_high"], arrays["identity_low"]], axis=1),
            stratum=arrays["stratum"],
            raw_bytes=arrays["raw_bytes"],
            strata=tuple(tuple(values) for values in columns.meta["strata"]),
            split=arrays["split"],
            generated=arrays["generated"].view(np.bool_),
            records=Records(
                arrays["batch"],
                arrays["row"],
                Batches.of_part(*(arrays[_BATCH + name] for name in ("offset", "length", "check"))),
            ),
            marks={n.removeprefix(_MARK): column for n, column in arrays.items() if n.startswith(_MARK)},
        )
        return rows, columns.meta["part"]


@dataclass(frozen=True, slots=True, eq=False)
class ShardRows:
    """What one shard is to hold; arrays have one entry per row, in row order."""

    number: int  # of the shard in the manifest
    ordinal: NDArray[np.int64]
    records: Records
    stratum: NDArray[np.int32] | None  # number of each row's own stratum where the shard has pooled rows
    segment_stratum: NDArray[np.int32]  # numbers in `Rows`, one per segment, in row order
    segment_rows: NDArray[np.int64]
    block_rows: int  # rows per block
    row_bytes: NDArray[np.int64]  # of each row in the shard, before compression

    @property
    def raw_bytes(self) -> int:
        """Bytes of all rows."""
        return int(self.row_bytes.sum())

    def fingerprint(self) -> str:
        """32 hex digits that are equal only where the shard holds the same rows in the same way."""
        digest = xxhash.xxh3_128(f"{self.number} {self.block_rows}".encode())
        for column in (self.ordinal, *self.records.identity, self.segment_stratum, self.segment_rows):
            digest.update(np.ascontiguousarray(column).data)
        if self.stratum is not None:
            digest.update(np.ascontiguousarray(self.stratum).data)
        return digest.hexdigest()

    def __str__(self) -> str:
        return f"shard {self.number} ({len(self.ordinal)} rows)"


def join_parts(parts: Sequence[Rows]) -> Rows:
    """The rows of parts, one behind the other; strata that several parts have are one."""
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
    """A row by key and source, for messages; of rows that were counted only, by its place."""
    if reader is None:
        return f"row {place}"
    ordinal = first_ordinal + place
    held = reader.read(rows.records[place : place + 1], np.array([ordinal]))
    block = held.block(0, 1, payloads=False)
    name = f"sample {dict(block.originals).get(0, block.keys[0])!r}"
    if not block.source_names or block.source_row is None:
        return f"{name} (number {ordinal})"
    return f"{name} ({block.source_names[0]} row {block.source_row[0]})"


# ---- Rows on their way to scratch


def sized_run(source_bytes: int, shard_size: int) -> int:
    """Bytes of a run that is as short as memory is dear, and long enough: of it a shard is read in one MiB and more.

    Memory that is touched for the first time costs more than a copy, and a short run stays in the processor's cache.
    """
    shards = -(-source_bytes // max(1, shard_size))
    return min(RUN_BYTES, max(MIN_RUN_BYTES, shards * _RANGE_BYTES))


def sized_batch(run_bytes: int, source_bytes: int, shard_size: int) -> int:
    """Bytes of a record batch: a shard reads whole ones, so that they are small if it takes little of each run."""
    shards = -(-source_bytes // max(1, shard_size))
    return min(_MAX_BATCH_BYTES, max(_MIN_BATCH_BYTES, run_bytes // max(1, 4 * shards)))


@dataclass(eq=False)
class RowSpool:
    """Takes encoded rows, keeps their columns, and writes their payloads in sorted runs of record batches.

    Not safe for threads: the caller locks.
    """

    folder: str  # where the scratch file is made when memory does not suffice; "": count only, keep nothing
    name: str  # of the scratch file
    schema: Schema  # of the dataset
    _: KW_ONLY
    seed: int | None  # of the shuffle, None where rows keep the order of adding
    run_bytes: int | None = None  # held in memory before a run is written; None: `RUN_BYTES`
    batch_bytes: int = _MAX_BATCH_BYTES  # of a record batch: a shard reads whole ones
    always_file: bool = False  # write even a single run to the file
    marks: Sequence[str] = ()  # names of further numbers that come with every row

    def __post_init__(self) -> None:
        self._arrow = spool_schema(self.schema)
        self._strata: dict[tuple[str, ...], int] = {}
        self._columns = {
            **{name: array("Q") for name in ("identity_high", "identity_low", "split")},
            "raw_bytes": array("q"),
            **{name: array("i") for name in ("stratum", "batch", "row")},
            "generated": array("B"),
        }
        self._marks = {name: array("Q") for name in self.marks}
        self._rows: list[EncodedRow] = []
        self._rows_bytes = 0
        self._run: list[Any] = []  # record batches
        self._run_bytes = 0
        self._batches = (array("q"), array("q"), array("Q"))  # offset, length, check
        self._broken = False
        self._file: ScratchFile | None = None
        self._part: Parts | None = None

    def __len__(self) -> int:
        return len(self._columns["stratum"])

    def append(self, row: EncodedRow, identity: tuple[int, int], marks: Sequence[int] = ()) -> None:
        """Take a row; ``identity`` replaces `EncodedRow.identity` if that is None."""
        size = sum(map(len, row.payloads))
        if self.folder:
            self._make_room(size)
            self._rows.append(row)
            self._rows_bytes += size
        columns = self._columns
        columns["identity_high"].append(identity[0])
        columns["identity_low"].append(identity[1])
        columns["split"].append(row.split or 0)
        columns["raw_bytes"].append(row.raw_bytes)
        columns["stratum"].append(self._strata.setdefault(row.stratum, len(self._strata)))
        columns["generated"].append(row.key is None)
        for column, mark in zip(self._marks.values(), marks, strict=True):
            column.append(mark)

    def append_rows(self, rows: EncodedRows) -> None:
        """Take rows that were encoded together."""
        if self.folder:
            self._flush_rows()
            batch = pa.RecordBatch.from_arrays(
                [
                    *(
                        spool_array(kind, column, name)
                        for (name, kind), column in zip(self.schema.stored.items(), rows.columns, strict=True)
                    ),
                    *rows.origin_arrays(),
                ],
                schema=self._arrow,
            )
            self._make_room(batch.nbytes)
            self._run.append(batch)
            self._run_bytes += batch.nbytes
        numbers = [self._strata.setdefault(values, len(self._strata)) for values in rows.strata]
        for name, values in (
            ("identity_high", rows.identity[:, 0]),
            ("identity_low", rows.identity[:, 1]),
            ("split", rows.split),
            ("raw_bytes", rows.raw_bytes),
            ("stratum", np.array(numbers, np.int32)[rows.stratum]),
            ("generated", rows.generated.astype(np.uint8)),
        ):
            self._columns[name].frombytes(values.tobytes())
        for name, column in self._marks.items():
            column.frombytes(rows.marks[name].tobytes())

    def finish(self) -> tuple[Rows, Parts | None]:
        """Return the columns, and where the records are; None if nothing was kept."""
        if self.folder:
            pieces = self._run_messages(0 if self._file is None else self._file.size)
            if self.always_file or self._file is not None:
                self._write(pieces)
                assert self._file is not None
                self._file.write(_END_OF_STREAM)
                self._file.close()
                self._file = None
                self._part = PartFiles(self.folder, [self.name])
            else:
                self._part = MemoryPart(b"".join(pieces))
        return self.columns(), self._part

    def columns(self) -> Rows:
        """Return the columns as they are now."""
        dtypes: dict[str, type] = {"Q": np.uint64, "q": np.int64, "i": np.int32, "B": np.bool_}
        found: dict[str, NDArray[Any]] = {
            name: np.array(column, dtypes[column.typecode]) for name, column in self._columns.items()
        }
        if not self.folder:  # counted only
            found |= {name: np.zeros(len(self), np.int32) for name in ("batch", "row")}
        offset, length, check = self._batches
        batches = Batches.of_part(
            np.array(offset, np.int64), np.array(length, np.int64), np.array(check, np.uint64)
        )
        return Rows(
            identity=np.stack([found["identity_high"], found["identity_low"]], axis=1),
            strata=tuple(self._strata),
            records=Records(found["batch"], found["row"], batches),
            marks={name: np.array(column, np.uint64) for name, column in self._marks.items()},
            **{name: found[name] for name in ("stratum", "raw_bytes", "split", "generated")},
        )

    def drop(self) -> None:
        """Forget the rows and remove the scratch file."""
        self._rows, self._run, self._run_bytes, self._rows_bytes = [], [], 0, 0
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._part is not None:
            self._part.close()
            self._part = None
        if self.folder:
            remove_scratch(self.folder, self.name)

    def _make_room(self, size: int) -> None:
        """Write the run if ``size`` more bytes would not fit into it."""
        if self._broken:
            raise StoreError(
                f"scratch file {self.folder}/{self.name}: an earlier write failed, so rows are missing; start again"
            )
        if self._rows and (self._rows_bytes + size > _FLUSH_BYTES or len(self._rows) >= _FLUSH_ROWS):
            self._flush_rows()
        held = self._run_bytes + self._rows_bytes
        if held and held + size > (RUN_BYTES if self.run_bytes is None else self.run_bytes):
            self._write(self._run_messages(0 if self._file is None else self._file.size))

    def _flush_rows(self) -> None:
        """Make a record batch of the rows that were added one by one."""
        if self._rows:
            rows, self._rows, self._rows_bytes = self._rows, [], 0
            batch = _batch_of(rows, self.schema, self._arrow)
            self._run.append(batch)
            self._run_bytes += batch.nbytes

    def _write(self, messages: Iterable[bytes | memoryview]) -> None:
        self._broken = True
        if self._file is None:
            self._file = ScratchFile(self.folder, self.name)
        for message in messages:
            self._file.write(message)
        self._broken = False

    def _run_messages(self, offset: int) -> Iterator[bytes | memoryview]:
        """Yield the run as messages of an IPC stream, in the order of the layout, and note where its rows are."""
        if not offset:
            head = self._arrow.serialize()
            offset += len(head)
            yield memoryview(head)
        self._flush_rows()
        run, self._run, self._run_bytes = pa.Table.from_batches(self._run, self._arrow), [], 0
        run = run.combine_chunks()
        order = self._order(run.num_rows)
        number, row = (np.empty(run.num_rows, np.int32) for _ in range(2))
        for start, stop in self._cut(run.nbytes, run.num_rows):
            piece = (
                run.slice(start, stop - start)
                if self.seed is None
                else run.take(index_array(order[start:stop]))
            )
            message = memoryview(piece.combine_chunks().to_batches()[0].serialize())
            places = order[start:stop]
            number[places], row[places] = len(self._batches[0]), np.arange(stop - start)
            for column, value in zip(
                self._batches, (offset, len(message), xxhash.xxh3_64_intdigest(message)), strict=True
            ):
                column.append(value)
            offset += len(message)
            yield message
        self._columns["batch"].frombytes(number.tobytes())
        self._columns["row"].frombytes(row.tobytes())

    def _cut(self, size: int, rows: int) -> Iterator[tuple[int, int]]:
        """Yield runs of rows of about `batch_bytes`."""
        step = max(1, min(_FLUSH_ROWS, rows * self.batch_bytes // max(1, size)))
        for start in range(0, rows, step):
            yield start, min(rows, start + step)

    def _order(self, count: int) -> NDArray[np.int64]:
        """Return the rows of the run in the order of writing."""
        if self.seed is None or not count:
            return np.arange(count)
        start = len(self._columns["batch"])  # rows before the run
        high = np.frombuffer(self._columns["identity_high"], dtype=np.uint64)[start : start + count]
        low = np.frombuffer(self._columns["identity_low"], dtype=np.uint64)[start : start + count]
        return np.argsort(order_keys(np.stack([high, low], axis=1), self.seed), kind="stable")


_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def _batch_of(rows: Sequence[EncodedRow], schema: Schema, arrow: Any) -> Any:
    """Return a record batch of rows that were encoded one by one."""
    columns = [
        spool_array(kind, [row.payloads[place] for row in rows], name)
        for place, (name, kind) in enumerate(schema.stored.items())
    ]
    sources = [row.source or (None, None) for row in rows]
    origin = origin_arrays(
        [row.key for row in rows],
        [row.original_key for row in rows],
        [name for name, _ in sources],
        optional_rows([row for _, row in sources]),
    )
    return pa.RecordBatch.from_arrays(
        [*columns, *origin],
        schema=arrow,
    )


class ScratchFile:
    """A scratch file that is being written."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder = folder
        self.name = name
        self.size = 0
        doing = f"create scratch file {folder}/{name}"
        with explained(doing, writing=True), Directories(folder).opened(()) as opened:
            self._file = active().create_file(opened, name)
        with contextlib.suppress(OSError):  # tells the sweep of a store's tmp/ that we live
            active().try_lock(self._file)

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        with explained(f"write scratch file {self.folder}/{self.name}", writing=True):
            write_all(self._file, memoryview(data).cast("B"))
        self.size += len(data)

    def close(self) -> None:
        active().close(self._file)


def remove_scratch(folder: str, name: str) -> None:
    """Remove a scratch file if it is there; one that cannot be removed is left to the sweep."""
    with contextlib.suppress(OSError), Directories(folder).opened(()) as opened:
        active().unlink(opened, name)


def scratch_folder(repository: Repository, scratch: str | os.PathLike[str] | None) -> str:
    """Where scratch files of a build go."""
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
