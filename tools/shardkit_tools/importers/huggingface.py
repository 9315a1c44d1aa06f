"""A dataset that Hugging Face ``datasets`` saved with `save_to_disk`: Arrow streams and two JSON files about them.

`ClassLabel` of the column ``label`` gives the class names; `Image` and `Audio` columns give the bytes of the
file; `Array2D` and its like give fixed arrays.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

from shardkit.errors import SourceError
from shardkit_tools.importers.arrow import ArrowImporter, open_arrow
from shardkit_tools.importers.arrow_values import class_names, described_arrays
from shardkit_tools.importers.protocol import (
    ImportOptions,
    SourceFile,
)
from shardkit_tools.importers.source_files import Source, read_file
from shardkit_tools.importers.strict_json import parse_json

__all__ = ["open_huggingface"]

_INFO, _STATE, _SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"


def open_huggingface(source: Source, options: ImportOptions) -> ArrowImporter:
    """Read the description and the schemas of a saved dataset.

    Raises:
        SourceError: a file is missing or damaged, or the folder holds several splits.
    """
    by_name = {file.name: file for file in source.files}
    if _SPLITS in by_name:
        splits = _document(by_name[_SPLITS]).get("splits")
        shown = ", ".join(map(str, splits)) if isinstance(splits, list) else "several"
        raise SourceError(
            f"{source.given}: holds the splits {shown}; name one of them, such as "
            f"{os.path.join(source.given, 'train')}"
        )
    for name in (_INFO, _STATE):
        if name not in by_name:
            raise SourceError(f"{source.given}: {name} is missing; save the dataset again with save_to_disk")
    features = _document(by_name[_INFO]).get("features")
    features = features if isinstance(features, dict) else {}
    listed = Source(source.given, tuple(_data_files(_document(by_name[_STATE]), by_name, source)))
    given = {**described_arrays(features), **options.field_types}
    arrow = open_arrow(listed, dataclasses.replace(options, field_types=given))
    return dataclasses.replace(
        arrow, classes=class_names([features.get("label")], arrow.schema), name="huggingface"
    )


def _document(file: SourceFile) -> dict[str, Any]:
    value = parse_json(read_file(file), file.path)
    if not isinstance(value, dict):
        raise SourceError(
            f"{file.path}: holds a {type(value).__name__}, not an object; save the dataset again"
        )
    return value


def _data_files(
    state: Mapping[str, Any], by_name: Mapping[str, SourceFile], source: Source
) -> Iterator[SourceFile]:
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not listed:
        raise SourceError(
            f"{source.given}: {_STATE} lists no data files; save the dataset again with save_to_disk"
        )
    for entry in listed:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in by_name:
            raise SourceError(
                f"{source.given}: the data file {name!r} of {_STATE} is missing; fetch the folder again"
            )
        yield by_name[name]
