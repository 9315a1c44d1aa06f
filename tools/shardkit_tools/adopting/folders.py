"""Adopt folders of files: a sample is a file, and some files with the values of their rows are a shard (SPEC.md §6)."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from shardkit.errors import SampleError, UsageError
from shardkit.formats import FieldType, Schema, ShardIndex, Texts, presence_of, xxh3
from shardkit.reading.adopted_places import FileGroup
from shardkit_tools.adopting.files import (
    BUILD_INSTEAD,
    AdoptableFiles,
    AdoptTask,
    LabelRuns,
    Report,
    ScannedBlocks,
    ScannedFile,
    even_block_rows,
    key_columns,
    label_text,
)
from shardkit_tools.building.source_digests import check_unchanged
from shardkit_tools.importers.folder import FolderImporter, TextImporter
from shardkit_tools.importers.protocol import SourceFailure, SourceFile, SourceSample, row_name
from shardkit_tools.importers.source_files import is_url


@dataclass(frozen=True)
class FolderFiles(AdoptableFiles):
    """Files of one kind, with labels from folders, sidecars and metadata."""

    has_strata: ClassVar[bool] = True
    key_note: ClassVar[str] = (
        "a key is the path of a file in its folder, so files that are renamed get other keys"
    )
    importer: FolderImporter | TextImporter

    @classmethod
    def of(cls, importer: FolderImporter | TextImporter) -> FolderFiles:
        """Return the files that an importer has recognised."""
        splits = importer.layout.splits
        if splits:
            first = next(iter(splits))
            raise UsageError(
                f"{importer.source.given}: its folders {', '.join(splits)} are splits; adopt each by itself, such as "
                f"{importer.source.given}/{first} with --ref {splits[first]}, or pass --no-split-folders"
            )
        found = cls(importer)
        own = found.own
        if importer.options.per != "file" or own not in importer.schema or importer.schema[own].optional:
            raise UsageError(
                f"{importer.source.given}: adopted samples are whole files, so the field {own!r} is needed and has a "
                f"value in every sample; leave out --schema {own}=…, or {BUILD_INSTEAD}"
            )
        return found

    @property
    def own(self) -> str:
        """Field whose payload is the file."""
        return self.importer.media if isinstance(self.importer, FolderImporter) else "text"

    @property
    def classes(self) -> tuple[str, ...]:
        return self.importer.classes

    @property
    def parts(self) -> tuple[tuple[SourceFile, ...], ...]:
        return tuple(task.files for task in self.importer.tasks())

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read the files of a shard; memory holds one block and its checksums."""
        files = {file.name: file for file in task.files}
        failures: list[str] = []
        block_rows = even_block_rows(np.cumsum([0, *(file.size for file in task.files)]), block_bytes)
        with ScannedBlocks() as blocks:
            scan = _GroupScan(self.schema, self.own, block_rows, blocks, LabelRuns(axes))
            for found in self.importer.read(self.importer.tasks()[task.number]):
                if isinstance(found, SourceSample):
                    try:
                        size = scan.add(found, files[found.source_name].size, row_name(found, {}))
                    except SampleError as error:
                        found = SourceFailure(found.source_name, found.source_row, error)
                    else:
                        report(1, size)
                        continue
                failures.append(str(found.error))
                report(0, files[found.source_name].size)
            for file in task.files:
                if not is_url(file.path):
                    check_unchanged(file)
            return scan.result(str(task), tuple(failures))


@dataclass
class _GroupScan:
    """The rows of one shard while its files are read."""

    schema: Schema
    own: str
    block_rows: int
    blocks: ScannedBlocks
    runs: LabelRuns
    names: list[str] = field(default_factory=list)  # of the files, in order
    keys: list[str] = field(default_factory=list)
    _hashes: list[int] = field(default_factory=list)
    _pieces: list[tuple[int, int]] = field(default_factory=list)  # (bytes, 1 for a file)
    _values: list[bytes] = field(default_factory=list)  # of the finished blocks
    _places: list[Any] = field(default_factory=list)  # (rows, fields, 2) of each finished block
    _files: list[bytes] = field(default_factory=list)  # of the current block
    _size: int = 0  # bytes of the files of the current block
    _stored: bytearray = field(default_factory=bytearray)  # values of the current block
    _rows: list[list[tuple[int, int]]] = field(default_factory=list)
    _labels: tuple[str, ...] = ()  # values of the axes in the current block

    def add(self, row: SourceSample, file_bytes: int, where: str) -> int:
        """Add a row, whose file has `file_bytes`, and return these.

        Raises:
            SampleError: A value does not fit the schema.
        """
        payloads = dict(zip(self.schema.stored, self.schema.encode(row.sample, where=where), strict=True))
        labels = tuple(label_text(self.schema[axis], row.sample[axis], where) for axis in self.runs.axes)
        if self._files and (len(self._files) == self.block_rows or labels != self._labels):
            self._end_block()
        self._labels = labels
        # a byte-order mark belongs to the file, and not to the text
        data = (BOM_UTF8 if len(payloads[self.own]) < file_bytes else b"") + payloads[self.own]
        self._rows.append(
            [self._place(name, kind, payloads, len(data)) for name, kind in self.schema.items()]
        )
        self._files.append(data)
        self._size += len(data)
        self._hashes.append(xxh3(data))
        self.names.append(row.source_name)
        self.keys.append(row.key or row.source_name)
        return len(data)

    def _place(
        self, name: str, kind: FieldType, payloads: dict[str, bytes], file_bytes: int
    ) -> tuple[int, int]:
        """Return (offset in the files or in the values, bytes) of a field; offset -1 for an absent value."""
        if name == self.own:
            size = len(payloads[name])
            return self._size + file_bytes - size, size
        if kind.optional and not payloads[presence_of(name)][0]:
            return -1, 0
        start = len(self._stored)
        self._stored += payloads[name]
        return start, len(payloads[name])

    def _end_block(self) -> None:
        """End the current block."""
        if not self._stored and not self._size:
            self._stored += b"\0"  # a block has at least one byte
        table = np.array(self._rows, np.int64).reshape(len(self._rows), len(self.schema), 2)
        is_value = np.array([name != self.own for name in self.schema])
        starts = table[:, :, 0]
        table[:, :, 0] = np.where(starts < 0, 0, starts + is_value * self._size)
        self._places.append(table)
        values = bytes(self._stored)
        self.blocks.add(b"".join([*self._files, values]), len(self._rows))
        self.runs.add(self._labels, len(self._rows))
        self._pieces += [(len(data), 1) for data in self._files]
        if values:
            self._pieces.append((len(values), 0))
            self._values.append(values)
        self._files, self._size, self._rows, self._stored = [], 0, [], bytearray()

    def result(self, where: str, failures: tuple[str, ...]) -> ScannedFile:
        if self._files:
            self._end_block()
        runs = self.runs.checked(where)
        if not self.names:
            return ScannedFile("", None, (), failures=failures)
        digest = f"sha256:{self.blocks.sha256}"
        table = np.concatenate(self._places).astype(np.uint64)
        pieces = np.array(self._pieces, np.int64).reshape(-1, 2)
        index = ShardIndex(
            format="rows",
            compression="none",
            schema=self.schema,
            block_rows=self.block_rows,
            shard_size=int(pieces[:, 0].sum()),
            **self.blocks.columns(),
            **key_columns(self.keys),
            field_offset=table[:, :, 0].copy(),
            field_size=table[:, :, 1].copy(),
            field_is_payload=np.ones(len(self.schema), np.uint8),
        )
        group = FileGroup(
            digest=digest,
            names=Texts.pack(self.names),
            xxh3=np.array(self._hashes, np.uint64),
            piece_size=pieces[:, 0].copy(),
            piece_is_file=pieces[:, 1].astype(np.uint8),
            values=np.frombuffer(b"".join(self._values), np.uint8),
        )
        return ScannedFile(digest, index, runs, group=group, failures=failures)
