"""A pass over a file: its digests, the sizes and checksums of its blocks, and its index."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Self

import numpy as np

from shardkit.errors import SourceError
from shardkit.formats import NumberedKeys, Schema, ShardIndex, xxh3
from shardkit_tools.adopting.files import AdoptTask, Report, Runs, ScannedFile, stat_source
from shardkit_tools.importers.source_files import open_file

Span = tuple[int, int]
"""(start, stop) of a range of a block."""

Digests = tuple[int, bytes]
"""XXH3 and SHA-256."""

_HASH_THREADS = 3  # for the file, its block and the ranges of the block
_THREAD_BYTES = 1 << 16  # fewer bytes are hashed faster than they are given to a thread
_PIECE_BYTES = 1 << 20


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

    def __enter__(self) -> Self:
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
        keys = NumberedKeys(self.task.first_ordinal, self._starts[-1])
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
