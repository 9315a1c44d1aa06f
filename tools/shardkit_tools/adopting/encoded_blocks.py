"""Blocks that need decoding: memory and segments for the index of a file (SPEC.md §5)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardkit.errors import SourceError
from shardkit.formats import Schema
from shardkit.formats.foreign_blocks import foreign_columns, memory_of
from shardkit_tools.adopting.files import BUILD_INSTEAD, AdoptTask, FilledFiles, Runs, ScannedFile
from shardkit_tools.adopting.scanned_blocks import FilePass
from shardkit_tools.importers.tables import TableImporter

MAX_BLOCK_BYTES = 256 << 20
"""Maximum stored and decoded size of a block: a read of one row reads and decodes its block."""

MAX_WHOLE_BYTES = 128 << 20
"""The same for a block that is decoded as a whole, so that its stored and decoded bytes are in memory."""

MAX_COMMON_BYTES = 64 << 20
"""Maximum size of the bytes that every block needs, which are copied into the index."""


def check_block_size(path: str, what: str, size: int, most_bytes: int) -> None:
    """Raise SourceError if a block is too large."""
    if size > most_bytes:
        raise SourceError(
            f"{path}: {what} has {size} bytes, and a read of one of its rows would decode it; "
            f"expected at most {most_bytes}: write the file with smaller ones, or {BUILD_INSTEAD}"
        )


@dataclass(frozen=True)
class TableFiles(FilledFiles):
    """Files of tables of one schema; columns that a file lacks are null in its rows."""

    importer: TableImporter

    def encoded_blocks(
        self, task: AdoptTask, columns: Collection[str], most_bytes: int = MAX_BLOCK_BYTES
    ) -> EncodedBlocks:
        """Return the blocks of a file that has these columns; partition columns that it lacks are constants."""
        values = self.importer.partitions.get(task.file.name, {})
        constants = {
            name: str(value.as_py())
            for name, value in values.items()
            if name in self.schema and name not in columns
        }
        return EncodedBlocks(task, self.schema, constants, most_bytes)


@dataclass
class EncodedBlocks:
    """Facts about the blocks of a file that were scanned so far."""

    task: AdoptTask
    schema: Schema
    constants: Mapping[str, str]  # field → text of the value of all rows
    most_bytes: int = MAX_BLOCK_BYTES  # maximum stored and decoded size of a block
    _memory: list[int] = field(default_factory=list)  # bytes of each block when it is decoded
    _rows: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._rows)

    def check_size(self, what: str, size: int) -> None:
        """Raise SourceError if a block is too large."""
        check_block_size(self.task.file.path, what, size, self.most_bytes)

    def decode(
        self, what: str, batches: Iterable[Any], fields: Collection[str], rows: int | None = None
    ) -> int:
        """Decode some fields of a block with the code that will read them, and return their memory.

        `rows` is the number of rows that the file states; None: `batches` are only some of them.

        Raises:
            SourceError: A value does not fit the schema, the block is too large, or it has another number of rows.
        """
        schema = Schema({name: kind for name, kind in self.schema.items() if name in fields})
        memory, first, seen = 0, sum(self._rows), 0
        for batch in batches:
            try:
                columns = foreign_columns(batch, schema, self.constants, self.task.file.path, first + seen)
            except SourceError as error:
                if "--on-error skip" not in str(error):
                    raise
                raise SourceError(
                    f"{error}; shardkit adopt leaves out no rows of a table: {BUILD_INSTEAD} --on-error skip"
                ) from None
            memory, seen = memory + memory_of(columns.values()), seen + batch.num_rows
            self.check_size(what, memory)
        if rows is not None and seen != rows:
            raise SourceError(
                f"{self.task.file.path}: {what} has {seen} rows, its file says {rows}; write it again"
            )
        return memory

    def add(self, what: str, rows: int, memory: int) -> None:
        """Note a block whose rows take about `memory` bytes when they are decoded."""
        self.check_size(what, memory)
        self._memory.append(max(1, memory))
        self._rows.append(rows)

    def scanned(self, encoding: str, blocks: FilePass, common: bytes) -> ScannedFile:
        """Return the result of the pass over the file."""
        block_rows = max(self._rows)
        return blocks.scanned(
            self.schema,
            block_rows,
            _runs(self._rows, block_rows),
            encoding=encoding,
            constants=dict(self.constants) or None,
            common=np.frombuffer(common, np.uint8),
            block_raw_size=np.array(self._memory, np.uint64),
        )


def _runs(rows: Sequence[int], block_rows: int) -> Runs:
    """Return runs of blocks in which only the last has fewer rows, so that manifest arithmetic finds rows."""
    runs: list[int] = []
    is_open = False
    for count in rows:
        if is_open:
            runs[-1] += count
        else:
            runs.append(count)
        is_open = count == block_rows
    return tuple(((), count) for count in runs)
