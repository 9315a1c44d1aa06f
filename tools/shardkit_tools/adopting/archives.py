"""Adopt NumPy archives: the rows of each array follow one another, so an archive is one block (SPEC.md §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkit.errors import FormatError, SourceError
from shardkit.formats.foreign_blocks import foreign_block
from shardkit_tools.adopting.arrays import check_array
from shardkit_tools.adopting.encoded_blocks import MAX_WHOLE_BYTES, check_block_size
from shardkit_tools.adopting.files import BUILD_INSTEAD, AdoptTask, FilledFiles, Report, ScannedFile
from shardkit_tools.adopting.scanned_blocks import FilePass
from shardkit_tools.importers.numpy_archives import ArchiveImporter, stored_spans


@dataclass(frozen=True)
class Archives(FilledFiles):
    """Archives of the same arrays; the rows of all archives follow one another."""

    importer: ArchiveImporter

    @classmethod
    def of(cls, importer: ArchiveImporter) -> Archives:
        """Return the archives of an importer.

        Raises:
            UsageError: `--schema` gives another type than an array has.
            SourceError: The rows of an array are not stored as they are read, or an archive is too large.
        """
        for file, arrays in importer.archives.items():
            for one in arrays:
                check_array(one, importer.schema[one.field])
            check_block_size(file.path, "the archive", file.size, MAX_WHOLE_BYTES)
        return cls(importer, tuple(arrays[0].header.shape[0] for arrays in importer.archives.values()))

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read an archive from start to end; memory holds the archive."""
        assert not axes, "the rows of an archive are one stratum"
        file, arrays = task.file, self.importer.archives[task.file]
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
