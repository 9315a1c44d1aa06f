"""CSV and TSV with a header line. Types are inferred from the first rows; later rows must fit them.

The delimiter is the comma if the header has one, otherwise the most frequent of semicolon, tab and bar.

A column of integers is int64, one of numbers, with ``nan`` and ``inf`` among them, float64, one of true and false
bool, any other str. Integers with leading zeros or beyond int64 stay text, because a number would change them. An empty
cell is an empty text; in a column of numbers or booleans it means no value, and the column is optional.
"""

from __future__ import annotations

import codecs
import csv
import functools
import io
import itertools
import math
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias, cast

from shardkit.errors import SourceError, UsageError
from shardkit.extras import shell_word
from shardkit.formats.line_blocks import (
    MISSING,
    TRUTHS,
    UNDECODED,
    cell_type,
    cell_value,
    read_cells,
)
from shardkit_tools.importers.line_ranges import (
    before_damage,
    cut_lines,
    holds_plain_rows,
    rest_as_failure,
    rows_to_infer,
)
from shardkit_tools.importers.protocol import (
    FileImporter,
    ImportOptions,
    SampleStream,
    Source,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
)
from shardkit_tools.importers.source_files import (
    check_suffixes,
    file_suffix,
    lacking_columns,
    open_each,
    open_plain,
)

_SCAN_ROWS = 100_000
_HEADER_BYTES = 1 << 16
_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)\Z")
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"nan|NaN|[+-]?(?:inf|Inf|Infinity|infinity)\Z")
_INT64 = range(-(2**63), 2**63)
_EXACT = 2**53  # float64 holds every integer up to this
_MOST_DIGITS = 30  # more than an int64 has, less than Python converts
_UTF8 = "utf-8-sig"
_NumberedCells: TypeAlias = tuple[int, list[str] | SourceError]
_INDEX = "index"  # name of a first column that the header does not name


@dataclass(frozen=True, kw_only=True)
class CsvImporter(FileImporter):
    """CSV tables as a source."""

    name: str = "csv"
    names: tuple[str, ...]
    """Names of all columns of the first file, including excluded ones."""
    others: Mapping[str, tuple[str, ...]]
    """The same for files whose columns are others, or in another order: file → names."""
    encoding: str
    quote: str
    """What encloses cells: '"', "none", or "maybe": the user must say so if a cell begins with a quote."""

    def _rows(self, task: SourceTask) -> SampleStream:
        """Yield the rows; a row that does not fit is a failure of that row only."""
        first = max(0, task.first_row - 1)  # the header is not a row
        for file in task.files:
            rows = _rows(file, self.encoding, self.quote, task.start, task.stop, first)
            yield from rest_as_failure(file, self.rows_of(file, rows, first))

    def rows_of(self, file: SourceFile, rows: Iterable[_NumberedCells], first: int = 0) -> SampleStream:
        """Yield a sample or a failure for each (number of its line, cells); `first` rows of the file are before."""
        types = {name: cell_type(kind) for name, kind in self.fields.items()}  # without excluded columns
        names = self.names_of(file)
        lacking = dict.fromkeys(name for name in types if name not in names)
        value_of = _value_or_cell if self.options.unchecked else cell_value
        for row, (line, cells) in enumerate(rows, first):
            where = f"{file.path} line {line}"
            try:
                named = zip(names, _checked(cells, names, where, self.quote), strict=True)
                sample = {n: value_of(cell, types[n], n, where) for n, cell in named if n in types} | lacking
            except SourceError as error:
                yield SourceFailure(file.name, row, error)
                continue
            yield SourceSample(sample, None, file.name, row, where=where)

    def is_plain(self, piece: bytes) -> bool:
        """Return True if the lines of a piece are rows, see `holds_plain_rows`."""
        return holds_plain_rows(self.quote, piece)

    def names_of(self, file: SourceFile) -> tuple[str, ...]:
        """Return the names of all columns of a file."""
        return self.others.get(file.name, self.names)

    def _settings(self) -> dict[str, object]:
        encoding: dict[str, object] = {} if self.encoding == _UTF8 else {"encoding": self.encoding}
        return encoding if self.quote == '"' else {**encoding, "quote": self.quote}


def open_csv(source: Source, options: ImportOptions) -> CsvImporter:
    """Read the headers and first rows of tables."""
    check_suffixes(source, ("csv", "tsv"), "a CSV file")
    encoding = _encoding(source, options)
    quote = options.quote or ("maybe" if file_suffix(source.files[0].name) == "tsv" else '"')
    source, headers = open_each(source, options, lambda file: _header(file, encoding, quote))
    first = headers[0]
    for file, header in zip(source.files, headers, strict=True):
        if first.keys().isdisjoint(header):  # such as a part of a table without a header
            raise SourceError(
                f"{file.path}: its header ({', '.join(header)[:80]}) has no column of {source.files[0].name} "
                f"({', '.join(first)[:80]}); write a header into each file, or build the tables one by one"
            )
    types = _infer(source, headers, encoding, quote, options)
    numbers = [name for name, kind in types.items() if _NUMBER.match(name) and kind in ("int64", "float64")]
    if numbers and numbers != [str(column) for column in range(len(numbers))]:  # the names of pandas
        source.notes.append(
            f"the header calls a column of numbers {numbers[0]!r}; if the first line is a row, write a header above it"
        )
    if next(iter(first)) == _INDEX:
        source.notes.append(
            f"the first column has no name and became {_INDEX}; --drop {_INDEX} leaves it out"
        )
    # line ends are the byte 10, which does not hold for UTF-16
    is_cut = b"\n".decode(encoding, "replace") == "\n"
    whole = () if is_cut else [file.name for file in source.files]
    return CsvImporter(
        source=source,
        fields=options.schema(types, source.given),
        options=options,
        names=tuple(first),
        others={
            file.name: tuple(header)
            for file, header in zip(source.files, headers, strict=True)
            if list(header) != list(first)
        },
        encoding=encoding,
        quote=quote,
        cut=cut_lines(source.files, whole, is_plain=functools.partial(holds_plain_rows, quote)),
    )


def _encoding(source: Source, options: ImportOptions) -> str:
    if options.encoding:
        try:
            "a".encode(options.encoding)  # fails for encodings that are not of text, such as hex and zip
            return codecs.lookup(options.encoding).name
        except LookupError:
            raise UsageError(
                f"--encoding {options.encoding!r}: no such encoding; expected one such as latin-1, cp1252 or shift_jis"
            ) from None
    for file in source.files:
        with suppress(SourceError), open_plain(file) as stream:  # reported when the headers are read
            is_wide = stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            return "utf-16" if is_wide else _UTF8
    return _UTF8


def _infer(
    source: Source, headers: Sequence[dict[str, None]], encoding: str, quote: str, options: ImportOptions
) -> dict[str, str]:
    # column → kind → where it is first
    kinds: dict[str, dict[str, str]] = {name: {} for header in headers for name in header}
    rows = (
        (file, header, one)
        for file, header in zip(source.files, headers, strict=True)
        for one in before_damage(_rows(file, encoding, quote), skip=options.skip_bad_rows)
    )
    seen = 0
    for file, names, (line, found) in itertools.islice(rows, rows_to_infer(source.files, _SCAN_ROWS)):
        where = f"{file.path} line {line}"
        try:
            cells = _checked(found, names, where, quote)
        except SourceError:
            if not options.skip_bad_rows:
                raise
            continue
        seen += 1
        for name, cell in zip(names, cells, strict=True):
            kind = _kind(cell)
            if kind not in kinds[name]:
                kinds[name][kind] = f"{cell!r} in {where}"
    if not seen:
        raise SourceError(f"{source.given}: a header and no rows; give a table with samples in it")
    types = {name: _common(found) for name, found in kinds.items()}
    for name in lacking_columns(source, headers, options):
        types[name] = types[name].removesuffix("?") + "?"
    types |= {name: options.field_types[name] for name in types if name in options.field_types}
    for name, found_kinds in kinds.items():
        number = _common(found_kinds.keys() - {"missing"}).rstrip("?")
        if name not in options.field_types and "missing" in found_kinds and number != "str":
            source.notes.append(
                f"{name} is text because of {found_kinds['missing']}; --schema {shell_word(name)}={number}? takes such "
                "cells as missing values"
            )
    return types


def _kind(cell: str) -> str:
    """Return the type of a cell, "" for an empty one, or "inexact" (int64 only), "not finite" or "missing"."""
    if not cell:
        return ""
    if _INTEGER.match(cell):
        number = int(cell[:_MOST_DIGITS])
        if abs(number) <= _EXACT:
            return "int64"
        return "str" if number not in _INT64 else "int64" if int(float(number)) == number else "inexact"
    if _NUMBER.match(cell):
        return "str" if math.isinf(float(cell)) else "float64"
    if _NOT_FINITE.match(cell):
        return "not finite"
    return "bool" if cell in TRUTHS else "missing" if cell in MISSING else "str"


def _common(kinds: Collection[str]) -> str:
    """Return the type of a column whose cells are of these kinds."""
    some = set(kinds) - {""}
    kind = "str"
    if some == {"bool"}:
        kind = "bool"
    elif some and some <= {"int64", "inexact"}:
        kind = "int64"
    elif some & {"int64", "float64"} and some <= {"int64", "float64", "not finite"}:
        kind = "float64"
    return kind if kind == "str" or "" not in kinds else f"{kind}?"


def _value_or_cell(cell: str, kind: str, name: str, where: str) -> object:
    """Return the value, the cell itself if it does not convert, or None for an empty cell."""
    try:
        return cell_value(cell, kind, name, where)
    except SourceError:
        return cell or None


def _checked(cells: list[str] | SourceError, names: Collection[str], where: str, quote: str) -> list[str]:
    """Return the cells of a row that has one for each column."""
    if isinstance(cells, SourceError):
        raise cells
    if len(cells) != len(names):
        raise SourceError(f"{where}: {len(cells)} cells, but the header has {len(names)}; fix the row")
    _check_quotes(cells, where, quote)
    return cells


def _check_quotes(cells: list[str], where: str, quote: str) -> None:
    """Refuse a table separated by tabs if its readers disagree on quotes."""
    if quote == "maybe" and any(cell.startswith('"') for cell in cells):
        raise SourceError(
            f"{where}: a cell begins with a quote, which may enclose it or be a character of it; pass --quote none to "
            "keep quotes as characters, or --quote '\"' to remove those that enclose cells"
        )


def _header(file: SourceFile, encoding: str, quote: str) -> dict[str, None]:
    """Return the names of the columns of a file, in order."""
    if not file.size:
        raise SourceError(f"{file.path}: an empty file; write it again, or leave it out: --on-error skip")
    with open_plain(file) as stream, closing(_cells(stream, file, encoding, quote)) as cells:
        _, header = next(cells, (1, list[str]()))
    if isinstance(header, SourceError):
        raise header
    if "\0" in "".join(header):
        raise SourceError(
            f"{file.path}: its header holds NUL characters; if it is UTF-16: --encoding utf-16-le"
        )
    if "".join(header).startswith("sep="):
        raise SourceError(f"{file.path} line 1: 'sep=' is a setting of Excel, not a header; delete the line")
    _check_quotes(header, f"{file.path} line 1", quote)
    if len(header) > 1 and not header[0]:
        header[0] = _INDEX  # as pandas writes an index without a name
    if not header or not all(header):
        raise SourceError(
            f"{file.path}: no header, or a column without a name; the first line must name the columns"
        )
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise SourceError(f"{file.path}: two columns are called {twice!r}; rename one")
    return dict.fromkeys(header)


@functools.lru_cache(maxsize=1024)
def delimiter_of(file: SourceFile, encoding: str) -> str:
    """Return the delimiter of a file: by its extension, or by its header."""
    if file_suffix(file.name) == "tsv":
        return "\t"
    with open_plain(file) as stream:
        header = re.split(r"[\r\n]", stream.read(_HEADER_BYTES).decode(encoding, "replace"), maxsplit=1)[0]
    return max(",;\t|", key=header.count) if "," not in header else ","


def _rows(
    file: SourceFile, encoding: str, quote: str, start: int = 0, stop: int | None = None, first: int = 0
) -> Iterator[_NumberedCells]:
    """Yield (number of the first line, cells) of the rows below the header, without empty lines.

    Of a range, yield its rows, where `first` rows of the file are before it.

    A range begins at a row, or at the header, and holds no empty lines.
    """
    stream = open_plain(file)
    if start or stop is not None:
        with stream:
            stream.seek(start)
            part = stream.read((file.size if stop is None else stop) - start)
        stream = cast(BinaryIO, io.BytesIO(part))
    if start and encoding == _UTF8:
        encoding = "utf-8"  # a byte-order mark is only at the beginning of a file
    with stream, closing(_cells(stream, file, encoding, quote, line=first + 1 if start else 0)) as cells:
        if not start:
            next(cells, None)
        yield from (row for row in cells if row[1])


def _cells(
    stream: BinaryIO, file: SourceFile, encoding: str, quote: str, *, line: int = 0
) -> Generator[_NumberedCells]:
    """Yield (number of the first line, cells) of every row of a file, or of a range after `line` lines."""
    text = io.TextIOWrapper(stream, encoding=encoding, newline="", errors=UNDECODED)
    try:
        rows = read_cells(text, delimiter_of(file, encoding), quote)
        yield from numbered_cells(rows, file, encoding, line=line)
    finally:
        text.detach()  # the caller closes the stream


def numbered_cells(
    rows: Iterator[tuple[list[str] | csv.Error | UnicodeError, int]],
    file: SourceFile,
    encoding: str = _UTF8,
    *,
    line: int = 0,
) -> Iterator[_NumberedCells]:
    """Yield (number of the first line, cells or an error) of rows of `read_cells` that begin after `line` lines.

    Raises:
        SourceError: The rest of the text is not of this encoding.
    """
    start = line + 1
    try:
        for found, lines in rows:
            where = f"{file.path} line {start}"
            if isinstance(found, UnicodeError):
                yield start, _undecoded(where, encoding, found)
            elif isinstance(found, csv.Error):
                yield start, _no_row(where, found)
            else:
                yield start, found
            start = line + lines + 1
    except UnicodeError as error:
        raise _undecoded(f"{file.path} near line {start}", encoding, error) from error


def _undecoded(where: str, encoding: str, error: UnicodeError) -> SourceError:
    if encoding in (_UTF8, "utf-8"):
        return SourceError(
            f"{where}: not UTF-8; convert the file, or build it with its encoding, such as --encoding latin-1"
        )
    return SourceError(f"{where}: not {encoding} ({error}); name another --encoding")


def _no_row(where: str, error: csv.Error) -> SourceError:
    if "unexpected end" in str(error):
        return SourceError(
            f"{where}: a quote that is never closed encloses the rest of the file; close it, or pass --quote none if "
            "quotes are plain characters"
        )
    return SourceError(
        f"{where}: not CSV ({error}); fix the line, or pass --quote none if quotes are plain characters"
    )
