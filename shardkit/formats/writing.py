"""Write shards of both formats: blocks of rows become the bytes of a shard and its index."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from shardkit.documents import xxh3
from shardkit.errors import SampleError, UsageError

from .block import EncodedBlock, Row, RowBlock, sizes_of
from .columns import Texts
from .compression import normalise_compression
from .index import ShardIndex
from .schema import Schema
from .tar_members import TarEncoder, member_bytes, member_names

MAX_KEY_BYTES = 80
"""Maximum size of a key in a shard; the index keeps longer original keys separately."""

MAX_MEMBER_NAME = 100  # the name field of a ustar header
MAX_EXTENSION = 4  # the longest extension of `member_extension` (flac, tiff, webp, json)
_KEY = re.compile(r"[A-Za-z0-9_-]{1,80}\Z")
_KEYS = re.compile(r"[A-Za-z0-9_-]+(?:,[A-Za-z0-9_-]+)*")
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")
_HASH_DIGITS = 16

MAX_SAMPLE_BYTES = 5 << 30
"""Maximum size of a sample: samples are never split, and an object store takes at most 5 GiB in one PUT."""

_MAX_UNHASHED = 4  # calls of `write_block` whose bytes stay in memory until they are hashed
_ARROW_ROW_BYTES = 8 + 24  # offset and typical size of a key


class Sink(Protocol):
    """Receiver of the bytes of a shard, strictly in order."""

    def write(self, data: bytes | memoryview, /) -> int | None:
        """Write bytes and return their number, which may be less than given; None means all."""
        ...


class BlockEncoder(Protocol):
    """Encoder of one format, as the writer uses it."""

    def head(self) -> bytes:
        """Return the bytes before the first block."""
        ...

    def encode(
        self, rows: RowBlock
    ) -> tuple[Sequence[EncodedBlock], NDArray[np.uint64] | None, NDArray[np.uint64] | None]:
        """Return (encoded blocks, field offsets, field sizes); offsets count from the start of the block of the row."""
        ...

    def tail(self) -> bytes:
        """Return the bytes after the last block; called once, at the end."""
        ...


def raw_row_bytes(format: str, schema: Schema, payload_sizes: Sequence[int]) -> int:
    """Return the raw bytes of a row in a block.

    For tar, an upper bound that is exact if every field has a value. For arrow, an estimate for a key of 24 bytes.
    """
    if format == "tar":
        columns = zip(schema.stored.items(), payload_sizes, strict=True)
        return sum(member_bytes(kind, size) for (name, kind), size in columns if name in schema)
    fixed = sum(8 for kind in schema.values() if kind.item_bytes is None)
    return sum(payload_sizes) + fixed + _ARROW_ROW_BYTES


class ShardWriter:
    """Write one shard: call `write_block` for each block, then `finish`.

    After an error the shard is incomplete, the output must be discarded, and further calls raise UsageError.

    Args:
        sink: Receives the bytes of the shard, strictly in order; the caller hashes and publishes them.
        format: ``tar`` or ``arrow``.
        compression: ``none``, or for arrow also ``zstd`` or ``zstd:LEVEL``.
        schema: Fields of every row.
        block_rows: Maximum number of rows in a block.
        executor: Hashes blocks while the next are encoded; None hashes in the calling thread.

    Raises:
        ConfigurationError: Format or compression are unknown, or do not go together.
        UsageError: `block_rows` is below 1.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        format: str = "tar",
        compression: str = "none",
        schema: Schema,
        block_rows: int,
        executor: Executor | None = None,
    ) -> None:
        compression = normalise_compression(format, compression)
        if block_rows < 1:
            raise UsageError(f"block_rows {block_rows}: expected at least 1")
        encoder: BlockEncoder
        if format == "tar":
            encoder = TarEncoder(schema)
        else:
            from .arrow_writing import ArrowEncoder  # slow to import, and readers do not need it

            encoder = ArrowEncoder(schema, compression)
        self.format = format
        self.compression = compression
        self.schema = schema
        self.block_rows = block_rows
        self._sink = sink
        self._encoder = encoder
        self._usable = True
        self._key_limit = max_key_bytes(schema, format)
        self._item_bytes = [
            (name, kind.item_bytes, kind.numpy_dtype.itemsize) for name, kind in schema.stored.items()
        ]
        self._seen: set[str] = set()
        self._keys: list[str] = []
        self._lineage = _Lineage()
        self._starts = [0]
        self._sizes: list[int] = []
        self._raw_sizes: list[int] = []
        self._executor = executor
        self._hashes: list[list[tuple[int, bytes]] | Future[list[tuple[int, bytes]]]] = []
        self._field_offsets: list[NDArray[np.uint64]] = []
        self._field_sizes: list[NDArray[np.uint64]] = []
        head = encoder.head()
        self._head = (len(head), hashlib.sha256(head).hexdigest())
        self._written = 0
        self._write(head)

    def write_block(self, rows: Sequence[Row] | RowBlock) -> None:
        """Write one block of 1 to `block_rows` rows, or all blocks of a `RowBlock`.

        Raises:
            SampleError: A key or payload is not valid, or a key occurs twice.
            UsageError: A block is empty or too large, or the writer has finished or failed.
        """
        if not self._usable:
            raise UsageError("this shard writer has finished or failed; open another")
        borders = rows.borders if isinstance(rows, RowBlock) else [0, len(rows)]
        for start, end in pairwise(borders):
            if not 1 <= end - start <= self.block_rows:
                raise UsageError(f"a block of {end - start} rows, expected 1 to {self.block_rows}")
        if borders[-1] != len(rows):
            raise UsageError(f"blocks of {borders[-1]} rows of {len(rows)}, expected all of them")
        self._usable = False
        block = rows if isinstance(rows, RowBlock) else RowBlock.of(rows, len(self.schema.stored))
        self._check(block)
        encoded, offsets, sizes = self._encoder.encode(block)
        if offsets is not None and sizes is not None:
            self._field_offsets.append(offsets)
            self._field_sizes.append(sizes)
        self._lineage.add(block, len(self._keys))
        self._starts.extend(len(self._keys) + end for end in borders[1:])
        self._keys.extend(block.keys)
        self._sizes.extend(len(stored) for stored, _ in encoded)
        self._raw_sizes.extend(raw_size for _, raw_size in encoded)
        self._hash([stored for stored, _ in encoded])
        for stored, _ in encoded:
            self._write(stored)
        self._usable = True

    def finish(self) -> ShardIndex:
        """Write the bytes after the last block and return the index of the shard.

        Raises:
            UsageError: The writer has finished or failed.
        """
        if not self._usable:
            raise UsageError("this shard writer has finished or failed; open another")
        self._usable = False
        tail = self._encoder.tail()
        self._write(tail)
        sizes = np.array(self._sizes, np.uint64)
        hashes = [
            pair for some in self._hashes for pair in (some.result() if isinstance(some, Future) else some)
        ]
        return ShardIndex(
            format=self.format,
            compression=self.compression,
            schema=self.schema,
            rows=len(self._keys),
            block_rows=self.block_rows,
            shard_size=self._written,
            head_size=self._head[0],
            head_sha256=self._head[1],
            tail_sha256=hashlib.sha256(tail).hexdigest(),
            block_offset=(self._head[0] + np.cumsum(sizes, dtype=np.uint64) - sizes).astype(np.uint64),
            block_size=sizes,
            block_raw_size=np.array(self._raw_sizes, np.uint64),
            block_start=np.array(self._starts, np.int64),
            block_xxh3=np.array([fast for fast, _ in hashes], np.uint64),
            block_sha256=np.frombuffer(b"".join([strong for _, strong in hashes]), np.uint8).reshape(-1, 32),
            key_texts=Texts.pack(self._keys),
            **self._field_columns(),
            **self._lineage.columns(),
        )

    def _hash(self, stored: Sequence[bytes | memoryview]) -> None:
        if self._executor is None:
            self._hashes.append(_hashes_of(stored))
            return
        if len(self._hashes) >= _MAX_UNHASHED and isinstance(behind := self._hashes[-_MAX_UNHASHED], Future):
            behind.result()
        self._hashes.append(self._executor.submit(_hashes_of, stored))

    def _write(self, data: bytes | memoryview) -> None:
        self._written += len(data)
        view = memoryview(data)
        while view:
            taken = self._sink.write(view)
            view = view[len(view) if taken is None else taken :]

    def _check(self, block: RowBlock) -> None:
        check_keys(block.keys, self._key_limit)
        before = len(self._seen)
        self._seen.update(block.keys)
        if len(self._seen) != before + len(block):
            twice = next(key for key, times in Counter([*self._keys, *block.keys]).items() if times > 1)
            raise SampleError(
                f"key {twice!r} appears twice in one shard; keys name samples, so give each its own"
            )
        if len(block.columns) != len(self._item_bytes):
            raise SampleError(f"{len(block.columns)} columns of payloads for {len(self._item_bytes)} fields")
        total = np.zeros(len(block), np.int64)
        for (name, fixed, item), column in zip(self._item_bytes, block.columns, strict=True):
            sizes = sizes_of(column)
            total += sizes
            wrong = sizes != fixed if fixed is not None else sizes % item != 0
            if wrong.any():
                row = int(np.argmax(wrong))
                raise SampleError(
                    f"key {block.keys[row]!r}, field {name!r}: payload of {sizes[row]} bytes does not fit the "
                    "schema"
                )
        if total.max() > MAX_SAMPLE_BYTES:
            row = int(np.argmax(total))
            raise SampleError(
                f"key {block.keys[row]!r}: a sample of {total[row]} bytes, at most {MAX_SAMPLE_BYTES} (5 GiB) "
                "fit a shard"
            )

    def _field_columns(self) -> dict[str, Any]:
        if self.format != "tar":
            return {}
        empty = np.empty((0, len(self.schema)), np.uint64)
        return {
            "field_offset": np.concatenate([empty, *self._field_offsets]),
            "field_size": np.concatenate([empty, *self._field_sizes]),
        }


def _hashes_of(stored: Sequence[bytes | memoryview]) -> list[tuple[int, bytes]]:
    return [(xxh3(one), hashlib.sha256(one).digest()) for one in stored]


class _Lineage:
    """Collector of the optional columns of the index; columns that no row needs are omitted."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._ids: list[NDArray[np.int32]] = []
        self._source_rows: list[NDArray[np.int64]] = []
        self._originals: list[tuple[int, str]] = []
        self._strata: list[NDArray[np.int32]] = []
        self._has_stratum = False

    def add(self, block: RowBlock, first_row: int) -> None:
        """Add sources, original keys and strata of the rows of a block."""
        none = np.full(len(block), -1, np.int32)
        numbers = [self._names.setdefault(name, len(self._names)) for name in block.source_names]
        of_block = np.array([*numbers, -1], np.int32)  # id -1 selects the last entry
        self._ids.append(none if block.source_id is None else of_block[block.source_id])
        self._source_rows.append(
            np.zeros(len(block), np.int64) if block.source_row is None else block.source_row
        )
        self._originals += [
            (first_row + place, text) for place, text in block.originals if text != block.keys[place]
        ]
        self._has_stratum |= block.stratum is not None
        self._strata.append(none if block.stratum is None else block.stratum)

    def columns(self) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        if self._names:
            columns["source_names"] = tuple(self._names)
            columns["source_id"] = np.concatenate(self._ids)
            columns["source_row"] = np.concatenate(self._source_rows)
        if self._originals:
            columns["original_rows"] = np.array([place for place, _ in self._originals], np.int64)
            columns["original_texts"] = Texts.pack([text for _, text in self._originals])
        if self._has_stratum:
            columns["row_stratum"] = np.concatenate(self._strata)
        return columns


# ---- Keys


def check_keys(keys: Sequence[str], limit: int) -> None:
    """Raise SampleError if a key is not 1 to `limit` characters of A-Z a-z 0-9 _ -."""
    try:
        joined = ",".join(keys)
    except TypeError:
        joined = ""
    # A key that contains a comma would match as two keys, so commas are counted.
    is_good = joined.count(",") == len(keys) - 1 and _KEYS.fullmatch(joined) is not None
    if is_good and max(map(len, keys)) <= min(limit, MAX_KEY_BYTES):
        return
    for key in cast("Sequence[object]", keys):  # untyped callers may pass other objects
        if not isinstance(key, str) or not _KEY.match(key) or len(key) > limit:
            raise SampleError(f"key {key!r:.120}: expected 1 to {limit} of A-Z a-z 0-9 _ -; use fit_key")


def fit_key(original: str, limit: int = MAX_KEY_BYTES) -> str:
    """Return a valid key for any text: `original` itself if it is valid.

    Otherwise, other characters become ``_``, the text is cut, and ``-`` and 16 hexadecimal digits of the SHA-256 of the
    original are appended, so that different originals have different keys.

    Raises:
        UsageError: `limit` has no room for the hash, or is above 80.
    """
    if not _HASH_DIGITS + 2 <= limit <= MAX_KEY_BYTES:
        raise UsageError(f"key limit {limit}: expected {_HASH_DIGITS + 2} to {MAX_KEY_BYTES}")
    if _KEY.match(original) and len(original) <= limit:
        return original
    digest = hashlib.sha256(original.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    head = _UNFIT.sub("_", original)[: limit - _HASH_DIGITS - 1]
    return f"{head}-{digest}" if head else digest


def max_key_bytes(schema: Schema, format: str) -> int:
    """Return the maximum size of a key in a shard of `schema`; tar member names have at most 100 bytes."""
    if format != "tar":
        return MAX_KEY_BYTES
    longest = max(map(len, member_names(schema)))
    return min(MAX_KEY_BYTES, MAX_MEMBER_NAME - longest - MAX_EXTENSION - 2)
