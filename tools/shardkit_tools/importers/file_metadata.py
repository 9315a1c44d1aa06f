"""Metadata of files, as in the folders of Hugging Face: ``metadata.jsonl``, ``metadata.csv``, ``metadata.parquet``.

A row is joined to the file that its ``file_name`` names, relative to the folder of the metadata.
"""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from unicodedata import normalize

from shardkit.errors import SourceError
from shardkit_tools.importers.protocol import (
    FileImporter,
    ImportOptions,
    Source,
    SourceFailure,
    SourceFile,
    row_name,
)
from shardkit_tools.importers.source_files import file_suffix
from shardkit_tools.importers.source_kinds import open_as

_NAME = "file_name"


@dataclass(frozen=True, eq=False)
class FileMetadata:
    """The metadata of a folder."""

    importer: FileImporter  # reads the metadata files
    skip: bool  # leave out rows that cannot be read

    @property
    def files(self) -> Sequence[SourceFile]:
        return self.importer.files()

    @property
    def types(self) -> dict[str, str]:
        """Field → type text."""
        return {name: str(kind) for name, kind in self.importer.fields.items() if name != _NAME}

    def rows(self) -> Mapping[str, Mapping[str, object]]:
        """Return file name → its fields; read once per process."""
        return _rows(self)

    def join(
        self, names: Collection[str], others: Collection[str], notes: list[str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Join the rows to files.

        Args:
            names: names of the files.
            others: fields of the files that are not metadata.
            notes: gets remarks on files and rows without a partner.

        Returns:
            The types of the fields, optional if a file has no row; and file → its name in the metadata, if they
            differ in their form.
        """
        if "label" in others and "label" in self.types:
            raise SourceError(
                f"{self.files[0].path}: its field 'label' has the name of the classes; pass --no-classes to take it"
            )
        rows = self.rows()
        unknown = {_form(name): name for name in sorted(rows.keys() - names)}
        lacking = sorted(set(names) - rows.keys())
        row_names = {name: unknown.pop(form) for name in lacking if (form := _form(name)) in unknown}
        lacking = [name for name in lacking if name not in row_names]
        if rows and len(lacking) == len(names):
            raise SourceError(
                f"{self.files[0].path}: no row names a file of the source: it names {min(rows)}, and there is "
                f"{lacking[0]}; a file_name is relative to the folder of the metadata"
            )
        found = f"{', '.join(self.types)} are from {self.files[0].name}, joined by file_name"
        notes.append(f"{found}; {len(lacking):,} files have no row ({lacking[0]})" if lacking else found)
        if unknown:
            notes.append(
                f"{len(unknown):,} rows of metadata name files that are not there ({min(unknown.values())})"
            )
        optional = "?" * bool(lacking)
        types = {
            name: kind.removesuffix("?") + ("?" if kind.endswith("?") else optional)
            for name, kind in self.types.items()
        }
        return types, row_names


def _form(name: str) -> str:
    """Return a name as it is compared: macOS decomposes letters with accents, and Windows has backslashes."""
    return normalize("NFC", name.replace("\\", "/"))


def open_metadata(
    source: Source, files: Sequence[SourceFile], options: ImportOptions, others: Sequence[str]
) -> FileMetadata:
    """Open the metadata files of a source; `others` are its fields that are not metadata."""
    kinds = sorted({file_suffix(file.name) for file in files})
    if len(kinds) > 1:
        raise SourceError(
            f"{source.given}: metadata files of several kinds ({', '.join(kinds)}); remove all but one kind"
        )
    types = {name: kind for name, kind in options.field_types.items() if name not in others}
    inner = ImportOptions(field_types=types, skip_bad_rows=options.skip_bad_rows, encoding=options.encoding)
    importer = open_as(replace(source, files=tuple(files)), kinds[0], inner)
    if _NAME not in importer.fields:
        raise SourceError(
            f"{files[0].path}: no field {_NAME!r}, which names the file that a row describes; its fields are "
            f"{', '.join(importer.fields)}"
        )
    clash = next((name for name in importer.fields if name in others), None)
    if clash is not None:
        raise SourceError(
            f"{files[0].path}: its field {clash!r} has the name of a field of the files; give it another name"
        )
    return FileMetadata(importer, options.skip_bad_rows)


@functools.lru_cache(maxsize=1)
def _rows(metadata: FileMetadata) -> Mapping[str, Mapping[str, object]]:
    found: dict[str, Mapping[str, object]] = {}
    paths = {file.name: file.path for file in metadata.files}
    for task in metadata.importer.tasks():
        for row in metadata.importer.read(task):
            if isinstance(row, SourceFailure):
                if not metadata.skip:
                    raise row.error
                continue
            where = row_name(row, paths)
            given = row.sample.get(_NAME)
            if not isinstance(given, str) or not given:
                raise SourceError(f"{where}: no {_NAME}; name the file that the row describes")
            name = posixpath.normpath(posixpath.join(posixpath.dirname(row.source_name), given))
            if name in found:
                raise SourceError(f"{where}: {given!r} has a row before it; remove one of them")
            found[name] = {field: value for field, value in row.sample.items() if field != _NAME}
    return found
