"""Rows gathered from blocks equal the rows that were written, of every type, size, format and compression."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import islice
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
    schema: Schema, samples: Sequence[dict[str, Any]], sizes: Sequence[int], format: str, compression: str
) -> list[GatherColumns]:
    """Blocks of so many rows each."""
    sink = io.BytesIO()
    writer = ShardWriter(sink, format=format, compression=compression, schema=schema, block_rows=max(sizes))
    rows = iter([Row(f"k{n}", schema.encode(sample, where=str(n))) for n, sample in enumerate(samples)])
    for size in sizes:
        writer.write_block(list(islice(rows, size)))
    index, data = writer.finish(), sink.getvalue()
    spans = zip(index.block_offset.tolist(), index.block_size.tolist(), strict=True)
    stored = [data[start : start + size] for start, size in spans]
    return [GatherColumns(read_block(one, index, n), list(schema)) for n, one in enumerate(stored)]


def _rows(schema: Schema, sizes: Sequence[int], wanted: np.ndarray[Any, Any]) -> RowAddresses:
    starts = np.concatenate([[0], np.cumsum(sizes)])
    which = np.searchsorted(starts, wanted, side="right") - 1
    return RowAddresses(schema, list(schema), which, wanted - starts[which])


@pytest.mark.parametrize(
    ("format", "compression"),
    [("tar", "none"), ("arrow", "none"), ("arrow", "zstd")],
)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_gather_equals_what_was_written(format: str, compression: str, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    samples = [_sample(n) for n in range(sum(sizes))]
    blocks = _blocks(SCHEMA, samples, sizes, format, compression)
    wanted = np.array(data.draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=20)), dtype=np.int64)
    rows, facts = _rows(SCHEMA, sizes, wanted), table(blocks)
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
    samples = [_sample(n) for n in range(4)]
    blocks = _blocks(SCHEMA, samples, [4], "arrow", "none")
    rows = RowAddresses(SCHEMA, list(SCHEMA), np.zeros(4, dtype=np.int64), np.arange(4))
    got = rows.take(table(blocks), [0, 4])[0]
    del blocks
    np.testing.assert_array_equal(got["image"], np.stack([s["image"] for s in samples]))


def test_a_row_past_the_end_of_its_block_is_refused() -> None:
    blocks = _blocks(SCHEMA, [_sample(n) for n in range(8)], [3, 5], "arrow", "none")
    rows = RowAddresses(SCHEMA, list(SCHEMA), np.array([1, 0]), np.array([4, 3]))
    with pytest.raises(FormatError, match="fewer rows"):
        rows.take(table(blocks), [0, 2])
