"""Adopt Parquet files: a block is a row group, with a range for the column chunks of each field (SPEC.md §5).

The memory of decoded columns is known from the footer and the headers of pages; few values are decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from shardkit.errors import SourceError
from shardkit.formats import FieldType
from shardkit.formats.foreign_blocks import (
    OFFSET_BYTES,
    PARQUET_MAGIC,
    SparseFile,
    chunk_span,
    column_leaves,
    filled_groups,
    parquet_footer,
)
from shardkit.formats.index import MAX_BLOCK_BYTES as LARGEST_BLOCK_BYTES
from shardkit_tools.adopting.encoded_blocks import (
    MAX_BLOCK_BYTES,
    MAX_COMMON_BYTES,
    EncodedBlocks,
    TableFiles,
)
from shardkit_tools.adopting.files import BUILD_INSTEAD, AdoptTask, FilePass, Report, ScannedFile, read_some
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.table_columns import type_text
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
        file = task.file
        with FilePass(task=task) as blocks:
            common = _read_footer(blocks.stream, file)
            footer = parquet_footer(common)
            groups = filled_groups(footer)
            columns = footer.schema.to_arrow_schema()
            found = self.encoded_blocks(task, columns.names)
            spans = [
                [chunk_span(one.column(place)) for place in range(one.num_columns)]
                for one in map(footer.row_group, groups)
            ]
            borders = _borders(spans, file.size - len(common), file)
            owners = column_leaves(columns)
            blocks.stream.seek(0)
            blocks.add_head(blocks.read(borders[0]))
            report(0, borders[0])
            types = {
                name: type_text(columns.field(name).type) for name in self.schema if name in columns.names
            }
            for group, leaves, (start, stop) in zip(groups, spans, pairwise(borders), strict=True):
                what, facts = f"row group {group}", footer.row_group(group)
                found.check_size(what, max(stop - start, facts.total_byte_size))
                data = blocks.read(stop - start)
                fields = [_field_span(name, owners, leaves, start) for name in self.schema]
                blocks.add(data, facts.num_rows, fields)
                own = _RowGroup(file, footer, group, owners, types, memoryview(data), start)
                found.add(what, facts.num_rows, self._check(found, what, own, is_first=not found))
                report(facts.num_rows, len(data))
            left = file.size - len(common) - borders[-1]
            while data := blocks.read(min(left, _PIECE_BYTES)):
                left -= len(data)
                blocks.add_tail(data)
                report(0, len(data))
            end = blocks.read(len(common) + 1)
            blocks.add_tail(end)
        if end != common:
            raise SourceError(f"{file.path}: it was changed while it was read; adopt what nobody writes to")
        return found.scanned("parquet", blocks, common)

    def _check(self, found: EncodedBlocks, what: str, group: _RowGroup, *, is_first: bool) -> int:
        """Return the memory of a row group, and decode fields whose memory is unknown or whose values may not fit.

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
            if own is None or (
                chunks and (group.types[name] != str(kind.required) or _may_misfit(name, kind, chunks))
            ):
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
    types: Mapping[str, str | None]  # column → field type that has all values of its Arrow type
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


def _may_misfit(name: str, kind: FieldType, chunks: Iterable[Chunk]) -> bool:
    """Return True if a value that the Arrow type of a column has may not be one of its field, such as a null."""
    for facts, leaf, _ in chunks:
        inner = leaf.path[len(name) + 1 :]
        if kind.kind == "json":
            if facts.physical_type in ("FLOAT", "DOUBLE", "FIXED_LEN_BYTE_ARRAY"):  # NaN and infinity
                return True
        elif facts.physical_type == "INT96":
            return True
        elif (inner or not kind.optional) and not (kind.kind == "bytes" and inner == "path"):
            counted = facts.statistics if facts.is_stats_set else None
            if leaf.max_definition_level and (
                counted is None or not counted.has_null_count or counted.null_count
            ):
                return True
    return False


# ---- Memory of decoded columns

_JSON_BYTES = 12  # quotes, separators and digits of a member of a JSON object
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3  # types of pages
_DICTIONARY_ENCODINGS = (2, 8)
_WHOLE_ENCODINGS = (0, 6)  # PLAIN, DELTA_LENGTH_BYTE_ARRAY: a page contains its values byte for byte
_CODECS = {"SNAPPY": "snappy", "GZIP": "gzip", "BROTLI": "brotli", "ZSTD": "zstd", "LZ4_RAW": "lz4_raw"}
_MAX_DICTIONARY_BYTES = 64 << 20
_MAX_DEPTH = 8


class Chunk(NamedTuple):
    """A column chunk."""

    facts: Any  # from the footer
    leaf: Any  # its column in the schema of the file
    data: memoryview


class ColumnMemory(NamedTuple):
    """Memory of decoded values."""

    num_bytes: int | None  # about how many bytes they have; None: they must be decoded
    longest: int = 0  # size of the longest entry of a dictionary that may make them too large


def field_memory(kind: FieldType, rows: int, chunks: Iterable[Chunk]) -> ColumnMemory:
    """Return the memory of a field of a row group as `memory_of` counts it, given the column chunks that store it."""
    total = rows if kind.optional else 0
    if kind.item_bytes is not None:
        return ColumnMemory(total + rows * kind.item_bytes)
    total += OFFSET_BYTES * rows
    items = kind.items or kind
    for chunk in chunks:
        found = _chunk_memory(*chunk, items.numpy_dtype.itemsize if items.dtype else 0)
        if found.num_bytes is None:
            return found
        total += found.num_bytes
        if kind.kind == "json":
            total += chunk.facts.num_values * (len(chunk.leaf.name) + _JSON_BYTES)
    return ColumnMemory(total)


def _chunk_memory(chunk: Any, leaf: Any, data: memoryview, item_bytes: int) -> ColumnMemory:
    """Return the memory of the values of a column chunk.

    A value of a dictionary counts with the mean size of the entries. A block could become as large as all values
    times the longest entry, which has at most the size of the dictionary. Only if that is more than a block may have
    is the dictionary decompressed.
    """
    kind = chunk.physical_type
    if kind != "BYTE_ARRAY":
        return ColumnMemory(int(chunk.num_values) * (item_bytes or _WIDTHS.get(kind, leaf.length)))
    whole = coded = 0  # bytes, values
    dictionary = _Page(_DICTIONARY, 0, data[:0], 0, 0)
    try:
        for page in _pages(data, chunk.num_values):
            if page.kind == _DICTIONARY:
                dictionary = page
            elif page.encoding in _DICTIONARY_ENCODINGS:
                coded += page.values
            elif page.encoding in _WHOLE_ENCODINGS:
                whole += page.size
            else:
                return ColumnMemory(None)
    except (IndexError, ValueError):
        return ColumnMemory(None)
    if coded * dictionary.size > LARGEST_BLOCK_BYTES:
        longest = _longest(dictionary, chunk.compression)
        if longest is None or coded * longest > LARGEST_BLOCK_BYTES:
            return ColumnMemory(None, longest or dictionary.size)
    mean = max(0, dictionary.size - 4 * dictionary.values) / max(1, dictionary.values)
    nulls = chunk.statistics.null_count if chunk.is_stats_set and chunk.statistics.has_null_count else 0
    return ColumnMemory(whole + int(coded * mean * (1 - nulls / chunk.num_values)))


class _Page(NamedTuple):
    kind: int
    size: int  # bytes, decompressed
    stored: memoryview
    values: int
    encoding: int


def _pages(data: memoryview, values: int) -> Iterator[_Page]:
    """Yield the pages of a column chunk.

    Raises:
        IndexError, ValueError: A header is damaged.
    """
    at = 0
    while values > 0:
        found, at = _read_struct(data, at)
        kind, size, stored = (found.get(field, -1) for field in (1, 2, 3))
        own = found.get({_DATA: 5, _DICTIONARY: 7, _DATA_2: 8}.get(kind, 0), {})
        count, encoding = own.get(1, 0), own.get(4 if kind == _DATA_2 else 2, 0)
        if min(kind, size, stored, count) < 0 or at + stored > len(data):
            raise ValueError("page header")
        yield _Page(kind, size, data[at : at + stored], count, encoding)
        at += stored
        values -= 0 if kind == _DICTIONARY else count


def _longest(dictionary: _Page, codec: str) -> int | None:
    """Return the size of the longest entry of a dictionary; None if it cannot be read, or is too large."""
    if dictionary.size > _MAX_DICTIONARY_BYTES:
        return None
    data: Any = dictionary.stored
    try:
        if codec != "UNCOMPRESSED":
            data = pa.Codec(_CODECS[codec]).decompress(data, dictionary.size)
    except (KeyError, OSError, pa.ArrowException):
        return None
    view, at, longest = memoryview(data), 0, 0
    while at < len(view):
        length = int.from_bytes(view[at : at + 4], "little")
        longest, at = max(longest, length), at + 4 + length
    return longest


# ---- Thrift's compact protocol


def _read_struct(data: memoryview, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Return the integers and structs of a struct by field, and where it ends."""
    if depth > _MAX_DEPTH:
        raise ValueError("nesting")
    found: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _read_integer(data, at)
        found[field], at = _read_value(data, at, head & 15, depth)
    return found, at + 1


def _read_value(data: memoryview, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true, false
        return None, at
    if kind == 3:
        return None, at + 1
    if kind in (4, 5, 6):
        return _read_integer(data, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = _read_varint(data, at)
        return None, at + size
    if kind == 12:
        return _read_struct(data, at, depth + 1)
    raise ValueError(f"type {kind}")


def _read_integer(data: memoryview, at: int) -> tuple[int, int]:
    value, at = _read_varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("integer")
