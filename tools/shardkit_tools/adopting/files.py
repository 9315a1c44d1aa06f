"""Files to adopt, and what is known about one after a pass over it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import IntegrityError, NotFoundError, SourceError, UsageError
from shardkit.formats import FieldType, Schema, ShardIndex, Texts, fit_key
from shardkit.reading.file_groups import FileGroup
from shardkit.stores.remote.addresses import split_url
from shardkit.stores.store import ObjectStat
from shardkit_tools.building.source_digests import check_unchanged
from shardkit_tools.console import count_text
from shardkit_tools.importers.protocol import FileImporter, ImportOptions, Source, SourceFile
from shardkit_tools.importers.remote_files import pinned_url, stat_file
from shardkit_tools.importers.source_files import is_url, list_source, name_files

BUILD_INSTEAD = "read it into shards of its own instead: shardkit build"
"""Advice for a file that cannot be adopted."""

Report = Callable[[int, int], None]
"""Called with (rows, bytes) read."""

Runs = tuple[tuple[tuple[str, ...], int], ...]
"""(values of the axes, rows) of each run of rows with equal values, in order."""

MAX_UNEVEN = 64
"""A block of more than this many times the target is too uneven: smaller blocks are tried."""

NUMBERED_KEYS = (
    "samples have no keys of their own: a key is the number of a row, counted over the files in this order"
)
"""Note on the keys of files whose rows have none."""

MIN_RUN_ROWS = 8
"""Samples that a run of equal values needs on average."""

_MAX_LABEL = 200
_PACKED_NAMES = (".gz", ".tgz", ".zst", ".bz2", ".xz", ".lz4")


@dataclass(frozen=True, slots=True)
class AdoptTask:
    """A file, or a group of files that become one shard, and its number in the order."""

    number: int
    files: tuple[SourceFile, ...]
    first_ordinal: int = 0  # number in the dataset of its first row; 0 if keys come from the file

    def __str__(self) -> str:
        more = f" and {count_text(len(self.files) - 1, 'more file')}" if len(self.files) > 1 else ""
        return f"{self.file.path}{more}"

    @property
    def file(self) -> SourceFile:
        """The file, or the first of the group."""
        return self.files[0]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def record_name(self) -> str:
        return f"file-{self.number:08d}.done"

    @property
    def stamp(self) -> str:
        """Text that changes when a file is written to, renamed or added, or when the rows get other keys."""
        if len(self.files) == 1:
            return f"{self.file.size} {self.file.stamp} {self.first_ordinal}"
        listed = "".join(f"{file.name}\0{file.size} {file.stamp}\0" for file in self.files)
        listed += str(self.first_ordinal)
        return hashlib.sha256(listed.encode("utf-8", "surrogatepass")).hexdigest()

    def check_unchanged(self) -> None:
        """Raise IntegrityError if a file has another size than when it was listed."""
        for file in self.files:
            if stat_source(file).size != file.size:
                raise IntegrityError(
                    f"{file.path}: it changed while it was adopted; adopt what nobody writes to"
                )


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """Result of one pass."""

    digest: str  # `sha256:<hex>` of the whole file; empty if no row can be read
    index: ShardIndex | None  # its index; None if no row can be read
    runs: Runs
    etag: str = ""  # ETag of these bytes in the file's store; empty if there is none
    group: FileGroup | None = None  # its files, if there are several
    failures: tuple[str, ...] = ()  # messages of samples that cannot be read


@dataclass(frozen=True)
class FilledFiles:
    """Files whose rows have no keys of their own and are one stratum (`formats.AdoptableFiles`).

    Files without rows are left out; the rows of the others follow one another.

    Raises:
        SourceError: No file has rows.
    """

    shard_format: ClassVar[str] = "rows"
    classes: ClassVar[tuple[str, ...]] = ()
    has_strata: ClassVar[bool] = False
    key_note: ClassVar[str] = NUMBERED_KEYS
    importer: FileImporter
    rows: tuple[int, ...]  # rows of each part

    def __post_init__(self) -> None:
        if not any(self.rows):
            raise SourceError(f"{self.importer.source.given}: the files have no rows; name others")

    @property
    def schema(self) -> Schema:
        return self.importer.schema

    @property
    def parts(self) -> tuple[tuple[SourceFile, ...], ...]:
        """Files that become one shard each: the shard, and files that are read with it at adoption."""
        return tuple((file,) for file in self.importer.source.files)

    @property
    def notes(self) -> tuple[str, ...]:
        parts = zip(self.parts, self.rows, strict=True)
        empty = [files[0].name for files, rows in parts if files[0].size and not rows]
        notes = tuple(self.importer.source.notes)
        return (*notes, name_files("left out what has no rows", empty)) if empty else notes

    def tasks(self) -> list[AdoptTask]:
        firsts = accumulate(self.rows, initial=0)
        counted = zip(self.parts, self.rows, firsts, strict=False)
        filled = [(files, first) for files, rows, first in counted if rows]
        return [AdoptTask(number, files, first) for number, (files, first) in enumerate(filled)]


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
    source = list_source(pinned_url(given), skip=options.skip_bad_rows, follow_links=options.follow_links)
    for file in source.files:
        if is_url(file.path):
            split_url(file.path)  # refuses credentials: the URL is recorded
    return source


def place_of(file: SourceFile) -> str:
    """Return the location that the root records: a URL, or a path without links."""
    return file.path if is_url(file.path) else os.path.realpath(file.path)


def place_of_folder(files: Sequence[SourceFile]) -> str:
    """Return the location that the root records for a group: the folder that the names of its files start at.

    Raises:
        SourceError: The files are not below one folder.
    """
    folders = {file.path.removesuffix(file.name) for file in files}
    if len(folders) > 1 or any(not file.path.endswith(file.name) for file in files):
        raise SourceError(
            f"{files[0].path}: files of several folders; adopt one folder at a time, "
            "then join the versions with shardkit merge"
        )
    (folder,) = folders
    return folder.rstrip("/") if is_url(folder) else os.path.realpath(folder or ".")


def stat_source(file: SourceFile) -> ObjectStat:
    """Return the current state of a file; for a local one, only the size is filled in."""
    if is_url(file.path):
        return stat_file(file)
    check_unchanged(file)
    return ObjectStat(file.size, None)


def refuse_packed(file: SourceFile) -> None:
    """Raise SourceError if a file is compressed as a whole, by its name: to open every file would take too long."""
    if file.name.lower().endswith(_PACKED_NAMES):
        raise SourceError(
            f"{file.path}: compressed, so samples cannot be read out of its middle; {BUILD_INSTEAD}"
        )


def even_block_rows(offsets: NDArray[np.int64], block_bytes: int) -> int:
    """Return the rows of a block: as many as have the target size on average, fewer if sizes are uneven.

    Args:
        offsets: (rows + 1,) offset of each row, then the end of the last.
        block_bytes: target size of a block.
    """
    rows = len(offsets) - 1
    block_rows = max(1, rows * block_bytes // max(1, int(offsets[-1] - offsets[0])))
    while block_rows > 1:
        cuts = offsets[np.append(np.arange(0, rows, block_rows), rows)]
        if int(np.diff(cuts).max()) <= MAX_UNEVEN * block_bytes:
            break
        block_rows = smaller(block_rows)
    return block_rows


class TooUnevenError(Exception):
    """A block is far larger than its target: the file is read again with smaller blocks."""


def smaller(block_rows: int) -> int:
    """Return the rows of a block for the next attempt."""
    return max(1, block_rows // 8)


def key_columns(originals: Sequence[str]) -> dict[str, Any]:
    """Return the values of `ShardIndex` for keys of a source, which are rewritten if they cannot be stored."""
    keys = [fit_key(original) for original in originals]
    rewritten = [row for row, key in enumerate(keys) if key != originals[row]]
    columns: dict[str, Any] = {"key_texts": Texts.pack(keys)}
    if rewritten:
        columns |= {
            "original_rows": np.array(rewritten, np.int64),
            "original_texts": Texts.pack([originals[row] for row in rewritten]),
        }
    return columns


def label_text(kind: FieldType, value: object, where: str) -> str:
    """Return a value as the name of a stratum, as a build would write it."""
    if kind.dtype == "bool":
        return "true" if value else "false"
    text = str(value)
    if not text or len(text) > _MAX_LABEL:
        raise SourceError(f"{where}: {len(text)} characters; a field to stratify by needs 1 to {_MAX_LABEL}")
    return text


@dataclass
class LabelRuns:
    """Runs of rows with equal values of the axes, while a file is read."""

    axes: Sequence[str]  # fields to stratify by
    _labels: list[tuple[str, ...]] = field(default_factory=list)  # values of each run
    _rows: list[int] = field(default_factory=list)  # rows of each run

    def continues(self, labels: tuple[str, ...]) -> bool:
        """Return True if a row with these values belongs to the last run."""
        return self._labels[-1:] == [labels]

    def add(self, labels: tuple[str, ...]) -> None:
        """Count a row with these values."""
        if not self.continues(labels):
            self._labels.append(labels)
            self._rows.append(0)
        self._rows[-1] += 1

    def checked(self, path: str) -> Runs:
        """Return the runs; raise SourceError if they are too short for blocks."""
        rows, count = sum(self._rows), len(self._rows)
        if count > 1 and count * MIN_RUN_ROWS > rows:
            raise SourceError(
                f"{path}: {count} runs of one {'/'.join(self.axes)} in {rows} samples; adopted files can be balanced "
                f"only where runs have {MIN_RUN_ROWS} samples and more: adopt without --stratify, or {BUILD_INSTEAD}"
            )
        return tuple(zip(self._labels, self._rows, strict=True))
