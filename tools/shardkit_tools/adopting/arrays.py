"""Adopt arrays: rows of one size, which the index locates by arithmetic (SPEC.md §3)."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardkit.errors import SourceError, UsageError
from shardkit.formats import FieldType
from shardkit_tools.adopting.files import BUILD_INSTEAD, AdoptTask, FilledFiles, Report, ScannedFile
from shardkit_tools.adopting.scanned_blocks import FilePass
from shardkit_tools.importers.numpy_arrays import ArrayFile, NumpyImporter, read_header


@dataclass(frozen=True)
class Arrays(FilledFiles):
    """Files of rows of one type; the rows of all files follow one another."""

    importer: NumpyImporter

    @classmethod
    def of(cls, importer: NumpyImporter) -> Arrays:
        """Return the parts of one array.

        Raises:
            UsageError: `--schema` gives another type than the array has.
            SourceError: The rows of a file are not stored as they are read.
        """
        arrays = importer.arrays.values()
        for one in arrays:
            check_array(one, importer.schema[one.field])
        return cls(importer, tuple(one.header.shape[0] for one in arrays))

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a file from start to end; memory holds one block and its checksums."""
        assert not axes, "the rows of an array are one stratum"
        array = self.importer.arrays[task.file]
        rows, row_bytes = array.header.shape[0], array.header.row_bytes
        block_rows = max(1, block_bytes // row_bytes)
        with FilePass(task=task) as blocks:
            blocks.add_head(self._head(array, blocks.read(array.header.offset)))
            report(0, blocks.head_size)
            for count in _counts(rows, block_rows):
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


def check_array(array: ArrayFile, kind: FieldType) -> None:
    """Check that the rows of an array can be read where they are as a field of the type `kind`.

    Raises:
        UsageError: The array has another type.
        SourceError: The rows are not stored as they are read.
    """
    head, where = array.header, f"{array.file.path}: {array.member or 'its rows'}"
    if head.columns_first or np.dtype(head.dtype).str[0] == ">":
        how = "column by column (Fortran order)" if head.columns_first else "big-endian"
        raise SourceError(f"{where}: stored {how}; {BUILD_INSTEAD}")
    if str(kind) != head.row_type:
        raise UsageError(
            f"--schema {array.field}={kind}: adopted rows keep their type, {head.row_type}; {BUILD_INSTEAD}"
        )


def _counts(rows: int, block_rows: int) -> Iterator[int]:
    """Yield the number of rows of each block."""
    for first in range(0, rows, block_rows):
        yield min(block_rows, rows - first)
