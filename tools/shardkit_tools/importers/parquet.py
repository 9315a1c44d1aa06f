"""Parquet files: row groups are read one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.errors import SourceError
from shardkit_tools.importers.arrow_types import KEY, flat_batch, flat_schema, is_media, table_schema
from shardkit_tools.importers.arrow_values import TASK_BYTES, TableImporter, null_columns
from shardkit_tools.importers.options import ImportOptions
from shardkit_tools.importers.protocol import Source, SourceFile, SourceTask
from shardkit_tools.importers.source_files import check_suffixes, open_file

_TASK_BYTES = TASK_BYTES
_BATCH_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class ParquetImporter(TableImporter):
    """Parquet files as a source."""

    name: ClassVar[str] = "parquet"
    groups: tuple[tuple[tuple[int, int], ...], ...]  # of each file: (rows, bytes) of its row groups
    wanted: tuple[str, ...] | None  # columns that are read; None: all

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

    def _batches(self, file: SourceFile, task: SourceTask) -> tuple[int, Iterator[Any]]:
        groups = self.groups[self.source.files.index(file)]
        row = [0, *accumulate(rows for rows, _ in groups)][task.start]
        return row, _batches(file, range(task.start, task.stop or 0), self.wanted)


def open_parquet(source: Source, options: ImportOptions) -> ParquetImporter:
    """Read the footers of Parquet files.

    Raises:
        SourceError: a file is damaged, or has other columns than the first.
    """
    check_suffixes(source, ("parquet", "pq"), "a Parquet file")
    footers = []
    for file in source.files:
        with open_file(file) as stream:
            parquet = _open(stream, file)
            footers.append((parquet.schema_arrow, parquet.metadata))

    def nulls(schema: Any, wanted: Collection[str]) -> set[str]:
        return _null_columns(source, footers, schema, wanted, options)

    schema, classes = table_schema(source, options, [one for one, _ in footers], nulls)
    names = flat_schema(footers[0][0], options).names
    wanted = tuple(name for name in names if name in schema or name == KEY)
    return ParquetImporter(
        source=source,
        fields=schema,
        options=options,
        labels=classes,
        groups=tuple(
            tuple(
                (group.num_rows, group.total_byte_size)
                for group in map(one.row_group, range(one.num_row_groups))
            )
            for _, one in footers
        ),
        wanted=wanted if len(wanted) < len(names) else None,
    )


def _null_columns(
    source: Source,
    footers: Sequence[tuple[Any, Any]],
    schema: Any,
    wanted: Collection[str],
    options: ImportOptions,
) -> set[str]:
    """Those of some columns that hold nulls: the footers say it, and where they do not tell, the columns."""
    found: set[str] = set()
    fields = {field.name: field for field in schema}
    for file, (whole, footer) in zip(source.files, footers, strict=True):
        unsure = set()
        # a name may hold dots, as the path of a leaf does
        owners = [field.name for field in flat_schema(whole, options) for _ in range(_leaves(field.type))]
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
                    unsure.add(name)  # inside of lists and structs the nulls are counted together
        if unsure - found:
            batches = _batches(file, range(footer.num_row_groups), sorted(unsure - found))
            found |= null_columns(flat_batch(batch, options) for batch in batches)
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


def _batches(file: SourceFile, groups: range, columns: Sequence[str] | None) -> Iterator[Any]:
    with open_file(file) as stream:
        parquet = _open(stream, file)
        only = None if columns is None else list(columns)
        try:
            yield from parquet.iter_batches(_BATCH_ROWS, list(groups), only, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(
                f"{file.path}: row groups {groups.start} to {groups.stop - 1} cannot be read ({error}); fetch or "
                "write it again"
            ) from error
