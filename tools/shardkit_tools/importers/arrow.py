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
from shardkit_tools.importers.arrow_values import as_sample, batch_rows, check_same_fields, column_types
from shardkit_tools.importers.options import ImportOptions
from shardkit_tools.importers.protocol import SourceFailure, SourceFile, SourceSample, SourceTask
from shardkit_tools.importers.source_files import Source, open_file

__all__ = ["ArrowImporter", "open_arrow", "open_ipc"]

_MAGIC = b"ARROW1"


@dataclass(frozen=True)
class ArrowImporter:
    """Arrow files as a source; made by `open_arrow`."""

    source: Source
    schema: Schema
    classes: tuple[str, ...] = ()

    def files(self) -> Sequence[SourceFile]:
        """Every file."""
        return self.source.files

    def tasks(self) -> Sequence[SourceTask]:
        """One per file: the rows before a record batch are known only to who has read the batches before it."""
        return [SourceTask(file.name, (file,), file.size) for file in self.source.files]

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """The rows of one file; a row with a null costs its own sample only."""
        (file,) = task.files
        types = dict(self.schema)
        row = 0
        with open_ipc(file) as reader:
            for batch in _record_batches(reader, file):
                for found in batch_rows(batch, types, file.path, row):
                    yield as_sample(found, file, row)
                    row += 1

    def describe(self) -> dict[str, object]:
        """Name and settings for the recipe."""
        return {"importer": "arrow"}


def open_arrow(source: Source, options: ImportOptions) -> ArrowImporter:
    """Read the schemas of Arrow files.

    Raises:
        SourceError: a file is damaged, or has other columns than the first.
    """
    source.keep(("arrow", "feather", "ipc"), "an Arrow file")
    first: Any = None
    for file in source.files:
        with open_ipc(file) as reader:
            first = reader.schema if first is None else first
            check_same_fields(first, reader.schema, source.files[0].name, file.path)
    types = column_types(first, options.field_types, source.files[0].path)
    return ArrowImporter(source, options.schema(types, source.given))


@contextmanager
def open_ipc(file: SourceFile) -> Iterator[Any]:
    """A reader of an Arrow file or stream, whichever it is.

    Raises:
        SourceError: it is neither.
    """
    with open_file(file) as stream:
        is_file = stream.read(len(_MAGIC)) == _MAGIC
        stream.seek(0)
        try:
            reader = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
            _ = reader.schema.names  # they are decoded here: they may not be UTF-8
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise SourceError(
                f"{file.path}: not a readable Arrow file ({error}); fetch or write it again"
            ) from error
        with reader:
            yield reader


def _record_batches(reader: Any, file: SourceFile) -> Iterator[Any]:
    count = getattr(reader, "num_record_batches", None)
    number = 0
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
