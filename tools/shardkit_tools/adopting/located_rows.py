"""Rows whose fields are located one by one: offsets and sizes for the index, and a check of every value."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardkit.errors import FormatError, SourceError
from shardkit.extras import shell_word
from shardkit.formats import FieldType, Schema
from shardkit.formats.fields import decode_json
from shardkit.formats.reading import tar_column
from shardkit_tools.adopting.files import BUILD_INSTEAD, Report, even_block_rows
from shardkit_tools.adopting.scanned_blocks import FilePass

Span = tuple[int, int]
"""(offset, bytes) of a value."""

SpanTable = NDArray[np.int64] | Sequence[Sequence[Span]]
"""Spans of the fields of each row of a block, in schema order."""

_DIGITS = re.compile(rb"[ \t\r\n]*(?:\+?0*(0|[1-9][0-9]*)|(-[1-9][0-9]*))[ \t\r\n]*\Z")


@dataclass
class LocatedRows:
    """The fields of the rows that were scanned so far."""

    schema: Schema
    path: str  # for messages
    is_payload: dict[str, bool] = field(
        default_factory=dict
    )  # field → whether its spans locate the payload, without header
    _tables: list[NDArray[np.int64]] = field(
        default_factory=list
    )  # of each block: (rows, fields, offset from its start and size)

    def scan(
        self,
        blocks: FilePass,
        borders: NDArray[np.int64],
        block_bytes: int,
        spans_of: Callable[[bytes, int, NDArray[np.int64]], SpanTable],
        report: Report,
    ) -> int:
        """Read the rows of a file, and return the number of rows of a block; memory holds one block.

        Args:
            blocks: pass over the file, which is at its first row.
            borders: (rows + 1,) offset in the file of each row, then the end of the last.
            block_bytes: target size of a block.
            spans_of: returns the spans of the fields of each row of a block, in schema order. Its arguments are the
                bytes of the block, the number of its first row, and the borders of its rows in it.
            report: called with (rows, bytes) read.
        """
        block_rows = even_block_rows(borders, block_bytes)
        for first in range(0, len(borders) - 1, block_rows):
            own = borders[first : first + block_rows + 1] - borders[first]
            data = blocks.read(int(own[-1]))
            blocks.add(data, len(own) - 1)
            self.add(data, spans_of(data, first, own), row_names(first))
            report(len(own) - 1, len(data))
        return block_rows

    def add(self, data: bytes, rows: SpanTable, name_of: Callable[[int], str]) -> None:
        """Check the values of a block with the code that will read them, and keep their spans.

        Args:
            data: bytes of the block.
            rows: spans of the fields of each row in the block, in schema order.
            name_of: returns the name of a row of the block, for messages.

        Raises:
            SourceError: A value cannot be decoded; the message names file and row.
        """
        raw = np.frombuffer(data, np.uint8)
        table = np.array(rows, np.int64).reshape(len(rows), len(self.schema), 2)
        for place, (name, kind) in enumerate(self.schema.items()):
            suspects = range(0)
            try:
                self._check_column(raw, table[:, place], kind, name)
            except FormatError:
                suspects = range(len(rows))  # one of these is bad
            for row in suspects:
                self.check_value(raw, table[row, place], name, name_of(row))
        self._tables.append(table)

    def check_value(self, raw: NDArray[np.uint8], span: ArrayLike, name: str, row: str) -> None:
        """Check one value; `span` is its (offset, size).

        Raises:
            SourceError: It cannot be decoded; the message names file and row.
        """
        try:
            self._check_column(raw, np.array([span], np.int64), self.schema[name], name)
        except FormatError as error:
            raise SourceError(
                f"{self.path} {row}: {error}; fix it, or keep its bytes with --schema {shell_word(name)}=bytes"
            ) from None

    def _check_column(
        self, raw: NDArray[np.uint8], table: NDArray[np.int64], kind: FieldType, name: str
    ) -> None:
        if kind.kind == "json":
            for start, size in table.tolist():
                decode_json(raw[start : start + size].data, name)
        elif kind.kind != "bytes":
            tar_column(raw, table[:, 0], table[:, 1], kind, name, is_payload=self.is_payload[name])

    def columns(self) -> dict[str, Any]:
        """Return the values of `ShardIndex` that locate the fields."""
        table = np.concatenate(self._tables).astype(np.uint64)
        return {
            "field_offset": table[:, :, 0].copy(),
            "field_size": table[:, :, 1].copy(),
            "field_is_payload": np.array([self.is_payload[name] for name in self.schema], np.uint8),
        }


def row_names(first: int) -> Callable[[int], str]:
    """Return a function that names the rows of a block that begins with the row `first` of its file."""
    return lambda row: f"row {first + row}"


def locate_decimal(data: bytes, where: str) -> Span:
    """Return the span of a decimal in a value, without space, plus sign and leading zeros."""
    match = _DIGITS.match(data[:200]) if len(data) <= 200 else None
    if match is None:
        raise SourceError(
            f"{where}: {data[:40]!r} is not an integer that can be read where it is; {BUILD_INSTEAD}, or read it "
            "as text with --schema FIELD=str"
        )
    begin, end = match.span(match.lastindex or 1)
    return begin, end - begin


def refuse_array(kind: FieldType, dtype: str, shape: tuple[int, ...], note: str, where: str) -> None:
    """Raise SourceError unless an array has the type of its field."""
    is_shaped = len(shape) == 1 if kind.kind == "ragged" else shape == kind.shape
    if dtype != kind.numpy_dtype.str or note or not is_shaped:
        ragged = f", or give --schema with {kind.dtype}[*]" if kind.kind == "array" else ""
        raise SourceError(
            f"{where}: an array of dtype {dtype} and shape {shape}{note}, expected {kind}; {BUILD_INSTEAD}{ragged}"
        )
