"""The one writer of both formats: blocks of rows in, a shard's bytes and its index out."""

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

from shardkit.errors import SampleError, UsageError

from .block import EncodedBlock, Row, RowBlock, sizes_of
from .canonical_json import xxh3
from .columns import Texts
from .compression import normalise_compression
from .index import ShardIndex
from .schema import Schema
from .tar_members import TarEncoder, member_bytes, member_names

MAX_KEY_BYTES = 80
"""Bytes of a key in a shard; longer ones are kept beside a name that is made up."""

MAX_MEMBER_NAME = 100  # the name field of a ustar header
MAX_EXTENSION = 4  # the longest that `member_extension` gives: most have three letters, flac and tiff four
_KEY = re.compile(r"[A-Za-z0-9_-]{1,80}\Z")
_KEYS = re.compile(r"[A-Za-z0-9_-]+(?:,[A-Za-z0-9_-]+)*")
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")
_HASH_DIGITS = 16

MAX_SAMPLE_BYTES = 5 << 30  # an object store takes one PUT of at most 5 GiB, and a sample is never cut
"""Of one sample; it fills a shard of its own."""

_MAX_UNHASHED = 4  # blocks, or some that are encoded together; each of them is held in memory
_ARROW_ROW_BYTES = 8 + 24  # key: offset, and a length that is usual


class Sink(Protocol):
    """Takes a shard's bytes strictly in order; may take fewer than given and say so."""

    def write(self, data: bytes | memoryview, /) -> int | None:
        """Take bytes; returns how many, None for all."""
        ...


class BlockEncoder(Protocol):
    """What a format is, to the writer."""

    def head(self) -> bytes:
        """Bytes before the first block."""
        ...

    def encode(
        self, rows: RowBlock
    ) -> tuple[Sequence[EncodedBlock], NDArray[np.uint64] | None, NDArray[np.uint64] | None]:
        """(each of its blocks, field offsets, field sizes); offsets count from the begin of the row's block."""
        ...

    def tail(self) -> bytes:
        """Bytes after the last block; nothing is encoded afterwards."""
        ...


def raw_row_bytes(format: str, schema: Schema, payload_sizes: Sequence[int]) -> int:
    """Raw bytes that a row takes: at most so many for tar; for arrow an estimate that takes a key of 24 bytes.

    That of tar is exact where every field has a value.
    """
    if format == "tar":
        columns = zip(schema.stored.items(), payload_sizes, strict=True)
        return sum(member_bytes(kind, size) for (name, kind), size in columns if name in schema)
    fixed = sum(8 for kind in schema.values() if kind.item_bytes is None)
    return sum(payload_sizes) + fixed + _ARROW_ROW_BYTES


class ShardWriter:
    """Writes one shard: `write_block` for each block, then `finish`.

    After an error the shard is broken and what the sink has is to be thrown away; further calls are refused.

    Args:
        sink: Gets the shard's bytes, strictly in order; hashing and publishing them is the caller's.
        format: ``tar`` or ``arrow``.
        compression: ``none``, or for arrow also ``zstd`` or ``zstd:LEVEL``.
        schema: Fields of every row.
        block_rows: Most rows that a block may hold.
        executor: Hashes blocks while the next are encoded; None: in the caller's thread.

    Raises:
        SchemaError: unknown format or compression, or a pair that does not exist.
        UsageError: `block_rows` below 1.
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
            from .arrow_writing import ArrowEncoder  # slow to import, and nobody who reads needs it

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
        """Write one block of 1 to `block_rows` rows, or those of which the rows are."""
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
        """Write what follows the last block and return the shard's index."""
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
    """Optional columns of the index, block by block; those that no row needs are absent in the end."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._ids: list[NDArray[np.int32]] = []
        self._source_rows: list[NDArray[np.int64]] = []
        self._originals: list[tuple[int, str]] = []
        self._strata: list[NDArray[np.int32]] = []
        self._has_stratum = False

    def add(self, block: RowBlock, first_row: int) -> None:
        """What the rows of a block came with."""
        none = np.full(len(block), -1, np.int32)
        numbers = [self._names.setdefault(name, len(self._names)) for name in block.source_names]
        of_block = np.array([*numbers, -1], np.int32)  # -1 indexes the last
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
    """Refuse keys that a shard cannot hold."""
    try:
        joined = ",".join(keys)
    except TypeError:
        joined = ""
    # A key with a comma in it would pass for two.
    is_good = joined.count(",") == len(keys) - 1 and _KEYS.fullmatch(joined) is not None
    if is_good and max(map(len, keys)) <= min(limit, MAX_KEY_BYTES):
        return
    for key in cast("Sequence[object]", keys):  # of callers without types
        if not isinstance(key, str) or not _KEY.match(key) or len(key) > limit:
            raise SampleError(f"key {key!r:.120}: expected 1 to {limit} of A-Z a-z 0-9 _ -; use fit_key")


def fit_key(original: str, limit: int = MAX_KEY_BYTES) -> str:
    """A valid key for any text, the same one always; `original` itself where it fits.

    Otherwise the text with other characters replaced by ``_``, cut, and ``-`` with 16 hexadecimal digits of
    the SHA-256 of the original, so that different originals stay different.

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
    """Longest key that a shard of `schema` can hold; tar member names end at 100 bytes."""
    if format != "tar":
        return MAX_KEY_BYTES
    longest = max(map(len, member_names(schema)))
    return min(MAX_KEY_BYTES, MAX_MEMBER_NAME - longest - MAX_EXTENSION - 2)
