"""Blocks of rows in memory, by column: decoded blocks of a shard, and rows to be written.

Encoders take whole blocks, so that most work is done on arrays instead of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError, SampleError

from .schema import FieldType, Schema, presence_of


@dataclass(frozen=True, slots=True, eq=False)
class FixedColumn:
    """A column whose payloads have one size.

    `values` is (rows, *shape) in the little-endian dtype of the field. It is read-only, may be strided and unaligned,
    and may be a view of the stored block: copy it to keep it.
    """

    values: NDArray[Any]

    def payload(self, row: int) -> bytes:
        payload: bytes = self.values[row].tobytes()
        return payload


@dataclass(frozen=True, slots=True, eq=False)
class VariableColumn:
    """A column whose payloads vary in size: the payload of row i is ``data[starts[i]:ends[i]]``.

    `data` is uint8, read-only, and may be a view of the stored block; `starts` and `ends` are (rows,) int64.
    Text has been checked to be UTF-8; JSON has not been parsed.
    """

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    kind: FieldType

    def payload(self, row: int) -> bytes:
        return self.data[self.starts[row] : self.ends[row]].tobytes()


Column = FixedColumn | VariableColumn
"""The payloads of one stored column of a block."""


class Block:
    """The rows of one block; columns are decoded on first access.

    Attributes:
        schema: Fields of the rows.
        rows: Number of rows.
        nbytes: Bytes of memory that the block keeps alive: stored bytes that columns are views of, and
            decompressed bytes.
    """

    def __init__(self, schema: Schema, rows: int, nbytes: int, load: Callable[[str], Column]) -> None:
        self.schema = schema
        self.rows = rows
        self.nbytes = nbytes
        self._load = load
        self._columns: dict[str, Column] = {}

    def column(self, name: str) -> Column:
        """Return one column of `Schema.stored`: a field, or the presence column of an optional field."""
        column = self._columns.get(name)
        if column is None:
            self.schema.stored.position(name)
            column = self._columns[name] = self._load(name)
        return column

    def present(self, name: str) -> NDArray[np.bool_]:
        """Return a mask of the rows that have a value of a field: (rows,)."""
        if not self.schema[name].optional:
            return np.ones(self.rows, np.bool_)
        column = self.column(presence_of(name))
        assert isinstance(column, FixedColumn), "bools are of one size"
        return column.values

    def payloads(self, row: int) -> tuple[bytes, ...]:
        """Return copies of the canonical payloads of one row, in the order of `Schema.stored`."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of a block of {self.rows}")
        return tuple([self.column(name).payload(row) for name in self.schema.stored])

    def sample(self, row: int) -> dict[str, object]:
        """Return one sample; its values are copies (`Schema.decode`)."""
        return self.schema.decode(self.payloads(row))


def check_text(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64], name: str
) -> None:
    """Raise FormatError if a row is not valid UTF-8 by itself."""
    if _is_text(data, starts, ends):
        return
    view = data.data
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        try:
            str(view[start:end], "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"field {name!r}, row {row} of the block: not UTF-8 ({error.reason})") from None


def _is_text(data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> bool:
    """Return True if one pass over the common range of the rows proves that each row is valid UTF-8.

    A valid text splits into valid rows exactly if no row begins or ends inside a character, that is, at a
    continuation byte (10xxxxxx).
    """
    if not len(starts):
        return True
    first, last = int(starts.min()), int(ends.max())
    try:
        str(data[first:last].data, "utf-8")
    except UnicodeDecodeError:
        return False  # the invalid bytes may be between the rows
    borders = np.concatenate((starts, ends))
    borders = borders[borders < last]
    return not bool(((data[borders] & 0xC0) == 0x80).any())


# ---- Rows to be written


class Row(NamedTuple):
    """A sample to be written.

    `payloads` are the canonical bytes of the stored columns (`Schema.encode`). `original_key` is the key in the source
    if it was rewritten, `source` is (source name, row number in the source), and `stratum` is an index into the strata
    of the manifest, needed only with pooled strata.
    """

    key: str
    payloads: tuple[bytes, ...]
    original_key: str | None = None
    source: tuple[str, int] | None = None
    stratum: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class JoinedPayloads:
    """Payloads that are contiguous in one buffer."""

    data: NDArray[np.uint8]  # (sum of the sizes,), contiguous
    sizes: NDArray[np.int64]  # (rows,) bytes of each payload

    def __len__(self) -> int:
        return len(self.sizes)


PayloadColumn = Sequence[bytes | memoryview] | NDArray[np.uint8] | JoinedPayloads
"""Canonical payloads of one column: one buffer per row, uint8 (rows, bytes) with contiguous rows, or joined."""


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Rows of one block, or of several blocks that are encoded together, by column.

    Buffers are borrowed until the rows are written.
    """

    keys: Sequence[str]
    columns: Sequence[PayloadColumn]  # one per column of `Schema.stored`, in its order
    # (row of the block, key in the source) of the rows whose key was rewritten
    originals: Sequence[tuple[int, str]] = ()
    source_names: tuple[str, ...] = ()  # indexed by `source_id`; empty if no row has a source
    source_id: NDArray[np.int32] | None = None  # (n,), -1 for none
    source_row: NDArray[np.int64] | None = None  # (n,), 0 for none
    stratum: NDArray[np.int32] | None = None  # (n,), -1 for none; None if no row has a stratum
    ends: Sequence[int] = ()  # end row of each block; empty for one block

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def borders(self) -> list[int]:
        """First row of each block, then the number of rows."""
        return [0, *(self.ends or (len(self),))]

    @classmethod
    def of(cls, rows: Sequence[Row], num_fields: int) -> RowBlock:
        """Return the rows by column.

        Raises:
            SampleError: A row does not have `num_fields` payloads.
        """
        for row in rows:
            if len(row.payloads) != num_fields:
                raise SampleError(f"key {row.key!r}: {len(row.payloads)} payloads for {num_fields} fields")
        names = tuple(dict.fromkeys(row.source[0] for row in rows if row.source is not None))
        number = {name: place for place, name in enumerate(names)}
        has_stratum = any(row.stratum is not None for row in rows)
        return cls(
            keys=[row.key for row in rows],
            columns=[[row.payloads[place] for row in rows] for place in range(num_fields)],
            originals=[
                (place, row.original_key) for place, row in enumerate(rows) if row.original_key is not None
            ],
            source_names=names,
            source_id=np.array([-1 if r.source is None else number[r.source[0]] for r in rows], np.int32),
            source_row=np.array([0 if row.source is None else row.source[1] for row in rows], np.int64),
            stratum=np.array([-1 if row.stratum is None else row.stratum for row in rows], np.int32)
            if has_stratum
            else None,
        )


class EncodedBlock(NamedTuple):
    """The stored bytes of a block, and its raw size in bytes."""

    stored: bytes | memoryview
    raw_size: int


def payloads_of(column: PayloadColumn) -> Sequence[bytes | memoryview]:
    """Return one buffer per row."""
    if isinstance(column, JoinedPayloads):
        stops = np.cumsum(column.sizes)
        view = column.data.data
        starts = (stops - column.sizes).tolist()
        return [view[start:stop] for start, stop in zip(starts, stops.tolist(), strict=True)]
    if not isinstance(column, np.ndarray):
        return column
    flat, size = np.ascontiguousarray(column).reshape(-1).data, column.shape[1]
    return [flat[start : start + size] for start in range(0, len(column) * size, size)]


def part_of(column: PayloadColumn, start: int, end: int) -> PayloadColumn:
    """Return rows `start` … `end` - 1 of a column."""
    if not isinstance(column, JoinedPayloads):
        return column[start:end]
    before, sizes = int(column.sizes[:start].sum()), column.sizes[start:end]
    return JoinedPayloads(column.data[before : before + int(sizes.sum())], sizes)


def sizes_of(column: PayloadColumn) -> NDArray[np.int64]:
    """Return the size in bytes of each payload: (rows,) int64."""
    if isinstance(column, JoinedPayloads):
        return column.sizes
    if isinstance(column, np.ndarray):
        return np.full(len(column), column.shape[1], np.int64)
    return np.fromiter(map(len, column), np.int64, len(column))


# ---- Payloads of Arrow columns in the types of a shard, as views of their memory


def stored_columns(schema: Schema, batch: Any) -> list[PayloadColumn]:
    """Return the payloads of the stored columns of a batch of samples, as views of its memory if possible."""
    columns: list[PayloadColumn] = []
    for (_, kind), array in zip(schema.items(), batch.columns, strict=True):
        if not kind.optional:
            columns.append(_bool_bytes(kind, array))
            continue
        valid = mask_of(array.is_valid())
        columns += [_without_absent(kind, array, valid), valid.astype(np.uint8).reshape(-1, 1)]
    return columns


def mask_of(flags: Any) -> NDArray[np.bool_]:
    """Return an Arrow array of bools without nulls; `to_numpy` would import pandas if it is installed."""
    bits = np.frombuffer(flags.buffers()[1], np.uint8) if len(flags) else np.empty(0, np.uint8)
    octets = np.unpackbits(bits, bitorder="little")[flags.offset : flags.offset + len(flags)]
    return octets.view(np.bool_)


def _without_absent(kind: FieldType, array: Any, valid: NDArray[np.bool_]) -> PayloadColumn:
    """Return the payloads of a column; absent values become zero bytes, or empty."""
    column = _bool_bytes(kind, array)
    if valid.all():
        return column
    if not isinstance(column, JoinedPayloads):
        return np.where(valid[:, None], column, np.uint8(0))
    if not column.sizes[~valid].any():
        return column
    return [
        payload if is_valid else b"" for payload, is_valid in zip(payloads_of(column), valid, strict=True)
    ]


def _bool_bytes(kind: FieldType, array: Any) -> NDArray[np.uint8] | JoinedPayloads:
    """Return the `payload_column` of an array of `arrow_type`, where bools are bits."""
    if kind.dtype != "bool":
        return payload_column(kind, array)
    rows = len(array)
    inner, borders = array, None
    if kind.kind == "ragged":
        borders = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + rows + 1]
        inner = array.values[int(borders[0]) : int(borders[-1])]
    for size in kind.shape:
        inner = _items(inner, size)
    items = mask_of(inner) & mask_of(inner.is_valid()) if inner.null_count else mask_of(inner)
    octets = items.view(np.uint8)
    return octets.reshape(rows, -1) if borders is None else JoinedPayloads(octets, np.diff(borders))


def payload_column(kind: FieldType, array: Any) -> NDArray[np.uint8] | JoinedPayloads:
    """Return the payloads of an array made by `spool_array`, as a view of its memory."""
    rows = len(array)
    width = kind.numpy_dtype.itemsize
    if kind.item_bytes is not None:
        for size in kind.shape:
            array = _items(array, size)
        data = np.frombuffer(array.buffers()[1], np.uint8) if len(array) else np.empty(0, np.uint8)
        return data[array.offset * width : (array.offset + len(array)) * width].reshape(rows, kind.item_bytes)
    borders = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + rows + 1]
    base, buffer = (
        (0, array.buffers()[2]) if kind.is_opaque else (array.values.offset, array.values.buffers()[1])
    )
    data = np.frombuffer(buffer, np.uint8) if buffer is not None and buffer.size else np.empty(0, np.uint8)
    first, last = (base + int(borders[0])) * width, (base + int(borders[-1])) * width
    return JoinedPayloads(data[first:last], np.diff(borders) * width)


def _items(array: Any, size: int) -> Any:
    """Return the items of fixed-size lists, including the items of null lists, which `flatten` leaves out."""
    first = array.offset * size
    return array.values[first : first + len(array) * size]
