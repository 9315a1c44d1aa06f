"""Adopt documents of tokens: rows of any length, located by the `.idx` file of each `.bin` file (SPEC.md §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SourceError, UsageError
from shardkit_tools.adopting.files import BUILD_INSTEAD, AdoptTask, FilledFiles, Report, ScannedFile
from shardkit_tools.adopting.located_rows import LocatedRows
from shardkit_tools.adopting.scanned_blocks import FilePass
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.token_documents import TokenDocuments, read_index


@dataclass(frozen=True)
class Documents(FilledFiles):
    """Files of tokens, each with its index."""

    importer: TokenDocuments

    @classmethod
    def of(cls, importer: TokenDocuments) -> Documents:
        """Return the files of an importer.

        Raises:
            UsageError: `--schema` gives another type than the index has.
        """
        own = f"{read_index(*importer.pairs[0]).dtype}[*]"
        for field, kind in importer.schema.items():
            if str(kind) != own:
                raise UsageError(
                    f"--schema {field}={kind}: adopted documents keep their type, {own}; {BUILD_INSTEAD}"
                )
        return cls(importer, importer.rows)

    @property
    def parts(self) -> tuple[tuple[SourceFile, ...], ...]:
        return self.importer.pairs

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a file from start to end; memory holds one block and the index."""
        assert not axes, "documents are one stratum"
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
