"""Record batches hold the payloads of their samples, and rows that cannot be stored are named."""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.dataset.encoding import (
    CLASS_AXIS,
    RowEncoder,
    RowOrigin,
    sample_batch,
    spool_array,
)
from shardkit.errors import SampleError
from shardkit.formats import Schema
from shardkit.formats.block import payload_column, payloads_of, stored_columns

KINDS = {
    "bool": st.booleans(),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint8": st.integers(0, 255),
    "float16": st.floats(width=16, allow_nan=False),
    "int32[5]": st.lists(st.integers(-9, 9), min_size=5, max_size=5),
    "bool[3]": st.lists(st.booleans(), min_size=3, max_size=3),
    "bool[*]": st.lists(st.booleans(), max_size=9),
    "float64[2,3]": st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=2, max_size=2),
    "int16[*]": st.lists(st.integers(-9, 9), max_size=9),
    "uint8[*,2]": st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), max_size=4),
    "str": st.text(st.characters(codec="utf-8"), max_size=20),
    "str[*]": st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=4),
    "bytes": st.binary(max_size=30),
    "json": st.dictionaries(st.sampled_from("ab"), st.integers(0, 9)),
    "date": st.dates(),
    "decimal[9,2]": st.integers(-999, 999).map(decimal.Decimal),
}


@st.composite
def samples_of_a_schema(draw: st.DrawFn) -> tuple[Schema, list[dict[str, Any]]]:
    names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5))
    optional = draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    fields = {f"f{n}": (name, mark) for n, (name, mark) in enumerate(zip(names, optional, strict=True))}
    row = {field: st.none() | KINDS[name] if mark else KINDS[name] for field, (name, mark) in fields.items()}
    rows = draw(st.lists(st.fixed_dictionaries({**row, "label": st.integers(0, 2)}), min_size=1, max_size=30))
    types = {field: name + "?" * mark for field, (name, mark) in fields.items()}
    return Schema.parse({**types, "label": "int64"}), rows


@settings(max_examples=80, deadline=None)
@given(samples_of_a_schema(), st.integers(0, 99))
def test_record_batches_hold_the_payloads_of_the_samples(
    given_: tuple[Schema, list[dict[str, Any]]], start: int
) -> None:
    """Also of a slice, and of rows that were taken."""
    schema, rows = given_
    encoded = [schema.encode(row, where="") for row in rows]
    batch = sample_batch(schema, encoded)
    batch.validate(full=True)
    start = start % len(rows)
    order = np.random.default_rng(start).permutation(len(rows))
    for one, expected in (
        (batch, encoded),
        (batch.slice(start), encoded[start:]),
        (batch.take(order), [encoded[place] for place in order]),
    ):
        columns = [payloads_of(column) for column in stored_columns(schema, one)]
        assert list(zip(*[map(bytes, column) for column in columns], strict=True)) == expected
        spooled = [
            payload_column(kind, spool_array(kind, column, name)[:])
            for (name, kind), column in zip(schema.stored.items(), stored_columns(schema, one), strict=True)
        ]
        assert list(zip(*[map(bytes, payloads_of(one)) for one in spooled], strict=True)) == expected


def test_rows_that_cannot_be_stored_are_named() -> None:
    schema = Schema.parse({"n": "int32", "label": "int64", "name": "str"})
    encoder = RowEncoder(schema, "tar", stratify=[CLASS_AXIS, "name"], classes=["a"])
    rows = [{"n": n, "label": int(n == 1), "name": "" if n == 2 else "x"} for n in range(4)]
    batch = sample_batch(schema, [schema.encode(row, where="") for row in rows])
    origin = RowOrigin(["s"] * 4, np.arange(4))
    errors = encoder.encode_rows(stored_columns(schema, batch), origin, "row {}".format)
    assert isinstance(errors, dict)
    assert errors.keys() == {1, 2}
    assert "row 1: label 1 has no class name" in str(errors[1])
    assert "row 2: field 'name' has 0 characters" in str(errors[2])
    for row, expected in ((1, errors[1]), (2, errors[2])):
        with pytest.raises(SampleError) as error:
            encoder.check_row(schema.encode(rows[row], where=""), None, f"row {row}")
        assert str(error.value) == str(expected)
