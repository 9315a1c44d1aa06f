"""JSON lines: one object per line; the schema is inferred from the first rows and checked on the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardkit.errors import SourceError
from shardkit.formats import Schema
from shardkit_tools.importers.json_types import check_row, infer_types
from shardkit_tools.importers.line_ranges import LineTasks, cut_lines, read_lines
from shardkit_tools.importers.options import ImportOptions
from shardkit_tools.importers.protocol import SourceFailure, SourceFile, SourceSample, SourceTask
from shardkit_tools.importers.source_files import Source
from shardkit_tools.importers.strict_json import parse_json

__all__ = ["SCAN_ROWS", "JsonLinesImporter", "open_json_lines"]

# The schema is inferred from this many rows of the source, in source order: the same for any number of jobs.
SCAN_ROWS = 100_000
"""Rows of the source that the schema is inferred from."""


@dataclass(frozen=True)
class JsonLinesImporter:
    """Files of JSON lines as a source; made by `open_json_lines`."""

    source: Source
    schema: Schema
    types: Mapping[str, str]
    given: Mapping[str, str]
    lines: LineTasks
    classes: tuple[str, ...] = ()

    def files(self) -> Sequence[SourceFile]:
        """Every file."""
        return self.source.files

    def tasks(self) -> Sequence[SourceTask]:
        """Runs of lines."""
        return self.lines.tasks

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """One sample per line; a line that does not parse or fit costs its own sample only."""
        for file, number, line in self.lines.read(task):
            if not line.strip():
                continue
            where = f"{file.path} line {number + 1}"
            try:
                row = _object(line, where)
                check_row(row, self.types, self.given, where)
            except SourceError as error:
                yield SourceFailure(file.name, number, error)
                continue
            yield SourceSample(row, None, file.name, number)

    def describe(self) -> dict[str, object]:
        """Name and settings for the recipe."""
        return {"importer": "jsonl", "given": dict(self.given)}


def open_json_lines(source: Source, options: ImportOptions) -> JsonLinesImporter:
    """Infer the schema of files of JSON lines.

    Raises:
        SourceError: a line is not an object, rows differ in their fields, or a field's values have no common
        type.
    """
    source.keep(("jsonl", "ndjson", "json"), "a file of JSON lines")
    rows = itertools.islice(_rows(source, options.skip_bad_rows), SCAN_ROWS)
    types = infer_types(rows, options.field_types, skip=options.skip_bad_rows)
    if not types:
        raise SourceError(
            f"{source.given}: no fields found (no rows, or empty objects); give a file with samples in it"
        )
    schema = options.schema(types, source.given)
    return JsonLinesImporter(source, schema, types, dict(options.field_types), cut_lines(source.files))


def _rows(source: Source, skip: bool) -> Iterator[tuple[str, dict[str, object]]]:
    for file in source.files:
        for number, line in enumerate(read_lines(file), 1):
            if not line.strip():
                continue
            where = f"{file.path} line {number}"
            try:
                row = _object(line, where)
            except SourceError:
                if not skip:
                    raise
                continue
            yield where, row


def _object(line: bytes, where: str) -> dict[str, object]:
    value = parse_json(line, where)
    if not isinstance(value, dict):
        raise SourceError(
            f"{where}: holds a {type(value).__name__}, not an object; each line must be one JSON object"
        )
    return value
