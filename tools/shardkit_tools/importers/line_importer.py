"""Importers of files of lines: lines are parsed in blocks, and their rows encoded by column."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shardkit.dataset.encoding import RowOrigin
from shardkit.errors import ShardkitError, SourceError
from shardkit.formats.arrow_writing import arrow_array, arrow_schema
from shardkit.formats.line_blocks import LineName, LineRows
from shardkit.formats.sample_columns import encode_rows
from shardkit.formats.schema import presence_of
from shardkit_tools.importers.line_ranges import read_pieces, rows_to_infer
from shardkit_tools.importers.protocol import (
    DecodedRows,
    DecodedStream,
    FileImporter,
    FileObserver,
    SampleStream,
    Source,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
    ignore_file,
)
from shardkit_tools.importers.source_files import LeftOut

_PARTITION = re.compile(r"(?:^|/)([^/=]+=[^/]*)/")


class LineBlock(NamedTuple):
    """Consecutive lines of a file, and their rows."""

    file: SourceFile
    data: bytes  # empty if they are items of an array
    first_line: int  # number of lines before them
    lines: NDArray[np.int64]  # number in the file of the first line of each row
    rows: Any  # see `LineRows`; or of each row its sample, or the error that says why there is none
    numbers: NDArray[np.int64]  # number of each row in the file, for its origin
    unit: str = "line"

    def name_of(self, row: int) -> str:
        """Return the name of a row, given its place among the rows of this block."""
        return f"{self.file.path} {self.unit} {self.lines[row] + 1}"

    def part(self, start: int, stop: int | None) -> LineBlock:
        """Return some of the rows."""
        which = slice(start, stop)
        return self._replace(lines=self.lines[which], rows=self.rows[which], numbers=self.numbers[which])


ParseLines = Callable[[bytes, LineName, bool], LineRows]
"""Parses whole lines, given their names and whether they are the last."""


def parse_pieces(
    file: SourceFile, pieces: Iterable[bytes], parse: ParseLines, first_line: int = 0
) -> Iterator[LineBlock]:
    """Yield the rows of pieces of whole lines; a row that continues after its piece is parsed with the next one."""
    held: list[bytes] = []
    wanted = 0  # bytes: a row that continues is parsed again when as many again have been read
    line = first_line
    for piece in chain(pieces, [b""]):
        held.append(piece)
        if piece and sum(map(len, held)) < wanted:
            continue
        data = b"".join(held)
        if not data:
            return

        def name_of(number: int, first: int = line) -> str:
            return f"{file.path} line {first + number + 1}"

        found = parse(data, name_of, not piece)
        rest = data[found.num_bytes :]
        held, wanted = [rest] if rest else [], 2 * len(rest)
        if found.num_bytes:
            lines = found.lines + line
            yield LineBlock(file, data[: found.num_bytes], line, lines, found.rows, lines)
        line += found.num_lines


def blocks_to_infer(
    source: Source,
    blocks_of: Callable[[SourceFile], Iterator[LineBlock]],
    most_rows: int,
    left_out: LeftOut,
) -> Iterator[LineBlock]:
    """Yield the rows that types are inferred from."""
    left = rows_to_infer(source.files, most_rows)
    for file in source.files:
        for block in left_out.before_damage(blocks_of(file)):
            if left is None:
                yield block
                continue
            yield block.part(0, left)
            left -= len(block.rows)
            if left <= 0:
                return


def note_partitions(source: Source) -> None:
    """Add a note if folders have the names of partition columns, which only tables of Parquet and Arrow have."""
    found = next((one for file in source.files if (one := _PARTITION.search(file.name))), None)
    if found is not None:
        source.notes.append(
            f"{found[1]}/ is the name of a folder, and no field; write it into the rows where it matters"
        )


@dataclass(frozen=True, kw_only=True)
class LineImporter(FileImporter):
    """Base class of importers of files of lines."""

    @cached_property
    def ranges(self) -> tuple[SourceTask, ...]:
        """The tasks; large files are read for them."""
        raise NotImplementedError

    def tasks(self) -> Sequence[SourceTask]:
        return self.ranges

    def pieces(self, file: SourceFile, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield a file, or a range that starts and stops at line ends, in pieces of whole lines of UTF-8."""
        return read_pieces(file, start, stop)

    def parser(self, file: SourceFile) -> ParseLines:
        """Return the parser of the lines of a file; the header of a table is a row."""
        raise NotImplementedError

    def plain_rows(self, lines: bytes) -> NDArray[np.int64] | None:
        """Return where lines begin if each is certainly a row that can be encoded, as the types hold it."""
        raise NotImplementedError

    def blocks(self, file: SourceFile, pieces: Iterable[bytes], first_line: int = 0) -> Iterator[LineBlock]:
        """Yield the rows of pieces of a file that begin after `first_line` lines."""
        raise NotImplementedError

    def samples(self, block: LineBlock) -> LineBlock:
        """Return a block with a sample in place of each row; errors of rows stay, and others may be added."""
        raise NotImplementedError

    def encode(self, block: LineBlock) -> tuple[list[Any], dict[int, ShardkitError]]:
        """Return the fields of the rows of a block in their Arrow types, and why rows do not fit the schema."""
        rows = self.samples(block).rows
        bad = {row: one for row, one in enumerate(rows) if isinstance(one, ShardkitError)}
        if bad:
            rows = [{} if row in bad else one for row, one in enumerate(rows)]
        columns, errors = encode_rows(self.fields, rows, block.name_of)
        arrays = [
            arrow_array(kind, columns[name], name, columns.get(presence_of(name)))
            for name, kind in self.fields.items()
        ]
        return arrays, {**errors, **bad}

    def decode(self, task: SourceTask, seen: FileObserver = ignore_file) -> DecodedStream:
        for block in self._task_blocks(task):
            if isinstance(block, SourceFailure):
                yield block
                continue
            arrays, bad = self.encode(block)
            for row, error in sorted(bad.items()):
                yield SourceFailure(block.file.name, int(block.numbers[row]), error)
            if len(bad) < len(block.rows):
                batch = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(self.schema, keys=False))
                origin = RowOrigin([block.file.name] * len(block.rows), block.numbers)
                yield DecodedRows(batch, origin).without(bad)

    def _rows(self, task: SourceTask) -> SampleStream:
        for block in self._task_blocks(task):
            if isinstance(block, SourceFailure):
                yield block
                continue
            block = self.samples(block)
            for row, (number, sample) in enumerate(zip(block.numbers.tolist(), block.rows, strict=True)):
                if isinstance(sample, ShardkitError):
                    yield SourceFailure(block.file.name, number, sample)
                else:
                    yield SourceSample(sample, None, block.file.name, number, where=block.name_of(row))

    def _task_blocks(self, task: SourceTask) -> Iterator[LineBlock | SourceFailure]:
        """Yield the rows of a task; damage of a file is the failure of row -1, so that other files are read."""
        for file in task.files:
            try:
                pieces = self.pieces(file, task.start, task.stop)
                yield from self.blocks(file, pieces, task.first_row)
            except SourceError as error:
                yield SourceFailure(file.name, -1, error)
