"""Samples encoded by columns, spooled and read back by blocks are those that go one by one."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.dataset.encoding import (
    CLASS_AXIS,
    EncodedRow,
    EncodedRows,
    RowEncoder,
    encode_columns,
    ordinal_identity,
)
from shardkit.dataset.scratch import RowSpool
from shardkit.dataset.scratch_reading import ScratchReader
from shardkit.errors import IntegrityError
from shardkit.formats import Row, RowBlock, Schema
from shardkit.formats.block import payloads_of

TYPES = ["bool", "int64", "uint8", "float16", "int32[5]", "float64[2,3]"]
COLUMNS = ("identity", "raw_bytes", "split", "generated")
RECORDS = ("part", "offset", "length", "check")
ROWS = st.builds(
    EncodedRow,
    key=st.none() | st.from_regex(r"[A-Za-z0-9_-]{1,80}", fullmatch=True),
    original_key=st.none() | st.text(min_size=1, max_size=30),
    source=st.none() | st.tuples(st.sampled_from(["a", "bé", "c/d"]), st.integers(0, 2**62)),
    payloads=st.tuples(st.binary(max_size=30), st.binary(min_size=8, max_size=8)),
    identity=st.none(),
    stratum=st.just(("a",)),
    split=st.none(),
    raw_bytes=st.just(1),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    types=st.lists(st.sampled_from(TYPES), min_size=1, max_size=4),
    rows=st.integers(1, 40),
    axes=st.sampled_from(["", "f0", "label", CLASS_AXIS, "both"]),
    split_by=st.sampled_from([None, "label"]),
    run_bytes=st.integers(1, 3000),
    seed=st.none() | st.integers(0, 9),
)
def test_columns_are_spooled_as_rows_are(
    tmp_path: Path,
    types: list[str],
    rows: int,
    axes: str,
    split_by: str | None,
    run_bytes: int,
    seed: int | None,
) -> None:
    schema = Schema.parse({**{f"f{n}": kind for n, kind in enumerate(types)}, "label": "int64"})
    random = np.random.default_rng(rows)
    columns: dict[str, Any] = {"label": random.integers(0, 3, rows)}
    for name, kind in list(schema.items())[:-1]:
        columns[name] = random.integers(0, 2, (rows, *kind.shape)).astype(kind.numpy_dtype)
    stratify = {"": [], "both": ["label", CLASS_AXIS]}.get(axes, [axes])
    if "f0" in stratify and types[0] not in ("bool", "int64", "uint8"):
        stratify = []
    encoder = RowEncoder(schema, "tar", stratify=stratify, classes=("x", "y", "ä"), split_by=split_by)
    found = encode_columns(encoder, columns, "été.npy", 7)
    assert found is not None
    spools = [
        RowSpool(
            str(tmp_path), f"part-{secrets.token_hex(8)}", seed=seed, run_bytes=run_bytes, always_file=True
        )
        for _ in range(2)
    ]
    spools[0].append_rows(found)
    for row in range(rows):
        sample = {name: column[row] for name, column in columns.items()}
        encoded = encoder.encode(sample, None, ("été.npy", 7 + row), where="")
        assert encoded.identity is not None
        spools[1].append(encoded, encoded.identity)
    (by_column, part), (by_row, other) = spools[0].finish(), spools[1].finish()
    assert part is not None
    assert other is not None
    for name in COLUMNS:
        assert getattr(by_column, name).tolist() == getattr(by_row, name).tolist(), name
    for name in RECORDS:
        assert getattr(by_column.records, name).tolist() == getattr(by_row.records, name).tolist(), name
    texts = [[held.strata[n] for n in held.stratum.tolist()] for held in (by_column, by_row)]
    assert texts[0] == texts[1]
    one, another = (bytearray(int(by_row.records.length.sum()) + 1) for _ in range(2))
    part.read_into(0, 0, memoryview(one))
    other.read_into(0, 0, memoryview(another))
    assert one == another
    for spool in spools:
        spool.drop()


def test_what_has_to_be_converted_goes_row_by_row() -> None:
    encoder = RowEncoder(Schema.parse({"n": "int32", "t": "str"}), "tar")
    texts = np.array(["a", "b"])
    assert encode_columns(encoder, {"n": np.zeros(2, np.int32), "t": texts}, "s", 0) is None
    encoder = RowEncoder(
        Schema.parse({"n": "int32", "label": "int64"}), "tar", stratify=[CLASS_AXIS], classes=["a"]
    )
    good: dict[str, Any] = {"n": np.zeros(2, np.int32), "label": np.zeros(2, np.int64)}
    assert isinstance(encode_columns(encoder, good, "s", 0), EncodedRows)
    for other in (
        {"n": np.zeros(2, np.int64)},
        {"n": np.zeros(2, ">i4")},
        {"n": np.zeros((2, 1), np.int32)},
        {"label": np.array([0, 1])},
        {"more": np.zeros(2)},
    ):
        assert encode_columns(encoder, {**good, **other}, "s", 0) is None


def rows_of(block: RowBlock) -> list[Row]:
    originals = dict(block.originals)
    assert block.source_id is not None
    assert block.source_row is not None
    columns = [payloads_of(column) for column in block.columns]
    return [
        Row(
            key,
            tuple(bytes(column[place]) for column in columns),
            originals.get(place),
            (block.source_names[source], int(block.source_row[place])) if source >= 0 else None,
            None if block.stratum is None else int(block.stratum[place]),
        )
        for place, (key, source) in enumerate(zip(block.keys, block.source_id.tolist(), strict=True))
    ]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(ROWS, min_size=1, max_size=30),
    st.none() | st.integers(0, 9),
    st.integers(1, 900),
    st.integers(0, 99),
)
def test_blocks_hold_the_rows_that_were_spooled(
    tmp_path: Path, rows: list[EncodedRow], seed: int | None, run_bytes: int, random: int
) -> None:
    schema = Schema.parse({"blob": "bytes", "n": "int64"})
    spool = RowSpool(str(tmp_path), f"part-{secrets.token_hex(8)}", seed=seed, run_bytes=run_bytes)
    for number, row in enumerate(rows):
        spool.append(row, ordinal_identity(number))
    columns, part = spool.finish()
    assert part is not None
    order = np.random.default_rng(random).permutation(len(rows))
    wanted = columns.records[order]
    expected = [
        Row(row.key or f"{number:010d}", row.payloads, row.original_key, row.source)
        for number, row in ((number, rows[number]) for number in order.tolist())
    ]
    reader = ScratchReader(part, schema)
    reader.read(columns.records[:1], order[:1])  # a buffer that is too small, and is replaced
    held = reader.read(wanted, order)
    middle = random % len(rows)
    found = [row for first, last in ((0, middle), (middle, len(rows))) if first < last
             for row in rows_of(held.block(first, last, None))]  # fmt: skip
    assert found == expected
    assert held.payload_bytes[-1] == sum(len(p) for row in rows for p in row.payloads)
    wrong = np.where(np.arange(len(order)) == len(order) - 1, wanted.check ^ 1, wanted.check)
    with pytest.raises(IntegrityError, match=f"row {order[-1]} changed"):
        reader.read(dataclasses.replace(wanted, check=wrong), order)
    spool.drop()
