"""Scratch read back: parts by number, and the records in them, verified one by one.

A record is a header (lengths and the row in the source), key, original key, source name, and the payloads; or, of a
payload that is read from the source later, where it is (`extents.py`).
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.column_encoding import EncodedRows
from shardkit.dataset.encoding import EncodedRow, generated_key
from shardkit.dataset.extents import EXTENT_BYTES, IN_SOURCE, Extent
from shardkit.errors import IntegrityError
from shardkit.formats import Row
from shardkit.stores.file_operations import Handle, active
from shardkit.stores.os_errors import explained

__all__ = [
    "NO_ROW",
    "FilePart",
    "MemoryPart",
    "Part",
    "PartFiles",
    "Parts",
    "changed_record",
    "pack_heads",
    "pack_record",
    "read_ranges",
    "read_rows",
    "record_header",
]

_MAX_GAP = 128 * 2**10
_MAX_OPEN = 128
NO_ROW = -1
"""Row in the source of a sample that has no source."""

_ROW_AT = struct.calcsize("<HII")  # of the row in the source, in a header


class Parts(Protocol):
    """Parts by number."""

    def __getitem__(self, number: int, /) -> Part:
        """The part; used before the next one is asked for."""


class Part(Protocol):
    """Where the records of a spool are."""

    def read(self, offset: int, length: int) -> memoryview:
        """Exactly ``length`` bytes, or fewer where the part ends."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer; where the part ends before, the rest of it is zero."""

    def close(self) -> None:
        """Let go of the file."""


class MemoryPart:
    """Records that never left memory."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)

    def read(self, offset: int, length: int) -> memoryview:
        """See `Part`."""
        return self._data[offset : offset + length]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `Part`."""
        found = self._data[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        buffer[len(found) :] = bytes(len(buffer) - len(found))

    def close(self) -> None:
        """See `Part`."""


class FilePart:
    """Records in a scratch file; opened at the first read."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder = folder
        self._name = name
        self._file: Handle | None = None

    def read(self, offset: int, length: int) -> memoryview:
        """See `Part`.

        Raises:
            StoreError: the file cannot be read.
        """
        with explained(f"read scratch file {self._folder}/{self._name}"):
            file = self._opened()
            pieces = []
            while length > 0:
                piece = active().read(file, length, offset)
                if not piece:
                    break
                pieces.append(piece)
                offset += len(piece)
                length -= len(piece)
        return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `Part`.

        Raises:
            StoreError: the file cannot be read.
        """
        with explained(f"read scratch file {self._folder}/{self._name}"):
            file = self._opened()
            while len(buffer):
                size = active().read_into(file, buffer, offset)
                if not size:
                    buffer[:] = bytes(len(buffer))
                    return
                buffer, offset = buffer[size:], offset + size

    def _opened(self) -> Handle:
        if self._file is None:
            root = active().open_root(self._folder)
            try:
                self._file = active().open_file(root, self._name)
            finally:
                active().close(root)
        return self._file

    def close(self) -> None:
        """See `Part`."""
        if self._file is not None:
            active().close(self._file)
            self._file = None


class PartFiles:
    """Scratch files by number, of which only so many are open at a time.

    Args:
        folder: of the files.
        names: of all parts, in order.
    """

    def __init__(self, folder: str, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = names
        self._open: OrderedDict[int, FilePart] = OrderedDict()

    def __getitem__(self, number: int) -> Part:
        part = self._open.pop(number, None) or FilePart(self._folder, self._names[number])
        self._open[number] = part
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        return part

    def close(self) -> None:
        """Let go of the files."""
        for part in self._open.values():
            part.close()
        self._open.clear()


def read_rows(
    parts: Parts,
    part: NDArray[np.int32],
    offset: NDArray[np.int64],
    length: NDArray[np.int64],
    check: NDArray[np.uint64],
    ordinal: NDArray[np.int64],
    num_fields: int,
) -> Iterator[Row]:
    """Read records back, in the order asked for, verified; neighbouring ones in one read.

    All payloads are held at once: ask for as many rows as memory takes. A payload that is still in the source comes
    empty.

    Args:
        parts: what ``part`` indexes.
        part: of each row.
        offset: of each row's record in its part.
        length: of each record, in bytes.
        check: XXH3-64 of each record.
        ordinal: of each row, for generated keys.
        num_fields: payloads per row.

    Raises:
        IntegrityError: a record is not what was written.
        StoreError: a part cannot be read.
    """
    records = _gather(parts, part, offset, length)
    for place, expected in enumerate(check.tolist()):
        record = records[place]
        records[place] = memoryview(b"")
        if xxhash.xxh3_64_intdigest(record) != expected:
            raise changed_record(int(ordinal[place]))
        yield _row(record, int(ordinal[place]), num_fields)


def _gather(
    parts: Parts, part: NDArray[np.int32], offset: NDArray[np.int64], length: NDArray[np.int64]
) -> list[memoryview]:
    records = [memoryview(b"")] * len(part)
    for number, base, size, rows in read_ranges(part, offset, length):
        data = parts[number].read(base, size)
        begins = offset[rows] - base
        for place, begin, stop in zip(
            rows.tolist(), begins.tolist(), (begins + length[rows]).tolist(), strict=True
        ):
            records[place] = data[begin:stop]
    return records


def read_ranges(
    part: NDArray[np.int32], offset: NDArray[np.int64], length: NDArray[np.int64]
) -> Iterator[tuple[int, int, int, NDArray[np.int64]]]:
    """The reads that give these records: neighbours in one.

    Yields:
        (part, offset, bytes, places of the records in it).
    """
    order = np.lexsort((offset, part))
    ends = (offset + length)[order]
    starts = offset[order]
    numbers = part[order]
    apart = (numbers[1:] != numbers[:-1]) | (starts[1:] - ends[:-1] > _MAX_GAP) | (starts[1:] < ends[:-1])
    borders = [0, *(np.flatnonzero(apart) + 1).tolist(), len(order)]
    for first, last in itertools.pairwise(borders):
        if first < last:
            base = int(starts[first])
            yield int(numbers[first]), base, int(ends[last - 1]) - base, order[first:last]


def changed_record(ordinal: int) -> IntegrityError:
    """What to raise where a record is not what was written."""
    return IntegrityError(
        f"scratch record of row {ordinal} changed between being written and being read; "
        "the scratch disk or memory is faulty: use another --scratch, then run it again"
    )


@functools.cache
def record_header(num_fields: int) -> struct.Struct:
    """Lengths of key, original key and source name (0: none), row in the source, then the size of each payload."""
    return struct.Struct(f"<HIIq{num_fields}Q")


def pack_record(row: EncodedRow) -> tuple[bytes, list[bytes]]:
    """A row's record: everything before the payloads, and the payloads."""
    key = b"" if row.key is None else row.key.encode("ascii")
    original = b"" if row.original_key is None else row.original_key.encode("utf-8", "surrogatepass")
    name, number = row.source or ("", NO_ROW)
    source = name.encode("utf-8")
    sizes = []
    payloads = []
    for payload in row.payloads:
        if isinstance(payload, Extent):
            sizes.append(payload.size | IN_SOURCE)
            payloads.append(payload.packed())
        else:
            sizes.append(len(payload))
            payloads.append(payload)
    header = record_header(len(payloads)).pack(len(key), len(original), len(source), number, *sizes)
    return b"".join((header, key, original, source)), payloads


def pack_heads(rows: EncodedRows) -> NDArray[np.uint8]:
    """What stands before the payloads of each row: uint8 (rows, bytes)."""
    source = rows.source_name.encode("utf-8")
    header = record_header(len(rows.columns))
    head = header.pack(0, 0, len(source), 0, *rows.sizes) + source
    heads = np.empty((len(rows), len(head)), np.uint8)
    heads[:] = np.frombuffer(head, np.uint8)
    heads[:, _ROW_AT : _ROW_AT + 8] = rows.source_row.astype("<i8").view(np.uint8).reshape(-1, 8)
    return heads


def _row(record: memoryview, ordinal: int, num_fields: int) -> Row:
    header = record_header(num_fields)
    key_size, original_size, source_size, number, *sizes = header.unpack_from(record)
    at = header.size + key_size + original_size + source_size
    texts = bytes(record[header.size : at])
    payloads = []
    for size in sizes:
        end = at + (EXTENT_BYTES if size & IN_SOURCE else size)
        payloads.append(b"" if size & IN_SOURCE else bytes(record[at:end]))
        at = end
    original = texts[key_size : key_size + original_size]
    return Row(
        texts[:key_size].decode("ascii") or generated_key(ordinal),
        tuple(payloads),
        original.decode("utf-8", "surrogatepass") or None,
        (texts[key_size + original_size :].decode("utf-8"), number) if number != NO_ROW else None,
    )
