"""Importers: each turns one kind of source into samples.

An importer divides its source into tasks, reads strictly, and names file and row in every error; it does not
know shards. Functions that open or read a source raise SourceError for its content, and UsageError for options that
do not go with it. Third-party packages are imported by the importer that needs them.
"""

from __future__ import annotations

from shardkit_tools.importers.protocol import (
    Importer,
    ImportOptions,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
    parse_field_types,
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
