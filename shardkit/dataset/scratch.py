"""Encoded rows between being added and being written to shards: payloads in scratch files, columns in memory.

Rows are buffered and written in *runs*, each sorted by the order that the layout will use, so that the rows
of one shard lie together in every run: a source of any size is read back in a few long ranges per run and
shard, not one seek per row. What is small enough stays in memory. Nothing here is synced to disk: scratch is
worth nothing after a power cut, and every record is verified when it is read back (SPEC.md §3).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.encoding import EncodedRow, generated_key
from shardkit.dataset.layout import order_keys
from shardkit.errors import IntegrityError, StoreError
from shardkit.formats import Row, pack_columns, unpack_columns
from shardkit.storage.file_operations import Handle, active
from shardkit.storage.os_errors import explained

__all__ = [
    "FilePart",
    "MemoryPart",
    "Part",
    "PartFiles",
    "Parts",
    "RowColumns",
    "RowSpool",
    "ScratchFile",
    "read_rows",
    "remove_scratch",
]

RUN_BYTES = 64 * 2**20
_JOIN_BYTES = 4 * 2**20
_MAX_GAP = 128 * 2**10
_MAX_OPEN = 128
_KIND = "scratch-rows"
_NO_ROW = -1


@dataclass(frozen=True, slots=True, eq=False)
class RowColumns:
    """One entry per row of a part, in the order of adding.

    Attributes:
        strata: value texts of the strata of this part; ``stratum`` indexes them.
        identity_high, identity_low: uint64[n]. split: uint64[n], zeros where the identity decides.
        stratum: int32[n]. raw_bytes: int64[n].
        generated: uint8[n], 1 where the key is to be made from the ordinal.
        offset, length: int64[n], the record in the part. check: uint64[n], XXH3-64 of the record.
    """

    strata: tuple[tuple[str, ...], ...]
    identity_high: NDArray[np.uint64]
    identity_low: NDArray[np.uint64]
    stratum: NDArray[np.int32]
    raw_bytes: NDArray[np.int64]
    split: NDArray[np.uint64]
    generated: NDArray[np.uint8]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    check: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.stratum)

    def to_bytes(self, meta: dict[str, object]) -> bytes:
        """The columns as a container, with something to remember them by."""
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "strata"}
        strata = [list(values) for values in self.strata]
        return pack_columns(_KIND, {"strata": strata, "part": meta}, columns, compress=False)

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[RowColumns, dict[str, object]]:
        """What `to_bytes` was given.

        Raises:
            FormatError: the bytes are not of `to_bytes`.
        """
        columns = unpack_columns(data, _KIND)
        strata = tuple(tuple(values) for values in columns.meta["strata"])
        return cls(strata=strata, **columns.arrays), columns.meta["part"]


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


class ScratchFile:
    """A scratch file that is being written."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder = folder
        self.name = name
        self.size = 0
        with explained(f"create scratch file {folder}/{name}", writing=True):
            root = active().open_root(folder)
            try:
                self._file = active().create_file(root, name)
            finally:
                active().close(root)
        with contextlib.suppress(OSError):  # tells the sweep of a store's tmp/ that we live
            active().try_lock(self._file)

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``.

        Raises:
            StoreFullError, StoreError: the scratch disk does not take it; names the file.
        """
        rest = memoryview(data).cast("B")
        with explained(f"write scratch file {self.folder}/{self.name}", writing=True):
            while len(rest):
                rest = rest[active().write(self._file, rest) :]
        self.size += len(data)

    def close(self) -> None:
        """Close; the file stays."""
        active().close(self._file)


class RowSpool:
    """Takes encoded rows, keeps their columns, and writes their payloads in sorted runs.

    Not safe for threads: the caller locks.

    Args:
        folder: where the scratch file is made when memory does not suffice; "": count only, keep nothing.
        name: of the scratch file.
        seed: of the shuffle, None where rows keep the order of adding.
        run_bytes: payload bytes held in memory before a run is written; by default 64 MiB.
        always_file: write even a single run to the file.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        *,
        seed: int | None,
        run_bytes: int | None = None,
        always_file: bool = False,
    ) -> None:
        self._folder = folder
        self._name = name
        self._seed = seed
        self._run_bytes = RUN_BYTES if run_bytes is None else run_bytes
        self._always_file = always_file
        self._strata: dict[tuple[str, ...], int] = {}
        self._columns = {
            **{name: array("Q") for name in ("identity_high", "identity_low", "split", "check")},
            **{name: array("q") for name in ("raw_bytes", "offset", "length")},
            "stratum": array("i"),
            "generated": array("B"),
        }
        self._run: list[tuple[bytes, ...]] = []
        self._run_size = 0
        self._broken = False
        self._file: ScratchFile | None = None
        self._part: Part | None = None

    def __len__(self) -> int:
        return len(self._columns["stratum"])

    def append(self, row: EncodedRow, identity: tuple[int, int]) -> None:
        """Take a row; ``identity`` stands in for `EncodedRow.identity` where that is None."""
        columns = self._columns
        columns["identity_high"].append(identity[0])
        columns["identity_low"].append(identity[1])
        columns["split"].append(row.split or 0)
        columns["raw_bytes"].append(row.raw_bytes)
        columns["stratum"].append(self._strata.setdefault(row.stratum, len(self._strata)))
        columns["generated"].append(row.key is None)
        if not self._folder:
            return
        if self._broken:
            raise StoreError(
                f"scratch file {self._folder}/{self._name}: an earlier write failed, so rows are missing; start again"
            )
        record = _record(row)
        if row.raw_bytes < _JOIN_BYTES:  # one copy costs less than a hash piece by piece
            whole = b"".join(record)
            record, size = (whole,), len(whole)
            check = xxhash.xxh3_64_intdigest(whole)
        else:
            digest = xxhash.xxh3_64()
            for piece in record:
                digest.update(piece)
            size = sum(map(len, record))
            check = digest.intdigest()
        columns["check"].append(check)
        columns["length"].append(size)
        self._run.append(record)
        self._run_size += size
        if self._run_size >= self._run_bytes:
            self._write_run()

    def finish(self) -> tuple[RowColumns, Part | None]:
        """The columns and where the records are; None where nothing was kept."""
        if self._folder and (self._always_file or self._file is not None):
            self._write_run()
        elif self._folder:
            order = self._place_run(0)
            self._part = MemoryPart(b"".join([piece for row in order for piece in self._run[row]]))
            self._run = []
        if self._file is not None:
            self._file.close()
            self._part = FilePart(self._folder, self._name)
            self._file = None
        return self.columns(), self._part

    def columns(self) -> RowColumns:
        """The columns as they stand."""
        dtypes = {"Q": np.uint64, "q": np.int64, "i": np.int32, "B": np.uint8}
        arrays = {
            name: np.frombuffer(column, dtype=dtypes[column.typecode])
            if len(column)
            else np.zeros(0, column.typecode)
            for name, column in self._columns.items()
        }
        return RowColumns(strata=tuple(self._strata), **arrays)

    def drop(self) -> None:
        """Forget the rows and remove the scratch file."""
        self._run = []
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._part is not None:
            self._part.close()
            self._part = None
        if self._folder:
            remove_scratch(self._folder, self._name)

    def _place_run(self, start: int) -> list[int]:
        """The rows of the run in the order of writing; their offsets are noted."""
        count = len(self._run)
        if self._seed is None or not count:
            order = np.arange(count)
        else:
            high = np.frombuffer(self._columns["identity_high"], dtype=np.uint64)[-count:]
            low = np.frombuffer(self._columns["identity_low"], dtype=np.uint64)[-count:]
            order = np.argsort(order_keys(np.stack([high, low], axis=1), self._seed), kind="stable")
            del high, low  # an array.array cannot grow while it is viewed
        lengths = np.array(self._columns["length"][-count:] if count else [], dtype=np.int64)
        offsets = np.empty(count, dtype=np.int64)
        offsets[order] = start + np.cumsum(lengths[order]) - lengths[order]
        self._columns["offset"].frombytes(offsets.tobytes())
        placed: list[int] = order.tolist()
        return placed

    def _write_run(self) -> None:
        self._broken = True
        if self._file is None:
            self._file = ScratchFile(self._folder, self._name)
        pending: list[bytes] = []
        size = 0
        for row in self._place_run(self._file.size):
            for piece in self._run[row]:
                if len(piece) >= _JOIN_BYTES:
                    self._file.write(b"".join(pending))
                    self._file.write(piece)
                    pending, size = [], 0
                else:
                    pending.append(piece)
                    size += len(piece)
            if size >= _JOIN_BYTES:
                self._file.write(b"".join(pending))
                pending, size = [], 0
        self._file.write(b"".join(pending))
        self._run = []
        self._run_size = 0
        self._broken = False


def remove_scratch(folder: str, name: str) -> None:
    """Remove a scratch file if it is there; one that cannot be removed is left to the sweep."""
    with contextlib.suppress(OSError):
        root = active().open_root(folder)
        try:
            active().unlink(root, name)
        finally:
            active().close(root)


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


def _record(row: EncodedRow) -> tuple[bytes, ...]:
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
