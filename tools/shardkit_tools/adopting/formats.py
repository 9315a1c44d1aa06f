"""The files that a user names, and the formats whose files can be adopted."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shardkit.errors import NotFoundError, SourceError, UsageError
from shardkit.formats.schema import KEY_FIELD
from shardkit.stores.remote.addresses import split_url
from shardkit_tools.adopting.arrays import Archives, Arrays
from shardkit_tools.adopting.encoded_blocks import ArrowFiles
from shardkit_tools.adopting.files import BUILD_INSTEAD, AdoptableFiles
from shardkit_tools.adopting.folders import FolderFiles
from shardkit_tools.adopting.line_files import LineFiles
from shardkit_tools.adopting.located_rows import Documents, MdsFolder
from shardkit_tools.adopting.parquet_files import ParquetFiles
from shardkit_tools.adopting.tars import Tars
from shardkit_tools.importers.arrow_files import ArrowImporter
from shardkit_tools.importers.csv import CsvImporter
from shardkit_tools.importers.folder import FolderImporter, TextImporter
from shardkit_tools.importers.json_lines import JsonLinesImporter
from shardkit_tools.importers.mds import MdsImporter
from shardkit_tools.importers.numpy_archives import ArchiveImporter
from shardkit_tools.importers.numpy_arrays import NumpyImporter
from shardkit_tools.importers.protocol import FileImporter, ImportOptions, Source, SourceFile
from shardkit_tools.importers.source_files import file_suffix, is_url
from shardkit_tools.importers.source_kinds import choose_kind, list_source, open_listed
from shardkit_tools.importers.tables import ParquetImporter, TableImporter
from shardkit_tools.importers.tokens import TokenDocuments
from shardkit_tools.importers.webdataset import WebDatasetImporter

_ADOPTED: dict[type[FileImporter], Callable[[Any], AdoptableFiles]] = {
    WebDatasetImporter: Tars,
    NumpyImporter: Arrays.of,
    ArchiveImporter: Archives.of,
    TokenDocuments: Documents.of,
    MdsImporter: MdsFolder.of,
    FolderImporter: FolderFiles.of,
    TextImporter: FolderFiles.of,
    ParquetImporter: ParquetFiles.of,
    ArrowImporter: ArrowFiles.of,
    JsonLinesImporter: LineFiles.of,
    CsvImporter: LineFiles.of,
}

_OF_ONE_FOLDER = ("mds", "huggingface", "folder", "text")  # files of several folders may have equal names
_NOT_PACKED = ("webdataset", "npy", "tokens", "text", "jsonl", "csv")  # formats that importers decompress


_PACKED_NAMES = (".gz", ".tgz", ".zst", ".bz2", ".xz", ".lz4")


def find_files(given: Sequence[str | os.PathLike[str]], options: ImportOptions) -> Source:
    """Return all files that paths, folders, globs and URLs name, in this order.

    Raises:
        UsageError: A file is named twice.
        NotFoundError: There are no files.
    """
    listed = [_list_source(os.fspath(one), options) for one in given]
    seen: set[str] = set()
    for file in (file for one in listed for file in one.files):
        place = place_of(file)
        if place in seen:
            raise UsageError(f"{file.path}: named twice; name it once")
        seen.add(place)
    if not seen:
        raise NotFoundError("no files: name at least one")
    if len(listed) == 1:
        return listed[0]
    return Source(
        ", ".join(one.given for one in listed),
        tuple(file for one in listed for file in one.files),
        left_out={name: why for one in listed for name, why in one.left_out.items()},
        notes=[note for one in listed for note in one.notes],
    )


def _list_source(given: str, options: ImportOptions) -> Source:
    source = list_source(given, skip=options.skip_bad_rows, follow_links=options.follow_links)
    for file in source.files:
        if is_url(file.path):
            split_url(file.path)  # refuses credentials: the URL is recorded
    return source


def place_of(file: SourceFile) -> str:
    """Return the location that the root records: a URL, or a path without links."""
    return file.path if is_url(file.path) else os.path.realpath(file.path)


def place_of_folder(files: Sequence[SourceFile]) -> str:
    """Return the location that the root records for a group: the folder that the names of its files start at."""
    folders = {file.path.removesuffix(file.name) for file in files}
    if len(folders) > 1 or any(not file.path.endswith(file.name) for file in files):
        raise SourceError(
            f"{files[0].path}: files of several folders; adopt one folder at a time, "
            "then join the versions with shardkit merge"
        )
    (folder,) = folders
    return folder.rstrip("/") if is_url(folder) else os.path.realpath(folder or ".")


def refuse_packed(file: SourceFile) -> None:
    """Raise SourceError if a file is compressed as a whole, by its name: to open every file would take too long."""
    if file.name.lower().endswith(_PACKED_NAMES):
        raise SourceError(
            f"{file.path}: compressed, so samples cannot be read out of its middle; {BUILD_INSTEAD}"
        )


def open_files(source: Source, kind: str | None, options: ImportOptions) -> AdoptableFiles:
    """Return the files as one of `IMPORTERS`; `kind` None: by options and extensions."""
    if kind is None and {file_suffix(file.name) for file in source.files} == {"bin"}:
        kind = "tokens"
    source, kind = choose_kind(source, kind, options)
    if kind in _OF_ONE_FOLDER:
        place_of_folder(source.files)
    for file in source.files if kind in _NOT_PACKED else ():
        refuse_packed(file)
    # arrays are parts of one, and the first keys of many tars need not be compared
    importer = open_listed(source, kind, replace(options, arrays="rows", keys="source"))
    if isinstance(importer, TableImporter) and importer.has_keys:
        source.notes.append(
            f"the column {KEY_FIELD} is not used, because keys of adopted rows are numbers; a build takes it as keys"
        )
    return _ADOPTED[type(importer)](importer)
