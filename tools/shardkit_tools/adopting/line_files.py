"""Adopt JSON lines and CSV: a block is a run of lines, decoded when it is read (SPEC.md §5)."""

from __future__ import annotations

import io
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

import msgspec

from shardkit.errors import SampleError, SourceError
from shardkit.formats import Schema
from shardkit.formats.foreign_blocks import memory_of
from shardkit.formats.line_blocks import UNDECODED, LineSettings, encoded_columns, read_cells
from shardkit.formats.values import MAX_JSON_DEPTH
from shardkit_tools.adopting.encoded_blocks import EncodedBlocks
from shardkit_tools.adopting.files import (
    BUILD_INSTEAD,
    MAX_UNEVEN,
    AdoptableFiles,
    AdoptTask,
    FilePass,
    Report,
    ScannedFile,
    TooUnevenError,
    smaller,
)
from shardkit_tools.importers.csv import CsvImporter, delimiter_of, numbered_cells
from shardkit_tools.importers.json_lines import JsonLinesImporter
from shardkit_tools.importers.line_ranges import count_plain_lines, rows_to_infer, whole_lines
from shardkit_tools.importers.protocol import SourceFailure, SourceFile, SourceSample
from shardkit_tools.importers.source_files import open_each, open_file

_OFFSET_BYTES = 16  # memory per value of a field of variable size
_SURROGATES = re.compile(rb"\\u[dD]")  # begin escapes that JSON may have alone, and UTF-8 may not
_EMPTY_LINE = re.compile(rb"\n\s*(?:\n|\Z)")
_LONE_RETURN = re.compile(rb"\r(?!\n)")
_UTF8 = "utf-8-sig"


@dataclass(frozen=True)
class LineFiles(AdoptableFiles):
    """Files of JSON lines, or tables of CSV; types are inferred from all rows, as in a build."""

    importer: JsonLinesImporter | CsvImporter

    @classmethod
    def of(cls, importer: JsonLinesImporter | CsvImporter) -> LineFiles:
        """Return the files of an importer."""
        files = importer.source.files
        for file in files:
            if isinstance(importer, JsonLinesImporter) and file.name in importer.arrays:
                raise SourceError(f"{file.path}: one JSON array, not a file of lines; {BUILD_INSTEAD}")
            if isinstance(importer, CsvImporter) and importer.encoding != _UTF8:
                raise SourceError(f"{file.path}: its text is {importer.encoding}, not UTF-8; {BUILD_INSTEAD}")
        if len(files) == 1:  # which begins with row 0, whatever its number of rows
            return cls(importer, (1,))
        source, counts = open_each(importer.source, importer.options, lambda file: _count(importer, file))
        return cls(replace(importer, source=source), tuple(counts))

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a file from start to end; memory holds one block, and its rows while they are checked."""
        is_counted, block_rows = self._are_parsed, None
        while True:
            scan = _LineScan(self.importer, task, block_bytes, block_rows)
            try:
                return scan.run(report, is_counted=is_counted)
            except _NotPlainError:
                is_counted, block_rows = False, None
            except TooUnevenError:
                block_rows = smaller(scan.block_rows or scan.rows)
            report(-scan.rows, -scan.read_bytes)

    @property
    def _are_parsed(self) -> bool:
        """Whether inference of types parses every row, and so leaves no error for the adoption to find."""
        options = self.importer.options
        needs_check = options.field_types or options.skip_bad_rows or options.check == "decode"
        return not needs_check and rows_to_infer(self.importer.source.files, 1) is None


class _NotPlainError(Exception):
    """A file has lines that are not certainly rows, or rows that may not fit the schema: they must be parsed."""


class _HeldLines:
    """The lines of a file, which are held until they are taken."""

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self._stream, self._path = stream, path
        self._held: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        for line in whole_lines(self._stream, self._path):
            self._held.append(line)
            yield line

    def texts(self) -> Iterator[str]:
        """Yield the lines as text; a lone carriage return ends a line, as in a build."""
        for line in self:
            self._held.pop()
            for text in io.StringIO(line.decode(errors=UNDECODED), newline=""):
                self._held.append(text.encode(errors=UNDECODED))
                yield text

    def take(self) -> bytes:
        """Return the lines since the last call."""
        data = b"".join(self._held)
        self._held.clear()
        return data


@dataclass
class _LineScan:
    """One pass over a file."""

    importer: JsonLinesImporter | CsvImporter
    task: AdoptTask
    block_bytes: int
    block_rows: int | None  # None: the number in the first `block_bytes`, once these are read
    rows: int = 0
    read_bytes: int = 0
    _block: list[bytes] = field(default_factory=list)
    _in_block: int = 0  # rows of the current block, including skipped rows
    _payloads: list[tuple[bytes, ...]] = field(default_factory=list)  # of each good row of the current block
    _size: int = 0  # bytes of the current block
    _blocks: int = 0
    _skipped: list[tuple[int, int]] = field(default_factory=list)  # of all blocks, see `LineSettings`
    _failures: list[str] = field(default_factory=list)

    def run(self, report: Report, *, is_counted: bool) -> ScannedFile:
        """Read the file; rows that are parsed already are counted only.

        Raises:
            TooUnevenError: A block gets far too large.
            _NotPlainError: The rows cannot be counted without parsing them.
        """
        self._found = EncodedBlocks(self.task, self.importer.schema, {})
        self._settings = LineSettings()  # of JSON lines
        if isinstance(self.importer, CsvImporter):
            self._settings = LineSettings(
                names=self.importer.names_of(self.task.file),
                delimiter=delimiter_of(self.task.file, self.importer.encoding),
                quote=self.importer.quote,
            )
        with FilePass(task=self.task) as blocks:
            (self._count if is_counted else self._parse)(blocks, report)
        if not self.rows:
            blocks.check()
            return ScannedFile("", None, (), failures=tuple(self._failures))
        settings = msgspec.structs.replace(self._settings, skipped=tuple(self._skipped))
        scanned = self._found.scanned(self.importer.name, blocks, settings.to_bytes())
        return replace(scanned, failures=tuple(self._failures))

    # Rows that inference has parsed

    def _count(self, blocks: FilePass, report: Report) -> None:
        """Take every line as a row."""
        importer, stream = self.importer, blocks.stream
        if isinstance(importer, CsvImporter):
            head = stream.readline()
            if _LONE_RETURN.search(head):
                raise _NotPlainError
            blocks.add_head(head)
        while data := self._next_lines(stream):
            text, rows = b"\n" + data + b"\0" * (not data.endswith(b"\n")), self._in_block
            if (
                not importer.is_plain(text)
                if isinstance(importer, CsvImporter)
                else _EMPTY_LINE.search(text[:-1])
            ):
                raise _NotPlainError
            self._check_encodable(data)
            self._found.add(f"block {self._blocks}", rows, _memory(importer.schema, rows, len(data)))
            blocks.add(data, rows)
            report(rows, len(data))
            self.rows += rows
            self.read_bytes += len(data)
            self._blocks += 1

    def _next_lines(self, stream: BinaryIO) -> bytes:
        """Return the lines of the next block, and set `_in_block`."""
        lines: list[bytes] = []
        size = 0
        for line in whole_lines(stream, self.task.file.path):
            lines.append(line)
            size += len(line)
            if size > MAX_UNEVEN * self.block_bytes and len(lines) > 1:
                self.block_rows = self.block_rows or len(lines) - 1
                raise TooUnevenError
            if len(lines) == self.block_rows or (self.block_rows is None and size >= self.block_bytes):
                break
        self._in_block = len(lines)
        self.block_rows = self.block_rows or len(lines)
        return b"".join(lines)

    def _check_encodable(self, data: bytes) -> None:
        """Encode the rows of a block of JSON that may have text or objects that a schema does not encode."""
        importer = self.importer
        if isinstance(importer, CsvImporter):
            return
        has_escapes = b"\\u" in data and _SURROGATES.search(data)
        if not has_escapes and all(_brackets(line) <= MAX_JSON_DEPTH for line in data.split(b"\n")):
            return
        for row in importer.rows_of(self.task.file, enumerate(data.split(b"\n"))):
            if self._encode_row(row) is None:
                raise _NotPlainError

    # Rows that are parsed now

    def _parse(self, blocks: FilePass, report: Report) -> None:
        """Parse, check and encode every row."""
        pending: list[bytes] = []  # bytes of bad rows after the last good one
        held = _HeldLines(blocks.stream, self.task.file.path)
        for row in self._read_rows(held, blocks):
            data = held.take()
            self.read_bytes += len(data)
            payloads = self._encode_row(row)
            if payloads is None:
                pending.append(data)
                report(0, len(data))
                continue
            if self.block_rows is None and self._size >= self.block_bytes:
                self.block_rows = len(self._payloads)
            if self._payloads and len(self._payloads) == self.block_rows:
                self._end_block(blocks)
            for bad in pending:
                self._skipped.append((self._blocks, self._in_block))
                self._append(bad)
            pending = []
            self._append(data)
            self._payloads.append(payloads)
            self.rows += 1
            report(1, len(data))
        if self._payloads:
            self._end_block(blocks)
        blocks.add_tail(b"".join([*pending, held.take(), blocks.stream.read()]))

    def _read_rows(self, held: _HeldLines, blocks: FilePass) -> Iterator[SourceSample | SourceFailure]:
        """Yield the rows; when one is yielded, `held` holds its lines and empty ones before it."""
        importer, file = self.importer, self.task.file
        if isinstance(importer, JsonLinesImporter):
            yield from importer.rows_of(file, enumerate(held))
            return
        mark = blocks.read(len(BOM_UTF8))
        if mark == BOM_UTF8:
            blocks.add_head(mark)
        else:
            blocks.stream.seek(0)
        cells = numbered_cells(read_cells(held.texts(), self._settings.delimiter, importer.quote), file)
        next(cells, None)
        blocks.add_head(held.take())
        yield from importer.rows_of(file, (row for row in cells if row[1]))

    def _encode_row(self, row: SourceSample | SourceFailure) -> tuple[bytes, ...] | None:
        """Return the payloads of a row; if it cannot be read, note why and return None."""
        if isinstance(row, SourceFailure):
            self._failures.append(str(row.error))
            return None
        try:
            return self.importer.schema.encode(row.sample, where=row.where)
        except SampleError as error:
            self._failures.append(str(error))
            return None

    def _append(self, data: bytes) -> None:
        self._block.append(data)
        self._in_block += 1
        self._size += len(data)
        if self._payloads and self._size > MAX_UNEVEN * self.block_bytes:
            raise TooUnevenError

    def _end_block(self, blocks: FilePass) -> None:
        """End the current block. Its rows are parsed and encoded already, by the functions that will read them."""
        columns = encoded_columns(self.importer.schema, self._payloads)
        self._found.add(f"block {self._blocks}", len(self._payloads), memory_of(columns.values()))
        blocks.add(b"".join(self._block), len(self._payloads))
        self._block, self._in_block, self._payloads, self._size = [], 0, [], 0
        self._blocks += 1


def _brackets(line: bytes) -> int:
    return line.count(b"[") + line.count(b"{")


def _memory(schema: Schema, rows: int, num_bytes: int) -> int:
    """Return about how much memory the rows of a block take when they are decoded."""
    row_bytes = sum(
        (_OFFSET_BYTES if kind.item_bytes is None else kind.item_bytes) + kind.optional
        for kind in schema.values()
    )
    return rows * row_bytes + num_bytes


def _count(importer: JsonLinesImporter | CsvImporter, file: SourceFile) -> int:
    """Return the number of rows of a file, readable or not: keys are numbers over all files."""
    if isinstance(importer, JsonLinesImporter):
        with open_file(file) as stream:
            return sum(bool(line.strip()) for line in whole_lines(stream, file.path))
    if lines := count_plain_lines(file, importer.is_plain):
        return lines - 1
    with open_file(file) as stream:
        held, count = _HeldLines(stream, file.path), -1  # the header
        cells = read_cells(held.texts(), delimiter_of(file, importer.encoding), importer.quote)
        for _, row in numbered_cells(cells, file):
            held.take()
            count += bool(row)
        return max(0, count)
