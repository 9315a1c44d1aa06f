"""Blocks that need decoding: their memory and segments; Arrow files, whose blocks are record batches (SPEC.md §5)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from shardkit.errors import FormatError, SampleError, SourceError
from shardkit.formats import Schema
from shardkit.formats.arrow_message import (
    DICTIONARY,
    RECORD_BATCH,
)
from shardkit.formats.foreign_blocks import (
    arrow_batch,
    arrow_raw_bytes,
    arrow_schema_of,
    foreign_columns,
    memory_of,
)
from shardkit_tools.adopting.files import (
    BUILD_INSTEAD,
    AdoptableFiles,
    AdoptTask,
    FilePass,
    Report,
    Runs,
    ScannedFile,
)
from shardkit_tools.importers.arrow_files import ArrowImporter, Message, list_messages, open_ipc
from shardkit_tools.importers.protocol import SourceFile
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
class TableFiles(AdoptableFiles):
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
        """
        schema = Schema({name: kind for name, kind in self.schema.items() if name in fields})
        memory, first, seen = 0, sum(self._rows), 0
        for batch in batches:
            try:
                columns = foreign_columns(batch, schema, self.constants, self.task.file.path, first + seen)
            except (SampleError, SourceError) as error:
                if not error.is_of_row:
                    raise
                raise type(error)(
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


# ---- Arrow IPC files and streams, Feather, folders of `save_to_disk`

_BATCH_ROWS = 4096


@dataclass(frozen=True)
class ArrowFiles(TableFiles):
    """Arrow files and streams, Feather."""

    messages: Mapping[SourceFile, Sequence[Message]] = field(default_factory=dict)  # of each file

    @classmethod
    def of(cls, importer: ArrowImporter) -> ArrowFiles:
        """Return the files of an importer."""
        messages = {file: _list_messages(file) for file in importer.source.files}
        rows = tuple(sum(place.head.rows for place in places) for places in messages.values())
        return cls(importer, rows, messages)

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a file from start to end; memory holds one record batch, decoded, and the index."""
        file, places = task.file, self.messages[task.file]
        batches = [place for place in places if place.head.rows]
        common, schema = b"", pa.schema([])
        with FilePass(task=task) as blocks:
            head = blocks.read(batches[0].start)
            blocks.add_head(head)
            report(0, len(head))
            common = b"".join(
                head[place.start : place.stop]
                for place in places
                if place.stop <= batches[0].start and place.head.kind != RECORD_BATCH
            )
            schema = _schema(common, file)
            found = self.encoded_blocks(task, schema.names, MAX_WHOLE_BYTES)
            ends = [*(place.start for place in batches[1:]), places[-1].stop]
            for number, (place, end) in enumerate(zip(batches, ends, strict=True)):
                what = f"record batch {number}"
                found.check_size(what, end - place.start)
                data = blocks.read(end - place.start)
                blocks.add(data, place.head.rows)
                self._decode(found, what, common, schema, memoryview(data), place.head.rows)
                report(place.head.rows, len(data))
            blocks.add_rest(report)
        return found.scanned("arrow", blocks, common)

    def _decode(
        self, found: EncodedBlocks, what: str, common: bytes, schema: pa.Schema, data: memoryview, rows: int
    ) -> None:
        where = found.task.file.path
        try:
            declared = arrow_raw_bytes(data)
            found.check_size(what, declared)
            batch = arrow_batch(common, schema, data, list(self.schema), rows)
        except (FormatError, pa.ArrowException, OSError) as error:
            raise SourceError(
                f"{where}: {what} cannot be read where it is ({error}); {BUILD_INSTEAD}"
            ) from error
        parts = (batch.slice(first, _BATCH_ROWS) for first in range(0, batch.num_rows, _BATCH_ROWS))
        memory = found.decode(what, parts, self.schema, rows)
        found.add(what, rows, max(declared, memory))


def _schema(common: bytes, file: SourceFile) -> pa.Schema:
    if len(common) > MAX_COMMON_BYTES:
        raise SourceError(
            f"{file.path}: schema and dictionaries have {len(common)} bytes, which would be copied into the index; "
            f"expected at most {MAX_COMMON_BYTES}: {BUILD_INSTEAD}"
        )
    try:
        return arrow_schema_of(common)
    except pa.ArrowException as error:
        raise SourceError(f"{file.path}: not a readable Arrow file ({error}); write it again") from error


def _list_messages(file: SourceFile) -> list[Message]:
    """Return the messages of a file; bodies are skipped."""
    with open_ipc(file) as (reader, _):
        expected = getattr(reader, "num_record_batches", None)
    try:
        places = list_messages(file)
    except FormatError as error:
        raise SourceError(f"{file.path}: {error}; write it again, or {BUILD_INSTEAD}") from error
    kinds = [place.head.kind for place in places]
    batches = kinds.count(RECORD_BATCH)
    if batches and DICTIONARY in kinds[kinds.index(RECORD_BATCH) :]:
        raise SourceError(f"{file.path}: a dictionary changes between record batches; {BUILD_INSTEAD}")
    if expected not in (None, batches):
        raise SourceError(
            f"{file.path}: {batches} record batches, its footer lists {expected}; write it again"
        )
    return places
