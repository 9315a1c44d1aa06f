"""Arrow IPC files (``.arrow``, Feather 2) and streams; record batches are read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from shardkit.errors import SourceError
from shardkit.formats import Schema
from shardkit_tools.importers.arrow_values import (
    SCAN_ROWS,
    batch_samples,
    check_same_fields,
    class_names,
    column_types,
    described_features,
    flat_batch,
    flat_schema,
    kept_columns,
    list_notes,
    null_columns,
)
from shardkit_tools.importers.protocol import (
    ImportOptions,
    SampleColumns,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
    one_by_one,
)
from shardkit_tools.importers.remote_files import is_url
from shardkit_tools.importers.source_files import Source, open_file

__all__ = ["ArrowImporter", "open_arrow", "open_ipc"]

_MAGIC = b"ARROW1"
_TASK_BYTES = 64 << 20


@dataclass(frozen=True)
class ArrowImporter:
    """Arrow files as a source; made by `open_arrow`."""

    source: Source
    schema: Schema
    options: ImportOptions
    batches: tuple[tuple[int, ...], ...] = ()
    """Of each file: rows of its record batches; empty where they are known only to who has read them."""
    classes: tuple[str, ...] = ()
    name: str = "arrow"
    """Of the importer, in the recipe."""

    def files(self) -> Sequence[SourceFile]:
        return self.source.files

    def tasks(self) -> Sequence[SourceTask]:
        """Runs of record batches of about 64 MiB, or one per file."""
        tasks = []
        for file, rows in zip(self.source.files, self.batches, strict=True):
            if not rows:
                tasks.append(SourceTask(file.name, (file,), file.size))
                continue
            step = max(1, _TASK_BYTES * len(rows) // max(1, file.size))
            for start in range(0, len(rows), step):
                stop = min(len(rows), start + step)
                size = file.size * stop // len(rows) - file.size * start // len(rows)
                name = file.name if step >= len(rows) else f"{file.name}:{start}"
                tasks.append(SourceTask(name, (file,), size, start, stop))
        return tasks

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """The rows of some record batches; a row with a null costs its own sample only."""
        return one_by_one(self.read_columns(task))

    def read_columns(self, task: SourceTask) -> Iterator[SampleColumns | SourceSample | SourceFailure]:
        """Whole record batches where no row has to be looked at by itself."""
        (file,) = task.files
        types = dict(self.schema)
        row = sum(self.batches[self.source.files.index(file)][: task.start])
        with open_ipc(file) as reader:
            for found in _record_batches(reader, file, task.start, task.stop):
                batch = flat_batch(found, self.options)
                yield from batch_samples(batch, types, file, row, unchecked=self.options.unchecked)
                row += batch.num_rows

    def describe(self) -> dict[str, object]:
        return {"importer": self.name, **({"flatten": True} if self.options.flatten else {})}


def open_arrow(source: Source, options: ImportOptions) -> ArrowImporter:
    """Read the schemas of Arrow files.

    Raises:
        SourceError: a file is damaged, or has other columns than the first.
    """
    source.keep(("arrow", "feather", "ipc"), "an Arrow file")
    first: Any = None
    batches, labels = [], []
    for file in source.files:
        with open_ipc(file) as reader:
            first = reader.schema if first is None else first
            labels.append(described_features(reader.schema).get("label"))
            check_same_fields(first, reader.schema, source.files[0].name, file.path)
        batches.append(_rows_of_batches(file, first) if file.size > _TASK_BYTES else ())
    first = flat_schema(first, options)
    types = column_types(
        kept_columns(first, options),
        options,
        source.files[0].path,
        null_columns(flat_batch(batch, options) for batch in _first_batches(source)),
    )
    source.notes.extend(list_notes(first, types, options))
    schema = options.schema(types, source.given, names=first.names)
    return ArrowImporter(source, schema, options, tuple(batches), class_names(labels, schema))


def _first_batches(source: Source) -> Iterator[Any]:
    """The batches that types are inferred from."""
    rows = size = 0
    for file in source.files:
        with open_ipc(file) as reader:
            for batch in _record_batches(reader, file, 0, None):
                yield batch
                rows, size = rows + batch.num_rows, size + batch.nbytes
                if rows >= SCAN_ROWS or size >= _TASK_BYTES:
                    return


def _rows_of_batches(file: SourceFile, schema: Any) -> tuple[int, ...]:
    """Rows of each record batch of a local file; nothing of a stream, nor of a URL: that would read all of it."""
    if is_url(file.path) or not schema.names:
        return ()
    widths = [kind.bit_width if pa.types.is_primitive(kind) else 10_000 for kind in schema.types]
    narrow = widths.index(min(widths))  # a compressed batch is unpacked for its columns: one, the cheapest
    with open_ipc(file, pa.ipc.IpcReadOptions(included_fields=[narrow])) as reader:
        if not hasattr(reader, "num_record_batches"):
            return ()
        return tuple(batch.num_rows for batch in _record_batches(reader, file, 0, None))


@contextmanager
def open_ipc(file: SourceFile, options: Any = None) -> Iterator[Any]:
    """A reader of an Arrow file or stream, whichever it is.

    Raises:
        SourceError: it is neither.
    """
    with open_file(file) as stream:
        is_file = stream.read(len(_MAGIC)) == _MAGIC
        stream.seek(0)
        try:
            reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(stream, options=options)
            _ = reader.schema.names  # they are decoded here: they may not be UTF-8
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise SourceError(
                f"{file.path}: not a readable Arrow file ({error}); fetch or write it again"
            ) from error
        with reader:
            yield reader


def _record_batches(reader: Any, file: SourceFile, start: int, stop: int | None) -> Iterator[Any]:
    count = getattr(reader, "num_record_batches", None)
    if count is not None and stop is not None:
        count = min(count, stop)
    number = start
    while count is None or number < count:
        try:
            batch = reader.read_next_batch() if count is None else reader.get_batch(number)
        except StopIteration:
            return
        except (pa.ArrowException, OSError, MemoryError) as error:  # a damaged length asks for any amount
            raise SourceError(
                f"{file.path}: record batch {number} cannot be read ({error}); fetch or write it again"
            ) from error
        yield batch
        number += 1
