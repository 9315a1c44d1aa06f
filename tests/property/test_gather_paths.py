"""Rows of all kinds out of any blocks in any order, and rows that are copied in pieces."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.formats import Row, Schema, ShardWriter, read_block
from shardkit.loader.gather import GatherColumns, RowAddresses
from tests.property.facts_of_blocks import table

pytestmark = pytest.mark.usefixtures("copies")

MIXED = Schema.parse(
    {
        "blob": "bytes",
        "small": "bytes",
        "text": "str",
        "meta": "json",
        "tokens": "int16[*]",
        "image": "uint8[3,5]",
        "wide": "float64[4100]",  # more than 32 KiB: copied in pieces, and one such row exceeds what is copied at once
        "label": "int64",
        "flag": "bool",
    }
)


def _mixed(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "blob": rng.bytes(int(rng.integers(0, 9000))) if number % 5 else b"",
        "small": b"s" * (number % 3),
        "text": "ü" * (number % 4),
        "meta": {"n": number},
        "tokens": rng.integers(-99, 99, number % 4, dtype=np.int16),
        "image": rng.integers(0, 256, (3, 5), dtype=np.uint8),
        "wide": rng.normal(size=4100),
        "label": -number,
        "flag": number % 2 == 0,
    }


def _stored(
    schema: Schema, samples: Sequence[dict[str, Any]], sizes: Sequence[int], format: str, compression: str
) -> tuple[list[bytearray], Any]:
    """Stored bytes of blocks of so many rows each, in memory that may be written to, and their index."""
    sink = io.BytesIO()
    writer = ShardWriter(sink, format=format, compression=compression, schema=schema, block_rows=max(sizes))
    first = 0
    for size in sizes:
        writer.write_block(
            [Row(f"k{n}", schema.encode(samples[n], where=f"row {n}")) for n in range(first, first + size)]
        )
        first += size
    index = writer.finish()
    data = sink.getvalue()
    spans = zip(index.block_offset.tolist(), index.block_size.tolist(), strict=True)
    return [bytearray(data[start : start + size]) for start, size in spans], index


def _rows(schema: Schema, sizes: Sequence[int], wanted: np.ndarray[Any, Any]) -> RowAddresses:
    starts = np.concatenate([[0], np.cumsum(sizes)])
    which = np.searchsorted(starts, wanted, side="right") - 1
    return RowAddresses(schema, list(schema), which, wanted - starts[which])


def _expect(got: Any, schema: Schema, name: str, samples: Sequence[dict[str, Any]]) -> None:
    kind = schema[name]
    if kind.kind == "ragged":
        values, borders = got
        assert borders.tolist() == np.cumsum([0, *(len(s[name]) for s in samples)]).tolist()
        np.testing.assert_array_equal(
            values, np.concatenate([np.empty(0, kind.dtype), *(s[name] for s in samples)])
        )
    elif kind.kind in ("scalar", "array"):
        expected = np.array([s[name] for s in samples], dtype=kind.dtype).reshape(-1, *kind.shape)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    else:
        assert got == [s[name] for s in samples]


@pytest.mark.parametrize(("format", "compression"), [("tar", "none"), ("arrow", "none"), ("arrow", "zstd")])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_rows_of_every_kind_are_gathered_from_any_block(
    format: str, compression: str, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    samples = [_mixed(n) for n in range(sum(sizes))]
    stored, index = _stored(MIXED, samples, sizes, format, compression)
    blocks = [
        GatherColumns(read_block(block, index, number), list(MIXED)) for number, block in enumerate(stored)
    ]
    wanted = np.array(data.draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=12)), dtype=np.int64)
    cut = data.draw(st.integers(0, len(wanted)))
    expected = [samples[n] for n in wanted.tolist()]
    rows = _rows(MIXED, sizes, wanted)
    for first, last in ((0, cut), (cut, len(wanted))):
        got = rows.take(table(blocks), [first, last])[0]
        assert list(got) == list(MIXED)
        for name in MIXED:
            _expect(got[name], MIXED, name, expected[first:last])


# Bytes of a row: one piece, many, odd ones, prime ones, primes beyond the largest piece and twice such a prime.
ITEMS = [
    1,
    7,
    127,
    128,
    129,
    257,
    3072,
    4099,
    8192,
    32_767,
    32_768,
    32_769,
    32_771,
    65_542,
    98_304,
    100_003,
    131_072,
]


@settings(max_examples=40, deadline=None)
@given(
    item=st.sampled_from(ITEMS) | st.integers(1, 40_000),
    dtype=st.sampled_from(["uint8", "int16", "float64"]),
    rows=st.sampled_from([1, 2, 3, 63, 64, 500, 501, 502]),
    seed=st.integers(0, 99),
)
def test_rows_cut_into_pieces_are_whole_again(item: int, dtype: str, rows: int, seed: int) -> None:
    size = np.dtype(dtype).itemsize
    columns = max(1, item // size)
    rows = max(1, min(rows, (24 << 20) // (columns * size)))
    rng = np.random.default_rng(seed)
    there = min(rows, 9)
    values = rng.integers(0, 256, (there, columns * size), dtype=np.uint8).view(dtype)
    schema = Schema.parse({"x": f"{dtype}[{columns}]"})
    sizes = [there - there // 2, there // 2] if there > 1 else [1]
    stored, index = _stored(schema, [{"x": row} for row in values], sizes, "arrow", "none")
    blocks = [GatherColumns(read_block(block, index, n), ["x"]) for n, block in enumerate(stored)]
    wanted = rng.integers(0, there, rows)
    got = _rows(schema, sizes, wanted).take(table(blocks), [0, rows])[0]["x"]
    assert got.dtype == np.dtype(dtype)
    assert got.flags.c_contiguous
    assert got.flags.writeable
    np.testing.assert_array_equal(got.view(np.uint8), values[wanted].view(np.uint8))
