"""Adopt rows of any size, whose fields are located one by one: shards of MDS, documents of tokens (SPEC.md §3, §4)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError, SourceError, UsageError
from shardkit.extras import shell_word
from shardkit.formats import FieldType, Schema
from shardkit.formats.compression import decompress_frame
from shardkit.formats.reading import tar_column
from shardkit.formats.strict_json import JSON_DECODER, parse_objects
from shardkit_tools.adopting.encoded_blocks import MAX_WHOLE_BYTES, check_block_size
from shardkit_tools.adopting.files import (
    BUILD_INSTEAD,
    AdoptableFiles,
    AdoptTask,
    FilePass,
    Report,
    ScannedFile,
    even_block_rows,
)
from shardkit_tools.importers.mds import (
    SPAN_ROWS,
    MdsImporter,
    MdsShard,
    ShardHashes,
    array_head,
    field_spans,
    head_bytes,
    row_offsets,
)
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.tokens import TokenDocuments, read_index

Span = tuple[int, int]
"""(offset, bytes) of a value."""

_DIGITS = re.compile(rb"[ \t\r\n]*(?:\+?0*(0|[1-9][0-9]*)|(-[1-9][0-9]*))[ \t\r\n]*\Z")


@dataclass
class LocatedRows:
    """The fields of the rows that were scanned so far."""

    schema: Schema
    path: str  # for messages
    is_payload: dict[str, bool] = field(
        default_factory=dict
    )  # field → whether its spans locate the payload, without header
    _tables: list[NDArray[np.int64]] = field(
        default_factory=list
    )  # of each block: (rows, fields, offset from its start and size)

    def scan(
        self,
        blocks: FilePass,
        borders: NDArray[np.int64],
        block_bytes: int,
        spans_of: Callable[[bytes, int, NDArray[np.int64]], NDArray[np.int64]],
        report: Report,
    ) -> int:
        """Read the rows of a file, and return the number of rows of a block; memory holds one block.

        Args:
            blocks: pass over the file, which is at its first row.
            borders: (rows + 1,) offset in the file of each row, then the end of the last.
            block_bytes: target size of a block.
            spans_of: returns the spans of the fields of each row of a block, in schema order. Its arguments are the
                bytes of the block, the number of its first row, and the borders of its rows in it.
            report: called with (rows, bytes) read.
        """
        block_rows = even_block_rows(borders, block_bytes)
        for first in range(0, len(borders) - 1, block_rows):
            own = borders[first : first + block_rows + 1] - borders[first]
            data = blocks.read(int(own[-1]))
            blocks.add(data, len(own) - 1)
            self.add_checked(data, spans_of(data, first, own), first)
            report(len(own) - 1, len(data))
        return block_rows

    def add_checked(self, data: bytes, spans: NDArray[np.int64], first: int) -> None:
        """Check the values of a block, and keep their spans.

        Args:
            data: bytes of the block.
            spans: spans in `data` of the fields of each row, in schema order.
            first: number in the file of the block's first row, for messages.
        """
        for place, name in enumerate(self.schema):
            self.check(name, data, spans[:, place], lambda row: f"row {first + row}")
        self.add(spans)

    def add(self, spans: NDArray[np.int64]) -> None:
        """Keep spans: (rows, fields, offset from the start of the row's block and size); offset 0: no value."""
        self._tables.append(spans)

    def check(self, name: str, data: bytes, spans: NDArray[np.int64], name_of: Callable[[int], str]) -> None:
        """Check values of a field with the code that will read them.

        Args:
            name: the field.
            data: bytes that contain the values.
            spans: (values, offset in `data` and size).
            name_of: returns the name of the row of a value, for messages.
        """
        try:
            self._check_column(name, data, spans)
        except FormatError:
            for row, span in enumerate(spans.tolist()):
                self.check_value(name, data, span, name_of(row))

    def check_value(self, name: str, data: bytes, span: Span, row: str) -> None:
        """Check one value."""
        try:
            self._check_column(name, data, np.array([span], np.int64))
        except FormatError as error:
            raise SourceError(
                f"{self.path} {row}: {error}; fix it, or keep its bytes with --schema {shell_word(name)}=bytes"
            ) from None

    def _check_column(self, name: str, data: bytes, spans: NDArray[np.int64]) -> None:
        kind = self.schema[name]
        if kind.kind == "json":
            values = [data[start : start + size] for start, size in spans.tolist()]
            lines = b"\n".join(values)
            objects = parse_objects(lines) if lines.count(b"\n") == len(values) - 1 else None
            if objects is not None and len(objects) == len(values):
                return
            for value in values:
                try:  # strictly, as a build: readers would take the last of two values
                    JSON_DECODER.decode(value.decode())
                except (ValueError, RecursionError) as error:
                    raise FormatError(f"field {name!r}: no JSON: {error}") from None
        elif kind.kind != "bytes":
            raw, is_payload = np.frombuffer(data, np.uint8), self.is_payload.get(name, False)
            tar_column(raw, spans[:, 0], spans[:, 1], kind, name, is_payload=is_payload)

    def columns(self) -> dict[str, Any]:
        """Return the values of `ShardIndex` that locate the fields."""
        table = np.concatenate(self._tables).astype(np.uint64)
        return {
            "field_offset": table[:, :, 0].copy(),
            "field_size": table[:, :, 1].copy(),
            "field_is_payload": np.array(
                [self.is_payload.get(name, False) for name in self.schema], np.uint8
            ),
        }


def locate_decimal(data: bytes, where: str) -> Span:
    """Return the span of a decimal in a value, without space, plus sign and leading zeros."""
    match = _DIGITS.match(data[:200]) if len(data) <= 200 else None
    if match is None:
        raise SourceError(
            f"{where}: {data[:40]!r} is not an integer that can be read where it is; {BUILD_INSTEAD}, or read it "
            "as text with --schema FIELD=str"
        )
    begin, end = match.span(match.lastindex or 1)
    return begin, end - begin


def refuse_array(kind: FieldType, dtype: str, shape: tuple[int, ...], note: str, where: str) -> None:
    """Raise SourceError unless an array has the type of its field."""
    is_shaped = len(shape) == 1 if kind.kind == "ragged" else shape == kind.shape
    if dtype != kind.numpy_dtype.str or note or not is_shaped:
        is_list = kind.kind == "array" and len(shape) == len(kind.shape) == 1
        ragged = f", or give --schema with {kind.dtype}[*]" if is_list else ""
        raise SourceError(
            f"{where}: an array of dtype {dtype} and shape {shape}{note}, expected {kind}; {BUILD_INSTEAD}{ragged}"
        )


# ---- MDS


@dataclass(frozen=True)
class MdsFolder(AdoptableFiles):
    """The shards of an MDS folder, in the order of its index."""

    importer: MdsImporter

    @classmethod
    def of(cls, importer: MdsImporter) -> MdsFolder:
        """Return the folder; only its shards are adopted, not its index."""
        for shard in importer.shards:
            if shard.compression.partition(":")[0] not in ("", "zstd"):
                raise SourceError(
                    f"{shard.file.path}: compressed with {shard.compression}, and only zstd is read where it is; "
                    f"{BUILD_INSTEAD}"
                )
            if shard.compression:
                size = max(shard.file.size, shard.raw_bytes)
                check_block_size(shard.file.path, "the compressed shard", size, MAX_WHOLE_BYTES)
            if head_bytes(shard) > shard.raw_bytes:
                raise SourceError(
                    f"{shard.file.path}: {shard.file.size} bytes for {shard.rows} rows; write the dataset again"
                )
        return cls(importer, tuple(shard.rows for shard in importer.shards))

    @property
    def parts(self) -> tuple[tuple[SourceFile, ...], ...]:
        return tuple((shard.file,) for shard in self.importer.shards)

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a shard from start to end; memory holds one block, the row offsets and the index."""
        shard = self.importer.shards[task.number]
        hashes, located = ShardHashes(shard), LocatedRows(self.schema, task.file.path)
        if shard.compression:
            return self._scan_frame(task, shard, located, report)
        with FilePass(task=task) as blocks:
            head = blocks.read(head_bytes(shard))
            borders = row_offsets(shard, head)
            head += blocks.read(int(borders[0]) - len(head))
            blocks.add_head(head)
            hashes.update(head)
            report(0, len(head))

            def spans_of(data: bytes, first: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
                hashes.update(data)
                return self._spans_of(located, data, rows, first)

            block_rows = located.scan(blocks, borders, block_bytes, spans_of, report)
            blocks.add_rest(report)
        scanned = blocks.scanned(self.schema, block_rows, **located.columns())
        hashes.check()
        return scanned

    def _scan_frame(
        self, task: AdoptTask, shard: MdsShard, located: LocatedRows, report: Report
    ) -> ScannedFile:
        """Read a shard that is one zstd frame; memory holds the frame and its content."""
        with FilePass(task=task) as blocks:
            stored = blocks.read(task.file.size)
            hashes = ShardHashes(shard)
            hashes.update(stored)
            hashes.check()
            try:
                raw = decompress_frame(stored, shard.raw_bytes, located.path)
            except FormatError as error:
                raise SourceError(f"{error}; fetch it again, or {BUILD_INSTEAD}") from error
            borders = row_offsets(shard, raw)
            blocks.add(stored, shard.rows)
            for first in range(0, shard.rows, SPAN_ROWS):
                rows = borders[first : first + SPAN_ROWS + 1]
                located.add_checked(raw, self._spans_of(located, raw, rows, first), first)
                report(len(rows) - 1, 0)
            report(0, len(stored))
            blocks.add_rest(report)
        columns = located.columns() | {"encoding": "zstd", "block_raw_size": np.array([len(raw)], np.uint64)}
        return blocks.scanned(self.schema, shard.rows, **columns)

    def _spans_of(
        self, located: LocatedRows, data: bytes, borders: NDArray[np.int64], first: int
    ) -> NDArray[np.int64]:
        """Locate the fields of the rows of a block: (rows, fields, offset and size)."""
        spans, error = field_spans(data, borders, self.importer.encodings, located.path, first)
        if error is not None:
            raise error
        places = {name: place for place, (name, _, _) in enumerate(self.importer.encodings)}
        columns = []
        for name, kind in self.schema.items():
            encoding, own = self.importer.encodings[places[name]][1], spans[:, places[name]]
            # a value of other encodings is the whole field, so the first row stands for all
            varies = not kind.is_opaque and encoding.partition(":")[0] in ("str_int", "ndarray")
            found = []
            for row, (start, size) in enumerate(own[: None if varies else 1].tolist(), first):
                where = f"{located.path} row {row}, column {name!r}"
                skipped, size, located.is_payload[name] = _locate(
                    kind, encoding, data[start : start + size], where
                )
                found.append((start + skipped, size))
            columns.append(np.array(found, np.int64).reshape(-1, 2) if varies else own)
        return np.stack(columns, 1)


def _locate(kind: FieldType, encoding: str, data: bytes, where: str) -> tuple[int, int, bool]:
    """Return (bytes to skip, size, is_payload) of the value in the bytes of a field."""
    name, _, settings = encoding.partition(":")
    if kind.is_packed or kind.optional:
        raise SourceError(f"{where}: {kind} cannot be read where it is; {BUILD_INSTEAD}")
    if kind.is_opaque:
        return 0, len(data), False
    if name == "str_int" and kind.is_whole and kind.logical is None:
        return (*locate_decimal(data, where), False)
    if name == "ndarray":
        try:
            dtype, shape, at = array_head(settings, data)
        except (ValueError, IndexError, KeyError) as error:
            raise SourceError(f"{where}: not an array ({error}); fetch the shard again") from error
        refuse_array(kind, np.dtype(dtype).newbyteorder("<").str, shape, "", where)
        return at, len(data) - at, True
    if kind.kind != "scalar" or {"int": "int64"}.get(name, name) != kind.dtype:
        raise SourceError(f"{where}: {encoding} cannot be read as {kind} where it is; {BUILD_INSTEAD}")
    return 0, len(data), True


# ---- Documents of tokens, located by the `.idx` file of each `.bin` file


@dataclass(frozen=True)
class Documents(AdoptableFiles):
    """Files of tokens, each with its index."""

    importer: TokenDocuments

    @classmethod
    def of(cls, importer: TokenDocuments) -> Documents:
        """Return the files of an importer."""
        own = f"{read_index(*importer.pairs[0]).dtype}[*]"
        for name, kind in importer.schema.items():
            if str(kind) != own:
                raise UsageError(
                    f"--schema {name}={kind}: adopted documents keep their type, {own}; {BUILD_INSTEAD}"
                )
        return cls(importer, importer.rows)

    @property
    def parts(self) -> tuple[tuple[SourceFile, ...], ...]:
        return self.importer.pairs

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a file from start to end; memory holds one block and the index."""
        file, index_file = task.files
        index = read_index(file, index_file)
        borders = np.append(0, index.start + index.sizes)
        if bool((borders[:-1] != index.start).any()):
            raise SourceError(
                f"{file.path}: its documents do not follow one another in the order of the index; {BUILD_INSTEAD}"
            )
        located = LocatedRows(self.schema, file.path, dict.fromkeys(self.schema, True))

        def spans_of(data: bytes, first: int, own: NDArray[np.int64]) -> NDArray[np.int64]:
            if not data:
                raise SourceError(f"{file.path} row {first}: a block of empty documents; {BUILD_INSTEAD}")
            return np.stack([own[:-1], np.diff(own)], 1)[:, None]

        with FilePass(task=task) as blocks:
            report(0, index_file.size)
            block_rows = located.scan(blocks, borders, block_bytes, spans_of, report)
            blocks.add_rest(report)
        return blocks.scanned(self.schema, block_rows, **located.columns())
