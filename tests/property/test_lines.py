"""Lines that are parsed together have the values that each has by itself, and columns the payloads of their samples."""

from __future__ import annotations

import csv
import io
import json
import re
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.errors import SampleError, SourceError
from shardkit.formats import Schema
from shardkit.formats.arrow_writing import arrow_schema, text_array
from shardkit.formats.block import payloads_of, stored_columns
from shardkit.formats.cells import cell_value, is_missing
from shardkit.formats.line_blocks import CsvRows, csv_rows, json_rows, split_rows
from shardkit.formats.sample_columns import encode_rows
from shardkit.formats.strict_json import parse_json, parse_objects
from shardkit_tools.importers import csv as csv_importer
from shardkit_tools.importers.json_types import TypeInference
from shardkit_tools.importers.source_files import LeftOut

_PIECES = [
    '"a"', '"b"', '"a\\""', '":"', '"\\\\"', '" : "', '"\\u0061"', '"\\ud83d"', '"\x01"', '"é"', "1", "-0", "1e999",
    "12345678901234567890", "1" * 30, "0.1", "01", "NaN", "true", "null", ":", " :", "\t:", ": ", ",", "{", "}", "[",
    "]", " ", "\r", "\n", "}\n{", "\ufeff", "{}", '{"a":1}', '{"a" :1,"a":2}', '{"a":{"b":[]}}', '{":":":"}',
]  # fmt: skip
_DIRT = st.lists(st.sampled_from(_PIECES), max_size=12).map("".join)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_OBJECTS = st.dictionaries(st.text(max_size=3), _VALUES, max_size=4).map(json.dumps)
_PAIRS = st.tuples(
    st.sampled_from(['"a"', '"b"', '"\\u0061"', '"a\\\\"', '":"']), st.sampled_from(["", " ", "\t "]), _DIRT
)
_MEMBERS = st.lists(_PAIRS.map(lambda pair: f"{pair[0]}{pair[1]}:{pair[2]}"), max_size=3)
_LINES = st.lists(_OBJECTS | _MEMBERS.map(lambda members: "{" + ",".join(members) + "}") | _DIRT, max_size=5)


@settings(max_examples=500)
@given(_LINES, st.sampled_from(["\n", "\r\n", "\n\n"]))
@example(['{"a":1} {"b":2}', '{"c":', "3}"], "\n")
@example(['{"a":[{"x":1}', '{"y":2}]}'], "\n")
@example(['{"a" :1,"a":2}', '{"a\\\\":1,"a\\\\":2}'], "\n")
@example(['{"a":{"b":1,"b":2}}', '{"a":":","b":" :"}'], "\n")
def test_lines_together_have_the_values_that_each_has_alone(lines: list[str], end: str) -> None:
    data = end.join(lines).encode("utf-8", "surrogatepass")
    expected: dict[int, str] = {}
    for number, line in enumerate(data.split(b"\n")):
        if line.strip():
            expected[number] = "error"
            with suppress(SourceError):
                value = parse_json(line, "")
                expected[number] = repr(value) if isinstance(value, dict) else "error"
    found = json_rows(data, str)
    rows = ["error" if isinstance(row, SourceError) else repr(row) for row in found.rows]
    assert dict(zip(found.lines, rows, strict=True)) == expected
    together = parse_objects(data)
    assert together is None or list(map(repr, together)) == list(expected.values())


_KINDS = [
    "bytes",
    "str",
    "json",
    "bool",
    "int8",
    "int64",
    "uint64",
    "float32",
    "float64",
    "int32[2]",
    "int32[*]",
    "date",
]
_SAMPLES: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.integers(0, 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=4)
    | st.binary(max_size=4)
    | st.lists(st.integers(-5, 5), max_size=3)
    | st.just("2024-02-29")
)
_PLAIN = st.sampled_from(
    [st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=4)]
)


@settings(max_examples=400)
@given(
    st.sampled_from(_KINDS),
    st.booleans(),
    st.lists(_SAMPLES, max_size=6) | _PLAIN.flatmap(lambda one: st.lists(st.none() | one, max_size=6)),
)
@example("uint64", False, [2**64 - 1, -1])
@example("float64", False, [2**53 + 1, 0.5])
def test_columns_have_the_payloads_of_their_samples(kind: str, optional: bool, values: list[Any]) -> None:
    schema = Schema.parse({"f": kind + "?" * optional})
    columns, bad = encode_rows(schema, [{"f": value} for value in values], lambda row: f"row {row}")
    found = list(zip(*(map(bytes, payloads_of(column)) for column in columns.values()), strict=True))
    assert list(columns) == list(schema.stored)
    for row, value in enumerate(values):
        if row not in bad:
            assert found[row] == schema.encode({"f": value}, where=f"row {row}")
            continue
        with pytest.raises(SampleError, match=f"^{re.escape(str(bad[row]))}$"):
            schema.encode({"f": value}, where=f"row {row}")


_CELLS = (
    st.text('a1,"\r\n \ufeffé\0', max_size=5)
    | st.sampled_from(
        [
            "",
            "NA",
            "nan",
            "true",
            "07",
            "1e5",
            "1_0",
            "+5",
            "-0",
            "-0.0",
            ".5",
            "1.",
            "300",
            "1e39",
            "9223372036854775808",
            "2024-02-29",
            "[1, 2]",
            "0x1",
            "-inf",
            "nan(1)",
            "1e-400",
            "0.1000000000000000055511151231257827",
        ]
    )
    | st.from_regex(r"[+-]?[0-9]{0,19}([.][0-9]{0,20})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
)


@settings(max_examples=500)
@given(
    st.text('a1,"\r\n \ufeffé\0', max_size=30)
    | st.lists(st.lists(st.text('a1" \ufeffé\0', max_size=3), min_size=2, max_size=2).map(",".join)).map(
        "\n".join
    ),
    st.booleans(),
)
@example("\ufeffa,b", False)
@example('"a,b\r\n', False)
def test_rows_of_csv_are_those_of_the_csv_module(text: str, encloses: bool) -> None:
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, quoting=csv.QUOTE_MINIMAL if encloses else csv.QUOTE_NONE, strict=True)
    expected: dict[int, list[str] | str] = {}
    line = 0
    while True:
        try:
            row: list[str] | str = next(reader)
        except StopIteration:
            break
        except csv.Error:
            row = "error"
        if row:
            expected[line] = row
        line = reader.line_num
    quote = '"' if encloses else "none"
    split = split_rows(text.encode(), ",", quote, str)
    rows = ["error" if isinstance(row, SourceError) else row for row in split.rows]
    assert dict(zip(split.lines, rows, strict=True)) == expected
    found = csv_rows(text.encode(), ["x", "y"], ",", quote, str)
    cells: list[Any] = [list(row.values()) for row in found.rows.cells.to_pylist()]
    assert list(found.lines) == list(split.lines)
    assert found[2:] == split[2:]
    for number, one in enumerate(rows):
        if isinstance(one, list) and len(one) == 2:
            assert number not in found.rows.bad
            assert cells[number] == one
        else:
            assert number in found.rows.bad


@settings(max_examples=300)
@given(
    st.lists(_CELLS, min_size=1, max_size=6),
    st.sampled_from(
        [
            "str",
            "bytes",
            "bool",
            "int8",
            "int64",
            "uint64",
            "float16",
            "float32",
            "float64",
            "json",
            "int32[*]",
            "date",
        ]
    ),
    st.booleans(),
)
@example(["0x1f", "0X1"], "int64", False)
@example(["1" * 20, "0" * 25], "uint64", False)
@example(["1e400", "inf"], "float64", False)
@example([str(2**53 + 1), "0.5"], "float64", False)
@example(["65520", "65519.99"], "float16", False)
def test_cells_of_a_column_have_the_payloads_that_each_has_alone(
    cells: list[str], kind: str, optional: bool
) -> None:
    schema = Schema.parse({"f": kind + "?" * optional})
    batch = pa.RecordBatch.from_arrays([pa.array(cells, pa.large_string())], ["f"])
    arrays, bad = CsvRows(batch, {}).columns(schema, "row {}".format)
    batch = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema, keys=False))
    columns = [payloads_of(column) for column in stored_columns(schema, batch)]
    found = list(zip(*([bytes(one) for one in column] for column in columns), strict=True))
    for row, cell in enumerate(cells):
        known, refused, expected = schema["f"], "", None
        try:
            value = None if is_missing(cell, known) else cell_value(cell, known, "f", f"row {row}")
            expected = schema.encode({"f": value}, where=f"row {row}")
        except (SourceError, SampleError) as error:
            refused = str(error)
        assert str(bad.get(row, "")) == refused
        assert refused or found[row] == expected


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_row_that_continues_in_the_next_piece_is_read_once(size: int) -> None:
    """Rows that a quote encloses are left for a call with more lines."""
    text = b'a,"1\n2"\nb,"3\n\n4"\n\nc,d\n'
    lines, rows, first, held = text.splitlines(keepends=True), [], 0, b""
    for start in range(0, len(lines), size):
        piece = held + b"".join(lines[start : start + size])
        found = split_rows(piece, ",", '"', str, is_last=start + size >= len(lines))
        rows += [(first + line, row) for line, row in zip(found.lines, found.rows, strict=True)]
        held, first = piece[found.num_bytes :], first + found.num_lines
    assert rows == [(0, ["a", "1\n2"]), (2, ["b", "3\n\n4"]), (6, ["c", "d"])]
    assert not held


# ---- Types of cells that are inferred together


_NUMBER_CELLS = [
    "", "0", "-0", "+5", "007", "-012", "00.5", "0x1F", "0e3", "0.", ".5", "-.5", "+1.5", "1e400", "1E+2", "5 ", " 5",
    "9007199254740993", "9007199254740992", "9223372036854775807", "9223372036854775808", "-9223372036854775808",
    "1e30", "100000000000000000000000", "nan", "NaN", "-nan", "nan(1)", "inf", "-Infinity", "INF", "NA", "null", "true",
    "False", "TRUE", "tRUE", "é", "٣",
]  # fmt: skip


@settings(max_examples=500)
@given(
    st.lists(
        st.lists(st.sampled_from(_NUMBER_CELLS) | st.integers().map(str) | st.floats().map(str), min_size=1),
        min_size=1,
    )
    | st.lists(st.lists(st.sampled_from(_NUMBER_CELLS), min_size=1, max_size=2), min_size=1, max_size=3)
    | st.lists(st.sampled_from(["0.5", str(2**53 + 1), str(-(2**53) - 1), str(2**53)]), min_size=1).map(
        lambda c: [c]
    )
    | st.lists(st.lists(st.integers().map(str) | st.just(""), min_size=1), min_size=1)
    | st.lists(st.lists(st.floats().map(repr) | st.sampled_from(["3", "NA"]), min_size=1), min_size=1),
    st.data(),
)
def test_the_type_of_a_column_is_that_of_its_cells(pieces: list[list[str]], data: st.DataObject) -> None:
    column, expected = csv_importer._Column(), set()
    for cells in pieces:
        places = [
            place for place in range(len(cells)) if data.draw(st.integers(0, 9))
        ]  # the others are bad rows
        expected |= {csv_importer._kind(cells[place]) for place in places}
        column.add(text_array(cells), np.array(places, np.int64), str)
    assert csv_importer._common(column.kinds) == csv_importer._common(expected)
    if "str" not in expected:
        assert ("missing" in column.kinds) == ("missing" in expected)


@given(
    rows=st.lists(st.dictionaries(st.sampled_from("abc"), _VALUES, max_size=3), max_size=12),
    skip=st.booleans(),
    unchecked=st.booleans(),
)
@example(
    rows=[{"a": 1}, {"a": 2**53 + 1, "b": "x"}, {"b": 1, "c": 1}, {"a": 2**64}], skip=True, unchecked=False
)
def test_types_inferred_by_column_are_those_inferred_row_by_row(
    rows: list[dict[str, object]], skip: bool, unchecked: bool
) -> None:
    def found(size: int) -> object:
        inference = TypeInference({}, bad := LeftOut(skip), unchecked=unchecked)
        try:
            for start in range(0, len(rows), size):
                names = [f"row {row}" for row in range(start, len(rows))]
                inference.add(rows[start : start + size], names.__getitem__)
            return inference.types(), inference.rows, inference.valued, str(bad.first)
        except SourceError as error:
            return str(error)

    assert found(len(rows) or 1) == found(1)
