"""Encoded rows between being added and being written to shards: payloads in scratch files, columns in memory.

Rows are buffered and written in *runs*, each sorted by the order that the layout will use, so that the rows
of one shard lie together in every run: a source of any size is read back in a few long ranges per run and
shard, not one seek per row. What is small enough stays in memory. Nothing here is synced to disk: scratch is
worth nothing after a power cut, and every record is verified when it is read back (SPEC.md §3). The columns of parts
are joined, and handed out by shard.
"""

from __future__ import annotations

import contextlib
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.encoding import EncodedRow, EncodedRows
from shardkit.dataset.layout import RowTable, order_keys
from shardkit.dataset.scratch_reading import (
    NO_ROW,
    MemoryPart,
    PartFiles,
    Parts,
    Records,
    ScratchReader,
    record_header,
)
from shardkit.errors import StoreError, UsageError
from shardkit.formats import pack_columns, unpack_columns
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import FOLDER, Directories, active, explained, write_all
from shardkit.stores.local import LocalStore, private_folder

RUN_BYTES = 64 * 2**20
"""Bytes of a run of scratch that is held in memory, at most and by default."""

MIN_RUN_BYTES = 8 * 2**20

_RANGE_BYTES = 2**20
_JOIN_BYTES = 4 * 2**20
_ROW_AT = struct.calcsize("<HII")  # of the row in the source, in a header

_KIND = "scratch-rows"
_MARK = "mark_"
_RECORDS = ("offset", "length", "check")


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
            **{name: getattr(self.records, name) for name in _RECORDS},
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
            records=Records.of_part(*(arrays[name] for name in _RECORDS)),
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
    raw_bytes: int  # of all rows

    def fingerprint(self) -> str:
        """32 hex digits that are equal only where the shard holds the same rows in the same way."""
        digest = xxhash.xxh3_128(f"{self.number} {self.block_rows}".encode())
        records = self.records
        for column in (self.ordinal, records.check, records.length, self.segment_stratum, self.segment_rows):
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
        records=Records(
            np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts]),
            joined((part.records.offset for part in parts), np.int64),
            joined((part.records.length for part in parts), np.int64),
            joined((part.records.check for part in parts), np.uint64),
        ),
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


class RunBuffer:
    """Memory for the records of a run; spools that follow one another share it, so that its pages are made once.

    Args:
        size: bytes; a record that is larger makes it grow.
    """

    def __init__(self, size: int = RUN_BYTES) -> None:
        self._size = max(1, size)
        self.data = np.empty(0, np.uint8)

    def reserve(self, size: int) -> None:
        """Room for ``size`` bytes and for a run."""
        if len(self.data) < max(size, self._size):
            self.data = np.empty(max(size, self._size), np.uint8)


@dataclass(eq=False)
class RowSpool:
    """Takes encoded rows, keeps their columns, and writes their records in sorted runs.

    Not safe for threads: the caller locks.
    """

    folder: str  # where the scratch file is made when memory does not suffice; "": count only, keep nothing
    name: str  # of the scratch file
    _: KW_ONLY
    seed: int | None  # of the shuffle, None where rows keep the order of adding
    run_bytes: int | None = None  # of records held in memory before a run is written; None: 64 MiB
    always_file: bool = False  # write even a single run to the file
    marks: Sequence[str] = ()  # names of further numbers that come with every row
    buffer: RunBuffer | None = (
        None  # that no other spool uses at the same time, instead of `run_bytes` of its own
    )

    def __post_init__(self) -> None:
        self._strata: dict[tuple[str, ...], int] = {}
        self._columns = {
            **{name: array("Q") for name in ("identity_high", "identity_low", "split", "check")},
            **{name: array("q") for name in ("raw_bytes", "offset", "length")},
            "stratum": array("i"),
            "generated": array("B"),
        }
        self._marks = {name: array("Q") for name in self.marks}
        self._buffer = self.buffer or RunBuffer(RUN_BYTES if self.run_bytes is None else self.run_bytes)
        self._view = self._buffer.data.data
        self._run_rows = 0
        self._run_size = 0
        self._broken = False
        self._file: ScratchFile | None = None
        self._part: Parts | None = None

    def __len__(self) -> int:
        return len(self._columns["stratum"])

    def append(self, row: EncodedRow, identity: tuple[int, int], marks: Sequence[int] = ()) -> None:
        """Take a row; ``identity`` stands in for `EncodedRow.identity` where that is None."""
        columns = self._columns
        if self.folder:
            self._put(*_pack_record(row))
        columns["identity_high"].append(identity[0])
        columns["identity_low"].append(identity[1])
        columns["split"].append(row.split or 0)
        columns["raw_bytes"].append(row.raw_bytes)
        columns["stratum"].append(self._strata.setdefault(row.stratum, len(self._strata)))
        columns["generated"].append(row.key is None)
        for column, mark in zip(self._marks.values(), marks, strict=True):
            column.append(mark)

    def append_rows(self, rows: EncodedRows) -> None:
        """Take rows that were encoded together; the same as taking one after the other."""
        if not self.folder:
            self._note(rows, 0, len(rows))
            return
        heads = _pack_heads(rows)
        size = heads.shape[1] + sum(column.shape[1] for column in rows.columns)
        start = 0
        while start < len(rows):
            self._make_room(size)
            stop = min(len(rows), start + (len(self._view) - self._run_size) // size)
            self._take(rows, heads, start, stop, size)
            self._note(rows, start, stop)
            start = stop

    def _put(self, head: bytes, payloads: Sequence[bytes]) -> None:
        """Copy a record into the run."""
        size = len(head) + sum(map(len, payloads))
        self._make_room(size)
        view, start = self._view, self._run_size
        at = start + len(head)
        view[start:at] = head
        for payload in payloads:
            end = at + len(payload)
            view[at:end] = payload
            at = end
        self._columns["check"].append(xxhash.xxh3_64_intdigest(view[start:at]))
        self._columns["length"].append(size)
        self._run_size = at
        self._run_rows += 1

    def _note(self, rows: EncodedRows, start: int, stop: int) -> None:
        """The columns of rows but for where their records are."""
        part = slice(start, stop)
        numbers = [self._strata.setdefault(values, len(self._strata)) for values in rows.strata]
        for name, values in (
            ("identity_high", rows.identity[part, 0]),
            ("identity_low", rows.identity[part, 1]),
            ("split", rows.split[part]),
            ("raw_bytes", np.full(stop - start, rows.raw_bytes, np.int64)),
            ("stratum", np.array(numbers, np.int32)[rows.stratum[part]]),
            ("generated", np.ones(stop - start, np.uint8)),
        ):
            self._columns[name].frombytes(values.tobytes())

    def _take(self, rows: EncodedRows, heads: NDArray[np.uint8], start: int, stop: int, size: int) -> None:
        """Copy records into the run, into which they fit; all of them are equally long."""
        first, last = self._run_size, self._run_size + (stop - start) * size
        records = self._buffer.data[first:last].reshape(-1, size)
        at = heads.shape[1]
        records[:, :at] = heads[start:stop]
        for column in rows.columns:
            records[:, at : at + column.shape[1]] = column[start:stop]
            at += column.shape[1]
        view, hashed = self._view, xxhash.xxh3_64_intdigest
        self._columns["check"].extend([hashed(view[at : at + size]) for at in range(first, last, size)])
        self._columns["length"].extend([size] * (stop - start))
        self._run_size = last
        self._run_rows += stop - start

    def finish(self) -> tuple[Rows, Parts | None]:
        """The columns and where the records are; None where nothing was kept."""
        if self.folder and (self.always_file or self._file is not None):
            self._write_run()
        elif self.folder:
            self._place_run(0, np.arange(self._run_rows))
            self._part = MemoryPart(self._view[: self._run_size])
        if self._file is not None:
            self._file.close()
            self._part = PartFiles(self.folder, [self.name])
            self._file = None
        return self.columns(), self._part

    def columns(self) -> Rows:
        """The columns as they stand."""
        dtypes: dict[str, type] = {"Q": np.uint64, "q": np.int64, "i": np.int32, "B": np.bool_}
        found: dict[str, NDArray[Any]] = {
            name: np.array(column, dtypes[column.typecode]) for name, column in self._columns.items()
        }
        if not self.folder:  # counted only
            found |= {name: np.zeros(len(self), found[name].dtype) for name in ("offset", "length", "check")}
        return Rows(
            identity=np.stack([found["identity_high"], found["identity_low"]], axis=1),
            strata=tuple(self._strata),
            records=Records.of_part(found["offset"], found["length"], found["check"]),
            marks={name: np.array(column, np.uint64) for name, column in self._marks.items()},
            **{name: found[name] for name in ("stratum", "raw_bytes", "split", "generated")},
        )

    def drop(self) -> None:
        """Forget the rows and remove the scratch file."""
        self._run_rows = self._run_size = 0
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._part is not None:
            self._part.close()
            self._part = None
        if self.folder:
            remove_scratch(self.folder, self.name)

    def _make_room(self, size: int) -> None:
        """Room for a record of ``size`` bytes; the run is written where there is none."""
        if self._broken:
            raise StoreError(
                f"scratch file {self.folder}/{self.name}: an earlier write failed, so rows are missing; start again"
            )
        if self._run_size + size <= len(self._view):
            return
        if self._run_rows:
            self._write_run()
        self._buffer.reserve(size)
        self._view = self._buffer.data.data

    def _order(self) -> NDArray[np.int64]:
        """The rows of the run in the order of writing."""
        count = self._run_rows
        if self.seed is None or not count:
            return np.arange(count)
        high = np.frombuffer(self._columns["identity_high"], dtype=np.uint64)[-count:]
        low = np.frombuffer(self._columns["identity_low"], dtype=np.uint64)[-count:]
        return np.argsort(order_keys(np.stack([high, low], axis=1), self.seed), kind="stable")

    def _place_run(self, start: int, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Note the offsets of the run's rows when they are written in this order; returns their lengths."""
        lengths = np.array(self._columns["length"][-len(order) :] if len(order) else [], dtype=np.int64)
        offsets = np.empty(len(order), dtype=np.int64)
        offsets[order] = start + np.cumsum(lengths[order]) - lengths[order]
        self._columns["offset"].frombytes(offsets.tobytes())
        return lengths

    def _write_run(self) -> None:
        self._broken = True
        if self._file is None:
            self._file = ScratchFile(self.folder, self.name)
        order = self._order()
        lengths = self._place_run(self._file.size, order)
        for piece in self._pieces(order, lengths):
            self._file.write(piece)
        self._run_rows = self._run_size = 0
        self._broken = False

    def _pieces(self, order: NDArray[np.int64], lengths: NDArray[np.int64]) -> Iterator[memoryview | bytes]:
        """The records in this order, some MiB at a time."""
        if self.seed is None:
            yield self._view[: self._run_size]
            return
        if len(lengths) and int(lengths.min()) == int(lengths.max()):  # into memory that is touched once
            records = self._buffer.data[: self._run_size].reshape(len(order), -1)
            step = max(1, _JOIN_BYTES // records.shape[1])
            joined = np.empty((min(step, len(order)), records.shape[1]), np.uint8)
            for start in range(0, len(order), step):
                rows = order[start : start + step]
                np.take(records, rows, axis=0, out=joined[: len(rows)], mode="clip")
                yield joined[: len(rows)].reshape(-1).data
            return
        stops = np.cumsum(lengths)
        begins, ends, sizes = (stops - lengths)[order], stops[order], np.cumsum(lengths[order])
        start = 0
        while start < len(order):
            limit = _JOIN_BYTES + (int(sizes[start - 1]) if start else 0)
            stop = max(start + 1, int(np.searchsorted(sizes, limit)))
            yield b"".join(
                [
                    self._view[first:last]
                    for first, last in zip(
                        begins[start:stop].tolist(), ends[start:stop].tolist(), strict=True
                    )
                ]
            )
            start = stop


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


def _pack_record(row: EncodedRow) -> tuple[bytes, tuple[bytes, ...]]:
    """A row's record: everything before the payloads, and the payloads."""
    key = b"" if row.key is None else row.key.encode("ascii")
    original = b"" if row.original_key is None else row.original_key.encode("utf-8", "surrogatepass")
    name, number = row.source or ("", NO_ROW)
    source = name.encode("utf-8")
    sizes = map(len, row.payloads)
    header = record_header(len(row.payloads)).pack(len(key), len(original), len(source), number, *sizes)
    return b"".join((header, key, original, source)), row.payloads


def _pack_heads(rows: EncodedRows) -> NDArray[np.uint8]:
    """What stands before the payloads of each row: uint8 (rows, bytes)."""
    source = rows.source_name.encode("utf-8")
    header = record_header(len(rows.columns))
    sizes = [column.shape[1] for column in rows.columns]
    head = header.pack(0, 0, len(source), 0, *sizes) + source
    heads = np.empty((len(rows), len(head)), np.uint8)
    heads[:] = np.frombuffer(head, np.uint8)
    heads[:, _ROW_AT : _ROW_AT + 8] = rows.source_row.astype("<i8").view(np.uint8).reshape(-1, 8)
    return heads


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
