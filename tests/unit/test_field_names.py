"""Fields of any name: what users see is the name that the source has, whatever stands for it in a tar."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.dataset.expressions import Where, parse_expression, without_spaces
from shardkit.errors import FormatError, SchemaError, UsageError
from shardkit.formats import Schema
from shardkit.formats.tar_members import member_names
from shardkit.ranges import split_names
from shardkit_tools import build
from shardkit_tools.importers import SourceSample, open_source
from tests.command_line import call, output_of
from tests.whole_shard import check_whole_shard

HOSTILE = [
    *("First Name", "1st", "größe", "年齢", "🦊", "a-b", "meta.a.b", ".", "..", "../../etc/passwd", "C:\\x", "a/b"),
    *("Id", "id", "ID", "weight", "Step", "STEP", "age?", "a,b", "a=b", "a:b", "x`y", "it's", '"q"', "<b>&amp;</b>"),
    *("[red]x[/]", "%20", "%-3", "a.npy", "a", "q" * 150 + "1", "q" * 150 + "2", "é" * 200, " ", "-rf", "__class__"),
    *("\u212a", "k", "K", "class", "*", "nul", "label?"),
]  # fmt: skip
REFUSED = [
    "",
    "\0",
    "a\nb",
    "\x1b[2J",
    "\x7f",
    "\u202egnp",
    "\ud800",
    "s3://bucket/x",
    "x" * 10_240,
    "step",
    "__key__",
]


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=60),
        unique=True,
        max_size=9,
    )
)
def test_members_of_a_sample_have_names_of_their_own(names: list[str]) -> None:
    assume_good = [name for name in names if not _is_refused(name)] or ["a"]
    derived = member_names(Schema.parse(dict.fromkeys(assume_good, "int64")))
    assert len({name.lower() for name in derived}) == len(assume_good)
    for name, member in zip(assume_good, derived, strict=True):
        assert re.fullmatch("[A-Za-z0-9_%-]+", member)
        assert len(member) <= 40
        if "%-" not in member:
            assert (
                bytes.fromhex("".join(_hex(part) for part in re.findall(r"%..|.", member))).decode() == name
            )
        if re.fullmatch("[a-z0-9_]{1,40}", name):
            assert member == name


def _hex(part: str) -> str:
    return part[1:] if part[0] == "%" else part.encode().hex()


def _is_refused(name: str) -> bool:
    try:
        Schema.parse({name: "str"})
    except SchemaError:
        return True
    return False


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_would_harm_are_refused_wherever_they_come_from(tmp_path: Path, name: str) -> None:
    with pytest.raises(SchemaError) as caught:
        Schema.parse({name: "str"})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
    with pytest.raises(FormatError):
        Schema.from_json([[name, "str"]])
    (tmp_path / "rows.jsonl").write_text(json.dumps({name: 1}) + "\n")
    said = output_of("build", tmp_path / "rows.jsonl", tmp_path / "root", code=1)
    assert "".join(said.split("\n")).isprintable()
    assert not (tmp_path / "root").exists()


@pytest.fixture(scope="module")
def table() -> pa.Table:
    columns: dict[str, Any] = {name: pa.array([f"{name} {n}" for n in range(12)]) for name in HOSTILE}
    columns["age"] = pa.array([None, *range(11)])
    columns["age?"] = pa.array(range(12))
    return pa.table(columns)


@pytest.mark.parametrize("settings", [{"format": "tar"}, {"format": "arrow"}])
def test_names_are_those_of_the_source_everywhere(
    tmp_path: Path, table: pa.Table, settings: dict[str, Any]
) -> None:
    pq.write_table(table, tmp_path / "rows.parquet")
    root = str(tmp_path / "root")
    build(str(tmp_path / "rows.parquet"), root, shuffle=False, stratify="../../etc/passwd", **settings)
    ds, rows = shardkit.open(root), table.to_pylist()
    order = [rows.index(ds[n]) for n in range(12)]
    assert sorted(order) == list(range(12))
    rows = [rows[n] for n in order]
    assert list(ds.schema) == table.column_names
    assert ds.to_arrow().select(table.column_names).to_pylist() == rows
    batch = next(iter(ds.loader(ds.plan(global_batch=12, lanes=1, shuffle="none"), fill={"age": -1})))
    at = [ds_rows["age?"] for ds_rows in rows]
    place = [at.index(number) for number in batch["age?"]]
    assert [bool(valid) for valid in batch.valid["age"]] == [rows[n]["age"] is not None for n in place]
    for name in HOSTILE:
        assert list(batch[name]) == [rows[n][name] for n in place]
    found = ds.select(where="`First Name` == 'First Name 7' and `age?` < 9 and `x``y` != '`a`'")
    assert [row["id"] for row in found] == ["id 7"]
    assert "<b>&amp;</b>" not in ds._repr_html_()
    if settings["format"] == "tar":  # of others costs are stored
        assert ds.plan(global_batch=4, cost="bytes( `First Name` )").steps_per_epoch == 3
    croissant = json.loads(call("export", root, "--as", "croissant")[1])
    described = [one["@id"] for records in croissant["recordSet"] for one in records["field"]]
    assert len(set(described)) == len(described) > len(table.column_names)


def test_tars_hold_names_that_any_reader_takes(tmp_path: Path, table: pa.Table) -> None:
    pq.write_table(table, tmp_path / "rows.parquet")
    build(str(tmp_path / "rows.parquet"), tmp_path / "root", format="tar")
    (shard,) = (tmp_path / "root").glob("objects/*/*/*.tar")
    with tarfile.open(shard) as tar:
        names = tar.getnames()
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_%-]+)+", name) for name in names)
    key = names[0].partition(".")[0]
    assert {
        f"{key}.First%20Name.txt",
        f"{key}.meta%2Ea%2Eb.txt",
        f"{key}.Id.txt",
        f"{key}.id%-13.txt",
    } <= set(names)
    assert (code_of("verify", tmp_path / "root", "--level", "decode")) == 0


def code_of(*arguments: object) -> int:
    code, said = call(*arguments)
    assert not code, said
    return code


def test_commands_take_the_names(tmp_path: Path, table: pa.Table) -> None:
    pq.write_table(table, tmp_path / "rows.parquet")
    source, root = tmp_path / "rows.parquet", tmp_path / "root"
    code_of(
        "build",
        source,
        root,
        "--columns",
        'First Name,"a,b",a=b,a:b,age?,größe',
        "--schema",
        "a=b=str?",
        "--lookup",
        '"a,b",a:b',
    )
    ds = shardkit.open(str(root))
    assert {name: str(kind) for name, kind in ds.schema.items()} == {
        "First Name": "str", "größe": "str", "a,b": "str", "a=b": "str?", "a:b": "str", "age?": "int64"
    }  # fmt: skip
    for asked in ("a,b=a,b 5", "a:b=a:b 5"):
        said = output_of("find", root, "--field", asked)
        assert "5" in said
    assert call("find", root, "--field", "a=b=a=b 5", "--scan")[0] == 0
    code_of("select", root, "--where", "`größe` == 'größe 3'", "--ref", "one")
    assert shardkit.open(f"{root}@one")[0]["First Name"] == "First Name 3"
    for form in ("parquet", "jsonl", "hf"):
        out = tmp_path / form
        code_of("export", f"{root}@one", "--as", form, "--out", out, "--columns", '"a,b",größe,First Name')
        importer = open_source(str(out))
        (row,) = (row for task in importer.tasks() for row in importer.read(task))
        assert isinstance(row, SourceSample)
        assert row.sample["a,b"] == "a,b 3"
        assert list(importer.schema) == ["a,b", "größe", "First Name"]
    code_of(
        "export", f"{root}@one", "--as", "webdataset", "--out", tmp_path / "tars", "--columns", '"a,b",größe'
    )
    assert list(open_source(str(tmp_path / "tars")).schema) == ["a,b", "größe"]
    code_of("build", source, tmp_path / "long", "--columns", "q" * 150 + "1")
    said = output_of(
        "export", tmp_path / "long", "--as", "webdataset", "--out", tmp_path / "long.tars", code=1
    )
    assert "too long for names of members" in said
    (path,) = (tmp_path / "parquet").glob("*.parquet")
    assert duckdb.execute(f"""select "a,b" from '{path}'""").fetchall() == [("a,b 3",)]
    _, said = call("show", root)
    assert "First Name" in said


@pytest.mark.parametrize("rows", [1, 40])
def test_an_index_is_made_again_from_a_tar(tmp_path: Path, table: pa.Table, rows: int) -> None:
    with shardkit.create(
        tmp_path / "root", schema={"a b": "int64?", "a b.c": "str?", "B": "bytes", "b": "float32[2]"}
    ) as writer:
        for n in range(rows):
            writer.add({"a b": n if n % 3 else None, "a b.c": None if n % 2 else "x", "B": b"y", "b": [n, n]})
    ds = shardkit.open(str(tmp_path / "root"))
    index = ds.reader.index(0)
    (shard,) = (tmp_path / "root").glob("objects/*/*/*.tar")
    check_whole_shard(shard.read_bytes(), index)


def test_lists_and_expressions_of_names() -> None:
    assert split_names('a, b c ,"d, e",f"g') == ["a", "b c", "d, e", 'f"g']
    with pytest.raises(UsageError, match="expected names such as"):
        split_names('a,"b')
    assert without_spaces("bytes( `a  b` ) + 1") == "bytes(`a  b`)+1"
    with pytest.raises(SyntaxError):
        parse_expression("`a` `b`")
    schema = Schema.parse({"a b": "int64", "class": "str"})
    with pytest.raises(UsageError, match=r"in backticks: \"`First Name`"):
        Where("a b < 5", schema)
    with pytest.raises(UsageError, match="there is no field 'a  b'"):
        Where("`a  b` < 5", schema)
    assert Where("`a b` < 5 and `class` == '`x`'", schema).fields == ["a b", "class"]
