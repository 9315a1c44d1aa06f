"""Tables: their batches as rows of the schema, and Parquet files, whose row groups are read one at a time."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from shardkit.errors import SourceError
from shardkit.formats.foreign_blocks import INT96_UNIT, PARQUET_MAGIC, chunk_span, column_leaves, parquet_file
from shardkit.formats.foreign_columns import is_media, plain_column
from shardkit.formats.schema import KEY_FIELD
from shardkit_tools.importers.protocol import (
    DecodedStream,
    FileImporter,
    FileObserver,
    ImportOptions,
    SampleStream,
    Source,
    SourceFailure,
    SourceFile,
    SourceTask,
    ignore_file,
)
from shardkit_tools.importers.source_files import (
    check_suffixes,
    file_stem,
    is_url,
    open_each,
    open_file,
)
from shardkit_tools.importers.table_columns import (
    batch_samples,
    conform_batch,
    flat_batch,
    flat_schema,
    hive_partitions,
    null_columns,
    table_schema,
    with_partitions,
)

TASK_BYTES = 64 << 20
"""Bytes of a task."""
_BATCH_ROWS = 4096
_BATCH_BYTES = 16 << 20
Batches: TypeAlias = Iterator[tuple[Any, int] | SourceError]
"""(record batch, number of its first row in the file), or why rows are lost though later ones can be read."""


@dataclass(frozen=True, kw_only=True)
class TableImporter(FileImporter):
    """Base class of importers of tables."""

    partitions: Mapping[str, Mapping[str, Any]]  # file → hive partition column → pyarrow scalar
    has_keys: bool  # a file has a column of keys

    def decode(self, task: SourceTask, seen: FileObserver = ignore_file) -> DecodedStream:
        """Yield the record batches of the file, converted to the types of the schema."""
        for found in self._raw(task):
            if isinstance(found, SourceFailure):
                yield found
                continue
            try:
                yield from conform_batch(found[0], self.fields, self.schema, task.files[0], found[1])
            except SourceError as error:  # damage that only a check of the values finds
                if not self.options.skip_bad_rows:
                    raise
                yield SourceFailure(task.files[0].name, -1, error)

    def _rows(self, task: SourceTask) -> SampleStream:
        for found in self._raw(task):
            if isinstance(found, SourceFailure):
                yield found
                continue
            yield from batch_samples(
                found[0], self.fields, task.files[0], found[1], unchecked=self.options.unchecked
            )

    def _raw(self, task: SourceTask) -> Iterator[tuple[Any, int] | SourceFailure]:
        """Yield (batch, number of its first row in the file) and failures."""
        file = task.files[0]
        for found in self._batches(task):
            if isinstance(found, SourceError):
                yield SourceFailure(file.name, -1, found)
            elif found[0].num_rows:
                batch = flat_batch(found[0], self.options)
                for name, value in self.partitions.get(file.name, {}).items():
                    if name not in batch.schema.names:
                        batch = batch.append_column(name, pa.repeat(value, batch.num_rows))
                yield self._with_keys(batch, file), found[1]

    def _with_keys(self, batch: Any, file: SourceFile) -> Any:
        """Return a batch whose column of keys, if it has one, is as `ImportOptions.keys` says."""
        place = batch.schema.get_field_index(KEY_FIELD)
        if place < 0 or self.options.keys in ("", "source"):
            return batch
        if self.options.keys == "none":
            return batch.remove_column(place)
        keys = plain_column(batch.column(place)).cast(pa.string())
        return batch.set_column(
            place, KEY_FIELD, pc.binary_join_element_wise(file_stem(file.name), keys, "/")
        )

    def _settings(self) -> dict[str, object]:
        keys = self.options.keys
        return {**super()._settings(), **({} if keys in ("", "source") else {"keys": keys})}

    def _batches(self, task: SourceTask) -> Batches:
        """Yield the record batches of a task."""
        raise NotImplementedError


def make_tasks(
    files: Sequence[SourceFile], pieces: Sequence[Sequence[tuple[int, int]]]
) -> tuple[SourceTask, ...]:
    """Return tasks of pieces of about 64 MiB; a file with unknown pieces is one task."""
    tasks = []
    for file, sizes in zip(files, pieces, strict=True):
        start = first_row = rows = size = 0
        for number, (piece_rows, piece_bytes) in enumerate(sizes, 1):
            rows, size = rows + piece_rows, size + piece_bytes
            if size >= TASK_BYTES or number == len(sizes):
                tasks.append(SourceTask(f"{file.name}:{start}", (file,), size, start, number, first_row))
                start, first_row, size = number, rows, 0
        if not sizes:
            tasks.append(SourceTask(file.name, (file,), file.size))
    return tuple(tasks)


@dataclass(frozen=True, kw_only=True)
class ParquetImporter(TableImporter):
    """Parquet files as a source."""

    name: str = "parquet"
    wanted: tuple[str, ...] | None  # columns to read; None: all
    rows: tuple[int, ...]  # rows of each file

    def _batches(self, task: SourceTask) -> Batches:
        groups, skip = range(task.start, task.stop or 0), self.options.skip_bad_rows
        return _row_groups(task.files[0], groups, self.wanted, task.first_row, skip=skip)


def open_parquet(source: Source, options: ImportOptions) -> ParquetImporter:
    """Read the footers of Parquet files."""
    check_suffixes(source, ("parquet", "pq"), "a Parquet file")
    source, footers = open_each(source, options, _footer)

    def nulls(schema: Any, wanted: Collection[str]) -> set[str]:
        return _null_columns(source, footers, wanted, options)

    partitions = hive_partitions(source, options)
    schemas = with_partitions(source, [one for one, _ in footers], partitions)
    schema, classes = table_schema(source, options, schemas, nulls)
    names = {name: None for one in schemas for name in flat_schema(one, options).names}
    wanted = tuple(name for name in names if name in schema or name == KEY_FIELD)
    groups = [
        [(one.num_rows, one.total_byte_size) for one in map(footer.row_group, range(footer.num_row_groups))]
        for _, footer in footers
    ]
    return ParquetImporter(
        source=source,
        fields=schema,
        options=options,
        labels=classes,
        cut=make_tasks(source.files, groups),
        partitions=partitions,
        has_keys=KEY_FIELD in names,
        wanted=wanted if len(wanted) < len(names) else None,
        rows=tuple(footer.num_rows for _, footer in footers),
    )


def _footer(file: SourceFile) -> tuple[Any, Any]:
    """Return the schema and the metadata of a Parquet file."""
    with open_file(file) as stream:
        parquet = _open(stream, file)
        stream.seek(-8, os.SEEK_END)
        size = int.from_bytes(stream.read(4), "little")
        signed = size - parquet.metadata.serialized_size
        # pyarrow ends the process if it meets an encrypted column without its key
        if signed == _SIGNATURE_BYTES:
            raise SourceError(f"{file.path}: columns of it are encrypted; write it again without encryption")
        stop = max((chunk_span(chunk)[1] for chunk in _chunks(parquet.metadata)), default=len(PARQUET_MAGIC))
        stream.seek(stop)
        if 2 * PARQUET_MAGIC in stream.read(max(0, min(_SEARCHED_BYTES, file.size - size - 8 - stop))):
            raise SourceError(
                f"{file.path}: several Parquet files in one, of which readers see the last footer only; split it"
            )
        return parquet.schema_arrow, parquet.metadata


def _chunks(footer: Any) -> Iterator[Any]:
    for group in map(footer.row_group, range(footer.num_row_groups)):
        yield from map(group.column, range(group.num_columns))


def _null_columns(
    source: Source,
    footers: Sequence[tuple[Any, Any]],
    wanted: Collection[str],
    options: ImportOptions,
) -> set[str]:
    """Return the wanted columns that hold nulls, from the footers or, if these do not say, from the data."""
    found: set[str] = set()
    for file, (whole, footer) in zip(source.files, footers, strict=True):
        unsure = set()
        # a name may hold dots, like the path of a leaf column
        fields = {field.name: field for field in flat_schema(whole, options)}
        owners = column_leaves(fields.values())
        for group in map(footer.row_group, range(footer.num_row_groups)):
            for place, name in enumerate(owners):
                if name not in wanted:
                    continue
                column = group.column(place)
                inner = column.path_in_schema[len(name) + 1 :]
                is_file = is_media(fields[name].type)
                if is_file and inner == "path":
                    continue
                counted = column.statistics if column.is_stats_set else None
                nulls = counted.null_count if counted is not None and counted.has_null_count else None
                if nulls and (is_file or not inner):
                    found.add(name)
                elif nulls != 0 and fields[name].nullable:
                    unsure.add(name)  # nulls inside lists and structs are counted together
        if unsure - found:
            groups, skip = range(footer.num_row_groups), options.skip_bad_rows
            batches = _row_groups(file, groups, sorted(unsure - found), skip=skip)
            found |= null_columns(
                flat_batch(one[0], options) for one in batches if not isinstance(one, SourceError)
            )
    return found


def _open(stream: Any, file: SourceFile, unit: str = INT96_UNIT, footer: Any = None) -> Any:
    try:
        buffer_bytes = _URL_BUFFER_BYTES if is_url(file.path) else _BUFFER_BYTES
        parquet = parquet_file(stream, footer=footer, unit=unit, buffer_bytes=buffer_bytes)
        _ = parquet.schema_arrow.names  # decoded here: names may not be UTF-8
        return parquet
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"{file.path}: not a readable Parquet file ({error}); fetch or write it again"
        ) from error


def _row_groups(
    file: SourceFile, groups: range, columns: Sequence[str] | None, first_row: int = 0, *, skip: bool
) -> Batches:
    """Yield (batch, number of its first row); with `skip`, a row group that cannot be read is an error between them."""
    with open_file(file) as stream:
        footer = _open(stream, file).metadata
        row = first_row
        for own in [groups[n : n + 1] for n in range(len(groups))] if skip else [groups]:
            stop = row + sum(footer.row_group(number).num_rows for number in own)
            try:
                for batch in read_groups(stream, file, own, columns, footer):
                    yield batch, row
                    row += batch.num_rows
            except SourceError as error:
                if not skip:
                    raise
                yield SourceError(f"{error}; rows {row} to {stop - 1} are lost")
            row = stop


def read_groups(
    stream: Any,
    file: SourceFile,
    groups: range,
    columns: Sequence[str] | None,
    footer: Any = None,
    most_rows: int | None = None,
) -> Iterator[Any]:
    """Yield the rows of row groups in batches of about 16 MiB; memory does not depend on the size of a group.

    Args:
        stream: the open file, or the parts of it that are needed.
        file: the file, for messages.
        groups: numbers of the row groups.
        columns: columns to read; None: all.
        footer: the metadata of the file; None: read from `stream`.
        most_rows: maximum number of rows of a batch.
    """
    parquet = _open(stream, file, footer=footer)
    only = None if columns is None else list(columns)
    if only is not None and not any(_is_column(path, only) for path in _paths(parquet)):
        only = _paths(parquet)[:1]  # pyarrow would yield no rows for no column
    rows = min(_rows_of_batches(parquet.metadata, groups), most_rows or _BATCH_ROWS)
    try:
        exact = _int96_columns(parquet, only)
        fine = None
        if exact:
            fine = _open(stream, file, "ns", footer).iter_batches(rows, list(groups), exact)
        for batch in parquet.iter_batches(rows, list(groups), only, use_threads=False):
            if fine is not None:
                _check_int96(batch, next(fine), file)
            yield batch
    except (pa.ArrowException, OSError) as error:
        advice = "fetch or write it again"
        if "lists to be of size" in str(error):
            advice += "; if it has missing arrays of a fixed size, pyarrow 26 and later read them"
        raise SourceError(
            f"{file.path}: row groups {groups.start} to {groups.stop - 1} cannot be read ({error}); {advice}"
        ) from error


def _paths(parquet: Any) -> list[str]:
    return [parquet.schema.column(place).path for place in range(len(parquet.schema))]


def _is_column(path: str, names: Iterable[str]) -> bool:
    """Return True if a leaf column belongs to one of the columns."""
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _rows_of_batches(footer: Any, groups: range) -> int:
    """Return the number of rows of about `_BATCH_BYTES`, at least 1."""
    found = [footer.row_group(number) for number in groups]
    size = int(
        sum(group.total_byte_size for group in found) // max(1, sum(group.num_rows for group in found))
    )
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, size)))


def _int96_columns(parquet: Any, only: Sequence[str] | None) -> list[str]:
    leaves = [parquet.schema.column(place) for place in range(len(parquet.schema))]
    names = [leaf.name for leaf in leaves if leaf.physical_type == "INT96" and leaf.path == leaf.name]
    return [name for name in names if only is None or name in only]


def _check_int96(batch: Any, fine: Any, file: SourceFile) -> None:
    """Refuse INT96 times that microseconds would truncate; both batches hold the same rows."""
    for name in fine.schema.names:
        coarse, exact = (one.column(name).cast(pa.int64()) for one in (batch, fine))
        micros, nanos = (one.fill_null(0).to_numpy(zero_copy_only=False) for one in (coarse, exact))
        held = np.abs(micros) < _NANOS_END_MICROS  # outside, nanoseconds have wrapped around
        if bool((nanos[held] % 1000 != 0).any()):
            raise SourceError(
                f"{file.path}: column {name!r} has INT96 times with nanoseconds, and INT96 is read as microseconds; "
                "write the file again with timestamp[ns], or leave the column out: --drop"
            )


_SEARCHED_BYTES = 1 << 20  # after the data, where the first of several files has its footer
# of a footer in plain text whose columns are encrypted: Parquet modular encryption, section 5.5
_SIGNATURE_BYTES = 28
_BUFFER_BYTES, _URL_BUFFER_BYTES = 2**20, 2**23  # bytes of a column that are read ahead
_NANOS_END_MICROS = 2**63 // 1000 - 1
