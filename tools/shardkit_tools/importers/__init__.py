"""Importers: each turns one kind of source into samples.

An importer divides its source into tasks, reads strictly, and names file and row in every error; it does not
know shards. Functions that open or read a source raise SourceError for its content, and UsageError for options that
do not go with it. Third-party packages are imported by the importer that needs them.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardkit.errors import UsageError
from shardkit.formats import FieldType
from shardkit_tools.importers.protocol import (
    Importer,
    ImportOptions,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
)
from shardkit_tools.importers.source_kinds import IMPORTERS, detect, open_source

__all__ = [
    "IMPORTERS",
    "ImportOptions",
    "Importer",
    "SourceFailure",
    "SourceFile",
    "SourceSample",
    "SourceTask",
    "detect",
    "open_source",
    "parse_field_types",
]


def parse_field_types(pairs: Iterable[str], option: str = "--schema") -> dict[str, str]:
    """Parse ``field=type`` texts from a command line.

    Raises:
        UsageError: A text does not have this form, or the type does not exist.
    """
    types = parse_pairs(pairs, option, "field=type, for example score=float64 or tokens=int32[*]")
    for text in types.values():
        FieldType.parse(text)
    return types


def parse_pairs(texts: Iterable[str], option: str, expected: str) -> dict[str, str]:
    """Split each text at its last equals sign and return a mapping.

    Raises:
        UsageError: A text has no equals sign or no value.
    """
    pairs = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        if not (equals and value):
            raise UsageError(f"{option} {text!r}: expected {expected}")
        pairs[name] = value
    return pairs
