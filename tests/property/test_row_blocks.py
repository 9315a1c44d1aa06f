"""A block given field by field has the bytes and the index of the same rows given one by one."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import SampleError, UsageError
from shardkit.formats import FieldType, Row, RowBlock, Schema, ShardWriter
from shardkit.formats.block import payloads_of
from shardkit.formats.schema import DTYPES
from tests.format_conformance import FORMAT_PAIRS
from tests.whole_shard import check_whole_shard

OTHERS = ("str", "int16?", "float32[*]?", "bytes?")


@pytest.mark.parametrize(("format", "compression"), FORMAT_PAIRS)
@settings(max_examples=40, deadline=None)
@given(
    types=st.lists(
        st.sampled_from([*DTYPES, "int32[3]", "uint8[2,5]", "float64[130]", "bool[7]", *OTHERS]), min_size=1, max_size=4
    ),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    data=st.data(),
)  # fmt: skip
def test_blocks_that_are_encoded_together_are_those_of_each(
    format: str, compression: str, types: list[str], sizes: list[int], data: st.DataObject
) -> None:
    schema = Schema.parse({"n": "int64"} | {f"f{place}": text for place, text in enumerate(types)})
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    widths = data.draw(st.sampled_from([[6], [1, 12]]))  # keys of one length, or of two
    gaps = data.draw(st.booleans())
    strata: list[int | None] = data.draw(st.sampled_from([[None], [4, None]]))
    others: dict[str, Any] = {
        "str": lambda: "é" * int(random.integers(0, 40)),
        "int16?": lambda: 7,
        "float32[*]?": lambda: np.arange(int(random.integers(0, 30)), dtype=np.float32),
        "bytes?": lambda: random.bytes(int(random.integers(0, 700))),
    }

    def value(kind: FieldType) -> Any:
        if str(kind) in others:
            return others[str(kind)]()
        raw = random.integers(0, 2 if kind.dtype == "bool" else 256, kind.item_bytes, dtype=np.uint8)
        return raw.view(kind.numpy_dtype).reshape(kind.shape)

    rows = []
    for place in range(sum(sizes)):
        sample = {name: value(kind) for name, kind in schema.items()}
        for name, kind in schema.items():
            if kind.optional and gaps and random.random() < 0.5:
                sample[name] = None
        source = (f"s{place % 3}", place) if place % 4 else None
        stratum = strata[place % len(strata)]
        key = f"{place:0{widths[place % len(widths)]}d}"
        rows.append(
            Row(key, schema.encode(sample, where=""), "é" if place % 5 == 1 else None, source, stratum)
        )
    ends = np.cumsum(sizes).tolist()
    together = dataclasses.replace(RowBlock.of(rows, len(schema.stored)), ends=ends)
    if not gaps and all(kind.item_bytes is not None for kind in schema.stored.values()):
        columns: Any = [  # not contiguous as a whole
            np.array([[0, *part] for part in payloads_of(column)], np.uint8)[:, 1:]
            for column in together.columns
        ]
        together = dataclasses.replace(together, columns=columns)
    written = []
    with ThreadPoolExecutor(2) as executor:
        for blocks, hashing in (([rows[a:b] for a, b in pairwise([0, *ends])], None), ([together], executor)):
            sink = io.BytesIO()
            writer = ShardWriter(
                sink,
                format=format,
                compression=compression,
                schema=schema,
                block_rows=max(sizes),
                executor=hashing,
            )
            for block in blocks:
                writer.write_block(block)
            index = writer.finish()
            written.append(hashlib.sha256(sink.getvalue() + index.to_bytes()).digest())
    assert written[0] == written[1]


@pytest.mark.parametrize("ends", [[2], [0, 3], [3, 3], [1, 4], [2, 1]])
def test_blocks_that_are_not_all_of_the_rows_are_refused(ends: list[int]) -> None:
    schema = Schema.parse({"n": "int64"})
    writer = ShardWriter(io.BytesIO(), schema=schema, block_rows=3)
    rows = RowBlock(["a", "b", "c"], [np.zeros((3, 8), np.uint8)], ends=ends)
    with pytest.raises(UsageError, match=r"a block of 0 rows|blocks of 2 rows|of 4 rows|a block of -1 rows"):
        writer.write_block(rows)


def test_many_blocks_are_hashed_in_their_order() -> None:
    schema = Schema.parse({"tokens": "int32[600]"})
    with ThreadPoolExecutor(3) as executor:
        sink = io.BytesIO()
        writer = ShardWriter(sink, schema=schema, block_rows=4, executor=executor)
        for block in range(40):
            payloads = np.full((4, 2400), block, np.uint8)
            writer.write_block(RowBlock([f"{block}-{row}" for row in range(4)], [payloads]))
        index = writer.finish()
    check_whole_shard(sink.getvalue(), index)
    assert len({bytes(digest) for digest in index.block_sha256}) == 40


def test_columns_that_do_not_fit_are_named() -> None:
    schema = Schema.parse({"tokens": "int32[2]", "blob": "bytes"})
    for columns, match in (
        ([np.zeros((2, 7), np.uint8), [b"", b""]], "'a', field 'tokens'.*7 bytes"),
        ([np.zeros((2, 8), np.uint8)], "1 columns of payloads for 2 fields"),
    ):
        with pytest.raises(SampleError, match=match):
            ShardWriter(io.BytesIO(), schema=schema, block_rows=2).write_block(RowBlock(["a", "b"], columns))  # type: ignore[arg-type]
    columns = [np.zeros((2, 8), np.uint8), [b"", b""]]
    with pytest.raises(SampleError, match="'a' appears twice"):
        ShardWriter(io.BytesIO(), schema=schema, block_rows=2).write_block(RowBlock(["a", "a"], columns))  # type: ignore[arg-type]
