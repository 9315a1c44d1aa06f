"""Decode lines of JSON and rows of CSV, in files that are built from and in blocks of adopted ones (SPEC.md §5).

Lines are parsed together. Where that fails, each is parsed by itself, so that the error names it.
"""

from __future__ import annotations

import csv
import io
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
from numpy.typing import NDArray

from shardkit.documents import Record, decode, encode
from shardkit.errors import FormatError, ShardkitError, SourceError

from .arrow_writing import arrow_schema, index_array, text_array
from .block import PayloadColumn, stored_columns
from .cells import without_missing
from .foreign_columns import ForeignColumns
from .index import ShardIndex
from .sample_columns import encode_rows
from .schema import Schema
from .strict_json import parse_json, parse_objects

LINES: Final = ("jsonl", "csv")
"""Encodings whose blocks are runs of lines."""

_MAX_CELL_CHARACTERS: Final = 1 << 30
_MAX_SETTINGS: Final = 64 << 20
UNDECODED: Final = "surrogateescape"
"""Error handler that keeps bytes which are not text, so that only their row is refused."""
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


LineName = Callable[[int], str]
"""Returns the name of a line for messages, given its number among the lines that are parsed."""


def line_starts(lines: bytes, *, returns: bool = False) -> NDArray[np.int64]:
    """Return where each line begins; with `returns`, a carriage return by itself ends a line, too."""
    octets = np.frombuffer(lines, np.uint8)
    ends = octets == ord("\n")
    if returns and b"\r" in lines:
        ends |= (octets == ord("\r")) & (np.append(octets[1:], 0) != ord("\n"))
    ends[-1] = False  # no line begins after the last
    return np.append(0, np.flatnonzero(ends) + 1)


class LineRows(NamedTuple):
    """The rows of consecutive lines."""

    # number, among these lines, of the first line of each row; empty lines are no rows
    lines: NDArray[np.int64]
    rows: Any  # of each row its object of JSON, or the error that says why there is none; or rows of CSV
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
        return name_of(found.lines[kept[row]])

    error: ShardkitError | None
    if encoding == "jsonl":
        found = json_rows(bytes(data), name_of)
        kept = [row for row in range(len(found.rows)) if row not in skipped]
        rows = [found.rows[row] for row in kept]
        error = next((row for row in rows if isinstance(row, ShardkitError)), None)
        columns, errors = encode_rows(schema, rows, row_name) if error is None else ({}, {})
    else:
        found = csv_rows(bytes(data), settings.names, settings.delimiter, settings.quote, name_of)
        kept = [row for row in range(len(found.rows)) if row not in skipped]
        arrays, errors = found.rows.take(kept).columns(schema, row_name)
        batch = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema, keys=False))
        columns, error = dict(zip(schema.stored, stored_columns(schema, batch), strict=True)), None
    if errors:
        error = errors[min(errors)]
    if error is not None:
        raise FormatError(f"{where}: cannot be decoded ({error}); adopt the file again") from error
    return columns, len(kept)


# ---- JSON


def json_rows(data: bytes, name_of: LineName, is_last: bool = True) -> LineRows:
    """Parse lines of JSON; no row continues after them."""
    objects: list[Any] | None = parse_objects(data)
    if objects is not None:
        return LineRows(np.arange(len(objects)), objects, len(objects), len(data))
    lines = data.split(b"\n")
    numbers = [number for number, line in enumerate(lines) if line.strip()]
    trimmed = [lines[number].removeprefix(BOM_UTF8).strip(b" \t\r") for number in numbers]
    objects = parse_objects(b"\n".join(trimmed))
    if objects is None:
        objects = [_json_row(lines[number], name_of(number)) for number in numbers]
    return LineRows(np.array(numbers, np.int64), objects, len(lines) - (not lines[-1]), len(data))


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


@dataclass(frozen=True, eq=False)
class CsvRows:
    """Rows of a table, by column."""

    cells: Any  # record batch of texts, which are empty in bad rows
    bad: Mapping[int, SourceError]  # rows that are none, and why

    def __len__(self) -> int:
        return int(self.cells.num_rows)

    def __getitem__(self, part: slice) -> CsvRows:
        return self.take(range(*part.indices(len(self))))

    def take(self, rows: Sequence[int]) -> CsvRows:
        """Return some of the rows."""
        if len(rows) == len(self):
            return self
        bad = {place: self.bad[row] for place, row in enumerate(rows) if row in self.bad} if self.bad else {}
        return CsvRows(self.cells.take(index_array(rows)), bad)

    def columns(
        self, fields: Schema, name_of: Callable[[int], str]
    ) -> tuple[list[Any], dict[int, ShardkitError]]:
        """Return the columns of fields in their Arrow types, and why rows do not fit; `name_of` names a row."""
        names = [name for name in fields if name in self.cells.schema.names]
        texts = [without_missing(self.cells.column(name), fields[name]) for name in names]
        # the last column: a table may have none of the fields
        batch = pa.RecordBatch.from_arrays([*texts, pa.nulls(len(self))], [*names, ""])
        found = ForeignColumns(batch, "", 0, name_of)
        found.bad.update(self.bad)
        arrays = [found.conform(name, kind) for name, kind in fields.items()]
        return arrays, found.bad


def csv_rows(
    data: bytes,
    names: Sequence[str],
    delimiter: str,
    quote: str,
    name_of: LineName,
    *,
    encoding: str = "utf-8",
    is_last: bool = True,
) -> LineRows:
    """Parse rows of strict CSV that have a cell for each of the named columns; arguments as for `split_rows`.

    Lines that are certainly rows are parsed by pyarrow, whose reader of quotes is not strict, and others by `csv`.
    """
    marks = (b'\n"', f'{delimiter}"'.encode())
    may_enclose = quote != "none" and b'"' in data and any(mark in b"\n" + data for mark in marks)
    if not may_enclose and _may_be_plain(quote, data):
        with suppress(pa.ArrowInvalid, OverflowError):  # a row of another size, no UTF-8, or 2 GiB
            cells = _plain_cells(data, names, delimiter)
            if len(cells) == data.count(b"\n") + (not data.endswith(b"\n")):  # pyarrow leaves out empty lines
                return LineRows(np.arange(len(cells)), CsvRows(cells, {}), len(cells), len(data))
    found = split_rows(data, delimiter, quote, name_of, encoding=encoding, is_last=is_last)
    rows, bad = found.rows, {}
    for row, cells in enumerate(rows):
        if not isinstance(cells, SourceError) and len(cells) != len(names):
            cells = SourceError(
                f"{name_of(found.lines[row])}: {len(cells)} cells, but the header has {len(names)}; fix the row"
            )
        if isinstance(cells, SourceError):
            bad[row], rows[row] = cells, [""] * len(names)
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    batch = pa.RecordBatch.from_arrays(list(map(text_array, columns)), list(names))
    return found._replace(rows=CsvRows(batch, bad))


def _plain_cells(data: bytes, names: Sequence[str], delimiter: str) -> Any:
    if data.startswith(BOM_UTF8):  # pyarrow would leave it out
        raise pa.ArrowInvalid("a mark")
    texts = dict.fromkeys(names, pa.large_string())
    table = pacsv.read_csv(
        pa.BufferReader(data),
        pacsv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=list(names)),
        pacsv.ParseOptions(delimiter=delimiter, quote_char=False),
        pacsv.ConvertOptions(column_types=texts, strings_can_be_null=False),
    )
    if not table.num_rows:
        raise pa.ArrowInvalid("no rows")
    (batch,) = table.combine_chunks().to_batches()
    return batch


def split_rows(
    data: bytes,
    delimiter: str,
    quote: str,
    name_of: LineName,
    *,
    encoding: str = "utf-8",
    is_last: bool = True,
) -> LineRows:
    """Split rows of strict CSV into lists of cells.

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
    found = _parse_cells(text, delimiter, quote, name_of, is_last=is_last)
    rows, lines = found.rows, found.lines
    is_text = text.isascii() or _is_text(text)
    if not is_text or (quote == "maybe" and '"' in text):
        rows = [_checked(row, quote, encoding, name_of(line)) for row, line in zip(rows, lines, strict=True)]
    if not all(rows):
        filled = [place for place, row in enumerate(rows) if row]
        lines, rows = lines[filled], [rows[place] for place in filled]
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
    return LineRows(np.array(lines, np.int64), rows, num_lines, len(whole.encode(errors=UNDECODED)))


def plain_row_starts(quote: str, lines: bytes) -> NDArray[np.int64] | None:
    r"""Return where each line of a table begins if it is certainly a row, otherwise None.

    A cell in quotes (unless `quote` is "none") may contain line ends, and only a reader from the start of the table
    can tell them from the ends of rows. Otherwise rows are counted as lines only if no line is empty and all line ends
    are ``\n`` or ``\r\n``.
    """
    if not _may_be_plain(quote, lines):
        return None
    starts = line_starts(lines)
    first = np.frombuffer(lines, np.uint8)[starts]
    return None if ((first == ord("\n")) | (first == ord("\r"))).any() else starts


def _may_be_plain(quote: str, lines: bytes) -> bool:
    """Return True if each line that is not empty is certainly a row."""
    if not lines or (quote == '"' and b'"' in lines):
        return False
    return b"\r" not in lines or lines.count(b"\r") == lines.count(b"\r\n")


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
