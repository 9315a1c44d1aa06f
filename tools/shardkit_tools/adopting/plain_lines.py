"""Files of lines whose rows were all parsed when types were inferred: they are only counted (SPEC.md §5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SampleError
from shardkit.formats import Schema
from shardkit.formats.line_blocks import LineSettings
from shardkit_tools.adopting.encoded_blocks import EncodedBlocks
from shardkit_tools.adopting.files import MAX_UNEVEN, AdoptTask, Report, ScannedFile, TooUnevenError, smaller
from shardkit_tools.adopting.scanned_blocks import FilePass
from shardkit_tools.importers.csv import CsvImporter, delimiter_of
from shardkit_tools.importers.json_lines import JsonLinesImporter
from shardkit_tools.importers.line_ranges import holds_plain_rows, holds_unquoted_rows, rows_to_infer
from shardkit_tools.importers.protocol import SourceFile, SourceSample

LineImporter = JsonLinesImporter | CsvImporter

_PIECE_BYTES = 4 << 20
_OFFSET_BYTES = 16  # memory per value of a field of variable size
_SURROGATES = (b"\\ud", b"\\uD")  # begin escapes that JSON may have alone, and UTF-8 may not


class NotPlainError(Exception):
    """A file has lines that are not certainly rows, or rows that may not fit the schema: they must be parsed."""


def are_parsed(importer: LineImporter) -> bool:
    """Return True if inference of types parses every row, and so leaves no error for the adoption to find."""
    options = importer.options
    needs_check = options.field_types or options.skip_bad_rows or options.check == "decode"
    return not needs_check and rows_to_infer(importer.source.files, 1) is None


def line_settings(importer: LineImporter, file: SourceFile) -> LineSettings:
    """Return how the lines of a file are read; no row of it is skipped."""
    if isinstance(importer, JsonLinesImporter):
        return LineSettings()
    delimiter = delimiter_of(file, importer.encoding)
    return LineSettings(names=importer.names_of(file), delimiter=delimiter, quote=importer.quote)


def count_rows(importer: LineImporter, file: SourceFile, stream: BinaryIO) -> int:
    """Return the number of rows of a file.

    Raises:
        NotPlainError: Lines are not certainly rows.
    """
    counts = (len(_row_ends(importer, lines)) for lines in _lines(importer, stream))
    return sum(counts) - isinstance(importer, CsvImporter)


@dataclass
class PlainLines:
    """One pass over a file."""

    importer: LineImporter
    task: AdoptTask
    block_bytes: int
    report: Report
    block_rows: int | None = None  # None: the number in the first `block_bytes`, once these are read
    rows: int = 0
    _data: bytes = b""  # bytes after the last block
    _ends: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # of the rows in them

    def run(self) -> ScannedFile:
        """Read the file; if a block gets far too large, read again with smaller blocks.

        Raises:
            NotPlainError: The rows must be parsed.
        """
        found = EncodedBlocks(self.task, self.importer.schema, {})
        with FilePass(task=self.task) as blocks:
            try:
                for lines in _lines(self.importer, blocks.stream):
                    self._add(lines, found, blocks)
                if len(self._ends):
                    self._end_blocks(found, blocks, len(self._ends))
                blocks.add_tail(self._data)
            except (TooUnevenError, NotPlainError) as error:
                self.report(-self.rows, -blocks.size)
                if isinstance(error, NotPlainError):
                    raise
                rows = smaller(self.block_rows or int(np.searchsorted(self._ends, self.block_bytes)))
                again = PlainLines(self.importer, self.task, self.block_bytes, self.report, rows)
                return again.run()
        settings = line_settings(self.importer, self.task.file)
        return found.scanned(self.importer.name, blocks, settings.to_bytes())

    def _add(self, lines: bytes, found: EncodedBlocks, blocks: FilePass) -> None:
        ends = _row_ends(self.importer, lines)
        if isinstance(self.importer, CsvImporter) and not blocks.size:
            blocks.add_head(lines[: int(ends[0])])
            self.report(0, blocks.head_size)
            lines, ends = lines[int(ends[0]) :], ends[1:] - ends[0]
        self._ends = np.concatenate((self._ends, ends + len(self._data)))
        self._data += lines
        rows = self.block_rows
        if rows is None:
            rows = int(np.searchsorted(self._ends, self.block_bytes)) + 1
        if len(self._ends) >= rows:
            self._end_blocks(found, blocks, rows)

    def _end_blocks(self, found: EncodedBlocks, blocks: FilePass, rows: int) -> None:
        """End all blocks of `rows` rows that are complete."""
        stops = self._ends[rows - 1 :: rows].tolist()
        start, view = 0, memoryview(self._data)
        for stop in stops:
            if rows > 1 and stop - start > MAX_UNEVEN * self.block_bytes:
                raise TooUnevenError
            data = bytes(view[start:stop])
            self._check_surrogates(data)
            found.add(f"block {len(found)}", rows, _memory(self.importer.schema, rows, len(data)))
            blocks.add(data, rows)
            self.report(rows, len(data))
            start, self.rows = stop, self.rows + rows
        self.block_rows = rows
        self._data = self._data[start:]
        self._ends = self._ends[rows * len(stops) :] - start

    def _check_surrogates(self, data: bytes) -> None:
        """Encode the rows of a block of JSON that may have text that UTF-8 cannot have."""
        importer = self.importer
        if isinstance(importer, CsvImporter) or b"\\" not in data:
            return
        if not any(mark in data for mark in _SURROGATES):
            return
        for row in importer.rows_of(self.task.file, enumerate(data.split(b"\n"))):
            try:
                if not isinstance(row, SourceSample):
                    raise NotPlainError
                importer.schema.encode(row.sample, where=row.where)
            except SampleError as error:
                raise NotPlainError from error


def _lines(importer: LineImporter, stream: BinaryIO) -> Iterator[bytes]:
    """Yield a file in pieces of whole lines.

    Raises:
        NotPlainError: Lines of a table are not certainly rows.
    """
    is_plain = None
    if isinstance(importer, CsvImporter):
        is_plain = holds_plain_rows if importer.quote == '"' else holds_unquoted_rows
    parts: list[bytes] = []
    before = b"\n"  # so that an empty first line is detected as well
    while piece := stream.read(_PIECE_BYTES):
        if is_plain is not None and not is_plain(before + piece):
            raise NotPlainError
        before = piece[-1:]
        end = piece.rfind(b"\n") + 1
        if end:
            yield b"".join([*parts, piece[:end]])
            parts = []
        parts.append(piece[end:])
    if is_plain is not None and not is_plain(before + b"\0"):
        raise NotPlainError
    if any(parts):
        yield b"".join(parts)


def _row_ends(importer: LineImporter, lines: bytes) -> NDArray[np.int64]:
    """Return where each row ends; empty lines belong to the row after them."""
    ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == ord("\n")) + 1
    if lines[-1:] != b"\n":
        ends = np.append(ends, len(lines))
    if isinstance(importer, CsvImporter):
        return ends
    starts = np.concatenate(([0], ends[:-1]))
    may_be_empty = np.frombuffer(lines, np.uint8)[starts] <= ord(" ")
    empty = [
        row
        for row in np.flatnonzero(may_be_empty).tolist()
        if not lines[int(starts[row]) : int(ends[row])].strip()
    ]
    return np.delete(ends, empty)


def _memory(schema: Schema, rows: int, num_bytes: int) -> int:
    """Return about how much memory the rows of a block take when they are decoded."""
    row_bytes = sum(
        (_OFFSET_BYTES if kind.item_bytes is None else kind.item_bytes) + kind.optional
        for kind in schema.values()
    )
    return rows * row_bytes + num_bytes
