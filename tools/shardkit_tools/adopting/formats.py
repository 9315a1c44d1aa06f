"""Formats whose files can be adopted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

from shardkit.errors import UsageError
from shardkit.formats import Schema
from shardkit.formats.schema import KEY_FIELD
from shardkit_tools.adopting.archives import Archives
from shardkit_tools.adopting.arrays import Arrays
from shardkit_tools.adopting.arrow_files import ArrowFiles
from shardkit_tools.adopting.documents import Documents
from shardkit_tools.adopting.files import AdoptTask, Report, ScannedFile, place_of_folder, refuse_packed
from shardkit_tools.adopting.folders import FolderFiles
from shardkit_tools.adopting.line_files import LineFiles
from shardkit_tools.adopting.mds_shards import MdsFolder
from shardkit_tools.adopting.parquet_files import ParquetFiles
from shardkit_tools.adopting.tar_scan import TarScan
from shardkit_tools.importers.csv import CsvImporter
from shardkit_tools.importers.folder import FolderImporter, TextImporter, split_notes
from shardkit_tools.importers.json_lines import JsonLinesImporter
from shardkit_tools.importers.mds import MdsImporter
from shardkit_tools.importers.numpy_archives import ArchiveImporter
from shardkit_tools.importers.numpy_arrays import NumpyImporter
from shardkit_tools.importers.protocol import FileImporter, ImportOptions, Source, SourceFile
from shardkit_tools.importers.source_files import file_suffix
from shardkit_tools.importers.source_kinds import check_kind, detect, open_listed, stray_notes, without_strays
from shardkit_tools.importers.tables import ArrowImporter, ParquetImporter, SavedDataset, TableImporter
from shardkit_tools.importers.token_documents import TokenDocuments
from shardkit_tools.importers.tokens import TokensImporter
from shardkit_tools.importers.webdataset import WebDatasetImporter


class AdoptableFiles(Protocol):
    """Files of one format; pickled to the processes of an adoption."""

    @property
    def shard_format(self) -> str:
        """Format of the shards that the files become: how `shardkit.formats` reads them."""

    @property
    def schema(self) -> Schema:
        """Fields of every sample."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the values of the field `label`; empty if the source has none."""

    @property
    def has_strata(self) -> bool:
        """Whether samples can be stratified by a field."""

    @property
    def key_note(self) -> str:
        """Note for users on the keys of the samples."""

    def tasks(self) -> list[AdoptTask]:
        """Return a task per file, in order."""

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a file once, check that every row can be read where it is, and return its index.

        Args:
            task: one of `tasks`.
            axes: fields to stratify by.
            block_bytes: target size of a block.
            report: called with (rows, bytes) read.

        Raises:
            SourceError: The file cannot be adopted, or changes meanwhile.
        """


@dataclass(frozen=True)
class Tars:
    """WebDataset tars."""

    shard_format: ClassVar[str] = "tar"
    classes: ClassVar[tuple[str, ...]] = ()
    has_strata: ClassVar[bool] = True
    key_note: ClassVar[str] = (
        "keys are unique inside a tar only, and JSON and media stay byte for byte as they are"
    )
    schema: Schema
    files: tuple[SourceFile, ...]
    notes: tuple[str, ...]
    skip: bool  # samples that cannot be read are left out

    @classmethod
    def of(cls, importer: WebDatasetImporter) -> Self:
        """Return the tars of an importer."""
        source = importer.source
        return cls(importer.schema, source.files, tuple(source.notes), importer.options.skip_bad_rows)

    def tasks(self) -> list[AdoptTask]:
        return [AdoptTask(number, (file,)) for number, file in enumerate(self.files)]

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        return TarScan(task, self.schema, axes, block_bytes, report, self.skip).run()


_ADOPTED: dict[type[FileImporter], Callable[[Any], AdoptableFiles]] = {
    WebDatasetImporter: Tars.of,
    NumpyImporter: Arrays.of,
    TokensImporter: Arrays.of,
    ArchiveImporter: Archives.of,
    TokenDocuments: Documents.of,
    MdsImporter: MdsFolder.of,
    SavedDataset: ArrowFiles.of,
    FolderImporter: FolderFiles.of,
    TextImporter: FolderFiles.of,
    ParquetImporter: ParquetFiles.of,
    ArrowImporter: ArrowFiles.of,
    JsonLinesImporter: LineFiles.of,
    CsvImporter: LineFiles.of,
}

_OF_ONE_FOLDER = ("mds", "huggingface", "folder", "text")  # files of several folders may have equal names
_NOT_PACKED = ("webdataset", "npy", "tokens", "text", "jsonl", "csv")  # formats that importers decompress


def open_files(source: Source, kind: str | None, options: ImportOptions) -> AdoptableFiles:
    """Return the files as one of `IMPORTERS`; `kind` None: by options and extensions.

    Raises:
        UsageError: `kind` is unknown, or the options do not go with it.
        SourceError: A file is not of this format, or cannot be read where it is.
    """
    source = without_strays(source, kind, options)
    source.notes[:0] = stray_notes(source)
    if kind is None:
        suffixes = {file_suffix(file.name) for file in source.files}
        kind = "tokens" if options.dtype or options.row or suffixes == {"bin"} else detect(source)
    check_kind(kind)
    if kind != "tokens" and (options.dtype or options.row):
        raise UsageError(f"--dtype and --row are for files of tokens, not for {kind}; leave them out")
    if kind in _OF_ONE_FOLDER:
        place_of_folder(source.files)
    for file in source.files if kind in _NOT_PACKED else ():
        refuse_packed(file)
    # arrays are parts of one, and the first keys of many tars need not be compared
    importer = open_listed(source, kind, replace(options, arrays="rows", keys="source"))
    if kind not in ("folder", "text"):
        source.notes.extend(split_notes(file.name for file in importer.source.files))
    if isinstance(importer, TableImporter) and importer.has_keys:
        source.notes.append(
            f"the column {KEY_FIELD} is not used, because keys of adopted rows are numbers; a build takes it as keys"
        )
    return _ADOPTED[type(importer)](importer)
