"""CSV and TSV with a header line. Types are inferred from the first rows; later rows must fit them.

The delimiter is the comma if the header has one, otherwise the most frequent of semicolon, tab and bar.

A column of integers is int64, one of numbers float64, one of true and false bool, any other str. Integers
with leading zeros stay text, because they are codes, which a number would change. An empty cell is an empty
text; in a column of numbers or booleans it means no value, and the column is optional.
"""

from __future__ import annotations

import codecs
import csv
import functools
import io
import itertools
import re
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, cast

from shardkit.errors import SourceError, UsageError
from shardkit.formats.line_blocks import TRUTHS, cell_type, cell_value, csv_reader
from shardkit_tools.importers.line_ranges import (
    cut_lines,
    holds_plain_rows,
    holds_unquoted_rows,
    rows_to_infer,
)
from shardkit_tools.importers.protocol import (
    FileImporter,
    FileObserver,
    ImportOptions,
    SampleStream,
    Source,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
)
from shardkit_tools.importers.source_files import check_suffixes, file_suffix, open_plain

_SCAN_ROWS = 100_000
_HEADER_BYTES = 1 << 16
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,18})\Z")
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z")
_INT64 = range(-(2**63), 2**63)
_UTF8 = "utf-8-sig"
_INDEX = "index"  # name of a first column that the header does not name


@dataclass(frozen=True, kw_only=True)
class CsvImporter(FileImporter):
    """CSV tables as a source."""

    name: ClassVar[str] = "csv"
    names: tuple[str, ...]
    """Names of all columns, including excluded ones."""
    encoding: str
    quote: str
    """What encloses cells: '"', "none", or "maybe": the user must say so if a cell begins with a quote."""

    def _rows(self, task: SourceTask, seen: FileObserver) -> SampleStream:
        """Yield the rows; a row that does not fit is a failure of that row only."""
        for file in task.files:
            first = max(0, task.first_row - 1)  # the header is not a row
            yield from self.rows_of(
                file, _rows(file, self.encoding, self.quote, task.start, task.stop, first), first
            )

    def rows_of(
        self, file: SourceFile, rows: Iterable[tuple[int, list[str]]], first: int = 0
    ) -> SampleStream:
        """Yield a sample or a failure for each (number of its line, cells); `first` rows of the file are before."""
        types = {name: cell_type(kind) for name, kind in self.fields.items()}  # without excluded columns
        value_of = _value_or_cell if self.options.unchecked else cell_value
        for row, (line, cells) in enumerate(rows, first):
            where = f"{file.path} line {line}"
            try:
                _check_row(cells, self.names, where, self.quote)
                named = zip(self.names, cells, strict=True)
                sample = {n: value_of(cell, types[n], n, where) for n, cell in named if n in types}
            except SourceError as error:
                yield SourceFailure(file.name, row, error)
                continue
            yield SourceSample(sample, None, file.name, row, where=where)

    def _settings(self) -> dict[str, object]:
        encoding: dict[str, object] = {} if self.encoding == _UTF8 else {"encoding": self.encoding}
        return encoding if self.quote == '"' else {**encoding, "quote": self.quote}


def open_csv(source: Source, options: ImportOptions) -> CsvImporter:
    """Read the headers and first rows of tables."""
    check_suffixes(source, ("csv", "tsv"), "a CSV file")
    encoding = _encoding(source.files[0], options)
    quote = options.quote or ("maybe" if file_suffix(source.files[0].name) == "tsv" else '"')
    first = _header(source.files[0], encoding, quote)
    for file in source.files[1:]:
        header = _header(file, encoding, quote)
        if header != first:
            raise SourceError(
                f"{file.path}: its header ({', '.join(header)[:80]}) is not that of {source.files[0].name} "
                f"({', '.join(first)[:80]}); make the files alike"
            )
    types = _infer(source, first, encoding, quote, options)
    if first[0] == _INDEX:
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
        encoding=encoding,
        quote=quote,
        cut=cut_lines(
            source.files, whole, is_plain=holds_plain_rows if quote == '"' else holds_unquoted_rows
        ),
    )


def _encoding(file: SourceFile, options: ImportOptions) -> str:
    if options.encoding:
        try:
            "a".encode(options.encoding)  # fails for encodings that are not of text, such as hex and zip
            return codecs.lookup(options.encoding).name
        except LookupError:
            raise UsageError(
                f"--encoding {options.encoding!r}: no such encoding; expected one such as latin-1, cp1252 or shift_jis"
            ) from None
    with open_plain(file) as stream:
        is_wide = stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return "utf-16" if is_wide else _UTF8


def _infer(
    source: Source, names: list[str], encoding: str, quote: str, options: ImportOptions
) -> dict[str, str]:
    kinds: dict[str, set[str]] = {name: set() for name in names}
    rows = ((file, line, cells) for file in source.files for line, cells in _rows(file, encoding, quote))
    seen = 0
    for file, line, cells in itertools.islice(rows, rows_to_infer(source.files, _SCAN_ROWS)):
        try:
            _check_row(cells, kinds, f"{file.path} line {line}", quote)
        except SourceError:
            if not options.skip_bad_rows:
                raise
            continue
        seen += 1
        for name, cell in zip(names, cells, strict=True):
            kinds[name].add(_kind(cell))
    if not seen:
        raise SourceError(f"{source.given}: a header and no rows; give a table with samples in it")
    return {name: options.field_types.get(name) or _common(found) for name, found in kinds.items()}


def _kind(cell: str) -> str:
    if not cell:
        return ""
    if _INTEGER.match(cell):
        return "int64" if int(cell) in _INT64 else "str"
    if _NUMBER.match(cell):
        return "float64"
    return "bool" if cell in TRUTHS else "str"


def _common(kinds: set[str]) -> str:
    some = kinds - {""}
    kind = next(iter(some)) if len(some) == 1 else "float64" if some == {"int64", "float64"} else "str"
    return kind if kind == "str" or "" not in kinds else f"{kind}?"


def _value_or_cell(cell: str, kind: str, name: str, where: str) -> object:
    """Return the value, the cell itself if it does not convert, or None for an empty cell."""
    try:
        return cell_value(cell, kind, name, where)
    except SourceError:
        return cell or None


def _check_row(cells: list[str], names: Collection[str], where: str, quote: str) -> None:
    if len(cells) != len(names):
        raise SourceError(f"{where}: {len(cells)} cells, but the header has {len(names)}; mend the row")
    _check_quotes(cells, where, quote)


def _check_quotes(cells: list[str], where: str, quote: str) -> None:
    """Refuse a table separated by tabs if its readers disagree on quotes."""
    if quote == "maybe" and any(cell.startswith('"') for cell in cells):
        raise SourceError(
            f"{where}: a cell begins with a quote, which may enclose it or be a character of it; pass --quote none to "
            "keep quotes as characters, or --quote '\"' to remove those that enclose cells"
        )


def _header(file: SourceFile, encoding: str, quote: str) -> list[str]:
    with open_plain(file) as stream, closing(_cells(stream, file, encoding, quote)) as cells:
        _, header = next(cells, (1, []))
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
    return header


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
) -> Iterator[tuple[int, list[str]]]:
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
) -> Generator[tuple[int, list[str]]]:
    """Yield (number of the first line, cells) of every row of a file, or of a range after `line` lines."""
    text = io.TextIOWrapper(stream, encoding=encoding, newline="")
    try:
        yield from numbered_cells(
            csv_reader(text, delimiter_of(file, encoding), quote), file, encoding, line=line
        )
    finally:
        text.detach()  # the caller closes the stream


def numbered_cells(
    reader: Any, file: SourceFile, encoding: str = _UTF8, *, line: int = 0
) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the first line, cells) of the rows of a reader that begins after `line` lines.

    Raises:
        SourceError: The text is not of this encoding, or not CSV.
    """
    start = line + 1
    try:
        for cells in reader:
            yield start, cells
            start = line + reader.line_num + 1
    except UnicodeError as error:
        where = f"{file.path} near line {line + reader.line_num + 1}"
        if encoding in (_UTF8, "utf-8"):
            raise SourceError(
                f"{where}: not UTF-8; convert the file, or name its encoding, such as --encoding latin-1"
            ) from error
        raise SourceError(f"{where}: not {encoding} ({error}); name another --encoding") from error
    except csv.Error as error:
        raise SourceError(
            f"{file.path} line {start}: not CSV ({error}); mend the line, or pass --quote none if "
            "quotes are plain characters"
        ) from error
