"""Columns of hive partitions: values in the names of folders, such as ``lang=de/``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from shardkit_tools.importers.protocol import ImportOptions, Source

_HIVE = re.compile(r"(?:^|/)([^/=]+)=[^/]*(?=/)")  # name of a partition column, before its value


def hive_partitions(source: Source, options: ImportOptions) -> dict[str, dict[str, Any]]:
    """Return file → column → value of folders such as ``lang=de/``, as pyarrow reads them.

    Columns whose values are all integers are int64, unless the user gives a type; others are texts.
    """
    names = [file.name for file in source.files]
    columns = dict.fromkeys(name for path in names for name in _HIVE.findall(path))
    if not columns:
        return {}
    import pyarrow.dataset as pads  # imports pandas if it is installed

    layout = pads.HivePartitioning(pa.schema([(name, pa.string()) for name in columns]))
    found = [pads.get_partition_keys(layout.parse(path)) for path in names]
    partitions: dict[str, dict[str, Any]] = {path: {} for path in names}
    for name in columns:
        values = pa.array([one.get(name) for one in found], pa.string())
        if name not in options.field_types:
            with suppress(pa.ArrowInvalid):
                values = values.cast(pa.int64())
        for path, one, value in zip(names, found, values, strict=True):
            if one.get(name) is not None:
                partitions[path][name] = value
    return partitions


def with_partitions(
    source: Source, schemas: Sequence[Any], partitions: Mapping[str, Mapping[str, Any]]
) -> list[Any]:
    """Return schemas with the partition columns that the files do not have themselves."""
    return [
        pa.schema(
            [
                *schema,
                *(
                    pa.field(name, value.type)
                    for name, value in partitions.get(file.name, {}).items()
                    if name not in schema.names
                ),
            ],
            schema.metadata,
        )
        for file, schema in zip(source.files, schemas, strict=True)
    ]
