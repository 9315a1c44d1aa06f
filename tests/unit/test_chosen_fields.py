"""`--columns`, ``--drop`` and ``--rename``, of every kind of source: what comes out, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

import shardkit
from shardkit.errors import SchemaError, UsageError
from shardkit_tools import build
from shardkit_tools.importers import ImportOptions, open_source
from tests.command_line import call
from tests.importer_conformance import check_importer
from tests.pictures import JPEG

ROWS: list[dict[str, Any]] = [
    {"First Name": f"n{n}", "age": n, "1st/note": f"note {n}", "left": "x" * n} for n in range(1, 30)
]
WANTED = [{"name": f"n{n}", "age": n, "note": f"note {n}"} for n in range(1, 30)]


def write_csv(folder: Path) -> Path:
    with (folder / "rows.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    return folder / "rows.csv"


def write_json_lines(folder: Path) -> Path:
    # a field that is left out may hold anything: its values have no common type
    mixed = [row | {"left": [None, 1, "text"][n % 3]} for n, row in enumerate(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    return folder / "rows.jsonl"


def table() -> pa.Table:
    made = pa.Table.from_pylist(ROWS)
    # nobody asks for a type of what is left out
    left = pa.array([None] * len(ROWS), pa.month_day_nano_interval())
    return made.set_column(made.column_names.index("left"), "left", left)


def write_parquet(folder: Path) -> Path:
    strings = table().set_column(3, "left", pa.array([row["left"] for row in ROWS]))
    pa.parquet.write_table(strings, folder / "rows.parquet", row_group_size=10)
    return folder / "rows.parquet"


def write_arrow(folder: Path) -> Path:
    pa.feather.write_feather(table(), str(folder / "rows.arrow"), chunksize=10)
    return folder / "rows.arrow"


WRITERS = [write_csv, write_json_lines, write_parquet, write_arrow]
RENAMES = {"First Name": "name", "1st/note": "note"}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("chosen", [{"columns": ("First Name", "age", "1st/note")}, {"drop": ("left",)}])
def test_fields_are_taken_and_renamed(
    tmp_path: Path, write: Callable[[Path], Path], chosen: dict[str, Any]
) -> None:
    importer = open_source(str(write(tmp_path)), options=ImportOptions(rename=RENAMES, **chosen))
    samples = check_importer(importer)
    assert list(importer.schema) == ["name", "age", "note"]
    assert [dict(row.sample) for row in samples] == WANTED
    assert importer.describe()["fields"] == {"First Name": "name", "age": "age", "1st/note": "note"}


@pytest.mark.parametrize("write", WRITERS)
def test_what_the_source_does_not_have_is_said(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    source = str(write(tmp_path))
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("columns", {"columns": ("agee",), "drop": ("left",)}),
        ("drop", {"drop": ("left", "agee")}),
        ("rename", {"rename": {"agee": "x"}, "drop": ("left",)}),
    ]
    for option, given in wrong:
        with pytest.raises(SchemaError, match=rf"--{option} names the field 'agee'.*did you mean 'age'\?"):
            open_source(source, options=ImportOptions(**given))
    with pytest.raises(SchemaError, match="leave no field"):
        open_source(source, options=ImportOptions(columns=("age",), drop=("age",)))
    with pytest.raises(SchemaError, match="two fields would be called 'age'"):
        open_source(source, options=ImportOptions(drop=("left",), rename=RENAMES | {"First Name": "age"}))


def test_a_name_that_cannot_be_stored_is_an_error_whose_advice_works(tmp_path: Path) -> None:
    names = ["step", "it's\ta\x85", "http://x.org/name", "name of two\nlines", "kept as it is"]
    pa.parquet.write_table(pa.table({name: [1, 2] for name in names}), tmp_path / "rows.parquet")
    rename: dict[str, str] = {}
    for _ in names[:-1]:
        with pytest.raises(SchemaError, match=r"rows\.parquet.*; give it another name") as caught:
            open_source(str(tmp_path / "rows.parquet"), options=ImportOptions(rename=rename))
        found = re.search(r"such as --rename (.*), or leave it out: --drop (.*)", str(caught.value))
        assert found is not None
        typed = ["bash", "-c", f"printf '%s\\0' {found[1]} {found[2]}"]  # as a person does who copies them
        pair, name, _ = subprocess.run(typed, capture_output=True, check=True).stdout.decode().split("\0")
        rename[name] = pair.removeprefix(f"{name}=")
    importer = open_source(str(tmp_path / "rows.parquet"), options=ImportOptions(rename=rename))
    assert list(importer.schema) == [
        "step_",
        "it_s_a",
        "http_x_org_name",
        "name_of_two_lines",
        "kept as it is",
    ]


def test_members_of_tars(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for n in range(5):
            for extension, data in (
                ("txt", b"text %d" % n),
                ("cls", b"%d" % n),
                ("bin", b"\0" * (n % 2 + 1)),
            ):
                member = tarfile.TarInfo(f"{n:03d}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    source = str(tmp_path / "a.tar")
    plain = open_source(source)
    kept, text, *_ = plain.schema
    importer = open_source(source, options=ImportOptions(columns=(kept, text), rename={kept: "words"}))
    samples = check_importer(importer)
    assert list(importer.schema) == ["words", text]
    assert [row.sample["words"] for row in samples] == [f"text {n}" for n in range(5)]
    assert [row.key for row in samples] == [f"{n:03d}" for n in range(5)]


def test_arrays_and_class_folders(tmp_path: Path) -> None:
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "x.npy", np.arange(12, dtype=np.int32).reshape(6, 2))
    np.save(tmp_path / "arrays" / "y.npy", np.arange(6))
    arrays = open_source(str(tmp_path / "arrays"), options=ImportOptions(drop=("y",), rename={"x": "pair"}))
    assert [list(map(int, row.sample["pair"])) for row in check_importer(arrays)] == [  # type: ignore[call-overload]
        [2 * n, 2 * n + 1] for n in range(6)
    ]
    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        (tmp_path / "images" / label / "a.jpg").write_bytes(JPEG + label.encode())
    renamed = build(tmp_path / "images", tmp_path / "root", options=ImportOptions(rename={"image": "jpeg"}))
    assert renamed.rows == 2
    ds = shardkit.open(tmp_path / "root")
    assert list(ds.schema) == ["jpeg", "label"]
    assert ds.manifest.classes == ("cat", "dog")
    assert {sample["jpeg"] for sample in ds} == {JPEG + b"cat", JPEG + b"dog"}


def test_what_is_beside_a_file_and_its_class_are_left_out(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for n in range(2):
            (tmp_path / "images" / label / f"{n}.jpg").write_bytes(JPEG + bytes([n]))
            (tmp_path / "images" / label / f"{n}.json").write_text(f'{{"n": {n}}}')
    fields = {"image": "bytes", "label": "int64", "meta": "json"}
    for dropped in fields:
        importer = open_source(str(tmp_path / "images"), options=ImportOptions(drop=(dropped,)))
        assert {name: str(kind) for name, kind in importer.schema.items()} == {
            name: kind for name, kind in fields.items() if name != dropped
        }
        assert len(check_importer(importer)) == 4


def test_the_command(tmp_path: Path) -> None:
    source, root = str(write_csv(tmp_path)), str(tmp_path / "root")
    code, told = call("build", source, root, "--drop", "left", "--rename", "First Name=name",
                         "--rename", "1st/note=note", "--stratify", "name")  # fmt: skip
    assert code == 0, told
    rows = [dict(row) for row in shardkit.open(root)]
    assert sorted(rows, key=lambda row: row["age"]) == WANTED
    code, told = call("build", source, root, "--rename", "name")
    assert (code, "expected OLD=NEW" in told) == (2, True), told
    with pytest.raises(UsageError):
        build(source, root, options=ImportOptions(per="word"))


def test_nothing_chosen_leaves_the_version_as_it_was(tmp_path: Path) -> None:
    """The recipe, and with it the id, holds the choice only where there is one."""
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    assert "fields" not in open_source(str(tmp_path / "rows.jsonl")).describe()
