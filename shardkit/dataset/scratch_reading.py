"""Scratch read back: parts by number, and their records as blocks of rows, field by field, verified.

A record is a header (lengths and the row in the source), key, original key, source name, and the payloads.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.encoding import generated_key, generated_keys
from shardkit.errors import IntegrityError
from shardkit.formats import RowBlock, Schema
from shardkit.stores.file_operations import Directories, Handle, active, explained, read_exactly, write_all

_CHECK_BYTES = 8  # of the XXH3-64 in front of a record of finished work
_MAX_GAP = 128 * 2**10
_MAX_OPEN = 128
_FEW_ROWS = 64  # below this comparing names as an array costs more than one by one
NO_ROW = -1
"""Row in the source of a sample that has no source."""


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Where the records of rows are, one entry per row."""

    part: NDArray[np.int32]
    offset: NDArray[np.int64]  # in the part
    length: NDArray[np.int64]  # bytes
    check: NDArray[np.uint64]  # XXH3-64 of the record

    @classmethod
    def of_part(
        cls, offset: NDArray[np.int64], length: NDArray[np.int64], check: NDArray[np.uint64]
    ) -> Records:
        """Those of one part, which knows no number."""
        return cls(np.zeros(len(offset), np.int32), offset, length, check)

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, places: slice | NDArray[np.int64]) -> Records:
        return Records(self.part[places], self.offset[places], self.length[places], self.check[places])


class Parts(Protocol):
    """Where the records of spools are, by the number of the spool."""

    def read_into(self, number: int, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from a part; where the part ends before, the rest of it is zero."""

    def close(self) -> None:
        """Let go of files."""


class MemoryPart:
    """The one part of a spool whose records never left memory."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)

    def read_into(self, number: int, offset: int, buffer: memoryview) -> None:
        found = self._data[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        buffer[len(found) :] = bytes(len(buffer) - len(found))

    def close(self) -> None:
        """Memory needs no closing."""


class PartFiles:
    """Scratch files, opened at the first read, of which only so many are open at a time."""

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
    """A record of finished work as it is stored: its XXH3-64, then what it holds."""
    return xxhash.xxh3_64_digest(data) + data


def unpack_record(stored: bytes) -> bytes | None:
    """What a record holds; None where it is damaged."""
    data = stored[_CHECK_BYTES:]
    return data if stored[:_CHECK_BYTES] == xxhash.xxh3_64_digest(data) else None


class ScratchFolder:
    """A folder of scratch files, and of records of what is finished in it.

    A record appears by rename once it is whole.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def parts(self, names: Sequence[str]) -> PartFiles:
        """Scratch files by number."""
        return PartFiles(self.path, names)

    def put_record(self, name: str, data: bytes, *, is_durable: bool = False) -> None:
        """Make a record appear, whole or not at all; where it is to last, so must what is in the folder by now."""
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
        """What a record holds; None where there is none, or it is damaged."""
        with self.opened(f"read {self.path}/{name}") as folder, contextlib.suppress(FileNotFoundError):
            file = active().open_file(folder, name)
            try:
                return unpack_record(read_exactly(file, 0, active().stat_open(file).st_size))
            finally:
                active().close(file)
        return None

    def names(self) -> list[str]:
        """Of everything in the folder."""
        with self.opened(f"read {self.path}") as folder:
            return [name for name, _ in active().names(folder)]

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        with (
            self.opened(f"write {self.path}", writing=True) as folder,
            contextlib.suppress(FileNotFoundError),
        ):
            active().unlink(folder, name)

    @contextlib.contextmanager
    def opened(self, doing: str, *, writing: bool = False) -> Iterator[Handle]:
        """The folder, open; errors say what was being done."""
        with explained(doing, writing=writing), Directories(self.path).opened(()) as folder:
            yield folder


def _read_ranges(records: Records) -> Iterator[tuple[int, int, int, NDArray[np.int64]]]:
    """The reads that give these records, neighbours in one: (part, offset, bytes, places of the records in it)."""
    order = np.lexsort((records.offset, records.part))
    starts, numbers = records.offset[order], records.part[order]
    ends = starts + records.length[order]
    apart = (numbers[1:] != numbers[:-1]) | (starts[1:] - ends[:-1] > _MAX_GAP) | (starts[1:] < ends[:-1])
    borders = [0, *(np.flatnonzero(apart) + 1).tolist(), len(order)]
    for first, last in itertools.pairwise(borders):
        if first < last:
            base = int(starts[first])
            yield int(numbers[first]), base, int(ends[last - 1]) - base, order[first:last]


@functools.cache
def record_header(num_fields: int) -> struct.Struct:
    """Lengths of key, original key and source name (0: none), row in the source, then the size of each payload."""
    return struct.Struct(f"<HIIq{num_fields}Q")


class ScratchReader:
    """Reads records of many rows into one buffer that it keeps; one per thread."""

    def __init__(self, parts: Parts, schema: Schema) -> None:
        self._parts = parts
        self._schema = schema
        self._buffer = np.empty(0, np.uint8)

    def read(self, records: Records, ordinal: NDArray[np.int64]) -> HeldRecords:
        """Records in the order asked for; what was read before is overwritten."""
        ranges = list(_read_ranges(records))
        total = sum(size for _, _, size, _ in ranges)
        if len(self._buffer) < total:
            self._buffer = np.empty(0, np.uint8)  # lets go of the old one first
            self._buffer = np.empty(total, np.uint8)
        begin = np.empty(len(records), np.int64)
        view, at = self._buffer.data, 0
        for number, base, size, rows in ranges:
            self._parts.read_into(number, base, view[at : at + size])
            begin[rows] = at + records.offset[rows] - base
            at += size
        borders = zip(begin.tolist(), (begin + records.length).tolist(), strict=True)
        found = np.array([xxhash.xxh3_64_intdigest(view[start:stop]) for start, stop in borders], np.uint64)
        changed = np.flatnonzero(found != records.check)
        if len(changed):
            raise IntegrityError(
                f"scratch record of row {ordinal[changed[0]]} changed between being written and being read; "
                "the scratch disk or memory is faulty: use another --scratch, then run it again"
            )
        return HeldRecords(self._buffer[:at], begin, ordinal, self._schema)


class HeldRecords:
    """Verified records in memory; blocks of them borrow the memory, a block until the next one is made."""

    def __init__(
        self,
        data: NDArray[np.uint8],
        begin: NDArray[np.int64],
        ordinal: NDArray[np.int64],
        schema: Schema,
    ) -> None:
        header = record_header(len(schema))
        layout = np.dtype(
            [
                ("key", "<u2"),
                ("original", "<u4"),
                ("source", "<u4"),
                ("row", "<i8"),
                ("size", "<u8", (len(schema),)),
            ]
        )
        assert layout.itemsize == header.size, "numpy reads what struct has packed"
        self._data = data
        self._view = data.data
        self._ordinal = ordinal
        self._schema = schema
        self._header = _runs(data, begin, header.size).view(layout)[:, 0]
        self._texts = begin + header.size  # key, original key and source name
        self._size = self._header["size"].astype(np.int64)
        before = self._texts + self._header["key"] + self._header["original"] + self._header["source"]
        # (rows, fields): where each payload begins
        self._start = before[:, None] + np.cumsum(self._size, axis=1) - self._size

    def block(
        self,
        start: int,
        stop: int,
        stratum: NDArray[np.int32] | None = None,
        *,
        payloads: bool = True,
        ends: Sequence[int] = (),
    ) -> RowBlock:
        """Rows ``start`` … ``stop`` − 1 with the stratum of each, if they have any; without columns, if so wished.

        `ends`, counted from `start`, are those of their blocks where they are several.
        """
        header = self._header[start:stop]
        keys, originals = self._keys(start, header)
        names, source_id = self._sources(start, header)
        has_source = header["row"] != NO_ROW
        return RowBlock(
            keys=keys,
            columns=[self._column(place, start, stop) for place in range(len(self._schema) * payloads)],
            originals=originals,
            source_names=names,
            source_id=np.where(has_source, source_id, np.int32(-1)),
            source_row=np.where(has_source, header["row"], 0),
            stratum=stratum,
            ends=ends,
        )

    @property
    def payload_bytes(self) -> NDArray[np.int64]:
        """Of the rows before each, and of all: (rows + 1,)."""
        found = np.zeros(len(self._size) + 1, np.int64)
        np.cumsum(self._size.sum(axis=1), out=found[1:])
        return found

    def _column(self, place: int, start: int, stop: int) -> NDArray[np.uint8] | list[memoryview]:
        begin, size = self._start[start:stop, place], self._size[start:stop, place]
        fixed = list(self._schema.values())[place].item_bytes
        if fixed is not None and bool((size == fixed).all()):
            return _runs(self._data, begin, fixed)
        view = self._view
        return [view[first:last] for first, last in zip(begin.tolist(), (begin + size).tolist(), strict=True)]

    def _keys(self, start: int, header: NDArray[np.void]) -> tuple[list[str], list[tuple[int, str]]]:
        ordinals = self._ordinal[start : start + len(header)].tolist()
        if not header["key"].any() and not header["original"].any():
            return generated_keys(ordinals), []
        keys = []
        originals = []
        texts = self._texts[start : start + len(header)].tolist()
        sizes = zip(header["key"].tolist(), header["original"].tolist(), strict=True)
        for place, (at, (key, original), ordinal) in enumerate(zip(texts, sizes, ordinals, strict=True)):
            keys.append(str(self._view[at : at + key], "ascii") or generated_key(ordinal))
            if original:
                text = str(self._view[at + key : at + key + original], "utf-8", "surrogatepass")
                originals.append((place, text))
        return keys, originals

    def _sources(self, start: int, header: NDArray[np.void]) -> tuple[tuple[str, ...], NDArray[np.int32]]:
        """Names of the sources and the number of each row's; meaningless for rows that have none."""
        rows = len(header)
        begin = self._texts[start : start + rows] + header["key"] + header["original"]
        size = header["source"].astype(np.int64)
        first = int(size[0])
        if rows > _FEW_ROWS and bool((size == first).all()) and bool((header["row"] != NO_ROW).all()):
            names = _runs(self._data, begin, first)
            if bool((names == names[:1]).all()):
                return (names[0].tobytes().decode("utf-8"),), np.zeros(rows, np.int32)
        texts = [
            bytes(self._view[at : at + length])
            for at, length in zip(begin.tolist(), size.tolist(), strict=True)
        ]
        # In the order of their first rows, as they are listed in an index; only those that a row has.
        named = [text for text, row in zip(texts, header["row"].tolist(), strict=True) if row != NO_ROW]
        number = {text: place for place, text in enumerate(dict.fromkeys(named))}
        source_id = np.array([number.get(text, -1) for text in texts], np.int32)
        return tuple(text.decode("utf-8") for text in number), source_id


def _runs(data: NDArray[np.uint8], begin: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    """``size`` bytes from each of many places: uint8 (n, size), a copy."""
    if not size:
        return np.empty((len(begin), 0), np.uint8)
    # Overlapping rows: indexing copies whole runs of bytes. The last record ends inside the data.
    windows = np.lib.stride_tricks.as_strided(data, (len(data) - size + 1, size), (1, 1), writeable=False)
    found: NDArray[np.uint8] = windows[begin]
    return found
