"""Decode blocks of adopted JSON lines and CSV (SPEC.md §5, "Encoded blocks").

Builds read values with the same functions: `parse_json`, `read_cells` and `cell_value`.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from shardkit.documents import Record, decode, encode
from shardkit.errors import FormatError, SampleError, SourceError
from shardkit.extras import shell_word

from .block import Column, FixedColumn, VariableColumn
from .index import ShardIndex
from .schema import FieldType, Schema
from .strict_json import parse_json

LINES: Final = ("jsonl", "csv")
"""Encodings whose blocks are runs of lines."""

_MAX_CELL_CHARACTERS: Final = 1 << 30
_MAX_SETTINGS: Final = 64 << 20
_EXACT = 2**53  # float64 holds every integer below this
MISSING: Final = frozenset(["NA", "N/A", "n/a", "#N/A", "NULL", "null", "None", "nan", "NaN", "<NA>", "\\N"])
"""Cells of optional numbers and booleans that mean no value, as pandas, R and databases write them."""
UNDECODED: Final = "surrogateescape"
"""Error handler that keeps bytes which are not text, so that only their row is refused."""
TRUTHS: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
"""Cells of booleans."""


class LineSettings(Record, frozen=True, kw_only=True):
    """Settings with which all blocks of a file of lines are read.

    Attributes:
        skipped: (block, number of the row in the block) of rows that are left out; empty lines are no rows.
        names: columns of CSV, in the order of the cells.
        delimiter: delimiter of CSV.
        quote: see `read_cells`.
    """

    skipped: tuple[tuple[int, int], ...] = ()
    names: tuple[str, ...] = ()
    delimiter: str = ""
    quote: str = ""

    def to_bytes(self) -> bytes:
        return encode(self)

    @classmethod
    def of(cls, index: ShardIndex) -> LineSettings:
        """Return the settings in an index."""
        common = b"" if index.common is None else index.common.tobytes()
        return decode(cls, common, "index: common", max_bytes=_MAX_SETTINGS)


def line_columns(
    encoding: str,
    settings: LineSettings,
    data: bytes | memoryview,
    schema: Schema,
    rows: int,
    skipped: Collection[int],
    where: str,
) -> dict[str, Column]:
    """Return the stored columns of some fields of a block.

    Args:
        encoding: one of `LINES`.
        settings: settings of the file.
        data: verified bytes of the block.
        schema: fields to decode.
        rows: number of rows of the block.
        skipped: numbers in the block of rows that are left out.
        where: name of the block, for messages.

    Raises:
        FormatError: A row cannot be decoded, or there are more or fewer.
    """
    read = _json_rows if encoding == "jsonl" else _csv_rows
    payloads: list[tuple[bytes, ...]] = []
    try:
        for row, sample in enumerate(read(bytes(data), settings, schema, skipped)):
            if sample is not None:
                payloads.append(schema.encode(sample, where=f"row {row} of the block"))
    except (SourceError, SampleError, UnicodeDecodeError, csv.Error) as error:
        raise FormatError(f"{where}: cannot be decoded ({error}); adopt the file again") from error
    if len(payloads) != rows:
        raise FormatError(f"{where}: {len(payloads)} rows, the index says {rows}")
    return encoded_columns(schema, payloads)


def encoded_columns(schema: Schema, payloads: Sequence[tuple[bytes, ...]]) -> dict[str, Column]:
    """Return the stored columns of rows, given the result of `Schema.encode` for each."""
    stored = schema.stored
    columns = zip(*payloads, strict=True) if payloads else [()] * len(stored)
    return {
        name: _column(kind, list(column))
        for (name, kind), column in zip(stored.items(), columns, strict=True)
    }


def _json_rows(
    data: bytes, settings: LineSettings, schema: Schema, skipped: Collection[int]
) -> Iterator[dict[str, object] | None]:
    """Yield the fields of each row, or None if it is left out."""
    lines = (line for line in data.split(b"\n") if line.strip())
    for row, line in enumerate(lines):
        if row in skipped:
            yield None
            continue
        value = parse_json(line, f"row {row} of the block")
        if not isinstance(value, dict):
            raise SourceError(f"row {row} of the block: not an object")
        yield {name: value.get(name) for name in schema}


def _csv_rows(
    data: bytes, settings: LineSettings, schema: Schema, skipped: Collection[int]
) -> Iterator[dict[str, object] | None]:
    types = {name: cell_type(kind) for name, kind in schema.items()}
    text = io.StringIO(data.decode(errors=UNDECODED), newline="")
    rows = (cells for cells, _ in read_cells(text, settings.delimiter, settings.quote) if cells)
    for row, cells in enumerate(rows):
        if row in skipped:
            yield None
            continue
        where = f"row {row} of the block"
        if isinstance(cells, Exception):
            raise SourceError(f"{where}: {cells}") from cells
        if len(cells) != len(settings.names):
            raise SourceError(f"{where}: {len(cells)} cells, expected {len(settings.names)}")
        named = zip(settings.names, cells, strict=True)
        yield {name: cell_value(cell, types[name], name, where) for name, cell in named if name in types}


def _column(kind: FieldType, payloads: Sequence[bytes]) -> Column:
    if kind.item_bytes is not None:
        values = np.frombuffer(b"".join(payloads), kind.numpy_dtype).reshape(len(payloads), *kind.shape)
        return FixedColumn(values)
    ends = np.cumsum(np.fromiter(map(len, payloads), np.int64, len(payloads)))
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if len(ends) else ends
    return VariableColumn(np.frombuffer(b"".join(payloads), np.uint8), starts, ends, kind)


# ---- CSV


def read_cells(
    lines: Iterable[str], delimiter: str, quote: str
) -> Iterator[tuple[list[str] | csv.Error | UnicodeError, int]]:
    """Yield the cells of each row of strict CSV, or why it is no row, and the number of lines read so far.

    Args:
        lines: lines with their ends, decoded with the error handler `UNDECODED`.
        delimiter: character between cells.
        quote: ``"`` if cells may be enclosed, otherwise quotes are characters.
    """
    csv.field_size_limit(_MAX_CELL_CHARACTERS)
    reader = csv.reader(
        lines,
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quote == '"' else csv.QUOTE_NONE,
        strict=True,
    )
    found: list[str] | csv.Error | UnicodeError
    while True:
        try:
            found = next(reader)
            "".join(found).encode()  # fails for bytes that were not decoded
        except StopIteration:
            return
        except (csv.Error, UnicodeEncodeError) as error:  # the reader continues with the next line
            found = error
        yield found, reader.line_num


def cell_type(kind: FieldType) -> str:
    """Return the type for `cell_value`; dates, times and decimals stay texts, which the schema parses."""
    return ("str" if kind.logical is not None else str(kind.required)) + "?" * kind.optional


def cell_value(cell: str, kind: str, name: str, where: str) -> object:
    """Return the value of a cell of a type; an empty cell of an optional field has none.

    Raises:
        SourceError: The cell does not have this type.
    """
    if kind.endswith("?"):
        kind = kind.removesuffix("?")
        if not cell or (cell in MISSING and _takes_numbers(kind, cell)):
            return None
    if kind == "str":
        return cell
    if kind == "bytes":
        return cell.encode()
    if kind == "json" or "[" in kind:
        return parse_json(cell.encode(), f"{where}, field {name!r}")
    if kind == "bool" and cell in TRUTHS:
        return TRUTHS[cell]
    if "int" in kind and re.fullmatch(r"[+-]?[0-9]{1,20}", cell):
        return int(cell)
    if "float" in kind:
        with suppress(ValueError):
            number = float(cell)
            if abs(number) < _EXACT or _is_same(cell, number, kind):
                return number
    shown = repr(cell) if len(cell) <= 40 else repr(cell[:37] + "…")
    raise SourceError(
        f"{where}: field {name!r} is {shown}, expected {kind}; fix the row, or pass --schema "
        f"{shell_word(name)}={'str' if cell and cell not in MISSING else f'{kind}?'}"
    )


def _is_same(cell: str, number: float, kind: str) -> bool:
    """Return False if a number overflows, or is an integer that float64 would change."""
    if not math.isfinite(number):
        return "n" in cell.lower()  # nan, inf and infinity
    return kind != "float64" or re.fullmatch(r"[+-]?[0-9]+", cell) is None or int(cell) == number


def _takes_numbers(kind: str, cell: str) -> bool:
    """Return True if a type holds numbers or booleans only, and the cell is none of them."""
    is_number = "[" not in kind and ("int" in kind or "float" in kind or kind == "bool")
    return is_number and not ("float" in kind and cell.lower() == "nan")
