"""CSV and TSV with a header line. Types are inferred from the first rows; later rows must fit them.

The delimiter is the comma if the header has one, otherwise the most frequent of semicolon, tab and bar.

A column of integers is int64, one of numbers, with ``nan`` and ``inf`` among them, float64, one of true and false
bool, any other str. Integers with leading zeros or beyond int64 stay text, because a number would change them. An empty
cell is an empty text; in a column of numbers or booleans it means no value, and the column is optional.
"""

from __future__ import annotations

import codecs
import functools
import io
import math
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.extras import shell_word
from shardkit.formats.arrow_writing import index_array, text_array
from shardkit.formats.block import mask_of
from shardkit.formats.cells import MISSING, TRUTHS, cell_value, is_missing
from shardkit.formats.compression import PACKED_HEADS
from shardkit.formats.line_blocks import (
    UNDECODED,
    LineName,
    LineRows,
    csv_rows,
    plain_row_starts,
    split_rows,
)
from shardkit.formats.sample_columns import EXACT_INTEGER, is_exact
from shardkit_tools.importers.line_importer import (
    LineBlock,
    LineImporter,
    ParseLines,
    blocks_to_infer,
    note_partitions,
    parse_pieces,
)
from shardkit_tools.importers.line_ranges import (
    READ_BYTES,
    cut_lines,
    read_pieces,
)
from shardkit_tools.importers.protocol import ImportOptions, Source, SourceFile, SourceSchema, SourceTask
from shardkit_tools.importers.source_files import (
    LeftOut,
    check_suffixes,
    file_suffix,
    lacking_columns,
    open_each,
    open_plain,
)

_SCAN_ROWS = 100_000
_HEADER_BYTES = 1 << 16
_LINE = re.compile(rb"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")
_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)\Z")
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"(?:nan|NaN|[+-]?(?:inf|Inf|Infinity|infinity))\Z")
_INT64 = range(-(2**63), 2**63)
_MOST_DIGITS = 30  # more than an int64 has, less than Python converts
UTF8 = "utf-8"
_WORDS = text_array(
    ["", *TRUTHS, *MISSING]
    + [sign + name for sign in ("", "+", "-") for name in ("inf", "Inf", "infinity", "Infinity")]
)
"""Cells without digits that are no text."""
_KINDS_OF_WORDS = {"", "bool", "missing", "not finite"}
_INDEX = "index"  # name of a first column that the header does not name


@dataclass(frozen=True, kw_only=True)
class CsvImporter(LineImporter):
    """CSV tables as a source."""

    name: str = "csv"
    names: tuple[str, ...]
    """Names of all columns of the first file, including excluded ones."""
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same for files whose columns are others, or in another order: file → names."""
    encoding: str
    quote: str
    """What encloses cells: '"', "none", or "maybe": the user must say so if a cell begins with a quote."""

    @cached_property
    def ranges(self) -> tuple[SourceTask, ...]:
        # line ends are the byte 10, which does not hold for UTF-16
        is_cut = b"\n".decode(self.encoding, "replace") == "\n"
        return cut_lines(
            self.files(), () if is_cut else [file.name for file in self.files()], self.plain_rows
        )

    def pieces(self, file: SourceFile, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """As `LineImporter.pieces`; bytes that are not text of the encoding are none of UTF-8 either."""
        if self.encoding == UTF8:
            for number, piece in enumerate(read_pieces(file, start, stop, returns=True)):
                yield piece.removeprefix(BOM_UTF8) if not (number or start) else piece
            return
        line = 1
        with open_plain(file) as stream:
            if start:
                stream.seek(start)
            part = stream if stop is None else cast(BinaryIO, io.BytesIO(stream.read(stop - start)))
            decoded = io.TextIOWrapper(part, encoding=self.encoding, newline="", errors=UNDECODED)
            try:
                while text := decoded.read(READ_BYTES):
                    if not text.endswith("\n"):
                        text += decoded.readline()
                    line += text.count("\n")
                    yield text.encode(errors=UNDECODED)
            except UnicodeError as error:
                raise SourceError(
                    f"{file.path} near line {line}: not {self.encoding} ({error}); name another --encoding"
                ) from error
            finally:
                decoded.detach()

    def parser(self, file: SourceFile) -> ParseLines:
        delimiter = delimiter_of(file, self.encoding)

        names = self.names_of(file)

        def parse(data: bytes, name_of: LineName, is_last: bool) -> LineRows:
            return csv_rows(
                data, names, delimiter, self.quote, name_of, encoding=self.encoding, is_last=is_last
            )

        return parse

    def blocks(self, file: SourceFile, pieces: Iterable[bytes], first_line: int = 0) -> Iterator[LineBlock]:
        row = first_line - 1  # the header is no row
        for block in parse_pieces(file, pieces, self.parser(file), first_line):
            found = block._replace(numbers=np.arange(row, row + len(block.rows)))
            yield found.part(1, None) if row < 0 and len(block.rows) else found
            row += len(block.rows)

    def header(self, file: SourceFile) -> dict[str, None]:
        """Return the names of the columns of a file, in order."""
        if not file.size:
            raise SourceError(f"{file.path}: an empty file; write it again, or leave it out: --on-error skip")
        with open_plain(file) as stream:
            head = stream.read(8)
        if suffix := next((PACKED_HEADS[one] for one in PACKED_HEADS if head.startswith(one)), ""):
            raise SourceError(f"{file.path}: it is compressed; name it .{suffix}")
        delimiter = delimiter_of(file, self.encoding)

        def parse(data: bytes, name_of: LineName, is_last: bool) -> LineRows:
            return split_rows(data, delimiter, self.quote, name_of, encoding=self.encoding, is_last=is_last)

        lines = (line[0] for piece in self.pieces(file) for line in _LINE.finditer(piece))
        block = next(parse_pieces(file, lines, parse), None)
        header: list[str] | SourceError = block.rows[0] if block is not None and block.rows else []
        if isinstance(header, SourceError):
            raise header
        if "\0" in "".join(header):
            raise SourceError(
                f"{file.path}: its header holds NUL characters; if it is UTF-16: --encoding utf-16-le"
            )
        if "".join(header).startswith("sep="):
            raise SourceError(
                f"{file.path} line 1: 'sep=' is a setting of Excel, not a header; delete the line"
            )
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

    def samples(self, block: LineBlock) -> LineBlock:
        rows: list[Any] = []
        block = self.checked(block)
        for row, cells in enumerate(block.rows.cells.to_pylist()):
            try:
                if row in block.rows.bad:
                    raise block.rows.bad[row]
                rows.append(
                    {name: self._value(cells.get(name), name, block.name_of(row)) for name in self.fields}
                )
            except SourceError as error:
                rows.append(error)
        return block._replace(rows=rows)

    def _value(self, cell: str | None, name: str, where: str) -> object:
        """Return the value of a cell; `unchecked`, one that does not fit is the cell itself."""
        kind = self.fields[name]
        if cell is None or is_missing(cell, kind):
            return None
        try:
            return cell_value(cell, kind, name, where)
        except SourceError:
            if not self.options.unchecked:
                raise
            return cell or None

    def encode(self, block: LineBlock) -> tuple[list[Any], dict[int, ShardkitError]]:
        columns, bad = self.checked(block).rows.columns(self.fields, block.name_of)
        return columns, bad

    def checked(self, block: LineBlock) -> LineBlock:
        """Return a block in which rows that repeat the header, as in tables that were joined, are bad."""
        names, first = self.names_of(block.file), block.rows.cells.column(0)
        # a table that was joined to another may begin with a byte-order mark
        heads = text_array([names[0], f"\ufeff{names[0]}"])
        is_first = pc.or_(pc.equal(first, heads[0]), pc.equal(first, heads[1]))
        if len(names) < 2 or not pc.any(is_first).as_py():  # a text may be the name of a single column
            return block
        bad = dict(block.rows.bad)
        for row in np.flatnonzero(mask_of(is_first)).tolist():
            (cells,) = block.rows.cells.slice(row, 1).to_pylist()
            if list(cells.values())[1:] == list(names[1:]):
                bad[row] = SourceError(
                    f"{block.name_of(row)}: repeats the header, as tables that were joined do; remove the line"
                )
        return block._replace(rows=replace(block.rows, bad=bad))

    def plain_rows(self, lines: bytes) -> NDArray[np.int64] | None:
        return plain_row_starts(self.quote, lines)

    def names_of(self, file: SourceFile) -> tuple[str, ...]:
        """Return the names of all columns of a file."""
        return self.others.get(file.name, self.names)

    def _settings(self) -> dict[str, object]:
        encoding: dict[str, object] = {} if self.encoding == UTF8 else {"encoding": self.encoding}
        return encoding if self.quote == '"' else {**encoding, "quote": self.quote}


def open_csv(source: Source, options: ImportOptions) -> CsvImporter:
    """Read the headers and first rows of tables."""
    check_suffixes(source, ("csv", "tsv"), "a CSV file")
    encoding = _encoding(source, options)
    quote = options.quote or ("maybe" if file_suffix(source.files[0].name) == "tsv" else '"')
    opened = CsvImporter(
        source=source, options=options, fields=SourceSchema({}), names=(), encoding=encoding, quote=quote
    )
    source, headers = open_each(source, options, opened.header)
    first = headers[0]
    opened = replace(
        opened,
        source=source,
        names=tuple(first),
        others={
            file.name: tuple(header)
            for file, header in zip(source.files, headers, strict=True)
            if list(header) != list(first)
        },
    )
    for file, header in zip(source.files, headers, strict=True):
        if first.keys().isdisjoint(header):  # such as a part of a table without a header
            raise SourceError(
                f"{file.path}: its header ({', '.join(header)[:80]}) has no column of {source.files[0].name} "
                f"({', '.join(first)[:80]}); write a header into each file, or build the tables one by one"
            )
    note_partitions(source)
    types = _infer(opened, headers)
    numbers = [name for name, kind in types.items() if _NUMBER.match(name) and kind in ("int64", "float64")]
    if numbers and numbers != [str(column) for column in range(len(numbers))]:  # the names of pandas
        source.notes.append(
            f"the header calls a column of numbers {numbers[0]!r}; if the first line is a row, write a header above it"
        )
    if next(iter(first)) == _INDEX:
        source.notes.append(
            f"the first column has no name and became {_INDEX}; --drop {_INDEX} leaves it out"
        )
    return replace(opened, fields=options.schema(types, source.given))


def _encoding(source: Source, options: ImportOptions) -> str:
    if options.encoding:
        try:
            "a".encode(options.encoding)  # fails for encodings that are not of text, such as hex and zip
            name = codecs.lookup(options.encoding).name
            return UTF8 if name == "utf-8-sig" else name
        except LookupError:
            raise UsageError(
                f"--encoding {options.encoding!r}: no such encoding; expected one such as latin-1, cp1252 or shift_jis"
            ) from None
    for file in source.files:
        with suppress(SourceError), open_plain(file) as stream:  # reported when the headers are read
            is_wide = stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            return "utf-16" if is_wide else UTF8
    return UTF8


def _infer(importer: CsvImporter, headers: Sequence[dict[str, None]]) -> dict[str, str]:
    """Return the types of the columns of all files, and note what may surprise."""
    source, options = importer.source, importer.options
    columns = {name: _Column() for header in headers for name in header}

    def blocks_of(file: SourceFile) -> Iterator[LineBlock]:
        return importer.blocks(file, importer.pieces(file))

    seen, left_out = 0, LeftOut(options.skip_bad_rows)
    for block in blocks_to_infer(source, blocks_of, _SCAN_ROWS, left_out):
        block = importer.checked(block)
        if block.rows.bad:
            left_out.add(block.rows.bad[min(block.rows.bad)])
        places = np.delete(np.arange(len(block.rows)), list(block.rows.bad))
        seen += len(places)
        for name, cells in zip(block.rows.cells.schema.names, block.rows.cells.columns, strict=True):
            columns[name].add(cells, places, block.name_of)
    if not seen:
        raise left_out.no_samples(source.given, "a header and no rows; give a table with samples in it")
    kinds = {name: column.kinds for name, column in columns.items()}
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


class _Column:
    """The kinds of the cells of a column."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}  # kind → its first cell and where it is, if it was met by itself

    def add(self, cells: Any, places: NDArray[np.int64], name_of: Callable[[int], str]) -> None:
        """Note the kinds of more cells; of a column with text, which decides its type, no more are looked at."""
        if "str" in self.kinds:
            return
        texts = cells if len(places) == len(cells) else cells.take(index_array(places))
        kinds = None if self.kinds.keys() & _KINDS_OF_WORDS else self._number_kinds(texts)
        if kinds is None:
            is_word = pc.is_in(texts, value_set=_WORDS)
            for word in pc.unique(texts.filter(is_word)):
                place = int(places[mask_of(pc.equal(texts, word)).argmax()])
                self.kinds.setdefault(_kind(word.as_py()), f"{word.as_py()!r} in {name_of(place)}")
            texts = texts.filter(pc.invert(is_word))
            kinds = self._number_kinds(texts)
        if kinds is None:
            kinds = set()
            for cell in texts.to_pylist():
                kinds.add(_kind(cell))
                if "str" in kinds:
                    break
        self.kinds |= dict.fromkeys(kinds - self.kinds.keys(), "")

    def _number_kinds(self, texts: Any) -> set[str] | None:
        """Return the kinds of cells if all are certainly finite numbers, or one is text; None if `_kind` must tell."""
        if not len(texts):
            return set()
        first = _kind(texts[0].as_py())
        if first == "str":
            return {first}
        if first not in ("int64", "inexact", "float64") or _have_odd_zeros(texts):
            return None
        # a cast that fails takes long, and integers are numbers, too
        target = pa.float64() if "float64" in (first, *self.kinds) else pa.int64()
        try:
            octets = texts.cast(target).buffers()[1]
        except pa.ArrowInvalid:
            return None
        if target == pa.int64():
            integers = np.frombuffer(octets, np.int64, len(texts))
            with np.errstate(invalid="ignore"):
                is_exact = integers.astype(np.float64).astype(np.int64) == integers
            return {"int64"} if is_exact.all() else {"int64", "inexact"}
        numbers = np.frombuffer(octets, np.float64, len(texts))
        if not np.isfinite(numbers).all():
            return None
        large = np.flatnonzero(
            np.abs(numbers) >= EXACT_INTEGER
        )  # among these may be integers that were rounded
        return {"float64", *map(_kind, texts.take(index_array(large)).to_pylist())}


def _have_odd_zeros(texts: Any) -> bool:
    """Return True if some cells may be numbers that begin with a zero and another digit, or a letter."""
    borders = np.frombuffer(texts.buffers()[1], np.int64, len(texts) + 1, 8 * texts.offset)
    octets = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
    starts, lasts = borders[:-1], borders[1:] - 1
    if not len(octets) or bool((lasts < starts).any()):
        return True  # an empty cell
    first = octets[starts]
    starts = starts + ((first == ord("-")) | (first == ord("+")))
    second = octets[np.minimum(starts + 1, lasts)] | 0x20  # in lower case
    is_odd = (octets[np.minimum(starts, lasts)] == ord("0")) & (starts < lasts)
    return bool((is_odd & (second != ord(".") | 0x20) & (second != ord("e"))).any())


def _kind(cell: str) -> str:
    """Return the type of a cell, "" for an empty one, or "inexact" (int64 only), "not finite" or "missing"."""
    if not cell:
        return ""
    if _INTEGER.match(cell):
        number = int(cell[:_MOST_DIGITS])
        return "str" if number not in _INT64 else "int64" if is_exact(number) else "inexact"
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


@functools.lru_cache(maxsize=1024)
def delimiter_of(file: SourceFile, encoding: str) -> str:
    """Return the delimiter of a file: by its extension, or by its header."""
    if file_suffix(file.name) == "tsv":
        return "\t"
    with open_plain(file) as stream:
        header = re.split(r"[\r\n]", stream.read(_HEADER_BYTES).decode(encoding, "replace"), maxsplit=1)[0]
    return max(",;\t|", key=header.count) if "," not in header else ","
