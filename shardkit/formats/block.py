"""A verified block: whole columns as numpy views, single samples as dicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError

from .schema import FieldType, Schema, presence_of


@dataclass(frozen=True, slots=True, eq=False)
class FixedColumn:
    """A field whose payloads have one size.

    `values` is (rows, *shape) in the field's little-endian dtype; read-only, perhaps strided and unaligned,
    perhaps a view of the stored block: copy before keeping it.
    """

    values: NDArray[Any]

    def payload(self, row: int) -> bytes:
        payload: bytes = self.values[row].tobytes()
        return payload


@dataclass(frozen=True, slots=True, eq=False)
class VariableColumn:
    """A field whose payloads vary: that of row i is ``data[starts[i]:ends[i]]``.

    `data` is uint8 and read-only, perhaps a view of the stored block; `starts` and `ends` are (rows,) int64.
    Text has been checked to be UTF-8; JSON has not been parsed.
    """

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    kind: FieldType

    def payload(self, row: int) -> bytes:
        return self.data[self.starts[row] : self.ends[row]].tobytes()


Column = FixedColumn | VariableColumn
"""The values of a field in a block."""


class Block:
    """The rows of one block, decoded column by column when asked for.

    Attributes:
        schema: Fields, in order.
        rows: Number of rows.
        nbytes: Bytes of memory that the block keeps alive: stored bytes where columns are views of them, and
            what was decompressed.
    """

    def __init__(self, schema: Schema, rows: int, nbytes: int, load: Callable[[str], Column]) -> None:
        self.schema = schema
        self.rows = rows
        self.nbytes = nbytes
        self._load = load
        self._columns: dict[str, Column] = {}

    def column(self, name: str) -> Column:
        """All rows of one field, or of another column of `Schema.stored`.

        Raises:
            SchemaError: there is no such field.
            FormatError: the stored members are not what shardkit writes for the field's type.
        """
        column = self._columns.get(name)
        if column is None:
            self.schema.stored.position(name)
            column = self._columns[name] = self._load(name)
        return column

    def present(self, name: str) -> NDArray[np.bool_]:
        """Which rows have a value of a field: (rows,)."""
        if not self.schema[name].optional:
            return np.ones(self.rows, np.bool_)
        column = self.column(presence_of(name))
        assert isinstance(column, FixedColumn), "bools are of one size"
        return column.values

    def payloads(self, row: int) -> tuple[bytes, ...]:
        """Canonical payloads of one row, in the order of `Schema.stored`; copies."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of a block of {self.rows}")
        return tuple([self.column(name).payload(row) for name in self.schema.stored])

    def sample(self, row: int) -> dict[str, object]:
        """One sample as values of its own (`Schema.decode`).

        Raises:
            FormatError: a payload does not decode.
        """
        return self.schema.decode(self.payloads(row))


def check_text(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64], name: str
) -> None:
    """Refuse rows that are not UTF-8, each by itself.

    Raises:
        FormatError: names the first bad row.
    """
    if _is_text(data, starts, ends):
        return
    view = data.data
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        try:
            str(view[start:end], "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"field {name!r}, row {row} of the block: not UTF-8 ({error.reason})") from None


def _is_text(data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> bool:
    """Whether one pass over the rows' common range shows that each of them is UTF-8 by itself.

    Text that is valid as a whole splits into valid rows exactly where no row begins or ends inside a character:
    at a continuation byte (10xxxxxx).
    """
    if not len(starts):
        return True
    first, last = int(starts.min()), int(ends.max())
    try:
        str(data[first:last].data, "utf-8")
    except UnicodeDecodeError:
        return False  # perhaps only between the rows
    borders = np.concatenate((starts, ends))
    borders = borders[borders < last]
    return not bool(((data[borders] & 0xC0) == 0x80).any())
