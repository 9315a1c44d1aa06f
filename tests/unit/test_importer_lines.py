from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path

import pytest

import shardkit
import shardkit_tools.importers.line_ranges as line_ranges
from shardkit.errors import SchemaError, SourceError, UsageError
from shardkit.formats.cells import MISSING
from shardkit_tools import build
from shardkit_tools.adopting import adopt
from shardkit_tools.importers import ImportOptions, SourceFailure, open_source, parse_field_types
from tests.importer_conformance import check_importer, read_all


def json_lines(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def types_of(source: str, **given: str) -> dict[str, str]:
    return {
        name: str(kind)
        for name, kind in open_source(source, options=ImportOptions(field_types=given)).schema.items()
    }


def test_given_types_replace_inferred_ones(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", [{"t": [1, 2, 3], "x": None}, {"t": [4, 5, 6], "x": "y"}])
    given = parse_field_types(["t=int32[3]", "x=json"])
    assert types_of(source, **given) == {"t": "int32[3]", "x": "json"}
    check_importer(open_source(source, options=ImportOptions(field_types=given)))
    with pytest.raises(
        SchemaError, match="names the field 'tt', which the source does not have; did you mean 't'"
    ):
        types_of(source, x="json", tt="int32[3]")
    with pytest.raises(UsageError, match="expected field=type"):
        parse_field_types(["t"])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ('{"a": "2", "b": "x"}', r"line 3: field 'a' is a string \('2'\), but an integer \(1\) in .*line 1"),
        ('{"a": true, "b": "x"}', r"line 3: field 'a' is a boolean \(True\), but an integer"),
        (
            '{"a": 18446744073709551616, "b": "x"}',
            r"line 3: field 'a' is 18446744073709551616, which no 64-bit",
        ),
        (
            f'{{"a": {2**63}}}\n{{"a": -2}}',
            rf"'a' holds -2 in .*rows\.jsonl line 4, and {2**63} in .*rows\.jsonl line 3; no integer type",
        ),
        (
            f'{{"a": {2**60 + 1}}}\n{{"a": 1.5}}',
            rf"'a' holds {2**60 + 1} in .*rows\.jsonl line 3, which float64",
        ),
        ('{"a": 2, "b": "x"', r"line 3: not valid JSON"),
        ('{"a": 2, "a": 3, "b": "x"}', r"line 3: not valid JSON \(the key 'a' is given twice"),
        ('{"a": Infinity, "b": "x"}', r"line 3: not valid JSON \(Infinity"),
        ("[1, 2]", r"line 3: holds a list, not an object"),
        ('{"a": 2, "b": "\udcff"}', r"line 3: not UTF-8"),
    ],
)
def test_errors_name_file_and_row(tmp_path: Path, second: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1, "b": "x"}\n\n' + second.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(SourceError, match=message):
        open_source(str(path))


@pytest.mark.parametrize("second", ['{"a": 1.5}', '{"a": "x"}', "{", "{}", '{"a": null}', '{"a": 1, "b": 2}'])
def test_rows_after_the_scan_are_checked(
    tmp_path: Path, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit_tools.importers.json_lines.SCAN_ROWS", 1)
    monkeypatch.setattr("shardkit_tools.importers.line_ranges.INFERRED_BYTES", 0)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n' + second + '\n{"a": 3}\n')
    importer = open_source(str(path))
    rows = list(importer.read(importer.tasks()[0]))
    assert [isinstance(row, SourceFailure) for row in rows] == [False, True, False]
    with pytest.raises(SourceError, match=r"rows\.jsonl line 2"):
        read_all(importer)


@pytest.mark.parametrize("second", ["{}", '{"a": null}'])
def test_what_is_suggested_for_a_late_null_works(
    tmp_path: Path, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit_tools.importers.json_lines.SCAN_ROWS", 1)
    monkeypatch.setattr("shardkit_tools.importers.line_ranges.INFERRED_BYTES", 0)
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n' + second + "\n")
    with pytest.raises(SourceError, match=r"--schema a=int64\?"):
        read_all(open_source(str(tmp_path / "rows.jsonl")))
    given = ImportOptions(field_types=parse_field_types(["a=int64?"]))
    found = check_importer(open_source(str(tmp_path / "rows.jsonl"), options=given))
    assert [row.sample.get("a") for row in found] == [1, None]


def test_reserved_and_odd_names_are_refused_with_the_source(tmp_path: Path) -> None:
    for name in ("step", "a://b"):
        with pytest.raises(SchemaError, match=rf"rows\.jsonl.*{name}"):
            open_source(json_lines(tmp_path / "rows.jsonl", [{name: 1}]))


def test_text_by_file_and_by_line(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.txt").write_bytes("Zürich\r\n\nlast".encode())
    (tmp_path / "b" / "2.md").write_bytes(b"x\n")
    whole = open_source(str(tmp_path))
    assert [dict(row.sample) for row in check_importer(whole)] == [
        {"text": "Zürich\r\n\nlast", "label": 0},
        {"text": "x\n", "label": 1},
    ]
    assert whole.classes == ("a", "b")
    lines = check_importer(open_source(str(tmp_path), options=ImportOptions(per="line")))
    assert [(row.sample["text"], row.source_name, row.source_row) for row in lines] == [
        ("Zürich", "a/1.txt", 0),
        ("last", "a/1.txt", 2),
        ("x", "b/2.md", 0),
    ]


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_bytes(b"K\xe9\n")
    for per in ("file", "line"):
        with pytest.raises(SourceError, match=r"old\.txt.*not UTF-8 \(byte 1 is 0xe9\).*--schema text=bytes"):
            read_all(open_source(str(tmp_path), options=ImportOptions(per=per)))
    importer = open_source(str(tmp_path), options=ImportOptions(field_types={"text": "bytes"}))
    assert [row.sample["text"] for row in check_importer(importer)] == [b"K\xe9\n"]
    with pytest.raises(UsageError, match="expected 'file' or 'line'"):
        ImportOptions(per="word")


def test_large_files_are_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_ranges, "_RANGE_BYTES", 50)
    monkeypatch.setattr(line_ranges, "READ_BYTES", 7)
    lines = [f"line {i} " + "x" * (i % 13) for i in range(60)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    importer = open_source(str(tmp_path), options=ImportOptions(per="line"))
    assert len(importer.tasks()) > 5
    assert [(row.sample["text"], row.source_row) for row in check_importer(importer)] == list(
        zip(lines, range(60), strict=True)
    )


def test_a_field_that_begins_late_is_kept_or_left_out_as_the_message_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit_tools.importers.json_lines.SCAN_ROWS", 2)
    monkeypatch.setattr("shardkit_tools.importers.line_ranges.INFERRED_BYTES", 0)
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1}\n{"id": 2}\n{"id": 3, "y": "late"}\n')
    (task,) = open_source(str(path)).tasks()
    (*_, failure) = open_source(str(path)).read(task)
    assert isinstance(failure, SourceFailure)
    assert "line 3" in str(failure.error)
    assert "--schema y=str?, or leave it out: --drop y" in str(failure.error)
    kept = open_source(str(path), options=ImportOptions(field_types={"y": "str?"}))
    assert [row.sample.get("y") for row in read_all(kept)] == [None, None, "late"]
    for options in (ImportOptions(drop=("y",)), ImportOptions(columns=("id",))):
        dropped = open_source(str(path), options=options)
        assert [dict(row.sample) for row in read_all(dropped)] == [{"id": 1}, {"id": 2}, {"id": 3}]


DIRTY_ROWS = {"undecodable": b"9,\xff\n", "quotes": b'9,"a"b\n', "cells": b"9\n", "words": b"nine,x\n"}


@pytest.mark.parametrize("bad", DIRTY_ROWS)
def test_a_bad_row_of_csv_is_lost_alone(tmp_path: Path, bad: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.csv").write_bytes(b"n,t\n1,x\n" + DIRTY_ROWS[bad] + b"2,y\n")
    (source / "b.csv").write_bytes(b"n,t\n3,z\n")
    types = {"n": "int64"}
    with pytest.raises(SourceError, match=r"a\.csv line 3"):
        build(source, tmp_path / "refused", options=ImportOptions(field_types=types))
    skip = ImportOptions(field_types=types, skip_bad_rows=True)
    built = build(source, tmp_path / "built", options=skip, on_error="skip", shuffle=False)
    adopted = adopt(source, tmp_path / "adopted", options=skip)
    assert [row["n"] for row in shardkit.open(tmp_path / "built")] == [1, 2, 3]
    assert [row["n"] for row in shardkit.open(tmp_path / "adopted")] == [1, 2, 3]
    assert len(built.skipped) == len(adopted.skipped) == 1


@pytest.mark.parametrize("end", [b'9,"x\n', b""], ids=["quote", "gzip"])
def test_damage_of_a_file_loses_its_rest_and_no_other_file(tmp_path: Path, end: bytes) -> None:
    rows = b"n,t\n" + b"".join(b"%d,x\n" % n for n in range(50_000))
    for name, data in {"a": rows + end, "b": b"n,t\n3,z\n"}.items():
        packed = gzip.compress(data)
        (tmp_path / f"{name}.csv.gz").write_bytes(packed[:-8] if name == "a" and not end else packed)
    options = ImportOptions(skip_bad_rows=True)
    result = build(tmp_path / "*.gz", tmp_path / "root", options=options, on_error="skip", shuffle=False)
    found = [row["n"] for row in shardkit.open(tmp_path / "root")]
    assert (found[:-1], found[-1]) == (list(range(len(found) - 1)), 3)
    assert len(found) > 40_000
    assert len(result.skipped) == 1
    assert "a.csv.gz" in result.skipped[0].message


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["1.5", "nan", "-inf"], "float64", [1.5, math.nan, -math.inf]),
        (["1", "nan"], "float64", [1.0, math.nan]),
        (["9007199254740993", "1.5"], "str", ["9007199254740993", "1.5"]),  # float64 would change it
        (["nan", "inf"], "str", ["nan", "inf"]),
        (["1", "NA"], "str", ["1", "NA"]),
        (["true", "NULL"], "str", ["true", "NULL"]),
    ],
)
def test_cells_that_are_not_finite_or_missing(
    tmp_path: Path, cells: list[str], kind: str, values: list[object]
) -> None:
    (tmp_path / "a.csv").write_text("x\n" + "".join(f"{cell}\n" for cell in cells))
    source = open_source(str(tmp_path / "a.csv"))
    assert str(source.schema["x"]) == kind
    found = [row.sample["x"] for row in read_all(source)]
    assert [str(value) for value in found] == [str(value) for value in values]
    if cells[1] in MISSING and kind == "str" and cells[0] != "nan":
        (note,) = open_source(str(tmp_path)).source.notes
        (wanted,) = re.findall(r"--schema x=(\S+\?)", note)
        typed = open_source(str(tmp_path / "a.csv"), options=ImportOptions(field_types={"x": wanted}))
        assert read_all(typed)[1].sample["x"] is None


def test_the_line_of_excel_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sep=;\nx;y\n1;2\n")
    with pytest.raises(SourceError, match="line 1: 'sep=' is a setting of Excel"):
        open_source(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.ndjson.gz"])
def test_an_array_is_read_whatever_its_extension(tmp_path: Path, name: str) -> None:
    data = b'[\n {"n": 1},\n {"n": 2}\n]\n'
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    source = open_source(str(tmp_path))
    assert [row.sample["n"] for row in read_all(source)] == [1, 2]
