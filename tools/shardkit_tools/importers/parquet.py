"""Parquet files: row groups are read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.errors import SourceError
from shardkit.formats import Schema
from shardkit_tools.importers.arrow_values import (
    KEY,
    batch_samples,
    check_same_fields,
    class_names,
    column_types,
    described_features,
    flat_batch,
    flat_schema,
    is_media,
    kept_columns,
    list_notes,
    null_columns,
)
from shardkit_tools.importers.protocol import (
    MIXED,
    ImportOptions,
    SampleColumns,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
    one_by_one,
)
from shardkit_tools.importers.source_files import Source, open_file

__all__ = ["ParquetImporter", "open_parquet"]

_TASK_BYTES = 64 << 20
_BATCH_ROWS = 4096


@dataclass(frozen=True)
class ParquetImporter:
    """Parquet files as a source; made by `open_parquet`."""

    source: Source
    schema: Schema
    groups: tuple[tuple[tuple[int, int], ...], ...]  # of each file: (rows, bytes) of its row groups
    options: ImportOptions
    classes: tuple[str, ...] = ()

    def files(self) -> Sequence[SourceFile]:
        return self.source.files

    def tasks(self) -> Sequence[SourceTask]:
        """Runs of row groups of about 64 MiB."""
        tasks = []
        for file, groups in zip(self.source.files, self.groups, strict=True):
            start = size = 0
            for number, (_, group_bytes) in enumerate(groups, 1):
                size += group_bytes
                if size >= _TASK_BYTES or number == len(groups):
                    tasks.append(SourceTask(f"{file.name}:{start}", (file,), size, start, number))
                    start, size = number, 0
            if not groups:
                tasks.append(SourceTask(file.name, (file,), file.size, 0, 0))
        return tasks

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """The rows of some row groups; a row with a null costs its own sample only."""
        return one_by_one(self.read_columns(task))

    def read_columns(self, task: SourceTask) -> Iterator[SampleColumns | SourceSample | SourceFailure]:
        """Whole record batches where no row has to be looked at by itself."""
        (file,) = task.files
        types = dict(self.schema)
        with open_file(file) as stream:
            parquet = _open(stream, file)
            sizes = [parquet.metadata.row_group(n).num_rows for n in range(parquet.num_row_groups)]
            firsts = [0, *accumulate(sizes)]
            row = firsts[task.start]
            names = flat_schema(parquet.schema_arrow, self.options).names
            left_out = set(names) - {*types, KEY}
            wanted = [name for name in names if name not in left_out] if left_out else None
            for batch in _batches(parquet, range(task.start, task.stop or 0), file, self.options, wanted):
                yield from batch_samples(batch, types, file, row, unchecked=self.options.unchecked)
                row += batch.num_rows

    def describe(self) -> dict[str, object]:
        return {"importer": "parquet", **({"flatten": True} if self.options.flatten else {})}


def open_parquet(source: Source, options: ImportOptions) -> ParquetImporter:
    """Read the footers of Parquet files.

    Raises:
        SourceError: a file is damaged, or has other columns than the first.
    """
    source.keep(("parquet", "pq"), "a Parquet file")
    first: Any = None
    groups, labels = [], []
    for file in source.files:
        with open_file(file) as stream:
            parquet = _open(stream, file)
            if first is None:
                first = parquet.schema_arrow
            check_same_fields(first, parquet.schema_arrow, source.files[0].name, file.path)
            labels.append(described_features(parquet.schema_arrow).get("label"))
            found = (parquet.metadata.row_group(number) for number in range(parquet.num_row_groups))
            groups.append(tuple((group.num_rows, group.total_byte_size) for group in found))
    first = flat_schema(first, options)
    names, first = first.names, kept_columns(first, options)
    types = column_types(first, options, source.files[0].path)
    source.notes.extend(list_notes(first, types, options))
    inferred = {
        name
        for name, kind in types.items()
        if name not in options.field_types and kind not in ("json", MIXED)
    }
    types |= {name: f"{types[name]}?" for name in _null_columns(source, first, inferred, options)}
    schema = options.schema(types, source.given, names=names)
    return ParquetImporter(source, schema, tuple(groups), options, class_names(labels, schema))


def _null_columns(source: Source, schema: Any, wanted: set[str], options: ImportOptions) -> set[str]:
    """Those of some columns that hold nulls: the footers say it, and where they do not tell, the columns."""
    found: set[str] = set()
    fields = {field.name: field for field in schema}
    for file in source.files:
        with open_file(file) as stream:
            parquet = _open(stream, file)
            unsure = set()
            owners = [
                field.name
                for field in flat_schema(parquet.schema_arrow, options)
                for _ in range(_leaves(field.type))
            ]
            for group in range(parquet.num_row_groups):
                row_group = parquet.metadata.row_group(group)
                for place, name in enumerate(owners):  # a name may hold dots, as the path of a leaf does
                    if name not in wanted:
                        continue
                    column = row_group.column(place)
                    inner = column.path_in_schema[len(name) + 1 :]
                    counted = column.statistics if column.is_stats_set else None
                    nulls = counted.null_count if counted is not None and counted.has_null_count else None
                    is_file = is_media(fields[name].type)
                    if is_file and inner == "path":
                        continue
                    if nulls and (is_file or not inner):
                        found.add(name)
                    elif nulls != 0 and fields[name].nullable:
                        unsure.add(
                            name
                        )  # of what is inside of lists and structs the nulls are counted together
            if unsure - found:
                found |= null_columns(
                    _batches(parquet, range(parquet.num_row_groups), file, options, sorted(unsure - found))
                )
    return found


def _leaves(kind: Any) -> int:
    """Columns of Parquet that a column of Arrow is kept in."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    return sum(_leaves(kind.field(n).type) for n in range(kind.num_fields)) if pa.types.is_nested(kind) else 1


def _open(stream: Any, file: SourceFile) -> Any:
    try:
        parquet = pq.ParquetFile(stream)
        _ = parquet.schema_arrow.names  # they are decoded here: they may not be UTF-8
        return parquet
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"{file.path}: not a readable Parquet file ({error}); fetch or write it again"
        ) from error


def _batches(
    parquet: Any, groups: range, file: SourceFile, options: ImportOptions, columns: list[str] | None = None
) -> Iterator[Any]:
    try:
        for batch in parquet.iter_batches(
            _BATCH_ROWS, row_groups=list(groups), columns=columns, use_threads=False
        ):
            yield flat_batch(batch, options)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{file.path}: row groups {groups.start} to {groups.stop - 1} cannot be read ({error}); fetch or "
            "write it again"
        ) from error
