"""Tables: Parquet, Arrow IPC files (``.arrow``, Feather 2) and streams, saved Hugging Face datasets.

Row groups and record batches are read one at a time. In a folder of `save_to_disk`, two JSON files list the
data files and the types of the columns.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from shardkit.errors import SourceError
from shardkit.formats.foreign_blocks import INT96_UNIT, column_leaves, parquet_file
from shardkit.formats.foreign_columns import is_media, plain_column
from shardkit.formats.schema import KEY_FIELD
from shardkit.formats.strict_json import parse_json
from shardkit_tools.importers.arrow_types import flat_batch, flat_schema, table_schema
from shardkit_tools.importers.arrow_values import batch_samples, conform_batch, null_columns
from shardkit_tools.importers.hive_partitions import hive_partitions, with_partitions
from shardkit_tools.importers.protocol import (
    DecodedStream,
    FileImporter,
    FileObserver,
    ImportOptions,
    SampleStream,
    Source,
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
    read_file,
)

_TASK_BYTES = 64 << 20
_BATCH_ROWS = 4096
_BATCH_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class TableImporter(FileImporter):
    """Base class of importers of tables."""

    partitions: Mapping[str, Mapping[str, Any]]  # file → hive partition column → pyarrow scalar
    has_keys: bool  # a file has a column of keys

    def decode(self, task: SourceTask, seen: FileObserver = ignore_file) -> DecodedStream:
        """Yield the record batches of the file, converted to the types of the schema."""
        for batch, first in self._raw(task):
            yield from conform_batch(batch, self.fields, self.schema, task.files[0], first)

    def _rows(self, task: SourceTask, seen: FileObserver) -> SampleStream:
        for batch, first in self._raw(task):
            yield from batch_samples(
                batch, self.fields, task.files[0], first, unchecked=self.options.unchecked
            )

    def _raw(self, task: SourceTask) -> Iterator[tuple[Any, int]]:
        """Yield (batch, number of its first row in the file)."""
        row = task.first_row
        for found in self._batches(task.files[0], task.start, task.stop):
            if found.num_rows:
                batch = flat_batch(found, self.options)
                for name, value in self.partitions.get(task.files[0].name, {}).items():
                    if name not in batch.schema.names:
                        batch = batch.append_column(name, pa.repeat(value, batch.num_rows))
                yield self._with_keys(batch, task.files[0]), row
            row += found.num_rows

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

    def _batches(self, file: SourceFile, start: int, stop: int | None) -> Iterator[Any]:
        """Yield the record batches of the pieces ``start`` to ``stop``, or to the end if `stop` is None."""
        raise NotImplementedError


def _make_tasks(
    files: Sequence[SourceFile], pieces: Sequence[Sequence[tuple[int, int]]]
) -> tuple[SourceTask, ...]:
    """Return tasks of pieces of about 64 MiB; a file with unknown pieces is one task."""
    tasks = []
    for file, sizes in zip(files, pieces, strict=True):
        start = first_row = rows = size = 0
        for number, (piece_rows, piece_bytes) in enumerate(sizes, 1):
            rows, size = rows + piece_rows, size + piece_bytes
            if size >= _TASK_BYTES or number == len(sizes):
                tasks.append(SourceTask(f"{file.name}:{start}", (file,), size, start, number, first_row))
                start, first_row, size = number, rows, 0
        if not sizes:
            tasks.append(SourceTask(file.name, (file,), file.size))
    return tuple(tasks)


@dataclass(frozen=True, kw_only=True)
class ParquetImporter(TableImporter):
    """Parquet files as a source."""

    name: ClassVar[str] = "parquet"
    wanted: tuple[str, ...] | None  # columns to read; None: all
    rows: tuple[int, ...]  # rows of each file

    def _batches(self, file: SourceFile, start: int, stop: int | None) -> Iterator[Any]:
        return _batches(file, range(start, stop or 0), self.wanted)


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
        cut=_make_tasks(source.files, groups),
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
        signed = int.from_bytes(stream.read(4), "little") - parquet.metadata.serialized_size
        # pyarrow ends the process if it meets an encrypted column without its key
        if signed == _SIGNATURE_BYTES:
            raise SourceError(f"{file.path}: columns of it are encrypted; write it again without encryption")
        return parquet.schema_arrow, parquet.metadata


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
            batches = _batches(file, range(footer.num_row_groups), sorted(unsure - found))
            found |= null_columns(flat_batch(batch, options) for batch in batches)
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


def _batches(file: SourceFile, groups: range, columns: Sequence[str] | None) -> Iterator[Any]:
    with open_file(file) as stream:
        yield from read_groups(stream, file, groups, columns)


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
        raise SourceError(
            f"{file.path}: row groups {groups.start} to {groups.stop - 1} cannot be read ({error}); fetch or "
            "write it again"
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


# of a footer in plain text whose columns are encrypted: Parquet modular encryption, section 5.5
_SIGNATURE_BYTES = 28
_BUFFER_BYTES, _URL_BUFFER_BYTES = 2**20, 2**23  # bytes of a column that are read ahead
_NANOS_END_MICROS = 2**63 // 1000 - 1
_MAGIC = b"ARROW1"
_SCAN_ROWS = 100_000  # rows whose nulls decide which fields are optional
_INFO, SAVED_STATE, _SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"


@dataclass(frozen=True, kw_only=True)
class ArrowImporter(TableImporter):
    """Arrow files as a source."""

    name: ClassVar[str] = "arrow"

    def _batches(self, file: SourceFile, start: int, stop: int | None) -> Iterator[Any]:
        return _record_batches(file, start, stop)


@dataclass(frozen=True, kw_only=True)
class SavedDataset(ArrowImporter):
    """A folder of `save_to_disk` as a source."""

    name: ClassVar[str] = "huggingface"


def open_arrow(source: Source, options: ImportOptions) -> ArrowImporter:
    """Read the schemas of Arrow files."""
    return _open_tables(ArrowImporter, source, options, None)


def _open_tables(
    kind: type[ArrowImporter], source: Source, options: ImportOptions, features: Mapping[str, Any] | None
) -> ArrowImporter:
    check_suffixes(source, ("arrow", "feather", "ipc"), "an Arrow file")
    source, schemas = open_each(source, options, _ipc_schema)
    pieces = [
        _sizes_of_batches(file, schema) if file.size > _TASK_BYTES else ()
        for file, schema in zip(source.files, schemas, strict=True)
    ]

    def nulls(_: Any, wanted: Collection[str]) -> set[str]:
        return null_columns(flat_batch(batch, options) for batch in _first_batches(source)).intersection(
            wanted
        )

    partitions = hive_partitions(source, options)
    whole = with_partitions(source, schemas, partitions)
    schema, classes = table_schema(source, options, whole, nulls, features)
    return kind(
        source=source,
        fields=schema,
        options=options,
        labels=classes,
        cut=_make_tasks(source.files, pieces),
        partitions=partitions,
        has_keys=any(KEY_FIELD in one.names for one in schemas),
    )


def _ipc_schema(file: SourceFile) -> Any:
    with open_ipc(file) as reader:
        return reader.schema


def open_huggingface(source: Source, options: ImportOptions) -> ArrowImporter:
    """Read the description and the schemas of a saved dataset.

    Raises:
        SourceError: A file is missing or invalid, or the folder holds several splits.
    """
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
    return _open_tables(SavedDataset, listed, options, features if isinstance(features, dict) else {})


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


def _first_batches(source: Source) -> Iterator[Any]:
    """Yield the batches that types are inferred from."""
    rows = size = 0
    for file in source.files:
        for batch in _record_batches(file):
            yield batch
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if rows >= _SCAN_ROWS or size >= _TASK_BYTES:
                return


def _sizes_of_batches(file: SourceFile, schema: Any) -> tuple[tuple[int, int], ...]:
    """Return (rows, even share of the bytes) of each record batch of a local file.

    Return nothing for a stream or a URL, which would have to be read completely.
    """
    if is_url(file.path) or not schema.names:
        return ()
    with open_ipc(file) as reader:
        if not hasattr(reader, "num_record_batches"):
            return ()
    widths = [kind.bit_width if pa.types.is_primitive(kind) else 10_000 for kind in schema.types]
    # a compressed batch is decompressed per column: read only the narrowest
    narrow = widths.index(min(widths))
    only = pa.ipc.IpcReadOptions(included_fields=[narrow])
    rows = [batch.num_rows for batch in _record_batches(file, options=only)]
    borders = [file.size * number // len(rows) for number in range(len(rows) + 1)] if rows else []
    return tuple(zip(rows, (stop - start for start, stop in pairwise(borders)), strict=True))


@contextmanager
def open_ipc(file: SourceFile, options: Any = None) -> Iterator[Any]:
    """Open a reader of an Arrow file or stream."""
    with open_file(file) as stream:
        head = stream.read(len(_MAGIC))
        is_file = head == _MAGIC
        stream.seek(0)
        if head.startswith(b"FEA1"):
            raise SourceError(
                f"{file.path}: Feather of version 1, which is not read; write it again with version 2"
            )
        try:
            reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(stream, options=options)
            _ = reader.schema.names  # decoded here: names may not be UTF-8
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise SourceError(
                f"{file.path}: not a readable Arrow file ({error}); fetch or write it again"
            ) from error
        with reader:
            yield reader


def _record_batches(
    file: SourceFile, start: int = 0, stop: int | None = None, options: Any = None
) -> Iterator[Any]:
    with open_ipc(file, options) as reader:
        count = getattr(reader, "num_record_batches", None)
        if count is not None and stop is not None:
            count = min(count, stop)
        number = start
        while count is None or number < count:
            try:
                batch = reader.read_next_batch() if count is None else reader.get_batch(number)
            except StopIteration:
                return
            # MemoryError: a damaged length may ask for any amount
            except (pa.ArrowException, OSError, MemoryError) as error:
                raise SourceError(
                    f"{file.path}: record batch {number} cannot be read ({error}); fetch or write it again"
                ) from error
            yield batch
            number += 1
