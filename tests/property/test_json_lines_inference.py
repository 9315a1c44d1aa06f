from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import SourceError
from shardkit.formats import Schema
from shardkit_tools.importers import open_source
from tests.importer_conformance import check_importer

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


def write(folder: str, rows: list[dict[str, object]]) -> str:
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
        importer = open_source(write(folder, rows))
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
        first = open_source(write(folder, rows)).schema
        second = open_source(write(folder, list(shuffled))).schema
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
        source = write(folder, all_rows)
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
