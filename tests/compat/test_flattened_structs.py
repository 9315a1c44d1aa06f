"""`--flatten`: structs of Parquet and Arrow and objects of JSON as fields, as pyarrow and pandas flatten them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.errors import SchemaError, ShardkitError, UsageError
from shardkit_tools import build
from shardkit_tools.importers import ImportOptions, open_source
from tests.command_line import call
from tests.importer_conformance import check_importer

pd: Any = pytest.importorskip("pandas")

ROWS: list[dict[str, Any]] = [
    {
        "id": n,
        "meta": None if n % 7 == 3 else {
            "author": None if n % 5 == 2 else {"name": f"n{n}", "born": 1900 + n},
            "tags": ["x"] * (n % 3),
            "links": [{"to": n}],
        },
    }
    for n in range(40)
]  # fmt: skip
TYPES = {
    "id": "int64", "meta.author.name": "str?", "meta.author.born": "int64?", "meta.tags": "json", "meta.links": "json"
}  # fmt: skip


def member(row: dict[str, Any], path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = None if value is None else value[name]
    return value


WANTED = [{path: member(row, path) for path in TYPES} for row in ROWS]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=16)


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    pa.feather.write_feather(pa.Table.from_pylist(rows), str(path), chunksize=16)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_array(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows))


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "a.parquet": write_parquet, "a.arrow": write_arrow, "a.jsonl": write_lines, "a.json": write_array
}  # fmt: skip


def types_of(importer: Any) -> dict[str, str]:
    return {name: str(kind) for name, kind in importer.schema.items()}


def rows_of(importer: Any) -> list[dict[str, Any]]:
    """Samples with None for what is not there; a struct that is none says nothing of its members in JSON."""
    return [{name: row.sample.get(name) for name in importer.schema} for row in check_importer(importer)]


@pytest.mark.parametrize("name", WRITERS)
def test_members_are_fields(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, ROWS)
    assert set(types_of(open_source(str(tmp_path / name)))) == {"id", "meta"}
    importer = open_source(str(tmp_path / name), options=ImportOptions(flatten=True))
    found = types_of(importer)
    if "json" in name:  # lists of JSON may be missing, as those of tables are null
        found = {field: kind.replace("json?", "json") for field, kind in found.items()}
    assert found == TYPES
    assert rows_of(importer) == WANTED
    assert importer.describe()["flatten"] is True
    for format in ("tar", "arrow"):
        root = str(tmp_path / format)
        build(str(tmp_path / name), root, options=ImportOptions(flatten=True), shuffle=False, format=format)
        ds = shardkit.open(root)
        assert [ds[n] for n in range(40)] == WANTED
        assert [row["id"] for row in ds.select(where="`meta.author.born` > 1935")] == [36, 39]


@pytest.mark.parametrize("name", WRITERS)
def test_one_is_kept_whole_taken_or_left_out(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, ROWS)

    def opened(**options: Any) -> Any:
        return open_source(str(tmp_path / name), options=ImportOptions(flatten=True, **options))

    whole = opened(field_types={"meta.author": "json?"}, columns=("id", "meta.author"))
    assert types_of(whole) == {"id": "int64", "meta.author": "json?"}
    assert rows_of(whole) == [{"id": row["id"], "meta.author": member(row, "meta.author")} for row in ROWS]
    # pyarrow before 24 sorts the members of a struct
    assert set(opened(columns=("meta.author",)).schema) == {"meta.author.name", "meta.author.born"}
    assert list(opened(drop=("meta",)).schema) == ["id"]
    renamed = opened(columns=("meta.author.name",), rename={"meta.author.name": "author"})
    assert rows_of(renamed) == [{"author": row["meta.author.name"]} for row in WANTED]
    with pytest.raises(SchemaError, match=r"--drop names the field 'meta.authr', .* did you mean 'meta"):
        opened(drop=("meta.authr",))


def test_the_command_and_the_message_that_names_it(tmp_path: Path) -> None:
    column = pa.array([{"raw": [b"x"], "in": {"at": 1.5, "blob": b"y"}}, None])
    pq.write_table(
        pa.table({"s": column, "photo": pa.array([{"bytes": b"jpg", "path": "p"}] * 2)}),
        tmp_path / "a.parquet",
    )
    code, said = call("build", tmp_path / "a.parquet", tmp_path / "root")
    assert code == 1
    assert "--schema s=json" in said
    assert "or --flatten for a field for each of its members" in said
    code, said = call(
        "build", tmp_path / "a.parquet", tmp_path / "root", "--flatten", "--schema", "s.raw=json"
    )
    assert not code, said
    ds = shardkit.open(str(tmp_path / "root"))
    assert types_of(ds) == {"s.raw": "json", "s.in.at": "float64?", "s.in.blob": "bytes?", "photo": "bytes"}
    first = {"s.raw": ["eA=="], "s.in.at": 1.5, "s.in.blob": b"y", "photo": b"jpg"}
    second = {"s.raw": None, "s.in.at": None, "s.in.blob": None, "photo": b"jpg"}
    assert sorted(map(dict, ds), key=str) in ([first, second], [second, first])


def test_maps_stay_whole_and_pandas_names_members_alike(tmp_path: Path) -> None:
    rows = [{"a": {"b": {"c": n, "d.e": "x"}, "f": [n]}, "g": n} for n in range(5)]
    write_lines(tmp_path / "a.jsonl", rows)
    importer = open_source(str(tmp_path / "a.jsonl"), options=ImportOptions(flatten=True))
    assert list(importer.schema) == sorted(pd.json_normalize(rows), key=list(importer.schema).index)
    maps = pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int8()))
    pq.write_table(pa.table({"s": pa.StructArray.from_arrays([maps], ["map"])}), tmp_path / "a.parquet")
    importer = open_source(str(tmp_path / "a.parquet"), options=ImportOptions(flatten=True))
    assert types_of(importer) == {"s.map": "json"}
    assert rows_of(importer) == [{"s.map": {"k": 1}}, {"s.map": {}}]


def test_what_cannot_be_flattened_is_said(tmp_path: Path) -> None:
    flat = ImportOptions(flatten=True)
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="is read as csv, which has no structs"):
        open_source(str(tmp_path / "a.csv"), options=flat)
    for name in ("a.parquet", "a.arrow", "a.jsonl"):
        WRITERS[name](tmp_path / name, [{"a.b": 1, "a": {"b": 2}}])
        with pytest.raises(ShardkitError, match=r"called 'a.b'"):
            open_source(str(tmp_path / name), options=flat)
        WRITERS[name](tmp_path / name, [{"a.b": 1, "a": {"c": 2}}, {"a.b": 3, "a": None}])
        assert rows_of(open_source(str(tmp_path / name), options=flat)) == [
            {"a.b": 1, "a.c": 2},
            {"a.b": 3, "a.c": None},
        ]
    write_lines(tmp_path / "a.jsonl", [{"counts": {f"k{n}": n for n in range(300)}}])
    with pytest.raises(
        SchemaError,
        match=r"1 to 256 fields, got 300; choose .* or keep an object of many keys whole with --schema",
    ):
        open_source(str(tmp_path / "a.jsonl"), options=flat)
    write_lines(tmp_path / "b.jsonl", [{f"k{n}": n for n in range(300)}])
    with pytest.raises(SchemaError, match=r"got 300; choose fields with --columns"):
        open_source(str(tmp_path / "b.jsonl"))
    kept = ImportOptions(flatten=True, field_types={"counts": "json"})
    assert types_of(open_source(str(tmp_path / "a.jsonl"), options=kept)) == {"counts": "json"}
