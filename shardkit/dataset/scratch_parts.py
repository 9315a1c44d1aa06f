"""Scratch read back: parts by number, and the records in them, verified one by one.

A record is a header (lengths and the row in the source), key, original key, source name, and the payloads.
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

from shardkit.dataset.encoding import EncodedRow, generated_key
from shardkit.errors import IntegrityError
from shardkit.formats import Row
from shardkit.storage.file_operations import Handle, active
from shardkit.storage.os_errors import explained

__all__ = ["FilePart", "MemoryPart", "Part", "PartFiles", "Parts", "pack_record", "read_rows"]

_MAX_GAP = 128 * 2**10
_MAX_OPEN = 128
_NO_ROW = -1


class Parts(Protocol):
    """Parts by number."""

    def __getitem__(self, number: int, /) -> Part:
        """The part; used before the next one is asked for."""


class Part(Protocol):
    """Where the records of a spool are."""

    def read(self, offset: int, length: int) -> memoryview:
        """Exactly ``length`` bytes, or fewer where the part ends."""

    def close(self) -> None:
        """Let go of the file."""


class MemoryPart:
    """Records that never left memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def read(self, offset: int, length: int) -> memoryview:
        """See `Part`."""
        return self._data[offset : offset + length]

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
            if self._file is None:
                root = active().open_root(self._folder)
                try:
                    self._file = active().open_file(root, self._name)
                finally:
                    active().close(root)
            pieces = []
            while length > 0:
                piece = active().read(self._file, length, offset)
                if not piece:
                    break
                pieces.append(piece)
                offset += len(piece)
                length -= len(piece)
        return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))

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

    All payloads are held at once: ask for as many rows as memory takes.

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
            raise IntegrityError(
                f"scratch record of row {int(ordinal[place])} changed between being written and being read; "
                "the scratch disk or memory is faulty: use another --scratch, then run it again"
            )
        yield _row(record, int(ordinal[place]), num_fields)


def _gather(
    parts: Parts, part: NDArray[np.int32], offset: NDArray[np.int64], length: NDArray[np.int64]
) -> list[memoryview]:
    records = [memoryview(b"")] * len(part)
    order = np.lexsort((offset, part))
    ends = (offset + length)[order]
    starts = offset[order]
    numbers = part[order]
    apart = (numbers[1:] != numbers[:-1]) | (starts[1:] - ends[:-1] > _MAX_GAP) | (starts[1:] < ends[:-1])
    borders = [0, *(np.flatnonzero(apart) + 1).tolist(), len(order)]
    for first, last in itertools.pairwise(borders):
        if first == last:
            continue
        base = int(starts[first])
        data = parts[int(numbers[first])].read(base, int(ends[last - 1]) - base)
        places = order[first:last].tolist()
        begins = (starts[first:last] - base).tolist()
        stops = (ends[first:last] - base).tolist()
        for place, begin, stop in zip(places, begins, stops, strict=True):
            records[place] = data[begin:stop]
    return records


@functools.cache
def _header(num_fields: int) -> struct.Struct:
    """Lengths of key, original key and source name (0: none), row in the source, then the size of each payload."""
    return struct.Struct(f"<HIIq{num_fields}Q")


def pack_record(row: EncodedRow) -> tuple[bytes, ...]:
    """The pieces of a row's record, in order."""
    key = b"" if row.key is None else row.key.encode("ascii")
    original = b"" if row.original_key is None else row.original_key.encode("utf-8", "surrogatepass")
    name, number = row.source or ("", _NO_ROW)
    source = name.encode("utf-8")
    payloads = row.payloads
    header = _header(len(payloads)).pack(len(key), len(original), len(source), number, *map(len, payloads))
    return (header, key, original, source, *payloads)


def _row(record: memoryview, ordinal: int, num_fields: int) -> Row:
    header = _header(num_fields)
    key_size, original_size, source_size, number, *sizes = header.unpack_from(record)
    at = header.size + key_size + original_size + source_size
    texts = bytes(record[header.size : at])
    payloads = []
    for size in sizes:
        payloads.append(bytes(record[at : at + size]))
        at += size
    original = texts[key_size : key_size + original_size]
    return Row(
        texts[:key_size].decode("ascii") or generated_key(ordinal),
        tuple(payloads),
        original.decode("utf-8", "surrogatepass") or None,
        (texts[key_size + original_size :].decode("utf-8"), number) if number != _NO_ROW else None,
    )
