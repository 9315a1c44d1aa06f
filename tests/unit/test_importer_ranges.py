"""Large tables are cut into tasks; the samples are those of the whole, and whole batches are those of single rows."""

from __future__ import annotations

import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit_tools
from shardkit_tools.importers import ImportOptions, arrow_files, line_ranges, open_source, tables
from shardkit_tools.importers.protocol import FileImporter, SourceFailure
from tests.importer_conformance import check_importer


def table(rows: int) -> pa.Table:
    numbers = np.arange(rows * 6, dtype=np.int32)
    return pa.table(
        {
            "tokens": pa.FixedSizeListArray.from_arrays(pa.array(numbers), 6),
            "score": pa.array(np.linspace(0, 1, rows)),
            "good": pa.array(np.arange(rows) % 3 == 0),
        }
    )


def write_arrow(path: Path, data: pa.Table, compression: str | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(path), data.schema, options=options) as writer:
        writer.write_table(data, max_chunksize=7)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_arrow_files_are_cut_between_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    write_arrow(tmp_path / "a.arrow", table(100), compression)
    whole = check_importer(open_source(str(tmp_path / "a.arrow")))
    for module in (tables, arrow_files):
        monkeypatch.setattr(module, "TASK_BYTES", 1500)
    cut = open_source(str(tmp_path / "a.arrow"))
    assert len(cut.tasks()) > 3
    assert cut.tasks()[0].start == 0
    assert sum(task.size for task in cut.tasks()) == (tmp_path / "a.arrow").stat().st_size
    samples = check_importer(cut)
    assert [one.source_row for one in samples] == list(range(100))
    assert [str(one.sample) for one in samples] == [str(one.sample) for one in whole]


def test_an_arrow_stream_is_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tables, arrow_files):
        monkeypatch.setattr(module, "TASK_BYTES", 100)
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table(1).schema) as writer:
        writer.write_table(table(50), max_chunksize=7)
    source = open_source(str(tmp_path / "a.arrow"))
    assert len(source.tasks()) == 1
    assert len(check_importer(source)) == 50


@pytest.mark.parametrize("kind", ["arrow", "parquet", "npy"])
def test_whole_batches_make_the_version_that_single_rows_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(tables, "_BATCH_ROWS", 9)
    path = tmp_path / f"a.{kind}"
    if kind == "arrow":
        write_arrow(path, table(60))
    elif kind == "parquet":
        pq.write_table(table(60), path)
    else:
        np.save(path, np.arange(360, dtype=np.int32).reshape(60, 6))
    source = open_source(str(path))
    assert isinstance(source, FileImporter)
    assert sum(1 for _ in source.decode(source.tasks()[0])) < 60
    named: dict[str, Any] = {
        "stratify": [] if kind == "npy" else ["good"],
        "shard_size": 1024,
        "block_size": 200,
    }
    singly: Any = types.SimpleNamespace()  # an importer without `read_rows`
    for name in ("schema", "classes", "files", "tasks", "read", "describe"):
        setattr(singly, name, getattr(source, name))
    by_batch = shardkit_tools.build(source, tmp_path / "batches", **named)
    by_row = shardkit_tools.build(singly, tmp_path / "rows", **named)
    assert by_batch.manifest is not None
    assert by_row.manifest is not None
    assert by_batch.manifest.id == by_row.manifest.id


def test_a_null_costs_its_own_row_only(tmp_path: Path) -> None:
    data = pa.table({"n": pa.array([1, None, 3]), "m": pa.array([1, 2, 3])})
    write_arrow(tmp_path / "a.arrow", data)
    source = open_source(str(tmp_path / "a.arrow"), options=ImportOptions(field_types={"n": "int64"}))
    found = list(source.read(source.tasks()[0]))
    assert [isinstance(one, SourceFailure) for one in found] == [False, True, False]
    source = open_source(str(tmp_path / "a.arrow"))
    assert str(source.schema["n"]) == "int64?"
    assert [dict(row.sample) for row in check_importer(source)] == data.to_pylist()


def lines(rows: int, ends: str = "\n") -> str:
    return "".join(f"{n},{n / 7:.3f},w{n}{ends}" for n in range(rows))


@pytest.mark.parametrize(("ends", "last"), [("\n", ""), ("\r\n", ""), ("\n", "7,7.0,no end")])
def test_tables_without_quotes_are_cut_between_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, last: str
) -> None:
    text = f"a,b,c{ends}" + lines(3000, ends) + last
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    whole = check_importer(open_source(str(tmp_path / "a.csv")))
    assert len(open_source(str(tmp_path / "a.csv")).tasks()) == 1
    monkeypatch.setattr(line_ranges, "_RANGE_BYTES", 5000)
    for piece in (100, 997, 4000):
        monkeypatch.setattr(line_ranges, "READ_BYTES", piece)
        cut = open_source(str(tmp_path / "a.csv"))
        assert len(cut.tasks()) > 1 + (piece < 1000)
        assert check_importer(cut) == whole


@pytest.mark.parametrize("inside", ['"x\ny",1,w\n', "\n", "1,1.0,a\r", "1,1.0,w\n\r\n", '1,1.0,a"b\n'])
def test_tables_where_rows_are_not_lines_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    monkeypatch.setattr(line_ranges, "_RANGE_BYTES", 1000)
    for piece in (64, 101, 1 << 20):
        monkeypatch.setattr(line_ranges, "READ_BYTES", piece)
        at = random.Random(piece).randrange(100, 400)
        text = lines(at) + inside + lines(400 - at)
        (tmp_path / "a.csv").write_bytes(b"a,b,c\n" + text.encode())
        options = ImportOptions(field_types={"a": "str"})
        (task,) = open_source(str(tmp_path / "a.csv"), "csv", options).tasks()
        assert task.stop is None


def test_errors_in_a_range_name_the_row_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_ranges, "_RANGE_BYTES", 1000)
    monkeypatch.setattr("shardkit_tools.importers.csv._SCAN_ROWS", 100)
    monkeypatch.setattr("shardkit_tools.importers.line_ranges.INFERRED_BYTES", 0)
    (tmp_path / "a.csv").write_text("a,b,c\n" + lines(900) + "x,1.0,w\n" + lines(100))
    source = open_source(str(tmp_path / "a.csv"))
    (failure,) = [
        row for task in source.tasks() for row in source.read(task) if isinstance(row, SourceFailure)
    ]
    assert failure.source_row == 900
    assert "line 902: field 'a' is 'x'" in str(failure.error)
    (tmp_path / "a.csv").write_bytes(b"a,b,c\n" + lines(900).encode() + b"1,1.0,\xff\n" + lines(10).encode())
    source = open_source(str(tmp_path / "a.csv"))
    (failure,) = [
        row for task in source.tasks() for row in source.read(task) if isinstance(row, SourceFailure)
    ]
    assert (failure.source_row, "line 902: not UTF-8" in str(failure.error)) == (900, True)
