"""Arrow IPC files (``.arrow``, Feather 2) and streams, and folders of `save_to_disk` of Hugging Face.

Record batches are read one at a time. With ``--on-error skip``, one that cannot be read is left out if its header is
intact; otherwise the rows after it have no numbers. In a folder of `save_to_disk`, two JSON files list the data files
and the types of the columns.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.ipc

from shardkit.errors import FormatError, SourceError
from shardkit.formats.arrow_message import (
    END_OF_STREAM,
    FILE_MAGIC,
    RECORD_BATCH,
    MessageHead,
    end_of_blocks,
    message_metadata_bytes,
    read_message_head,
)
from shardkit.formats.schema import KEY_FIELD
from shardkit.formats.strict_json import parse_json
from shardkit_tools.importers.protocol import ImportOptions, Source, SourceFile, SourceTask
from shardkit_tools.importers.source_files import (
    LeftOut,
    check_suffixes,
    is_url,
    open_each,
    open_file,
    read_file,
    unreadable,
)
from shardkit_tools.importers.table_columns import (
    flat_batch,
    hive_partitions,
    null_columns,
    table_schema,
    with_partitions,
)
from shardkit_tools.importers.tables import TASK_BYTES, Batches, TableImporter, make_tasks

_SEVERAL = "data follows the end of its stream (several streams in one file?), which would be lost"
_TAIL_BYTES = 10  # size of the footer, and magic
_SCAN_ROWS = 100_000  # rows whose nulls decide which fields are optional
_INFO, SAVED_STATE, _SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"


@dataclass(frozen=True, kw_only=True)
class ArrowImporter(TableImporter):
    """Arrow files as a source."""

    name: str = "arrow"

    def _batches(self, task: SourceTask) -> Batches:
        skip = self.options.skip_bad_rows
        return _record_batches(task.files[0], task.start, task.stop, task.first_row, skip=skip)


def open_arrow(source: Source, options: ImportOptions) -> ArrowImporter:
    """Read the schemas of Arrow files."""
    return _open_tables("arrow", source, options, None)


def _open_tables(
    name: str, source: Source, options: ImportOptions, features: Mapping[str, Any] | None
) -> ArrowImporter:
    check_suffixes(source, ("arrow", "feather", "ipc"), "an Arrow file")
    source, schemas = open_each(source, options, _ipc_schema)
    pieces = [_sizes_of_batches(file) if file.size > TASK_BYTES else () for file in source.files]

    def nulls(_: Any, wanted: Collection[str]) -> set[str]:
        return null_columns(
            flat_batch(batch, options) for batch in _first_batches(source, skip=options.skip_bad_rows)
        ).intersection(wanted)

    partitions = hive_partitions(source, options)
    whole = with_partitions(source, schemas, partitions)
    schema, classes = table_schema(source, options, whole, nulls, features)
    return ArrowImporter(
        name=name,
        source=source,
        fields=schema,
        options=options,
        labels=classes,
        cut=make_tasks(source.files, pieces),
        partitions=partitions,
        has_keys=any(KEY_FIELD in one.names for one in schemas),
    )


def _ipc_schema(file: SourceFile) -> Any:
    with open_ipc(file) as (reader, stream):
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            _refuse_several(stream, file)
        return reader.schema


def open_huggingface(source: Source, options: ImportOptions) -> ArrowImporter:
    """Read the description and the schemas of a saved dataset."""
    by_name = {file.name: file for file in source.files}
    if _SPLITS in by_name:
        splits = _document(by_name[_SPLITS]).get("splits")
        shown = ", ".join(map(str, splits)) if isinstance(splits, list) else "several"
        raise SourceError(
            f"{source.given}: holds the splits {shown}; name one of them, such as "
            f"{os.path.join(source.given, 'train')}"
        )
    for name in (_INFO, SAVED_STATE):
        if name not in by_name:
            raise SourceError(f"{source.given}: {name} is missing; save the dataset again with save_to_disk")
    features = _document(by_name[_INFO]).get("features")
    listed = Source(source.given, tuple(_data_files(by_name, source)))
    return _open_tables("huggingface", listed, options, features if isinstance(features, dict) else {})


def _document(file: SourceFile) -> dict[str, Any]:
    value = parse_json(read_file(file), file.path)
    if not isinstance(value, dict):
        raise SourceError(
            f"{file.path}: holds a {type(value).__name__}, not an object; save the dataset again"
        )
    return value


def _data_files(by_name: Mapping[str, SourceFile], source: Source) -> Iterator[SourceFile]:
    state = _document(by_name[SAVED_STATE])
    if state.get("_indices_data_files"):
        raise SourceError(
            f"{source.given}: its rows are chosen by the indices of an early release of datasets, which are not read; "
            "load it with datasets, then save flatten_indices() of it"
        )
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not listed:
        raise SourceError(
            f"{source.given}: {SAVED_STATE} lists no data files; save the dataset again with save_to_disk"
        )
    for entry in listed:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in by_name:
            raise SourceError(
                f"{source.given}: the data file {name!r} of {SAVED_STATE} is missing; fetch the folder again"
            )
        yield by_name[name]


def _first_batches(source: Source, *, skip: bool) -> Iterator[Any]:
    """Yield the batches that types are inferred from; with `skip`, unreadable batches are left out."""
    rows = size = 0
    for file in source.files:
        for found in LeftOut(skip).before_damage(_record_batches(file, skip=skip)):
            if isinstance(found, SourceError):
                continue
            batch, _ = found
            yield batch
            rows, size = rows + batch.num_rows, size + batch.get_total_buffer_size()
            if rows >= _SCAN_ROWS or size >= TASK_BYTES:
                return


def _sizes_of_batches(file: SourceFile) -> list[tuple[int, int]]:
    """Return (rows, bytes) of each record batch of a local file.

    Return nothing for a stream or a URL, which would have to be read completely, and for messages that are not parsed.
    """
    if is_url(file.path):
        return []
    with open_ipc(file) as (reader, _):
        if not hasattr(reader, "num_record_batches"):
            return []
    batches = _list_batches(file)
    borders = pairwise([0, *(one.start for one in batches[1:]), file.size])
    return [(one.head.rows, stop - start) for one, (start, stop) in zip(batches, borders, strict=False)]


def _list_batches(file: SourceFile) -> list[Message]:
    """Return the messages of record batches; none if a message cannot be parsed."""
    with suppress(FormatError):
        return [one for one in list_messages(file) if one.head.kind == RECORD_BATCH]
    return []


class Message(NamedTuple):
    """A message in a file: where it begins, its kind and sizes."""

    start: int
    head: MessageHead

    @property
    def stop(self) -> int:
        return self.start + self.head.num_bytes


def list_messages(file: SourceFile) -> list[Message]:
    """Return the messages of a file or stream; bodies are skipped.

    Raises:
        FormatError: A message cannot be parsed, or ends after the file.
    """
    messages: list[Message] = []
    with open_file(file) as stream:
        try:
            is_file = stream.read(len(FILE_MAGIC)) == FILE_MAGIC
            position = 8 if is_file else 0
            while position < file.size:
                stream.seek(position)
                length = message_metadata_bytes(stream.read(8))
                if not length:
                    if position + 8 < file.size and not is_file:
                        raise FormatError(f"arrow message: {_SEVERAL}")
                    break
                messages.append(Message(position, read_message_head(stream.read(length))))
                position = messages[-1].stop
        except OSError as error:
            raise unreadable(file.path, error) from error
    if position > file.size:
        raise FormatError(f"arrow message: it ends at {position} of {file.size} bytes")
    return messages


@contextmanager
def open_ipc(file: SourceFile) -> Iterator[tuple[Any, BinaryIO]]:
    """Open a reader of an Arrow file or stream, and the stream that it reads from."""
    with open_file(file) as stream:
        head = stream.read(len(FILE_MAGIC))
        is_file = head == FILE_MAGIC
        stream.seek(0)
        if head.startswith(b"FEA1"):
            raise SourceError(
                f"{file.path}: Feather of version 1, which is not read; write it again with version 2"
            )
        try:
            reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(stream)
            _ = reader.schema.names  # decoded here: names may not be UTF-8
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise SourceError(
                f"{file.path}: not a readable Arrow file ({error}); fetch or write it again"
            ) from error
        with reader:
            yield reader, stream


def _refuse_several(stream: BinaryIO, file: SourceFile) -> None:
    """Raise SourceError if bytes between the messages and the footer of a file are in neither."""
    stream.seek(file.size - _TAIL_BYTES)
    size = int.from_bytes(stream.read(4), "little")
    start = file.size - _TAIL_BYTES - size
    stream.seek(start)
    try:
        end = end_of_blocks(stream.read(size)) or start
    except FormatError as error:
        raise SourceError(
            f"{file.path}: not a readable Arrow file ({error}); fetch or write it again"
        ) from error
    stream.seek(end)
    at, gap = end, b""  # the end of the stream, and padding
    while at < start and not gap.strip(b"\0") and (piece := stream.read(min(start - at, TASK_BYTES))):
        at, gap = at + len(piece), piece.replace(END_OF_STREAM, b"")
    if end > start or gap.strip(b"\0"):
        raise SourceError(
            f"{file.path}: its footer lists messages up to byte {end}, and begins at byte {start} (several Arrow files "
            "in one?); what it does not list would be lost: split the file, or write it again as one"
        )


def _record_batches(
    file: SourceFile, start: int = 0, stop: int | None = None, first_row: int = 0, *, skip: bool
) -> Batches:
    """Yield record batches; with `skip`, an error in place of one whose header is intact but not its data."""
    with open_ipc(file) as (reader, stream):
        count = getattr(reader, "num_record_batches", None)
        if count is not None and stop is not None:
            count = min(count, stop)
        number, row = start, first_row
        heads: list[Message] | None = None  # read at the first damage
        while count is None or number < count:
            try:
                batch = reader.read_next_batch() if count is None else reader.get_batch(number)
            except StopIteration:
                if stream.read(1):
                    raise SourceError(
                        f"{file.path}: {_SEVERAL}; split it, or write it again as one"
                    ) from None
                return
            # MemoryError: a damaged length may ask for any amount
            except (pa.ArrowException, OSError, MemoryError) as error:
                why = f"{file.path}: record batch {number} cannot be read ({error}); fetch or write it again"
                if heads is None:
                    heads = _list_batches(file) if skip and count is not None else []
                if number >= len(heads):
                    raise SourceError(why) from error
                stop_row = row + heads[number].head.rows
                yield SourceError(f"{why}; rows {row} to {stop_row - 1} are lost")
                row = stop_row
            else:
                yield batch, row
                row += batch.num_rows
            number += 1
