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
from collections.abc import Collection, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO, ClassVar, cast

from shardkit.errors import SourceError, UsageError
from shardkit.formats import FieldType
from shardkit_tools.importers.json_lines import parse_json
from shardkit_tools.importers.line_ranges import cut_lines, holds_plain_rows
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
    shell_word,
)
from shardkit_tools.importers.source_files import check_suffixes, file_suffix, open_plain

_SCAN_ROWS = 100_000
_MAX_CELL_CHARACTERS = 1 << 30
_HEADER_BYTES = 1 << 16
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,18})\Z")
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z")
_TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT64 = range(-(2**63), 2**63)
_UTF8 = "utf-8-sig"


@dataclass(frozen=True, kw_only=True)
class CsvImporter(FileImporter):
    """CSV tables as a source."""

    name: ClassVar[str] = "csv"
    names: tuple[str, ...]
    """Names of all columns, including excluded ones."""
    encoding: str

    def _rows(self, task: SourceTask, seen: FileObserver) -> SampleStream:
        """Yield the rows; a row that does not fit is a failure of that row only."""
        types = {name: _cell_type(kind) for name, kind in self.fields.items()}  # without excluded columns
        value_of = _value_or_cell if self.options.unchecked else _value
        for file in task.files:
            first = max(0, task.first_row - 1)  # the header is not a row
            for row, cells in enumerate(_rows(file, self.encoding, task.start, task.stop, first), first):
                where = f"{file.path} row {row + 1}"
                try:
                    _check_width(cells, self.names, where)
                    named = zip(self.names, cells, strict=True)
                    sample = {n: value_of(cell, types[n], n, where) for n, cell in named if n in types}
                except SourceError as error:
                    yield SourceFailure(file.name, row, error)
                    continue
                yield SourceSample(sample, None, file.name, row)

    def _settings(self) -> dict[str, object]:
        return {} if self.encoding == _UTF8 else {"encoding": self.encoding}


def open_csv(source: Source, options: ImportOptions) -> CsvImporter:
    """Read the headers and first rows of tables."""
    check_suffixes(source, ("csv", "tsv"), "a CSV file")
    encoding = _encoding(source.files[0], options)
    first = _header(source.files[0], encoding)
    for file in source.files[1:]:
        header = _header(file, encoding)
        if header != first:
            raise SourceError(
                f"{file.path}: its header ({', '.join(header)[:80]}) is not that of {source.files[0].name} "
                f"({', '.join(first)[:80]}); make the files alike"
            )
    types = _infer(source, first, encoding, options)
    # line ends are the byte 10, which does not hold for UTF-16
    is_cut = b"\n".decode(encoding, "replace") == "\n"
    whole = () if is_cut else [file.name for file in source.files]
    return CsvImporter(
        source=source,
        fields=options.schema(types, source.given),
        options=options,
        names=tuple(first),
        encoding=encoding,
        cut=cut_lines(source.files, whole, is_plain=holds_plain_rows),
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


def _infer(source: Source, names: list[str], encoding: str, options: ImportOptions) -> dict[str, str]:
    kinds: dict[str, set[str]] = {name: set() for name in names}
    rows = ((file, row, cells) for file in source.files for row, cells in enumerate(_rows(file, encoding)))
    seen = 0
    for file, row, cells in itertools.islice(rows, _SCAN_ROWS):
        try:
            _check_width(cells, kinds, f"{file.path} row {row + 1}")
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
    return "bool" if cell in _TRUTHS else "str"


def _common(kinds: set[str]) -> str:
    some = kinds - {""}
    kind = next(iter(some)) if len(some) == 1 else "float64" if some == {"int64", "float64"} else "str"
    return kind if kind == "str" or "" not in kinds else f"{kind}?"


def _cell_type(kind: FieldType) -> str:
    """Return the type for `_value`; dates, times and decimals stay texts, which the schema parses."""
    return ("str" if kind.logical is not None else str(kind.required)) + "?" * kind.optional


def _value(cell: str, kind: str, name: str, where: str) -> object:
    if kind.endswith("?"):
        if not cell:
            return None
        kind = kind.removesuffix("?")
    if kind == "str":
        return cell
    if kind == "bytes":
        return cell.encode()
    if kind == "json" or "[" in kind:
        return parse_json(cell.encode(), f"{where}, field {name!r}")
    if kind == "bool" and cell in _TRUTHS:
        return _TRUTHS[cell]
    if "int" in kind and re.fullmatch(r"[+-]?[0-9]{1,20}", cell):
        return int(cell)
    if "float" in kind:
        try:
            return float(cell)
        except ValueError:
            pass
    shown = repr(cell) if len(cell) <= 40 else repr(cell[:37] + "…")
    raise SourceError(
        f"{where}: field {name!r} is {shown}, expected {kind}; mend the row, or pass --schema "
        f"{shell_word(name)}={'str' if cell else f'{kind}?'}"
    )


def _value_or_cell(cell: str, kind: str, name: str, where: str) -> object:
    """Return the value, the cell itself if it does not convert, or None for an empty cell."""
    try:
        return _value(cell, kind, name, where)
    except SourceError:
        return cell or None


def _check_width(cells: list[str], names: Collection[str], where: str) -> None:
    if len(cells) != len(names):
        raise SourceError(f"{where}: {len(cells)} cells, but the header has {len(names)}; mend the row")


def _header(file: SourceFile, encoding: str) -> list[str]:
    with open_plain(file) as stream, closing(_cells(stream, file, encoding)) as cells:
        header = next(cells, [])
    if not header or not all(header):
        raise SourceError(
            f"{file.path}: no header, or a column without a name; the first line must name the columns"
        )
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise SourceError(f"{file.path}: two columns are called {twice!r}; rename one")
    return header


@functools.lru_cache(maxsize=1024)
def _delimiter(file: SourceFile, encoding: str) -> str:
    if file_suffix(file.name) == "tsv":
        return "\t"
    with open_plain(file) as stream:
        header = re.split(r"[\r\n]", stream.read(_HEADER_BYTES).decode(encoding, "replace"), maxsplit=1)[0]
    return max(",;\t|", key=header.count) if "," not in header else ","


def _rows(
    file: SourceFile, encoding: str, start: int = 0, stop: int | None = None, first: int = 0
) -> Iterator[list[str]]:
    """Yield the rows below the header, without empty lines, or the rows of a range, from row `first` on.

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
    with stream, closing(_cells(stream, file, encoding, line=first + 1 if start else 0)) as cells:
        if not start:
            next(cells, None)
        yield from (row for row in cells if row)


def _cells(stream: BinaryIO, file: SourceFile, encoding: str, *, line: int = 0) -> Generator[list[str]]:
    """Yield the cells of every row of a file, or of a range after `line` lines."""
    csv.field_size_limit(_MAX_CELL_CHARACTERS)
    text = io.TextIOWrapper(stream, encoding=encoding, newline="")
    reader = csv.reader(text, delimiter=_delimiter(file, encoding), strict=True)
    try:
        yield from reader
    except UnicodeError as error:
        where = f"{file.path} near line {line + reader.line_num + 1}"
        if encoding in (_UTF8, "utf-8"):
            raise SourceError(
                f"{where}: not UTF-8; convert the file, or name its encoding, such as --encoding latin-1"
            ) from error
        raise SourceError(f"{where}: not {encoding} ({error}); name another --encoding") from error
    except csv.Error as error:
        raise SourceError(
            f"{file.path} line {line + reader.line_num}: not CSV ({error}); mend the line"
        ) from error
    finally:
        text.detach()  # the caller closes the stream
