"""Encoded rows between being added and being written to shards: payloads in scratch files, columns in memory.

Rows are buffered and written in *runs*, each sorted by the order that the layout will use, so that the rows
of one shard lie together in every run: a source of any size is read back in a few long ranges per run and
shard, not one seek per row. What is small enough stays in memory. Nothing here is synced to disk: scratch is
worth nothing after a power cut, and every record is verified when it is read back (SPEC.md §3).
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.encoding import EncodedRow
from shardkit.dataset.layout import order_keys
from shardkit.dataset.scratch_parts import FilePart, MemoryPart, Part, pack_record
from shardkit.errors import StoreError
from shardkit.formats import pack_columns, unpack_columns
from shardkit.storage.file_operations import active
from shardkit.storage.os_errors import explained

__all__ = ["RUN_BYTES", "RowColumns", "RowSpool", "ScratchFile", "remove_scratch"]

RUN_BYTES = 64 * 2**20
_JOIN_BYTES = 4 * 2**20
_KIND = "scratch-rows"
_MARK = "mark_"


@dataclass(frozen=True, slots=True, eq=False)
class RowColumns:
    """One entry per row of a part, in the order of adding.

    Attributes:
        strata: value texts of the strata of this part; ``stratum`` indexes them.
        identity_high, identity_low: uint64[n]. split: uint64[n], zeros where the identity decides.
        stratum: int32[n]. raw_bytes: int64[n].
        generated: uint8[n], 1 where the key is to be made from the ordinal.
        offset, length: int64[n], the record in the part. check: uint64[n], XXH3-64 of the record.
        marks: name → uint64[n], what else a build wants to know of every row.
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
    marks: Mapping[str, NDArray[np.uint64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.stratum)

    def to_bytes(self, meta: dict[str, object]) -> bytes:
        """The columns as a container, with something to remember them by."""
        names = {one.name for one in fields(self)} - {"strata", "marks"}
        columns = {name: getattr(self, name) for name in sorted(names)}
        columns |= {_MARK + name: column for name, column in self.marks.items()}
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
        named = {name: array for name, array in columns.arrays.items() if not name.startswith(_MARK)}
        marks = {
            name.removeprefix(_MARK): columns.arrays[name] for name in columns.arrays.keys() - named.keys()
        }
        return cls(strata=strata, marks=marks, **named), columns.meta["part"]


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
        marks: names of further numbers that come with every row.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        *,
        seed: int | None,
        run_bytes: int | None = None,
        always_file: bool = False,
        marks: Sequence[str] = (),
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
        self._marks = {name: array("Q") for name in marks}
        self._run: list[tuple[bytes, ...]] = []
        self._run_size = 0
        self._broken = False
        self._file: ScratchFile | None = None
        self._part: Part | None = None

    def __len__(self) -> int:
        return len(self._columns["stratum"])

    def append(self, row: EncodedRow, identity: tuple[int, int], marks: Sequence[int] = ()) -> None:
        """Take a row; ``identity`` stands in for `EncodedRow.identity` where that is None."""
        columns = self._columns
        columns["identity_high"].append(identity[0])
        columns["identity_low"].append(identity[1])
        columns["split"].append(row.split or 0)
        columns["raw_bytes"].append(row.raw_bytes)
        columns["stratum"].append(self._strata.setdefault(row.stratum, len(self._strata)))
        columns["generated"].append(row.key is None)
        for column, mark in zip(self._marks.values(), marks, strict=True):
            column.append(mark)
        if not self._folder:
            return
        if self._broken:
            raise StoreError(
                f"scratch file {self._folder}/{self._name}: an earlier write failed, so rows are missing; start again"
            )
        record = pack_record(row)
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
        marks = {name: np.array(column, dtype=np.uint64) for name, column in self._marks.items()}
        return RowColumns(strata=tuple(self._strata), marks=marks, **arrays)

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
