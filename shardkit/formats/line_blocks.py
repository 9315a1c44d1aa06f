"""Decode lines of JSON and rows of CSV, in files that are built from and in blocks of adopted ones (SPEC.md §5).

Lines are parsed together. Where that fails, each is parsed by itself, so that the error names it.
"""

from __future__ import annotations

import csv
import io
import math
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple

from shardkit.documents import Record, decode, encode
from shardkit.errors import FormatError, ShardkitError, SourceError
from shardkit.extras import shell_word

from .block import PayloadColumn
from .index import ShardIndex
from .sample_columns import EXACT_INTEGER, encode_rows
from .schema import FieldType, Schema
from .strict_json import parse_json, parse_objects

LINES: Final = ("jsonl", "csv")
"""Encodings whose blocks are runs of lines."""

_MAX_CELL_CHARACTERS: Final = 1 << 30
_MAX_SETTINGS: Final = 64 << 20
MISSING: Final = frozenset(["NA", "N/A", "n/a", "#N/A", "NULL", "null", "None", "nan", "NaN", "<NA>", "\\N"])
"""Cells of optional numbers and booleans that mean no value, as pandas, R and databases write them."""
TRUTHS: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
"""Cells of booleans."""
UNDECODED: Final = "surrogateescape"
"""Error handler that keeps bytes which are not text, so that only their row is refused."""
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,20}")
_INTEGERS: Final = re.compile(r"[+-]?[0-9]{1,20}(?:,[+-]?[0-9]{1,20})*")
ONE_A_LINE: Final = "jq -c . FILE, or jq -c '.data[]' FILE if the samples are a list in it"


class LineSettings(Record, frozen=True, kw_only=True):
    """Settings with which all blocks of a file of lines are read.

    Attributes:
        skipped: (block, number of the row in the block) of rows that are left out; empty lines are no rows.
        names: columns of CSV, in the order of the cells.
        delimiter: delimiter of CSV.
        quote: see `csv_rows`.
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


CellValue = Callable[[str, str, str, str], object]
"""Returns the value of a cell, given its type, its column and where it is."""

LineName = Callable[[int], str]
"""Returns the name of a line for messages, given its number among the lines that are parsed."""


class LineRows(NamedTuple):
    """The rows of consecutive lines."""

    lines: Sequence[int]  # number, among these lines, of the first line of each row; empty lines are no rows
    # sequence: of each row, its object in JSON or its cells in CSV, or the error that says why there is none
    rows: Any
    num_lines: int  # lines that the rows take, with empty ones
    num_bytes: int  # the same in bytes: less than all if the last row of CSV continues after the last line


def line_columns(
    encoding: str,
    settings: LineSettings,
    data: bytes | memoryview,
    schema: Schema,
    skipped: Collection[int],
    where: str,
) -> tuple[dict[str, PayloadColumn], int]:
    """Return the stored columns of some fields of a block, and the number of its rows.

    Args:
        encoding: one of `LINES`.
        settings: settings of the file.
        data: verified bytes of the block.
        schema: fields to decode.
        skipped: numbers in the block of rows that are left out.
        where: name of the block, for messages.

    Raises:
        FormatError: A row cannot be decoded.
    """

    def name_of(line: int) -> str:
        return f"line {line + 1} of the block"

    def row_name(row: int) -> str:
        return name_of(found.lines[row])

    if encoding == "jsonl":
        found = json_rows(bytes(data), name_of)
    else:
        found = csv_rows(bytes(data), settings.delimiter, settings.quote, name_of)
    if skipped:
        kept = [row for row in range(len(found.rows)) if row not in skipped]
        found = found._replace(
            lines=[found.lines[row] for row in kept], rows=[found.rows[row] for row in kept]
        )
    rows = found.rows
    if encoding == "csv":
        types = {name: cell_type(kind) for name, kind in schema.items()}
        rows = cell_samples(rows, settings.names, types, row_name)
    error: ShardkitError | None = next((row for row in rows if isinstance(row, ShardkitError)), None)
    if error is None:
        columns, errors = encode_rows(schema, rows, row_name)
        if not errors:
            return columns, len(rows)
        error = errors[min(errors)]
    raise FormatError(f"{where}: cannot be decoded ({error}); adopt the file again") from error


# ---- JSON


def json_rows(data: bytes, name_of: LineName, is_last: bool = True) -> LineRows:
    """Parse lines of JSON; no row continues after them."""
    objects: list[Any] | None = parse_objects(data)
    if objects is not None:
        return LineRows(range(len(objects)), objects, len(objects), len(data))
    lines = data.split(b"\n")
    numbers = [number for number, line in enumerate(lines) if line.strip()]
    trimmed = [lines[number].removeprefix(BOM_UTF8).strip(b" \t\r") for number in numbers]
    objects = parse_objects(b"\n".join(trimmed))
    if objects is None:
        objects = [_json_row(lines[number], name_of(number)) for number in numbers]
    return LineRows(numbers, objects, len(lines) - (not lines[-1]), len(data))


def _json_row(line: bytes, where: str) -> dict[str, object] | SourceError:
    try:
        return object_of(parse_json(line, where), where)
    except SourceError as error:
        if "Extra data" in str(error):
            what = (
                "a comma after the object" if line.rstrip().endswith(b"},") else "several values in one line"
            )
            return SourceError(f"{where}: {what}; write one object a line and nothing else: {ONE_A_LINE}")
        if not line.lstrip().startswith(b"{") or line.rstrip()[-1:] not in b"{[,":
            return error
        return SourceError(
            f"{where}: an object that continues on the next line; write one object a line: {ONE_A_LINE}"
        )


def object_of(value: object, where: str) -> dict[str, object]:
    """Return a value of JSON if it is an object; raise SourceError if it is none."""
    if isinstance(value, dict):
        return value
    raise SourceError(
        f"{where}: holds a {type(value).__name__}, not an object; each line must be one JSON object, or the file one "
        "array of them"
    )


# ---- CSV


def csv_rows(
    data: bytes,
    delimiter: str,
    quote: str,
    name_of: LineName,
    *,
    encoding: str = "utf-8",
    is_last: bool = True,
) -> LineRows:
    """Split rows of strict CSV into cells.

    Args:
        data: whole lines in UTF-8; other bytes are an error of their row.
        delimiter: character between cells.
        quote: ``"`` if cells may be enclosed; "none" if quotes are characters; "maybe" if the user must say so where a
            cell begins with a quote.
        name_of: returns the name of a line.
        encoding: encoding of the file, for messages.
        is_last: a quote that is not closed is an error; otherwise, its row is left for a call with more lines.
    """
    text = data.decode(errors=UNDECODED)
    if data and are_plain_rows(quote, data):
        texts = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
        found = LineRows(range(len(texts)), [line.split(delimiter) for line in texts], len(texts), len(data))
    else:
        found = _parse_cells(text, delimiter, quote, name_of, is_last=is_last)
    rows, lines = found.rows, found.lines
    is_text = text.isascii() or _is_text(text)
    if not is_text or (quote == "maybe" and '"' in text):
        rows = [_checked(row, quote, encoding, name_of(line)) for row, line in zip(rows, lines, strict=True)]
    if not all(rows):
        lines = [line for row, line in zip(rows, lines, strict=True) if row]
        rows = [row for row in rows if row]
    return found._replace(lines=lines, rows=rows)


def _parse_cells(text: str, delimiter: str, quote: str, name_of: LineName, *, is_last: bool) -> LineRows:
    """Parse rows that may take several lines, with the `csv` module."""
    csv.field_size_limit(_MAX_CELL_CHARACTERS)
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quote == '"' else csv.QUOTE_NONE,
        strict=True,
    )
    rows: list[Any] = []
    lines = [0]  # first line of each row, and of the next one
    while True:
        try:
            for row in reader:
                rows.append(row)
                lines.append(reader.line_num)
            break
        except csv.Error as error:  # the reader continues with the next line
            if "unexpected end" in str(error) and not is_last:
                break
            rows.append(_no_row(name_of(lines[-1]), error))
            lines.append(reader.line_num)
    num_lines = lines.pop()
    whole = (
        text if num_lines == reader.line_num else "".join(islice(io.StringIO(text, newline=""), num_lines))
    )
    return LineRows(lines, rows, num_lines, len(whole.encode(errors=UNDECODED)))


def are_plain_rows(quote: str, lines: bytes) -> bool:
    r"""Return True if every line of a table is certainly a row.

    A cell in quotes (unless `quote` is "none") may contain line ends, and only a reader from the start of the table
    can tell them from the ends of rows. Otherwise rows are counted as lines only if no line is empty and all line ends
    are ``\n`` or ``\r\n``.
    """
    if (quote == '"' and b'"' in lines) or b"\n\n" in lines or lines.startswith((b"\n", b"\r")):
        return False
    return b"\r" not in lines or (b"\n\r" not in lines and lines.count(b"\r") == lines.count(b"\r\n"))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # for bytes that were not decoded
        return False
    return True


def _checked(row: list[str] | SourceError, quote: str, encoding: str, where: str) -> list[str] | SourceError:
    """Return the cells of a row, or why they are none."""
    if isinstance(row, SourceError):
        return row
    if not _is_text("".join(row)):
        if encoding == "utf-8":
            return SourceError(
                f"{where}: not UTF-8; convert the file, or build it with its encoding, such as --encoding latin-1"
            )
        return SourceError(f"{where}: not {encoding}; name another --encoding")
    if quote == "maybe" and any(cell.startswith('"') for cell in row):
        return SourceError(
            f"{where}: a cell begins with a quote, which may enclose it or be a character of it; pass --quote none to "
            "keep quotes as characters, or --quote '\"' to remove those that enclose cells"
        )
    return row


def _no_row(where: str, error: csv.Error) -> SourceError:
    if "unexpected end" in str(error):
        return SourceError(
            f"{where}: a quote that is never closed encloses the rest of the file; close it, or pass --quote none if "
            "quotes are plain characters"
        )
    return SourceError(
        f"{where}: not CSV ({error}); fix the line, or pass --quote none if quotes are plain characters"
    )


def even_rows(rows: Sequence[Any], names: Sequence[str], name_of: Callable[[int], str]) -> Sequence[Any]:
    """Return rows of cells, each that has not one for each column replaced by an error."""
    try:
        if set(map(len, rows)) == {len(names)}:
            return rows
    except TypeError:  # an error has no length
        pass
    return [
        SourceError(f"{name_of(row)}: {len(cells)} cells, but the header has {len(names)}; fix the row")
        if not isinstance(cells, SourceError) and len(cells) != len(names)
        else cells
        for row, cells in enumerate(rows)
    ]


def cell_samples(
    rows: Sequence[Any],
    names: Sequence[str],
    types: Mapping[str, str],
    name_of: Callable[[int], str],
    value_of: CellValue | None = None,
) -> list[Any]:
    """Return a sample for each row of cells, or the error that says why there is none.

    Args:
        rows: rows of `csv_rows`.
        names: columns of the file.
        types: column to convert → type, of `cell_type`.
        name_of: returns the name of a row.
        value_of: function to convert with instead of `cell_value`.
    """
    rows = even_rows(rows, names, name_of)
    try:
        if value_of is not None:
            raise ValueError("each cell is converted by itself")
        columns = zip(names, zip(*rows, strict=True), strict=True)
        values = {name: _cell_values(cells, types[name], name) for name, cells in columns if name in types}
        if values:
            return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    except (ValueError, KeyError, TypeError, SourceError):
        pass
    return [
        row
        if isinstance(row, SourceError)
        else _cell_sample(row, names, types, name_of(place), value_of or cell_value)
        for place, row in enumerate(rows)
    ]


def _cell_sample(
    cells: Sequence[str], names: Sequence[str], types: Mapping[str, str], where: str, value_of: CellValue
) -> dict[str, object] | SourceError:
    try:
        named = zip(names, cells, strict=True)
        return {name: value_of(cell, types[name], name, where) for name, cell in named if name in types}
    except SourceError as error:
        return error


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
    if "int" in kind and _INTEGER.fullmatch(cell):
        return int(cell)
    if "float" in kind:
        with suppress(ValueError):
            number = float(cell)
            if abs(number) < EXACT_INTEGER or _is_same(cell, number, kind):
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


def _cell_values(cells: Sequence[str], kind: str, name: str) -> Sequence[object]:
    """Return the values that `cell_value` returns for each cell.

    Raises:
        ValueError, KeyError, SourceError: A cell must be looked at by itself.
    """
    if kind.endswith("?"):
        values = iter(_cell_values([cell for cell in cells if cell], kind.removesuffix("?"), name))
        return [next(values) if cell else None for cell in cells]
    if kind == "str" or not cells:
        return cells
    if kind == "bool":
        return [TRUTHS[cell] for cell in cells]
    if "[" not in kind and "float" in kind:
        numbers = list(map(float, cells))
        if not all(-EXACT_INTEGER < number < EXACT_INTEGER or number != number for number in numbers):
            raise ValueError("numbers that float64 may change")
        return numbers
    if "[" not in kind and "int" in kind:
        if not _INTEGERS.fullmatch(",".join(cells)):
            raise ValueError("not integers")
        return list(map(int, cells))
    return [cell_value(cell, kind, name, "") for cell in cells]


def _takes_numbers(kind: str, cell: str) -> bool:
    """Return True if a type holds numbers or booleans only, and the cell is none of them."""
    is_number = "[" not in kind and ("int" in kind or "float" in kind or kind == "bool")
    return is_number and not ("float" in kind and cell.lower() == "nan")
