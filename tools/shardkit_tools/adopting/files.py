"""Files to adopt, and the parts of a pass over one that do not depend on its format."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, BinaryIO, ClassVar

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import IntegrityError, NotFoundError, SourceError, UsageError
from shardkit.formats import FieldType, NumberedKeys, Schema, ShardIndex, Texts, fit_key, xxh3
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

Span = tuple[int, int]
"""(start, stop) of a range of a block."""

Digests = tuple[int, bytes]
"""XXH3 and SHA-256."""

_HASH_THREADS = 3  # for the file, its block and the ranges of the block
_THREAD_BYTES = 1 << 16  # fewer bytes are hashed faster than they are given to a thread
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


class NumberedRows:
    """Attributes of files whose rows have no keys of their own and are one stratum (`formats.AdoptableFiles`)."""

    shard_format: ClassVar[str] = "rows"
    classes: ClassVar[tuple[str, ...]] = ()
    has_strata: ClassVar[bool] = False
    key_note: ClassVar[str] = NUMBERED_KEYS


def numbered_tasks(parts: Iterable[tuple[SourceFile, ...]], rows: Iterable[int]) -> list[AdoptTask]:
    """Return a task for each part that has rows; the rows of all parts follow one another."""
    counts = list(rows)
    counted = zip(parts, counts, accumulate(counts, initial=0), strict=False)
    filled = [(files, first) for files, count, first in counted if count]
    return [AdoptTask(number, files, first) for number, (files, first) in enumerate(filled)]


@dataclass(frozen=True)
class FilledFiles(NumberedRows):
    """The files of an importer; files without rows are left out.

    Raises:
        SourceError: No file has rows.
    """

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
        return numbered_tasks(self.parts, self.rows)


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


def read_some(stream: BinaryIO, size: int, where: str) -> bytes:
    """Return the next bytes of a file, fewer only at its end."""
    parts: list[bytes] = []
    try:
        while size > 0 and (part := stream.read(size)):
            parts.append(part)
            size -= len(part)
    except OSError as error:
        raise SourceError(f"{where}: cannot be read ({error.strerror}); check the disk") from error
    return b"".join(parts)


def check_scanned(file: SourceFile, before: ObjectStat, read_bytes: int, sha256: str) -> None:
    """Compare what was read with the file after the pass, and with the SHA-256 that its store keeps.

    Raises:
        SourceError: The file has changed, or other bytes arrived than the store has.
    """
    if stat_source(file) != before or read_bytes != before.size:
        raise SourceError(f"{file.path}: it was changed while it was read; adopt what nobody writes to")
    if before.sha256 not in (None, sha256):
        raise SourceError(
            f"{file.path}: its store says that it has sha256:{before.sha256}, and the bytes that came have "
            f"sha256:{sha256}; try again, then look at the store"
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


@dataclass
class ScannedBlocks:
    """Sizes and checksums of head, blocks and tail of a file, collected while it is read; close it.

    Threads compute the digests of the whole file, of each block and of its ranges from the same buffer, while the
    caller decodes it. The next part is added once they are done, so that no more than two parts are kept in memory.
    """

    size: int = 0  # bytes that were added
    head_size: int = 0
    _head: Any = field(default_factory=hashlib.sha256)
    _whole: Any = field(default_factory=hashlib.sha256)
    _tail: Any = field(default_factory=hashlib.sha256)
    _sizes: list[int] = field(default_factory=list)  # bytes of each block
    _spans: list[Sequence[Span]] = field(default_factory=list)  # ranges of each block
    _digests: list[dict[Span, Digests]] = field(default_factory=list)  # of each block and its ranges
    _starts: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="shardkit-digest")
        self._hashing: list[Future[None]] = []

    def __enter__(self) -> ScannedBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def _add_part(self, data: bytes) -> None:
        self.size += len(data)
        self._wait()
        self._start(len(data), self._whole.update, data)

    def _start(self, size: int, work: Callable[..., None], *arguments: Any) -> None:
        if size < _THREAD_BYTES:
            work(*arguments)
        else:
            self._hashing.append(self._threads.submit(work, *arguments))

    def _wait(self) -> None:
        while self._hashing:
            self._hashing.pop().result()

    def add_head(self, data: bytes) -> None:
        self.head_size += len(data)
        self._head.update(data)
        self._add_part(data)

    def add(self, data: bytes, rows: int, spans: Sequence[Span] = ()) -> None:
        """Add the next block, which holds `rows` rows; `spans` are the (start, stop) of its ranges, if it has any."""
        self._add_part(data)
        self._sizes.append(len(data))
        self._starts.append(self._starts[-1] + rows)
        self._spans.append(spans)
        self._digests.append({})
        stops: dict[int, set[int]] = {0: {len(data)}}
        for start, stop in spans:
            stops.setdefault(start, set()).add(stop)
        for start, found in stops.items():
            self._start(max(found) - start, _hash_spans, data, start, sorted(found), self._digests[-1])

    def add_tail(self, data: bytes) -> None:
        """Add bytes after the last block."""
        self._tail.update(data)
        self._add_part(data)

    @property
    def sha256(self) -> str:
        """Hex digest of everything that was added."""
        self._wait()
        digest: str = self._whole.hexdigest()
        return digest

    def numbered(
        self,
        task: AdoptTask,
        schema: Schema,
        block_rows: int,
        before: ObjectStat,
        runs: Runs = (),
        **columns: Any,
    ) -> ScannedFile:
        """Return the result of the pass over a file whose rows have numbers as keys, after `check_scanned`.

        Args:
            task: the file.
            schema: fields of the rows.
            block_rows: rows of a full block.
            before: state of the file before the pass.
            runs: runs of rows; if there are none, all rows are one run.
            columns: other values of `ShardIndex`.
        """
        check_scanned(task.file, before, self.size, self.sha256)
        rows = self._starts[-1]
        facts: dict[str, Any] = {"format": "rows", "compression": "none", "schema": schema} | self.columns()
        facts |= {"block_rows": block_rows, "shard_size": self.size} | columns
        index = ShardIndex(**facts, key_texts=NumberedKeys(task.first_ordinal, rows))
        return ScannedFile(f"sha256:{self.sha256}", index, runs or (((), rows),), before.etag)

    def columns(self) -> dict[str, Any]:
        """Return the values of `ShardIndex` that describe blocks, their ranges, head and tail."""
        self._wait()
        sizes = np.array(self._sizes, np.uint64)
        blocks = [found[0, size] for found, size in zip(self._digests, self._sizes, strict=True)]
        return {
            "rows": self._starts[-1],
            "head_size": self.head_size,
            "head_sha256": self._head.hexdigest(),
            "tail_sha256": self._tail.hexdigest(),
            "block_offset": np.uint64(self.head_size) + np.cumsum(sizes) - sizes,
            "block_size": sizes,
            "block_raw_size": sizes,
            "block_start": np.array(self._starts, np.int64),
            **_digest_columns("block", (len(sizes),), blocks),
            **self._range_columns(),
        }

    def _range_columns(self) -> dict[str, Any]:
        if not any(self._spans):
            return {}
        table = np.array(self._spans, np.uint64)  # (blocks, fields, start and stop)
        ranges = [
            found[span] for found, spans in zip(self._digests, self._spans, strict=True) for span in spans
        ]
        return {
            "range_offset": table[:, :, 0].copy(),
            "range_size": table[:, :, 1] - table[:, :, 0],
            **_digest_columns("range", table.shape[:2], ranges),
        }


def _hash_spans(data: bytes, start: int, stops: Sequence[int], found: dict[Span, Digests]) -> None:
    """Hash the spans of a block that begin at `start` in one pass, because each is the beginning of the next."""
    view, strong, done = memoryview(data), hashlib.sha256(), start
    for stop in stops:
        strong.update(view[done:stop])
        done = stop
        found[start, stop] = xxh3(view[start:stop]), strong.digest()


def _digest_columns(name: str, shape: tuple[int, ...], digests: Sequence[Digests]) -> dict[str, Any]:
    strong = np.frombuffer(b"".join(strong for _, strong in digests), np.uint8)
    return {
        f"{name}_xxh3": np.array([fast for fast, _ in digests], np.uint64).reshape(shape),
        f"{name}_sha256": strong.reshape(*shape, 32),
    }
