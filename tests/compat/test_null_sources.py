"""What other libraries write for a missing value has no value here either; and they read it so again."""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import webdataset

import shardkit
import shardkit_tools
from shardkit_tools.importers import open_source
from tests.importer_conformance import check_importer

pd: Any = pytest.importorskip("pandas")
ROWS = 60
TYPES = {"id": "int64", "age": "int64?", "score": "float64?", "ok": "bool?", "name": "str?"}
WITH_LISTS = {**TYPES, "tokens": "int64[*]?"}


def rows(*, lists: bool = True) -> list[dict[str, Any]]:
    found = []
    for number in range(ROWS):
        row: dict[str, Any] = {
            "id": number, "age": number % 9, "score": number / 4, "ok": number % 2 == 0, "name": f"n{number}",
            "tokens": list(range(number % 4)),
        }  # fmt: skip
        for place, field in enumerate(list(row)[1:], 2):
            if number % (place + 3) == 1:
                row[field] = None
        if not lists:
            del row["tokens"]
        found.append(row)
    return found


def table() -> pa.Table:
    return pa.table({name: [row[name] for row in rows()] for name in WITH_LISTS})


def nullable_frame() -> Any:
    return pd.DataFrame(rows()).astype({"age": "Int64", "ok": "boolean", "name": "string"})


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [name for name in TYPES if name != "name"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows())


def write_lines(path: Path, *, missing: bool) -> None:
    kept = [{k: v for k, v in row.items() if v is not None or not missing} for row in rows(lists=False)]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def write_tar(path: Path) -> None:
    names = {"id": "id", "age": "count", "name": "txt"}
    with webdataset.TarWriter(str(path)) as writer:
        for row in rows():
            sample = {extension: row[name] for name, extension in names.items() if row[name] is not None}
            writer.write({"__key__": f"{row['id']:04}", **sample})


def save_huggingface(path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows()).save_to_disk(str(path))


def huggingface_parquet(path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows()).to_parquet(str(path))


NO_NAME = {name: kind for name, kind in TYPES.items() if name != "name"}
SOURCES: dict[str, tuple[str, Callable[[Path], Any], dict[str, str]]] = {
    "pyarrow parquet": ("a.parquet", lambda path: pq.write_table(table(), path), WITH_LISTS),
    "pyarrow parquet without statistics": (
        "a.parquet", lambda path: pq.write_table(table(), path, write_statistics=False), WITH_LISTS,
    ),
    "pyarrow parquet, small groups": (
        "a.parquet", lambda path: pq.write_table(table(), path, row_group_size=7), WITH_LISTS,
    ),
    "pandas parquet": ("a.parquet", lambda path: nullable_frame().to_parquet(path), WITH_LISTS),
    "polars parquet": ("a.parquet", lambda path: pl.DataFrame(rows()).write_parquet(path), WITH_LISTS),
    "huggingface parquet": ("a.parquet", huggingface_parquet, WITH_LISTS),
    "polars arrow": ("a.arrow", lambda path: pl.DataFrame(rows()).write_ipc(path), WITH_LISTS),
    "pandas feather": ("a.feather", lambda path: nullable_frame().to_feather(path), WITH_LISTS),
    "huggingface folder": ("saved", save_huggingface, WITH_LISTS),
    "csv": ("a.csv", write_csv, NO_NAME),
    "pandas json lines": (
        "a.jsonl", lambda path: nullable_frame()[list(TYPES)].to_json(path, orient="records", lines=True), TYPES,
    ),
    "json lines with null": ("a.jsonl", lambda path: write_lines(path, missing=False), TYPES),
    "json lines with missing keys": ("a.jsonl", lambda path: write_lines(path, missing=True), TYPES),
    "webdataset": ("a.tar", write_tar, {"id": "int64", "count": "int64?", "text": "str?"}),
}  # fmt: skip


def expected(types: dict[str, str]) -> list[dict[str, Any]]:
    names = {"count": "age", "text": "name"} if "text" in types else {}
    return [{name: row[names.get(name, name)] for name in types} for row in rows()]


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in sample.items()
    }


@pytest.mark.parametrize("source", SOURCES)
def test_nulls_of_other_libraries(tmp_path: Path, source: str) -> None:
    name, write, types = SOURCES[source]
    write(tmp_path / name)
    importer = open_source(str(tmp_path / name))
    assert {field: str(kind) for field, kind in importer.schema.items()} == types
    check_importer(importer)
    for format, compression in (("arrow", "none"), ("tar", "none")):
        root = str(tmp_path / format)
        shardkit_tools.build(str(tmp_path / name), root, format=format, compression=compression, jobs=1)
        found = sorted((plain(sample) for sample in shardkit.open(root)), key=lambda row: row["id"])
        assert found == expected(types)


def test_shards_with_nulls_are_read_by_others(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "a.parquet")
    shardkit_tools.build(str(tmp_path / "a.parquet"), str(tmp_path / "d"), format="arrow", jobs=1)
    (shard,) = (tmp_path / "d").rglob("*.arrow")
    for found in (
        pl.read_ipc(shard).sort("id").drop("__key__").to_dicts(),
        pa.ipc.open_file(shard).read_all().sort_by("id").drop_columns("__key__").to_pylist(),
        shardkit.open(str(tmp_path / "d")).to_polars().sort("id").to_dicts(),
    ):
        assert found == rows()
    shardkit_tools.build(str(tmp_path / "a.parquet"), str(tmp_path / "t"), format="tar", jobs=1)
    (shard,) = (tmp_path / "t").rglob("*.tar")
    with tarfile.open(shard) as tar:
        names = [member.name for member in tar]
        texts = {name: tar.extractfile(name).read() for name in names if name.endswith((".cls", ".txt"))}  # type: ignore[union-attr]
    by_id = {int(text): name.partition(".")[0] for name, text in texts.items() if name.endswith(".id.cls")}
    for row in rows():
        key = by_id[row["id"]]
        assert texts.get(f"{key}.age.cls") == (None if row["age"] is None else b"%d" % row["age"])
        assert texts.get(f"{key}.name.txt") == (None if row["name"] is None else row["name"].encode())
        assert (f"{key}.tokens.npy" in names) == (row["tokens"] is not None)


def test_a_null_among_the_values_of_a_dictionary(tmp_path: Path) -> None:
    """Arrow counts the nulls of a dictionary's indices alone."""
    held = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 0], pa.int32()), pa.array(["a", None, "c"]))
    pa.feather.write_feather(pa.table({"name": held}), str(tmp_path / "names.arrow"))
    importer = open_source(str(tmp_path / "names.arrow"))
    assert {name: str(kind) for name, kind in importer.schema.items()} == {"name": "str?"}
    assert [row.sample["name"] for row in check_importer(importer)] == ["a", None, "c", "a"]
