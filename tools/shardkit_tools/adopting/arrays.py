"""Adopt arrays: rows of one size, located by arithmetic, and archives of arrays (SPEC.md §3)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkit.errors import FormatError, SourceError, UsageError
from shardkit.formats import FieldType
from shardkit.formats.foreign_blocks import foreign_block
from shardkit_tools.adopting.encoded_blocks import MAX_WHOLE_BYTES, check_block_size
from shardkit_tools.adopting.files import (
    BUILD_INSTEAD,
    AdoptableFiles,
    AdoptTask,
    FilePass,
    Report,
    ScannedFile,
)
from shardkit_tools.importers.numpy_archives import ArchiveImporter, stored_spans
from shardkit_tools.importers.numpy_arrays import ArrayFile, NumpyImporter, read_header


@dataclass(frozen=True)
class Arrays(AdoptableFiles):
    """Files of rows of one type; the rows of all files follow one another."""

    importer: NumpyImporter

    @classmethod
    def of(cls, importer: NumpyImporter) -> Arrays:
        """Return the parts of one array."""
        arrays = [one for (one,) in importer.arrays.values()]
        for one in arrays:
            _check_array(one, importer.schema[one.field])
        return cls(importer, tuple(one.header.shape[0] for one in arrays))

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a file from start to end; memory holds one block and its checksums."""
        (array,) = self.importer.arrays[task.file]
        rows, row_bytes = array.header.shape[0], array.header.row_bytes
        block_rows = max(1, block_bytes // row_bytes)
        with FilePass(task=task) as blocks:
            blocks.add_head(self._head(array, blocks.read(array.header.offset)))
            report(0, blocks.head_size)
            for first in range(0, rows, block_rows):
                count = min(block_rows, rows - first)
                data = blocks.read(count * row_bytes)
                if len(data) != count * row_bytes:
                    raise SourceError(f"{task.file.path}: it ends inside of its rows; write it again")
                if array.header.dtype == "|b1" and data.translate(None, b"\x00\x01"):
                    raise SourceError(f"{task.file.path}: a bool is neither 0 nor 1; {BUILD_INSTEAD}")
                blocks.add(data, count)
                report(count, len(data))
            blocks.add_rest(report)
        return blocks.scanned(self.schema, block_rows)

    @staticmethod
    def _head(array: ArrayFile, data: bytes) -> bytes:
        """Return the bytes of a header after comparing it with the listed header."""
        is_same = not data or array.header == read_header(io.BytesIO(data), array.file.path, array.file.size)
        if len(data) != array.header.offset or not is_same:
            raise SourceError(f"{array.file.path}: it was changed after it was listed; adopt it again")
        return data


@dataclass(frozen=True)
class Archives(AdoptableFiles):
    """Archives of the same arrays; the rows of all archives follow one another."""

    importer: ArchiveImporter

    @classmethod
    def of(cls, importer: ArchiveImporter) -> Archives:
        """Return the archives of an importer."""
        for file, arrays in importer.arrays.items():
            for one in arrays:
                _check_array(one, importer.schema[one.field])
            check_block_size(file.path, "the archive", file.size, MAX_WHOLE_BYTES)
        return cls(importer, tuple(arrays[0].header.shape[0] for arrays in importer.arrays.values()))

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read an archive from start to end; memory holds the archive."""
        file, arrays = task.file, self.importer.arrays[task.file]
        rows = arrays[0].header.shape[0]
        with FilePass(task=task) as blocks:
            data = blocks.read(file.size + 1)
            spans = stored_spans(data, arrays)
            if spans is None:
                raise SourceError(
                    f"{file.path}: its arrays are compressed, so rows cannot be read out of their middle; "
                    f"{BUILD_INSTEAD}"
                )
            first, last = min(start for start, _ in spans.values()), max(stop for _, stop in spans.values())
            blocks.add_head(data[:first])
            block = data[first:last]
            blocks.add(
                block,
                rows,
                [(start - first, stop - first) for start, stop in map(spans.__getitem__, self.schema)],
            )
            blocks.add_tail(data[last:])
            report(rows, len(data))
        size = sum(one.header.row_bytes for one in arrays) * rows
        scanned = blocks.scanned(
            self.schema,
            rows,
            encoding="npz",
            common=np.empty(0, np.uint8),
            block_raw_size=np.array([size], np.uint64),
        )
        assert scanned.index is not None
        try:
            foreign_block(scanned.index, 0, {first: memoryview(block)}, list(self.schema))
        except FormatError as error:
            raise SourceError(f"{file.path}: {error}; {BUILD_INSTEAD}") from None
        return scanned


def _check_array(array: ArrayFile, kind: FieldType) -> None:
    """Check that the rows of an array can be read where they are as a field of the type `kind`."""
    head, where = array.header, f"{array.file.path}: {array.member or 'its rows'}"
    if head.columns_first or np.dtype(head.dtype).str[0] == ">":
        how = "column by column (Fortran order)" if head.columns_first else "big-endian"
        raise SourceError(f"{where}: stored {how}; {BUILD_INSTEAD}")
    if not head.row_bytes:
        raise SourceError(f"{where}: empty arrays; {BUILD_INSTEAD}")
    if str(kind) != head.row_type:
        raise UsageError(
            f"--schema {array.field}={kind}: adopted rows keep their type, {head.row_type}; {BUILD_INSTEAD}"
        )
