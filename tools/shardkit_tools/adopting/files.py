"""Files to adopt, a pass over one, and its blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, BinaryIO, ClassVar, NamedTuple, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.arrays import Buffer
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats import FieldType, NumberedKeys, Schema, ShardIndex, Texts, fit_key, xxh3
from shardkit.reading.adopted_places import FileGroup
from shardkit.stores.store import ObjectStat
from shardkit_tools.building.source_digests import check_unchanged
from shardkit_tools.console import count_text
from shardkit_tools.importers.protocol import FileImporter, SourceFile
from shardkit_tools.importers.remote_files import stat_file
from shardkit_tools.importers.source_files import is_url, name_files, open_file

BUILD_INSTEAD = "read it into shards of its own instead: shardkit build"
"""Advice for a file that cannot be adopted."""

Report = Callable[[int, int], None]
"""Called with (rows, bytes) read."""

Runs = tuple[tuple[tuple[str, ...], int], ...]
"""(values of the axes, rows) of each run of rows with equal values, in order."""

MAX_UNEVEN = 64
"""A block of more than this many times the target is too uneven: smaller blocks are tried."""

MIN_RUN_ROWS = 8
"""Samples that a run of equal values needs on average."""

_MAX_LABEL = 200

Span = tuple[int, int]
"""(start, stop) of a range of a block."""

Digests = tuple[int, bytes]
"""XXH3 and SHA-256."""

_HASH_THREADS = 3  # for the file, its block and the ranges of the block
_THREAD_BYTES = 1 << 16  # fewer bytes are hashed faster than they are given to a thread
_PIECE_BYTES = 1 << 20


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
class AdoptableFiles:
    """Files of one format; pickled to the processes of an adoption.

    Files without rows are left out; the rows of the others follow one another.

    Raises:
        SourceError: No file has rows.
    """

    # format of the shards that the files become: how `shardkit.formats` reads them
    shard_format: ClassVar[str] = "rows"
    has_strata: ClassVar[bool] = False  # samples can be stratified by a field
    key_note: ClassVar[str] = (
        "samples have no keys of their own: a key is the number of a row, counted over the files in this order"
    )
    importer: FileImporter
    rows: tuple[int, ...] | None = None  # rows of each part; None: keys come from the files

    def __post_init__(self) -> None:
        if self.rows is not None and not any(self.rows):
            raise SourceError(f"{self.importer.source.given}: the files have no rows; name others")
        parts = zip(self.parts, self.rows or (), strict=False)
        if empty := [files[0].name for files, rows in parts if files[0].size and not rows]:
            self.importer.source.notes.append(name_files("left out what has no rows", empty))

    @property
    def schema(self) -> Schema:
        return self.importer.schema

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the values of the field `label`; empty if the source has none."""
        return ()

    @property
    def parts(self) -> tuple[tuple[SourceFile, ...], ...]:
        """Files that become one shard each: the shard, and files that are read with it at adoption."""
        return tuple((file,) for file in self.importer.source.files)

    def tasks(self) -> list[AdoptTask]:
        """Return a task per part, in order."""
        if self.rows is None:
            return [AdoptTask(number, files) for number, files in enumerate(self.parts)]
        counted = zip(self.parts, self.rows, accumulate(self.rows, initial=0), strict=False)
        filled = [(files, first) for files, rows, first in counted if rows]
        return [AdoptTask(number, files, first) for number, (files, first) in enumerate(filled)]

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        """Read a part once, check that every row can be read where it is, and return its index.

        Args:
            task: one of `tasks`.
            axes: fields to stratify by; none without `has_strata`.
            block_bytes: target size of a block.
            report: called with (rows, bytes) read.

        Raises:
            SourceError: The part cannot be adopted, or changes meanwhile.
        """
        raise NotImplementedError


def stat_source(file: SourceFile) -> ObjectStat:
    """Return the current state of a file; for a local one, only the size is filled in."""
    if is_url(file.path):
        return stat_file(file)
    check_unchanged(file)
    return ObjectStat(file.size, None)


# ---- A pass over a file


class _Block(NamedTuple):
    size: int
    rows: int
    spans: Sequence[Span]  # its ranges
    digests: dict[Span, Digests]  # of the block and its ranges


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
    _blocks: list[_Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="shardkit-digest")
        self._hashing: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def _add_parts(self, parts: Sequence[Buffer]) -> None:
        """Hash the next bytes of the file, given in pieces."""
        size = sum(map(len, parts))
        self.size += size
        self._wait()
        self._start(size, _update, self._whole, parts)

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
        self._add_parts([data])

    def add(self, data: bytes, rows: int, spans: Sequence[Span] = ()) -> None:
        """Add the next block, which holds `rows` rows; `spans` are the (start, stop) of its ranges, if it has any."""
        self._add_parts([data])
        self._blocks.append(_Block(len(data), rows, spans, {}))
        stops: dict[int, set[int]] = {0: {len(data)}}
        for start, stop in spans:
            stops.setdefault(start, set()).add(stop)
        for start, found in stops.items():
            self._start(max(found) - start, _hash_spans, data, start, sorted(found), self._blocks[-1].digests)

    def add_small(self, parts: Sequence[Sequence[Buffer]], rows: Sequence[int]) -> None:
        """Add the next blocks, given the pieces of each, one after the other, and its rows."""
        blocks = [_Block(sum(map(len, own)), count, (), {}) for own, count in zip(parts, rows, strict=True)]
        self._add_parts([part for own in parts for part in own])
        self._blocks += blocks
        self._start(sum(block.size for block in blocks), _hash_blocks, parts, blocks)

    def add_tail(self, data: Buffer) -> None:
        """Add bytes after the last block."""
        self._tail.update(data)
        self._add_parts([data])

    @property
    def sha256(self) -> str:
        """Hex digest of everything that was added."""
        self._wait()
        digest: str = self._whole.hexdigest()
        return digest

    def columns(self) -> dict[str, Any]:
        """Return the values of `ShardIndex` that describe blocks, their ranges, head and tail."""
        self._wait()
        sizes = np.array([block.size for block in self._blocks], np.uint64)
        starts = np.cumsum([0, *(block.rows for block in self._blocks)])
        digests = [block.digests[0, block.size] for block in self._blocks]
        return {
            "rows": int(starts[-1]),
            "head_size": self.head_size,
            "head_sha256": self._head.hexdigest(),
            "tail_sha256": self._tail.hexdigest(),
            "block_offset": np.uint64(self.head_size) + np.cumsum(sizes) - sizes,
            "block_size": sizes,
            "block_raw_size": sizes,
            "block_start": starts,
            **_digest_columns("block", (len(sizes),), digests),
            **self._range_columns(),
        }

    def _range_columns(self) -> dict[str, Any]:
        if not any(block.spans for block in self._blocks):
            return {}
        # (blocks, fields, start and stop)
        table = np.array([block.spans for block in self._blocks], np.uint64)
        ranges = [block.digests[span] for block in self._blocks for span in block.spans]
        return {
            "range_offset": table[:, :, 0].copy(),
            "range_size": table[:, :, 1] - table[:, :, 0],
            **_digest_columns("range", table.shape[:2], ranges),
        }


@dataclass
class FilePass(ScannedBlocks):
    """One pass over a file, from its start to its end."""

    task: AdoptTask = field(kw_only=True)
    stream: BinaryIO = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._before = stat_source(self.task.file)
        self.stream = open_file(self.task.file)

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        super().__exit__()

    def read(self, size: int) -> bytes:
        """Return the next bytes of the file, fewer only at its end."""
        return read_some(self.stream, size, self.task.file.path)

    def add_rest(self, report: Report) -> None:
        """Read the rest of the file as the tail."""
        while data := self.read(_PIECE_BYTES):
            self.add_tail(data)
            report(0, len(data))

    def check(self) -> None:
        """Compare what was added with the file after the pass, and with the SHA-256 that its store keeps.

        Raises:
            SourceError: The file has changed, or other bytes arrived than the store has.
        """
        file, before = self.task.file, self._before
        if stat_source(file) != before or self.size != before.size:
            raise SourceError(f"{file.path}: it was changed while it was read; adopt what nobody writes to")
        if before.sha256 not in (None, self.sha256):
            raise SourceError(
                f"{file.path}: its store says that it has sha256:{before.sha256}, and the bytes that came have "
                f"sha256:{self.sha256}; try again, then look at the store"
            )

    def scanned(self, schema: Schema, block_rows: int, runs: Runs = (), **columns: Any) -> ScannedFile:
        """Return the result of the pass, after `check`; without other columns, keys are numbers.

        Args:
            schema: fields of the rows.
            block_rows: rows of a full block.
            runs: runs of rows; if there are none, all rows are one run.
            columns: other values of `ShardIndex`.
        """
        self.check()
        keys = NumberedKeys(self.task.first_ordinal, sum(block.rows for block in self._blocks))
        facts: dict[str, Any] = {"format": "rows", "compression": "none", "schema": schema} | self.columns()
        facts |= {"block_rows": block_rows, "shard_size": self.size, "key_texts": keys} | columns
        index = ShardIndex(**facts)
        return ScannedFile(f"sha256:{self.sha256}", index, runs or (((), len(keys)),), self._before.etag)


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


def _hash_spans(
    data: bytes | memoryview, start: int, stops: Sequence[int], found: dict[Span, Digests]
) -> None:
    """Hash the spans of a block that begin at `start` in one pass, because each is the beginning of the next."""
    view, strong, done = memoryview(data), hashlib.sha256(), start
    for stop in stops:
        strong.update(view[done:stop])
        done = stop
        found[start, stop] = xxh3(view[start:stop]), strong.digest()


def _hash_blocks(parts: Sequence[Sequence[Buffer]], blocks: Sequence[_Block]) -> None:
    for own, block in zip(parts, blocks, strict=True):
        fast, strong = xxhash.xxh3_64(), hashlib.sha256()
        for part in own:
            fast.update(part)
            strong.update(part)
        block.digests[0, block.size] = fast.intdigest(), strong.digest()


def _update(digest: Any, parts: Sequence[Buffer]) -> None:
    for part in parts:
        digest.update(part)


def _digest_columns(name: str, shape: tuple[int, ...], digests: Sequence[Digests]) -> dict[str, Any]:
    strong = np.frombuffer(b"".join(strong for _, strong in digests), np.uint8)
    return {
        f"{name}_xxh3": np.array([fast for fast, _ in digests], np.uint64).reshape(shape),
        f"{name}_sha256": strong.reshape(*shape, 32),
    }


# ---- Blocks and their rows


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

    def add(self, labels: tuple[str, ...], rows: int) -> None:
        """Add rows with these values."""
        if self._labels[-1:] != [labels]:
            self._labels.append(labels)
            self._rows.append(0)
        self._rows[-1] += rows

    def checked(self, path: str) -> Runs:
        """Return the runs; raise SourceError if they are too short for blocks."""
        rows, count = sum(self._rows), len(self._rows)
        if count > 1 and count * MIN_RUN_ROWS > rows:
            raise SourceError(
                f"{path}: {count} runs of one {'/'.join(self.axes)} in {rows} samples; adopted files can be balanced "
                f"only where runs have {MIN_RUN_ROWS} samples and more: adopt without --stratify, or {BUILD_INSTEAD}"
            )
        return tuple(zip(self._labels, self._rows, strict=True))
