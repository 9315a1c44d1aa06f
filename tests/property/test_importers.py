"""Types of JSON lines and of tables that differ."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import SourceError
from shardkit.formats import Schema
from shardkit_tools.importers import ImportOptions, open_source
from tests.importer_conformance import check_importer, read_all

# ---- Tables whose files differ: the values of every file arrive, whatever types, columns and folders the files have


WHEN, LATE = dt.datetime(2024, 1, 2, 3, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, tzinfo=dt.UTC)
TEXT = pa.dictionary(pa.int32(), pa.string())
FAMILIES: dict[str, tuple[list[Any], list[Any]]] = {  # values that every type of the family holds, and the types
    "integers": ([0, 1, 127], [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32()]),
    "numbers": ([0, 1, 100], [pa.int32(), pa.float32(), pa.float64(), pa.int64(), pa.float16()]),
    "texts": (["", "a", "\0\u00fc"], [pa.string(), pa.large_string(), TEXT, pa.dictionary(pa.int8(), pa.string())]),
    "bytes": ([b"ab", b"\0\xff"], [pa.binary(), pa.large_binary(), pa.binary(2)]),
    "times": ([WHEN, LATE], [pa.timestamp("s", "UTC"), pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC")]),
    "lists": ([[1, 2], [3, 4]], [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.int16(), 2)]),
    "structs": ([{"a": 1}], [pa.struct({"a": pa.int8()}), pa.struct({"a": pa.int64()})]),
    "truths": ([True, False], [pa.bool_()]),
}  # fmt: skip


@st.composite
def sources(draw: st.DrawFn) -> tuple[list[pa.Table], list[dict[str, Any]], list[str]]:
    """Tables, the rows that they hold together, and the folder of each."""
    columns = draw(st.dictionaries(st.sampled_from("uvwxyz"), st.sampled_from(sorted(FAMILIES)), min_size=1))
    parts = draw(st.booleans())
    tables, rows, folders = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        count, arrays = draw(st.integers(0, 3)), {}
        found: list[dict[str, Any]] = [dict.fromkeys(columns) for _ in range(count)]
        folder = draw(st.sampled_from(["de", "a b", "1e"])) if parts else ""
        for name in draw(st.permutations(sorted(columns))):
            values, types = FAMILIES[columns[name]]
            kind = draw(st.sampled_from([*types, pa.null(), None]))
            if kind is None:
                continue
            held = st.none() if kind == pa.null() else st.one_of(st.none(), st.sampled_from(values))
            column = draw(st.lists(held, min_size=count, max_size=count))
            arrays[name] = pa.array(column, kind)
            for row, value in zip(found, column, strict=True):
                row[name] = value
        arrays = arrays or {"other": pa.array(range(count), pa.int64())}
        tables.append(pa.table(arrays))
        folders.append(f"part={quote(folder)}/" * parts)
        rows += [row | ({"part": folder} if parts else {}) for row in found]
    return tables, rows, folders


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def write(folder: Path, suffix: str, tables: Sequence[pa.Table], folders: Sequence[str]) -> None:
    for number, (table, inside) in enumerate(zip(tables, folders, strict=True)):
        (folder / inside).mkdir(exist_ok=True)
        path = folder / inside / f"{number}.{suffix}"
        if suffix == "parquet":
            pq.write_table(table, path, row_group_size=2)
        else:
            with pa.ipc.new_file(str(path), table.schema) as out:
                out.write_table(table, max_chunksize=2)


@settings(max_examples=40, deadline=None)
@given(sources(), st.sampled_from(["parquet", "arrow"]))
def test_every_value_arrives(
    source: tuple[list[pa.Table], list[dict[str, Any]], list[str]], suffix: str
) -> None:
    tables, rows, folders = source
    names = sorted({name for table in tables for name in table.column_names} - {"other"})
    if not rows or not names:
        return
    order = sorted(range(len(tables)), key=lambda number: f"{folders[number]}{number}.")
    starts = np.cumsum([0, *map(len, tables)])
    wanted = [row for number in order for row in rows[starts[number] : starts[number + 1]]]
    with TemporaryDirectory() as text:
        write(Path(text), suffix, tables, folders)
        found = check_importer(
            open_source(
                text,
                options=ImportOptions(
                    drop=("other",) if any("other" in table.column_names for table in tables) else ()
                ),
            )
        )
    for got, row in zip(found, wanted, strict=True):
        expected = {name: value for name, value in row.items() if name in names or name == "part"}
        assert {name: plain(value) for name, value in got.sample.items()} == expected


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_types_of_the_user_have_the_last_word(tmp_path: Path, suffix: str) -> None:
    tables = [
        pa.table({"x": [1]}),
        pa.table({"x": ["b"]}),
        pa.table({"x": pa.array([True])}),
        pa.table({"y": [1]}),
    ]
    write(tmp_path, suffix, tables, [""] * 4)
    rows = read_all(open_source(str(tmp_path), options=ImportOptions(field_types={"x": "str?"})))
    assert [row.sample["x"] for row in rows] == ["1", "b", "true", None]


def test_nanoseconds_beside_times_that_they_cannot_hold(tmp_path: Path) -> None:
    times = [pa.array([WHEN], pa.timestamp("ns", "UTC")), pa.array([LATE], pa.timestamp("s", "UTC"))]
    write(tmp_path, "parquet", [pa.table({"x": one}) for one in times], ["", ""])
    assert [row.sample["x"] for row in read_all(open_source(str(tmp_path)))] == [WHEN, LATE]


def test_partition_columns_by_type(tmp_path: Path) -> None:
    """Integers are numbers unless the user says otherwise, and the default partition of Hive is no value."""
    folders = ["month=01/", "month=12/", "month=__HIVE_DEFAULT_PARTITION__/"]
    write(tmp_path, "parquet", [pa.table({"x": [1]})] * 3, folders)
    importer = open_source(str(tmp_path))
    assert [row.sample["month"] for row in read_all(importer)] == [1, 12, None]
    importer = open_source(str(tmp_path), options=ImportOptions(field_types={"month": "str?"}))
    assert [row.sample["month"] for row in read_all(importer)] == ["01", "12", None]
    importer = open_source(str(tmp_path), options=ImportOptions(columns=("month",)))
    assert [dict(row.sample) for row in read_all(importer)] == [{"month": 1}, {"month": 12}, {"month": None}]


# ---- test_json_lines_inference


VALUES: dict[str, st.SearchStrategy[object]] = {
    "bool": st.booleans(),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float64": st.floats(allow_nan=False, allow_infinity=False),
    "str": st.text(st.characters(exclude_categories=["Cs"])),
    "json": st.one_of(
        st.lists(st.one_of(st.integers(-100, 100), st.text("ab"), st.none())),
        st.dictionaries(st.text("xyz", min_size=1), st.booleans()),
    ),
}
NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True), min_size=1, max_size=4, unique=True)


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, str], list[dict[str, object]]]:
    types = {
        name: draw(st.sampled_from(sorted(VALUES)))
        for name in draw(NAMES)
        if name not in ("step", "samples", "weight")
    }
    types = types or {"a": "str"}
    rows = draw(
        st.lists(st.fixed_dictionaries({n: VALUES[t] for n, t in types.items()}), min_size=1, max_size=8)
    )
    return types, rows


def write_lines(folder: str, rows: list[dict[str, object]]) -> str:
    path = Path(folder) / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@settings(max_examples=60, deadline=None)
@given(tables())
def test_uniform_rows_come_back_with_their_types(
    table: tuple[dict[str, str], list[dict[str, object]]],
) -> None:
    types, rows = table
    with TemporaryDirectory() as folder:
        importer = open_source(write_lines(folder, rows))
        samples = check_importer(importer)
    assert [dict(row.sample) for row in samples] == rows
    assert {name: str(kind) for name, kind in importer.schema.items()} == types


@settings(max_examples=40, deadline=None)
@given(tables(), st.data())
def test_the_order_of_rows_does_not_change_the_types(
    table: tuple[dict[str, str], list[dict[str, object]]], data: st.DataObject
) -> None:
    _, rows = table
    shuffled = data.draw(st.permutations(rows))
    with TemporaryDirectory() as folder:
        first = open_source(write_lines(folder, rows)).schema
        second = open_source(write_lines(folder, list(shuffled))).schema
    assert dict(first) == dict(second)  # the order of the fields is that of the first row's keys


@settings(max_examples=60, deadline=None)
@given(tables(), st.data())
def test_a_row_of_another_shape_makes_fields_optional_and_one_of_another_kind_is_refused(
    table: tuple[dict[str, str], list[dict[str, object]]], data: st.DataObject
) -> None:
    types, rows = table
    at = data.draw(st.integers(0, len(rows)))
    odd = dict(rows[0])
    name = data.draw(st.sampled_from(sorted(types)))
    change = data.draw(st.sampled_from(["drop", "add", "null", "kind"]))
    if change == "drop":
        del odd[name]
    elif change == "add":
        odd[name + "_more"] = 1
    elif change == "null":
        odd[name] = None
    else:
        odd[name] = "text" if types[name] != "str" else True
    all_rows = [*rows[:at], odd, *rows[at:]]
    with TemporaryDirectory() as folder:
        source = write_lines(folder, all_rows)
        if change == "kind":
            with pytest.raises(SourceError, match=rf"rows\.jsonl line [0-9]+.*{name}"):
                open_source(source)
            return
        importer = open_source(source)
        assert [dict(row.sample) for row in check_importer(importer)] == all_rows
    added = {name + "_more": "int64?"} if change == "add" else {name: types[name] + "?"}
    assert {field: str(kind) for field, kind in importer.schema.items()} == types | added


@settings(max_examples=30, deadline=None)
@given(tables(), st.integers(0, 3), st.sampled_from([5, 0.5, "late", None, {"b": 1, "a": 2}]))
def test_a_late_surprise_changes_the_types(
    drawn: tuple[dict[str, str], list[dict[str, object]]], repeats: int, late: object
) -> None:
    """A field that begins in the last row has a type and is null before it, in every file of the source."""
    _, rows = drawn
    rows = [row for _ in range(repeats + 1) for row in rows]
    with TemporaryDirectory() as folder:
        lines = [json.dumps(row) for row in rows] + [json.dumps({**rows[0], "late": late})]
        Path(folder, "a.jsonl").write_text("\n".join(lines[:2]) + "\n")
        Path(folder, "b.jsonl").write_text("\n".join(lines[2:]) + "\n")
        found = check_importer(open_source(folder))
        assert [row.sample.get("late") for row in found] == [None] * len(rows) + [late]


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text("ab")),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text("cba"), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_the_order_of_keys_is_kept(value: object) -> None:
    schema = Schema.parse({"meta": "json"})
    found = schema.decode(schema.encode({"meta": value}, where=""))["meta"]
    assert json.dumps(found) == json.dumps(value)
