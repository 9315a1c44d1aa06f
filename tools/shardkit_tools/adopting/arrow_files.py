"""Adopt Arrow IPC files and streams, Feather, and folders of `save_to_disk`: a block is a record batch (SPEC.md §5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from shardkit.errors import FormatError, SourceError
from shardkit.formats.arrow_message import (
    DICTIONARY,
    FILE_MAGIC,
    RECORD_BATCH,
    MessageHead,
    message_metadata_bytes,
    read_message_head,
)
from shardkit.formats.foreign_blocks import arrow_batch, arrow_raw_bytes, arrow_schema_of
from shardkit_tools.adopting.encoded_blocks import (
    MAX_COMMON_BYTES,
    MAX_WHOLE_BYTES,
    EncodedBlocks,
    TableFiles,
)
from shardkit_tools.adopting.files import BUILD_INSTEAD, AdoptTask, Report, ScannedFile
from shardkit_tools.adopting.scanned_blocks import FilePass, read_some
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.source_files import open_file
from shardkit_tools.importers.tables import ArrowImporter, open_ipc

_BATCH_ROWS = 4096


class _Place(NamedTuple):
    """A message in a file: where it begins, its kind and sizes."""

    start: int
    head: MessageHead

    @property
    def stop(self) -> int:
        return self.start + self.head.num_bytes


@dataclass(frozen=True)
class ArrowFiles(TableFiles):
    """Arrow files and streams, Feather."""

    messages: Mapping[SourceFile, Sequence[_Place]]  # messages of each file

    @classmethod
    def of(cls, importer: ArrowImporter) -> ArrowFiles:
        """Return the files of an importer."""
        messages = {file: _list_messages(file) for file in importer.source.files}
        rows = tuple(sum(place.head.rows for place in places) for places in messages.values())
        return cls(importer, rows, messages)

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a file from start to end; memory holds one record batch, decoded, and the index."""
        assert not axes, "the rows of an Arrow file are one stratum"
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


def _list_messages(file: SourceFile) -> list[_Place]:
    """Return the messages of a file; bodies are skipped.

    Raises:
        SourceError: A message cannot be parsed, a dictionary follows a record batch, or the footer lists other batches.
    """
    with open_ipc(file) as reader:
        expected = getattr(reader, "num_record_batches", None)
    with open_file(file) as stream:
        try:
            places = list(_messages(stream, file))
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


def _messages(stream: BinaryIO, file: SourceFile) -> Iterator[_Place]:
    position = 8 if stream.read(len(FILE_MAGIC)) == FILE_MAGIC else 0
    while position < file.size:
        stream.seek(position)
        length = message_metadata_bytes(read_some(stream, 8, file.path))
        if not length:
            return
        place = _Place(position, read_message_head(read_some(stream, length, file.path)))
        if place.stop > file.size:
            raise FormatError(f"arrow message: it ends at {place.stop} of {file.size} bytes")
        yield place
        position = place.stop
