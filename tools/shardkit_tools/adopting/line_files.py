"""Adopt JSON lines and CSV: a block is a run of lines, decoded when it is read (SPEC.md §5)."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SourceError
from shardkit.formats import Schema
from shardkit.formats.foreign_blocks import OFFSET_BYTES
from shardkit.formats.line_blocks import LineName, LineRows, LineSettings, line_starts
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
from shardkit_tools.importers.csv import UTF8, CsvImporter, delimiter_of
from shardkit_tools.importers.json_lines import JsonLinesImporter
from shardkit_tools.importers.line_importer import LineBlock, LineImporter, ParseLines, parse_pieces
from shardkit_tools.importers.line_ranges import rows_to_infer, whole_lines
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.source_files import open_each


@dataclass(frozen=True)
class LineFiles(AdoptableFiles):
    """Files of JSON lines, or tables of CSV; types are inferred from all rows, as in a build."""

    importer: LineImporter

    @classmethod
    def of(cls, importer: LineImporter) -> LineFiles:
        """Return the files of an importer."""
        files = importer.source.files
        for file in files:
            if isinstance(importer, JsonLinesImporter) and file.name in importer.arrays:
                raise SourceError(f"{file.path}: one JSON array, not a file of lines; {BUILD_INSTEAD}")
            if isinstance(importer, CsvImporter) and importer.encoding != UTF8:
                raise SourceError(f"{file.path}: its text is {importer.encoding}, not UTF-8; {BUILD_INSTEAD}")
        if len(files) == 1:  # which begins with row 0, whatever its number of rows
            return cls(importer, (1,))
        source, counts = open_each(importer.source, importer.options, lambda file: _count(importer, file))
        return cls(replace(importer, source=source), tuple(counts))

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a file from start to end; memory holds a block, and what is read at once."""
        block_rows = None
        while True:
            scan = _LineScan(self.importer, task, block_bytes, report, block_rows)
            try:
                return scan.run(self._parser(task.file))
            except TooUnevenError:
                block_rows = smaller(scan.block_rows or 1)
            report(-scan.rows, -scan.read_bytes)

    def _parser(self, file: SourceFile) -> ParseLines:
        """Return the parser of a file: only a counter if inference of types has parsed every row."""
        options = self.importer.options
        needs_check = options.field_types or options.skip_bad_rows or options.check == "decode"
        if needs_check or rows_to_infer(self.importer.source.files, 1) is not None:
            return self.importer.parser(file)
        return _counter(self.importer, file)


def _counter(importer: LineImporter, file: SourceFile) -> ParseLines:
    """Return a parser that does not parse where lines are certainly rows that can be encoded.

    Its rows are then offsets, of int64: where each begins.
    """
    parse = importer.parser(file)

    def count(data: bytes, name_of: LineName, is_last: bool) -> LineRows:
        starts = importer.plain_rows(data)
        if starts is not None:
            return LineRows(np.arange(len(starts)), starts, len(starts), len(data))
        found = parse(data, name_of, is_last)
        if isinstance(importer, CsvImporter):  # any cells that have been parsed can be encoded
            found = found._replace(rows=line_starts(data, returns=True)[found.lines])
        return found

    return count


def _count(importer: LineImporter, file: SourceFile) -> int:
    """Return the number of rows of a file, readable or not: keys are numbers over all files."""
    blocks = parse_pieces(file, importer.pieces(file), _counter(importer, file))
    return max(0, sum(len(block.rows) for block in blocks) - isinstance(importer, CsvImporter))


@dataclass
class _LineScan:
    """One pass over a file."""

    importer: LineImporter
    task: AdoptTask
    block_bytes: int
    report: Report
    block_rows: int | None  # None: the number in the first `block_bytes`, once these are read
    rows: int = 0
    read_bytes: int = 0
    _data: bytes = b""  # rows that are in no block yet
    # for each of them: where it begins, whether it can be read
    _starts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _is_good: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    _skipped: list[tuple[int, int]] = field(default_factory=list)  # of all blocks, see `LineSettings`
    _failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._has_header = isinstance(self.importer, CsvImporter)  # until the header has been read

    def run(self, parse: ParseLines) -> ScannedFile:
        """Read the file.

        Raises:
            TooUnevenError: A block gets far too large.
        """
        importer, file = self.importer, self.task.file
        self._found = EncodedBlocks(self.task, importer.schema, {})
        settings = LineSettings()  # of JSON lines
        with FilePass(task=self.task) as self._pass:
            if isinstance(importer, CsvImporter):
                settings = LineSettings(
                    names=importer.names_of(file),
                    delimiter=delimiter_of(file, importer.encoding),
                    quote=importer.quote,
                )
            for block in parse_pieces(file, self._pieces(), parse):
                self._hold(block)
                if self.block_rows is None and len(self._data) >= self.block_bytes:
                    self.block_rows = self._first_rows()
                if self.block_rows is not None:
                    self._cut(self.block_rows)
            self.block_rows = self.block_rows or self._first_rows()
            self._cut(self.block_rows, is_last=True)
            self._pass.add_tail(self._data)
        if not self.rows:
            self._pass.check()
            return ScannedFile("", None, (), failures=tuple(self._failures))
        settings = msgspec.structs.replace(settings, skipped=tuple(self._skipped))
        scanned = self._found.scanned(importer.name, self._pass, settings.to_bytes())
        return replace(scanned, failures=tuple(self._failures))

    def _pieces(self) -> Iterator[bytes]:
        """Yield the lines; of a table without its byte-order mark, which becomes the beginning of the head."""
        if is_table := isinstance(self.importer, CsvImporter):
            if self._pass.read(len(BOM_UTF8)) == BOM_UTF8:
                self._pass.add_head(BOM_UTF8)
            else:
                self._pass.stream.seek(0)
        yield from whole_lines(self._pass.stream, self.task.file.path, returns=is_table)

    def _hold(self, block: LineBlock) -> None:
        """Hold rows until their block is complete; the header of a table is the head of the file."""
        data, is_table, starts = block.data, isinstance(self.importer, CsvImporter), block.rows
        if not (are_counted := isinstance(starts, np.ndarray)):
            starts = line_starts(data, returns=is_table)[block.lines - block.first_line]
        if self._has_header and len(starts):
            size = int(starts[1]) if len(starts) > 1 else len(data)
            self._pass.add_head(data[:size])
            self._has_header = False
            data, starts, block = data[size:], starts[1:] - size, block.part(1, None)
        is_good = np.ones(len(starts), np.bool_) if are_counted else self._check(block)
        self._starts = np.append(self._starts, starts + len(self._data))
        self._is_good = np.append(self._is_good, is_good)
        self._data += data
        self.read_bytes += len(block.data)
        self.report(0, len(block.data))

    def _check(self, block: LineBlock) -> NDArray[np.bool_]:
        """Encode rows, note why some cannot be, and return which can be read."""
        _, bad = self.importer.encode(block)
        self._failures += [str(bad[row]) for row in sorted(bad)]
        is_good = np.ones(len(block.rows), np.bool_)
        is_good[list(bad)] = False
        return is_good

    def _first_rows(self) -> int:
        """Return the number of good rows that begin in the first `block_bytes`."""
        return max(1, int(self._is_good[self._starts < self.block_bytes].sum()))

    def _cut(self, block_rows: int, *, is_last: bool = False) -> None:
        """End all blocks that are complete, or all; bad rows before a good one are in its block."""
        good = np.flatnonzero(self._is_good)
        stops = good[block_rows - 1 :: block_rows] + 1
        if is_last and len(good) % block_rows:
            stops = np.append(stops, good[-1] + 1)
        ends = np.append(self._starts[1:], len(self._data))[stops - 1]
        at, end = (int(stops[-1]), int(ends[-1])) if len(stops) else (0, 0)
        rows = np.diff(np.cumsum(self._is_good)[stops - 1], prepend=0)
        self._add(memoryview(self._data)[:end], np.diff(ends, prepend=0), rows)
        first_block = len(self._found) - len(stops)
        for row in np.flatnonzero(~self._is_good[:at]).tolist():
            block = int(np.searchsorted(stops, row, side="right"))
            self._skipped.append((first_block + block, row - int(stops[block - 1] if block else 0)))
        self._data, self._starts = self._data[end:], self._starts[at:] - end
        self._is_good = self._is_good[at:]
        self._check_sizes(np.array([len(self._data)]), np.array([self._is_good.sum()]))

    def _check_sizes(self, sizes: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        if bool(((rows > 1) & (sizes > MAX_UNEVEN * self.block_bytes)).any()):
            raise TooUnevenError

    def _add(self, data: memoryview, sizes: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """End blocks; about their memory: a value takes what its text takes."""
        self._check_sizes(sizes, rows)
        memory = sizes + rows * _row_memory(self.importer.schema)
        counts: list[int] = rows.tolist()
        for count, needed in zip(counts, memory.tolist(), strict=True):
            self._found.add(f"block {len(self._found)}", count, needed)
        ends = np.cumsum(sizes)
        borders = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
        self._pass.add_small([[data[start:end]] for start, end in borders], counts)
        self.rows += sum(counts)
        self.report(sum(counts), 0)


def _row_memory(schema: Schema) -> int:
    """Return the bytes that a row takes when it is decoded, without the bytes of values of variable size."""
    return sum(
        (OFFSET_BYTES if kind.item_bytes is None else kind.item_bytes) + kind.optional
        for kind in schema.values()
    )
