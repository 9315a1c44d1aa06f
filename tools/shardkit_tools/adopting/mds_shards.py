"""Adopt MDS shards: rows of any size, whose fields the shard's own offsets locate (SPEC.md §4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError, SourceError
from shardkit.formats import FieldType
from shardkit.formats.compression import decompress_frame
from shardkit_tools.adopting.encoded_blocks import MAX_WHOLE_BYTES, check_block_size
from shardkit_tools.adopting.files import BUILD_INSTEAD, AdoptTask, FilledFiles, Report, ScannedFile
from shardkit_tools.adopting.located_rows import LocatedRows, locate_decimal, refuse_array, row_names
from shardkit_tools.adopting.scanned_blocks import FilePass
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


@dataclass(frozen=True)
class MdsFolder(FilledFiles):
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
            if head_bytes(shard) > shard.raw_bytes or not shard.rows:
                raise SourceError(
                    f"{shard.file.path}: {shard.file.size} bytes for {shard.rows} rows; write the dataset again"
                )
        return cls(importer, tuple(shard.rows for shard in importer.shards))

    @property
    def parts(self) -> tuple[tuple[SourceFile, ...], ...]:
        return tuple((shard.file,) for shard in self.importer.shards)

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a shard from start to end; memory holds one block, the row offsets and the index."""
        assert not axes, "the rows of an MDS folder are one stratum"
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
                located.add(raw, self._spans_of(located, raw, rows, first), row_names(first))
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
    if name == "str_int" and kind.is_whole:
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
