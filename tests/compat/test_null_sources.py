"""Other libraries read missing values as such from shards; tests/property/test_importers.py has the other way."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

import shardkit
import shardkit_tools
from shardkit_tools.importers import open_source
from tests.importer_conformance import check_importer

ROWS = 60


def rows() -> list[dict[str, Any]]:
    found = []
    for number in range(ROWS):
        row: dict[str, Any] = {
            "id": number, "age": number % 9, "score": number / 4, "ok": number % 2 == 0, "name": f"n{number}",
            "tokens": list(range(number % 4)),
        }  # fmt: skip
        for place, field in enumerate(list(row)[1:], 2):
            if number % (place + 3) == 1:
                row[field] = None
        found.append(row)
    return found


def table() -> pa.Table:
    return pa.table({name: [row[name] for row in rows()] for name in rows()[0]})


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
