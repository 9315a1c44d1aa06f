"""Rows gathered from many blocks equal the rows that were written, for every field type, format and compression."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import FormatError
from shardkit.formats import Row, Schema, ShardWriter, read_block
from shardkit.loader.gather import GatherColumns, RowAddresses
from tests.property.facts_of_blocks import table

pytestmark = pytest.mark.usefixtures("copies")

SCHEMA = Schema.parse(
    {
        "image": "uint8[3,5]",
        "label": "int64",
        "score": "float32",
        "flag": "bool",
        "big": "int64[5000]",
        "tokens": "int32[*]",
        "text": "str",
        "blob": "bytes",
        "meta": "json",
    }
)


def _sample(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "image": rng.integers(0, 256, (3, 5), dtype=np.uint8),
        "label": number * 7 - 3,
        "score": np.float32(number) / 3,
        "flag": number % 3 == 0,
        "big": rng.integers(-(2**62), 2**62, 5000, dtype=np.int64),
        "tokens": rng.integers(0, 99, number % 5, dtype=np.int32),
        "text": "é" * (number % 4) + str(number),
        "blob": bytes(rng.integers(0, 256, number % 7, dtype=np.uint8)),
        "meta": {"n": number, "l": [None, 1.5, "x"]},
    }


def _blocks(
    format: str, compression: str, sizes: list[int]
) -> tuple[list[GatherColumns], list[dict[str, Any]]]:
    sink = io.BytesIO()
    writer = ShardWriter(sink, format=format, compression=compression, schema=SCHEMA, block_rows=max(sizes))
    samples = [_sample(n) for n in range(sum(sizes))]
    first = 0
    for size in sizes:
        rows = [Row(f"k{n}", SCHEMA.encode(samples[n], where=str(n))) for n in range(first, first + size)]
        writer.write_block(rows)
        first += size
    index = writer.finish()
    data = sink.getvalue()
    blocks = []
    for number in range(index.blocks):
        start, size = int(index.block_offset[number]), int(index.block_size[number])
        blocks.append(GatherColumns(read_block(data[start : start + size], index, number), list(SCHEMA)))
    return blocks, samples


@pytest.mark.parametrize(
    ("format", "compression"),
    [("tar", "none"), ("arrow", "none"), ("arrow", "zstd")],
)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_gather_equals_what_was_written(format: str, compression: str, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    blocks, samples = _blocks(format, compression, sizes)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    wanted = np.array(data.draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=20)), dtype=np.int64)
    block = np.searchsorted(starts, wanted, side="right") - 1
    rows, facts = RowAddresses(SCHEMA, list(SCHEMA), block, wanted - starts[block]), table(blocks)
    cut = data.draw(st.integers(0, len(wanted)))
    head, got = rows.take(facts, [0, cut])[0], rows.take(facts, [0, len(wanted)])[0]
    np.testing.assert_array_equal(head["image"], got["image"][:cut])
    assert head["text"] + rows.take(facts, [cut, len(wanted)])[0]["text"] == got["text"]
    for part, whole in zip(
        rows.take(facts, [0, cut, len(wanted)]), (head, rows.take(facts, [cut, len(wanted)])[0]), strict=True
    ):
        np.testing.assert_equal(part, whole)  # together as alone
    expected = [samples[n] for n in wanted.tolist()]
    for name in ("image", "label", "score", "flag", "big"):
        dtype = np.dtype(SCHEMA[name].dtype)
        stacked = np.array([s[name] for s in expected], dtype=dtype).reshape(len(wanted), *SCHEMA[name].shape)
        assert got[name].dtype == dtype
        np.testing.assert_array_equal(got[name], stacked)
    for name in ("text", "blob", "meta"):
        assert got[name] == [s[name] for s in expected]
    values, borders = got["tokens"]
    assert len(borders) == len(wanted) + 1
    for position, sample in enumerate(expected):
        np.testing.assert_array_equal(values[borders[position] : borders[position + 1]], sample["tokens"])


def test_what_was_gathered_does_not_change_when_the_block_is_gone() -> None:
    blocks, samples = _blocks("arrow", "none", [4])
    rows = RowAddresses(SCHEMA, list(SCHEMA), np.zeros(4, dtype=np.int64), np.arange(4))
    got = rows.take(table(blocks), [0, 4])[0]
    del blocks
    np.testing.assert_array_equal(got["image"], np.stack([s["image"] for s in samples]))


def test_a_row_past_the_end_of_its_block_is_refused() -> None:
    blocks, _ = _blocks("arrow", "none", [3, 5])
    rows = RowAddresses(SCHEMA, list(SCHEMA), np.array([1, 0]), np.array([4, 3]))
    with pytest.raises(FormatError, match="fewer rows"):
        rows.take(table(blocks), [0, 2])
