"""What every shard format must do: subclass `FormatConformance` and name format and compression.

The truth that reading is held to is the samples that went in, never another output of the code under test.
"""

from __future__ import annotations

import dataclasses
import io
import struct
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from shardkit.errors import (
    FormatError,
    IntegrityError,
    NotFoundError,
    SampleError,
    SchemaError,
    UsageError,
)
from shardkit.formats import (
    Block,
    FixedColumn,
    Row,
    Schema,
    ShardIndex,
    ShardWriter,
    max_key_bytes,
    read_block,
)
from tests.whole_shard import check_whole_shard, find_damage

FORMAT_PAIRS: tuple[tuple[str, str], ...] = (
    ("tar", "none"),
    ("arrow", "none"),
    ("arrow", "zstd"),
    ("arrow", "zstd:9"),
)
"""Every (format, compression) that shards are written in."""

EXAMPLE_SCHEMA = Schema.parse(
    {
        "image": "bytes",
        "text": "str",
        "meta": "json",
        "label": "int64",
        "count": "uint64",
        "flag": "bool",
        "loudness": "float32",
        "small": "float16",
        "pixels": "uint8[4,3]",
        "half": "float16[2,1,2]",
        "mask": "bool[5]",
        "tokens": "int32[*]",
        "marks": "bool[*]",
        "signal": "float64[*]",
    }
)
"""A schema with a field of every kind."""


def example_samples(count: int) -> list[dict[str, Any]]:
    """Samples at the edges of every type: empty, negative, extreme, NaN with payload bits, not ASCII."""
    odd_nan = struct.unpack("<f", struct.pack("<I", 0x7FC12345))[0]
    return [
        {
            "image": (b"\xff\xd8\xff", b"", b"\x89PNG\r\n\x1a\n", b"plain")[i % 4] + bytes(range(i % 251)),
            "text": ("", "plain", "größer \U0001f600", "line\nfeed\x00")[i % 4] * (i % 5),
            "meta": ({}, [1, 2.5, None], {"b": {"a": "ü"}, "a": [True]}, "x")[i % 4],
            "label": (0, -(2**63), 2**63 - 1, -7)[i % 4],
            "count": (0, 2**64 - 1, 10**19, i)[i % 4],
            "flag": i % 3 == 0,
            "loudness": np.array((0.0, -0.0, odd_nan, float("inf"))[i % 4], np.float32),
            "small": np.float16(i / 8),
            "pixels": np.arange(12, dtype=np.uint8).reshape(4, 3) + np.uint8(i % 200),
            "half": np.array([[[i, -i]], [[0.5, np.nan]]], np.float16),
            "mask": np.arange(5) % (i % 4 + 1) == 0,
            "tokens": np.arange(i % 9, dtype=np.int32) - 4,
            "marks": np.arange(i % 11) % 2 == 0,
            "signal": np.linspace(-1, 1, i % 3) if i % 3 else np.empty(0),
        }
        for i in range(count)
    ]


def write_shard(
    samples: Sequence[Mapping[str, object]],
    schema: Schema,
    *,
    format: str,
    compression: str,
    block_rows: int,
    keys: Sequence[str] | None = None,
) -> tuple[bytes, ShardIndex]:
    """A shard in memory: its bytes and its index."""
    sink = io.BytesIO()
    writer = ShardWriter(sink, format=format, compression=compression, schema=schema, block_rows=block_rows)
    names = keys or [f"key-{place}" for place in range(len(samples))]
    rows = [Row(key, schema.encode(sample, where=key)) for key, sample in zip(names, samples, strict=True)]
    for start in range(0, len(rows), block_rows):
        writer.write_block(rows[start : start + block_rows])
    index = writer.finish()
    return sink.getvalue(), index


def stored_block(data: bytes, index: ShardIndex, block: int) -> memoryview:
    """The stored bytes of one block of a shard in memory."""
    start = int(index.block_offset[block])
    return memoryview(data)[start : start + int(index.block_size[block])]


def read_samples(data: bytes, index: ShardIndex) -> list[dict[str, object]]:
    """Every sample of a shard in memory, block by block."""
    samples: list[dict[str, object]] = []
    for number in range(index.blocks):
        block = read_block(stored_block(data, index, number), index, number)
        samples += [block.sample(row) for row in range(block.rows)]
    return samples


class FormatConformance:
    """Tests that a (format, compression) pair passes; subclasses set the two attributes."""

    format: ClassVar[str]
    compression: ClassVar[str]
    count: ClassVar[int] = 23
    block_rows: ClassVar[int] = 8

    @pytest.fixture
    def samples(self) -> list[dict[str, Any]]:
        """What is written: `count` samples of `EXAMPLE_SCHEMA`."""
        return example_samples(self.count)

    @pytest.fixture
    def shard(self, samples: list[dict[str, Any]]) -> tuple[bytes, ShardIndex]:
        """The bytes of a shard of them, and its index."""
        return self.write(samples)

    def write(self, samples: Sequence[Mapping[str, object]]) -> tuple[bytes, ShardIndex]:
        """A shard of the pair under test."""
        return write_shard(
            samples,
            EXAMPLE_SCHEMA,
            format=self.format,
            compression=self.compression,
            block_rows=self.block_rows,
        )

    def writer(self, sink: Any) -> ShardWriter:
        """A writer of the pair under test."""
        return ShardWriter(
            sink,
            format=self.format,
            compression=self.compression,
            schema=EXAMPLE_SCHEMA,
            block_rows=self.block_rows,
        )

    def blocks(self, shard: tuple[bytes, ShardIndex]) -> list[Block]:
        """Every block of a shard, decoded."""
        data, index = shard
        return [
            read_block(stored_block(data, index, n), index, n, verify="strong") for n in range(index.blocks)
        ]

    def test_columns_are_read_only(self, shard: tuple[bytes, ShardIndex]) -> None:
        block = self.blocks(shard)[0]
        for name in EXAMPLE_SCHEMA:
            column = block.column(name)
            array = column.values if isinstance(column, FixedColumn) else column.data
            assert not array.flags.writeable, name

    def test_samples_are_fresh_copies(self, shard: tuple[bytes, ShardIndex]) -> None:
        block = self.blocks(shard)[0]
        first, second = block.sample(3), block.sample(3)
        tokens = first["tokens"]
        assert isinstance(tokens, np.ndarray)
        tokens[:] = 99
        assert not np.array_equal(tokens, np.asarray(second["tokens"]))

    def test_same_samples_same_bytes(
        self, shard: tuple[bytes, ShardIndex], samples: list[dict[str, Any]]
    ) -> None:
        data, index = self.write(samples)
        assert data == shard[0]
        assert index.to_bytes() == shard[1].to_bytes()

    def test_blocks_cover_the_rows(self, shard: tuple[bytes, ShardIndex]) -> None:
        index = shard[1]
        assert index.blocks == 3
        assert [index.block_of(row) for row in (0, 7, 8, 22)] == [(0, 0), (0, 7), (1, 0), (2, 6)]
        with pytest.raises(NotFoundError, match="23"):
            index.block_of(23)
        with pytest.raises(NotFoundError):
            index.key(-1)

    def test_every_byte_belongs_to_a_part(self, shard: tuple[bytes, ShardIndex]) -> None:
        data, index = shard
        check_whole_shard(data, index)
        assert find_damage(data, index) == []
        step = max(1, len(data) // 97)
        for position in range(0, len(data), step):
            broken = bytearray(data)
            broken[position] ^= 0x10
            damage = find_damage(broken, index)
            assert len(damage) == 1, position
            assert damage[0].offset <= position < damage[0].offset + damage[0].size

    @pytest.mark.parametrize("verify", ["fast", "strong"])
    def test_a_flipped_bit_is_an_integrity_error(self, shard: tuple[bytes, ShardIndex], verify: Any) -> None:
        data, index = shard
        for number in range(index.blocks):
            stored = stored_block(data, index, number)
            for position in range(0, len(stored), max(1, len(stored) // 41)):
                broken = bytearray(stored)
                broken[position] ^= 1 << position % 8
                with pytest.raises(IntegrityError, match=f"block {number}"):
                    read_block(broken, index, number, verify=verify)

    def test_other_lengths_and_blocks_are_integrity_errors(self, shard: tuple[bytes, ShardIndex]) -> None:
        data, index = shard
        stored = stored_block(data, index, 0)
        for other in (stored[:-1], bytes(stored) + b"\x00", b"", stored_block(data, index, 1)):
            with pytest.raises(IntegrityError):
                read_block(other, index, 0)
        with pytest.raises(NotFoundError, match="block 3"):
            read_block(stored, index, 3)
        with pytest.raises(UsageError, match="off"):
            read_block(stored, index, 0, verify="off")  # type: ignore[arg-type]

    def test_unaligned_bytes_read_the_same(self, shard: tuple[bytes, ShardIndex]) -> None:
        data, index = shard
        stored = stored_block(data, index, 1)
        expected = read_block(stored, index, 1)
        for shift in (1, 3, 4):
            moved = memoryview(bytes(shift) + bytes(stored))[shift:]
            block = read_block(moved, index, 1)
            assert [block.payloads(row) for row in range(block.rows)] == [
                expected.payloads(row) for row in range(expected.rows)
            ]

    def test_an_empty_shard_is_a_shard(self) -> None:
        data, index = self.write([])
        check_whole_shard(data, index)
        assert (index.rows, index.blocks) == (0, 0)
        assert ShardIndex.from_bytes(index.to_bytes()).keys() == []

    def test_unknown_field_is_named(self, shard: tuple[bytes, ShardIndex]) -> None:
        with pytest.raises(SchemaError, match="labels"):
            self.blocks(shard)[0].column("labels")
        with pytest.raises(IndexError):
            self.blocks(shard)[0].payloads(8)

    def test_bad_rows_are_refused(self, samples: list[dict[str, Any]]) -> None:
        payloads = EXAMPLE_SCHEMA.encode(samples[1], where="test")
        short = (*payloads[:3], payloads[3][:-1], *payloads[4:])
        limit = max_key_bytes(EXAMPLE_SCHEMA, self.format)
        cases: list[tuple[list[Row], type[Exception], str]] = [
            ([Row("a", payloads), Row("a", payloads)], SampleError, "'a' appears twice"),
            ([Row("a/b", payloads)], SampleError, "a/b"),
            ([Row("", payloads)], SampleError, "''"),
            ([Row("x" * (limit + 1), payloads)], SampleError, str(limit)),
            ([Row("a", payloads[1:])], SampleError, "13 payloads"),
            ([Row("a", short)], SampleError, "label"),
            ([], UsageError, "0 rows"),
            ([Row(f"k{i}", payloads) for i in range(self.block_rows + 1)], UsageError, "9 rows"),
        ]
        for rows, error, message in cases:
            writer = self.writer(io.BytesIO())
            with pytest.raises(error, match=message):
                writer.write_block(rows)

    def test_a_failed_writer_stays_failed(self, samples: list[dict[str, Any]]) -> None:
        payloads = EXAMPLE_SCHEMA.encode(samples[1], where="test")
        writer = self.writer(io.BytesIO())
        writer.write_block([Row("a", payloads)])
        with pytest.raises(SampleError):
            writer.write_block([Row("a", payloads)])
        with pytest.raises(UsageError, match="failed"):
            writer.finish()

    def test_short_writes_are_completed(self, samples: list[dict[str, Any]]) -> None:
        class Reluctant(io.RawIOBase):
            def __init__(self) -> None:
                self.taken = bytearray()

            def write(self, data: Any) -> int:
                self.taken += data[:1000]
                return min(1000, len(data))

        sink = Reluctant()
        writer = self.writer(sink)
        rows = [Row(f"key-{i}", EXAMPLE_SCHEMA.encode(sample, where="x")) for i, sample in enumerate(samples)]
        for start in range(0, len(rows), self.block_rows):
            writer.write_block(rows[start : start + self.block_rows])
        index = writer.finish()
        assert bytes(sink.taken) == self.write(samples)[0]
        assert index.shard_size == len(sink.taken)

    def test_a_block_of_other_keys_is_refused(self, samples: list[dict[str, Any]]) -> None:
        """A block is tied to its rows by its digest and, in arrow, by the keys it holds."""
        keys = [f"kex-{place}" for place in range(self.count)]
        data, index = write_shard(
            samples,
            EXAMPLE_SCHEMA,
            format=self.format,
            compression=self.compression,
            block_rows=self.block_rows,
            keys=keys,
        )
        mine = self.write(samples)[1]
        mixed = dataclasses.replace(index, key_texts=mine.key_texts)
        with pytest.raises(IntegrityError):
            read_block(stored_block(data, index, 0), mine, 0)
        if self.format == "arrow":
            with pytest.raises(FormatError, match="keys"):
                read_block(stored_block(data, index, 0), mixed, 0)
