"""Importers: each turns one kind of source into samples.

An importer divides its source into tasks, reads strictly, and names file and row in every error; it does not
know shards. Third-party packages are imported by the importer that needs them.
"""

from __future__ import annotations

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
]
