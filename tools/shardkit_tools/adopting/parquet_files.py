"""Adopt Parquet files: a block is a row group, with a range for the column chunks of each field (SPEC.md §5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, BinaryIO

from shardkit.errors import SourceError
from shardkit.formats.foreign_blocks import (
    PARQUET_MAGIC,
    SparseFile,
    chunk_span,
    column_leaves,
    filled_groups,
    parquet_footer,
)
from shardkit_tools.adopting.encoded_blocks import (
    MAX_BLOCK_BYTES,
    MAX_COMMON_BYTES,
    EncodedBlocks,
    TableFiles,
)
from shardkit_tools.adopting.files import BUILD_INSTEAD, AdoptTask, Report, ScannedFile
from shardkit_tools.adopting.parquet_pages import Chunk, field_memory
from shardkit_tools.adopting.scanned_blocks import FilePass, read_some
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.tables import ParquetImporter, read_groups

_PIECE_BYTES = 1 << 20
_TAIL_BYTES = 8  # size of the footer, and the magic


@dataclass(frozen=True)
class ParquetFiles(TableFiles):
    """Parquet files."""

    @classmethod
    def of(cls, importer: ParquetImporter) -> ParquetFiles:
        """Return the files of an importer."""
        return cls(importer, importer.rows)

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a file from start to end; memory holds one row group, a batch of decoded rows and the index."""
        assert not axes, "the rows of a Parquet file are one stratum"
        file = task.file
        with FilePass(task=task) as blocks:
            common = _read_footer(blocks.stream, file)
            footer = parquet_footer(common)
            groups = filled_groups(footer)
            columns = footer.schema.to_arrow_schema()
            found = self.encoded_blocks(task, columns.names)
            spans = [_leaf_spans(footer.row_group(group)) for group in groups]
            borders = _borders(spans, file.size - len(common), file)
            owners = column_leaves(columns)
            blocks.stream.seek(0)
            blocks.add_head(blocks.read(borders[0]))
            report(0, borders[0])
            for group, leaves, (start, stop) in zip(groups, spans, pairwise(borders), strict=True):
                what, facts = f"row group {group}", footer.row_group(group)
                found.check_size(what, max(stop - start, facts.total_byte_size))
                data = blocks.read(stop - start)
                fields = [_field_span(name, owners, leaves, start) for name in self.schema]
                blocks.add(data, facts.num_rows, fields)
                own = _RowGroup(file, footer, group, owners, memoryview(data), start)
                found.add(what, facts.num_rows, self._check(found, what, own, is_first=not found))
                report(facts.num_rows, len(data))
            for size in _pieces(file.size - len(common) - borders[-1]):
                blocks.add_tail(blocks.read(size))
                report(0, size)
            end = blocks.read(len(common) + 1)
            blocks.add_tail(end)
        if end != common:
            raise SourceError(f"{file.path}: it was changed while it was read; adopt what nobody writes to")
        return found.scanned("parquet", blocks, common)

    def _check(self, found: EncodedBlocks, what: str, group: _RowGroup, *, is_first: bool) -> int:
        """Return the memory of a row group, and decode what must be decoded to know it.

        The beginning of the first file is decoded, because most values that do not fit their field are in every row.
        """
        rows = group.facts.num_rows
        if self.importer.options.check == "decode":
            return found.decode(what, group.batches(self.schema), self.schema, rows)
        if is_first and found.task.number == 0:
            found.decode(what, islice(group.batches(self.schema), 1), self.schema)
        total = 0
        for name, kind in self.schema.items():
            chunks = group.chunks(name)
            expected = field_memory(kind, rows, chunks)
            own = expected.num_bytes
            if own is None or any(chunk.facts.physical_type == "INT96" for chunk in chunks):
                most_rows = max(1, MAX_BLOCK_BYTES // expected.longest) if expected.longest else None
                own = found.decode(what, group.batches([name], most_rows), [name], rows)
            total += own
        return total


@dataclass(frozen=True)
class _RowGroup:
    """A row group that was read."""

    file: SourceFile
    footer: Any
    number: int
    owners: Sequence[str]  # column of each leaf column
    data: memoryview
    start: int  # where it begins in the file

    @property
    def facts(self) -> Any:
        return self.footer.row_group(self.number)

    def chunks(self, name: str) -> list[Chunk]:
        """Return the column chunks of a field."""
        chunks = []
        for place, owner in enumerate(self.owners):
            if owner == name:
                facts = self.facts.column(place)
                start, stop = (at - self.start for at in chunk_span(facts))
                chunks.append(Chunk(facts, self.footer.schema.column(place), self.data[start:stop]))
        return chunks

    def batches(self, names: Iterable[str], most_rows: int | None = None) -> Iterator[Any]:
        """Decode some fields; fields that the file lacks are left out."""
        view = SparseFile(self.file.size, {self.start: self.data})
        present = [name for name in names if name in self.owners]
        groups = range(self.number, self.number + 1)
        return read_groups(view, self.file, groups, present, self.footer, most_rows)


def _read_footer(stream: BinaryIO, file: SourceFile) -> bytes:
    """Return the last bytes of a file: the footer, its size and the magic."""
    stream.seek(max(0, file.size - _TAIL_BYTES))
    end = read_some(stream, _TAIL_BYTES, file.path)
    size = int.from_bytes(end[:4], "little") + _TAIL_BYTES
    if end[4:] != PARQUET_MAGIC or not _TAIL_BYTES < size <= min(file.size, MAX_COMMON_BYTES):
        raise SourceError(
            f"{file.path}: {size} bytes of footer, expected a Parquet file with at most {MAX_COMMON_BYTES}; "
            f"fetch it again, or {BUILD_INSTEAD}"
        )
    stream.seek(file.size - size)
    return read_some(stream, size, file.path)


def _leaf_spans(group: Any) -> list[tuple[int, int]]:
    """Return the (start, stop) of each leaf column of a row group in the file."""
    return [chunk_span(group.column(place)) for place in range(group.num_columns)]


def _borders(spans: Sequence[Sequence[tuple[int, int]]], end: int, file: SourceFile) -> list[int]:
    """Return where the blocks begin, and where the last ends; bytes between two row groups belong to the first."""
    starts = [min(start for start, _ in leaves) for leaves in spans]
    stops = [max(stop for _, stop in leaves) for leaves in spans]
    borders = [*starts, stops[-1]]
    is_inside = all(stop <= after for stop, after in zip(stops, borders[1:], strict=True))
    if not is_inside or borders[0] < len(PARQUET_MAGIC) or borders[-1] > end:
        raise SourceError(
            f"{file.path}: its row groups do not follow one another in the file; {BUILD_INSTEAD}"
        )
    return borders


def _field_span(
    name: str, owners: Sequence[str], leaves: Sequence[tuple[int, int]], block: int
) -> tuple[int, int]:
    """Return the (start, stop) of a field in its block; (0, 0) if the file lacks it."""
    own = [span for owner, span in zip(owners, leaves, strict=True) if owner == name]
    if not own:
        return 0, 0
    return min(start for start, _ in own) - block, max(stop for _, stop in own) - block


def _pieces(size: int) -> Iterator[int]:
    for start in range(0, size, _PIECE_BYTES):
        yield min(_PIECE_BYTES, size - start)
