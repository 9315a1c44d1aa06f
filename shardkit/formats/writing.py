"""The one writer of both formats: blocks of rows in, a shard's bytes and its index out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SampleError, UsageError

from .arrow_writing import ArrowEncoder
from .compression import extension, normalise_compression
from .digest import xxh3
from .index import ShardIndex
from .keys import check_key, max_key_bytes
from .rows import Row
from .schema import Schema
from .tar_blocks import TarEncoder, member_bytes
from .texts import Texts

__all__ = ["MAX_SAMPLE_BYTES", "ShardWriter", "Sink", "open_writer", "raw_row_bytes"]

MAX_SAMPLE_BYTES = 5 << 30  # an object store takes one PUT of at most 5 GiB, and a sample is never cut
_ARROW_ROW_BYTES = 8 + 24  # key: offset, and a length that is usual


class Sink(Protocol):
    """Takes a shard's bytes strictly in order; may take fewer than given and say so."""

    def write(self, data: bytes, /) -> int | None:
        """Take bytes; returns how many, None for all."""
        ...


class BlockEncoder(Protocol):
    """What a format is, to the writer."""

    def head(self) -> bytes:
        """Bytes before the first block."""
        ...

    def encode(
        self, rows: Sequence[Row]
    ) -> tuple[bytes, int, NDArray[np.uint64] | None, NDArray[np.uint64] | None]:
        """(stored bytes, raw size, field offsets, field sizes) of a block."""
        ...

    def tail(self) -> bytes:
        """Bytes after the last block; nothing is encoded afterwards."""
        ...


def open_writer(
    sink: Sink,
    *,
    format: str = "tar",
    compression: str = "none",
    schema: Schema,
    block_rows: int,
) -> ShardWriter:
    """A writer of one shard.

    Args:
        sink: Gets the shard's bytes, strictly in order; hashing and publishing them is the caller's.
        format: ``tar`` or ``arrow``.
        compression: ``none``, ``zstd``, ``zstd:LEVEL`` or, for arrow, ``lz4``.
        schema: Fields of every row.
        block_rows: Most rows that a block may hold.

    Raises:
        SchemaError: unknown format or compression, or a pair that does not exist.
        UsageError: `block_rows` below 1.
    """
    compression = normalise_compression(compression)
    extension(format, compression)
    if block_rows < 1:
        raise UsageError(f"block_rows {block_rows}: expected at least 1")
    encoder: BlockEncoder = (TarEncoder if format == "tar" else ArrowEncoder)(schema, compression)
    return ShardWriter(
        sink, encoder, format=format, compression=compression, schema=schema, block_rows=block_rows
    )


def raw_row_bytes(format: str, schema: Schema, payload_sizes: Sequence[int]) -> int:
    """Raw bytes that a row takes: exact for tar; for arrow an estimate that takes a key of 24 bytes.

    Args:
        format: ``tar`` or ``arrow``.
        schema: Fields, in order.
        payload_sizes: Bytes of each field's canonical payload.
    """
    if format == "tar":
        return sum(
            member_bytes(kind, size) for kind, size in zip(schema.values(), payload_sizes, strict=True)
        )
    fixed = sum(8 for kind in schema.values() if kind.item_bytes is None)
    return sum(payload_sizes) + fixed + _ARROW_ROW_BYTES


class ShardWriter:
    """Writes one shard: `write_block` for each block, then `finish`.

    After an error the shard is broken and what the sink has is to be thrown away; further calls are refused.
    """

    def __init__(
        self,
        sink: Sink,
        encoder: BlockEncoder,
        *,
        format: str,
        compression: str,
        schema: Schema,
        block_rows: int,
    ) -> None:
        self.format = format
        self.compression = compression
        self.schema = schema
        self.block_rows = block_rows
        self._sink = sink
        self._encoder = encoder
        self._usable = True
        self._key_limit = max_key_bytes(schema, format)
        self._item_bytes = [
            (name, kind.item_bytes, kind.numpy_dtype.itemsize) for name, kind in schema.items()
        ]
        self._seen: set[str] = set()
        self._rows: list[Row] = []  # of every block, without payloads
        self._starts = [0]
        self._sizes: list[int] = []
        self._raw_sizes: list[int] = []
        self._xxh3: list[int] = []
        self._sha256: list[bytes] = []
        self._field_offsets: list[NDArray[np.uint64]] = []
        self._field_sizes: list[NDArray[np.uint64]] = []
        head = encoder.head()
        self._head = (len(head), hashlib.sha256(head).hexdigest())
        self._written = 0
        self._write(head)

    def write_block(self, rows: Sequence[Row]) -> None:
        """Write one block of 1 to `block_rows` rows.

        Raises:
            SampleError: a key is invalid or already in the shard, payloads do not fit the schema, or a sample
            is above 5 GiB. UsageError: no rows or too many, or the writer has finished or failed.
        """
        if not self._usable:
            raise UsageError("this shard writer has finished or failed; open another")
        if not 1 <= len(rows) <= self.block_rows:
            raise UsageError(f"a block of {len(rows)} rows, expected 1 to {self.block_rows}")
        self._usable = False
        for row in rows:
            self._check(row)
        stored, raw_size, offsets, sizes = self._encoder.encode(rows)
        if offsets is not None and sizes is not None:
            self._field_offsets.append(offsets)
            self._field_sizes.append(sizes)
        self._rows.extend(row._replace(payloads=()) for row in rows)
        self._starts.append(len(self._rows))
        self._sizes.append(len(stored))
        self._raw_sizes.append(raw_size)
        self._xxh3.append(xxh3(stored))
        self._sha256.append(hashlib.sha256(stored).digest())
        self._write(stored)
        self._usable = True

    def finish(self) -> ShardIndex:
        """Write what follows the last block and return the shard's index.

        Raises:
            UsageError: the writer has finished or failed already.
        """
        if not self._usable:
            raise UsageError("this shard writer has finished or failed; open another")
        self._usable = False
        tail = self._encoder.tail()
        self._write(tail)
        sizes = np.array(self._sizes, np.uint64)
        return ShardIndex(
            format=self.format,
            compression=self.compression,
            schema=self.schema,
            rows=len(self._rows),
            block_rows=self.block_rows,
            shard_size=self._written,
            head_size=self._head[0],
            head_sha256=self._head[1],
            tail_sha256=hashlib.sha256(tail).hexdigest(),
            block_offset=(self._head[0] + np.cumsum(sizes, dtype=np.uint64) - sizes).astype(np.uint64),
            block_size=sizes,
            block_raw_size=np.array(self._raw_sizes, np.uint64),
            block_start=np.array(self._starts, np.int64),
            block_xxh3=np.array(self._xxh3, np.uint64),
            block_sha256=np.frombuffer(b"".join(self._sha256), np.uint8).reshape(-1, 32),
            key_texts=Texts.pack([row.key for row in self._rows]),
            **self._field_columns(),
            **_lineage(self._rows),
        )

    def _write(self, data: bytes) -> None:
        self._written += len(data)
        view = memoryview(data)
        while view:
            taken = self._sink.write(view)  # type: ignore[arg-type]
            view = view[len(view) if taken is None else taken :]

    def _check(self, row: Row) -> None:
        check_key(row.key, self._key_limit)
        if row.key in self._seen:
            raise SampleError(
                f"key {row.key!r} appears twice in one shard; keys name samples, so give each its own"
            )
        self._seen.add(row.key)
        if len(row.payloads) != len(self._item_bytes):
            raise SampleError(
                f"key {row.key!r}: {len(row.payloads)} payloads for {len(self._item_bytes)} fields"
            )
        total = 0
        for (name, fixed, item), payload in zip(self._item_bytes, row.payloads, strict=True):
            size = len(payload)
            total += size
            if size != fixed if fixed is not None else size % item:
                raise SampleError(
                    f"key {row.key!r}, field {name!r}: payload of {size} bytes does not fit the schema"
                )
        if total > MAX_SAMPLE_BYTES:
            raise SampleError(
                f"key {row.key!r}: a sample of {total} bytes, at most {MAX_SAMPLE_BYTES} (5 GiB) fit a shard"
            )

    def _field_columns(self) -> dict[str, Any]:
        if self.format != "tar":
            return {}
        empty = np.empty((0, len(self.schema)), np.uint64)
        return {
            "field_offset": np.concatenate([empty, *self._field_offsets]),
            "field_size": np.concatenate([empty, *self._field_sizes]),
        }


def _lineage(rows: Sequence[Row]) -> dict[str, Any]:
    """Optional columns of the index; those that no row needs are absent."""
    columns: dict[str, Any] = {}
    names = list(dict.fromkeys(row.source[0] for row in rows if row.source is not None))
    if names:
        number = {name: place for place, name in enumerate(names)}
        columns["source_names"] = tuple(names)
        columns["source_id"] = np.array(
            [-1 if row.source is None else number[row.source[0]] for row in rows], np.int32
        )
        columns["source_row"] = np.array(
            [0 if row.source is None else row.source[1] for row in rows], np.int64
        )
    rewritten = [
        (place, row.original_key)
        for place, row in enumerate(rows)
        if row.original_key is not None and row.original_key != row.key
    ]
    if rewritten:
        columns["original_rows"] = np.array([place for place, _ in rewritten], np.int64)
        columns["original_texts"] = Texts.pack([text for _, text in rewritten])
    if any(row.stratum is not None for row in rows):
        columns["row_stratum"] = np.array(
            [-1 if row.stratum is None else row.stratum for row in rows], np.int32
        )
    return columns
