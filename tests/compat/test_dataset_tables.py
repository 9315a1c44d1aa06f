"""What people type first at a dataset, as they type it; and foreign readers of it as an Arrow stream."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import shardkit
from shardkit.errors import MissingDependency, UsageError

SCHEMA = {
    "image": "bytes",
    "label": "int64",
    "text": "str",
    "meta": "json",
    "flag": "bool",
    "pixels": "uint8[2,3]",
    "tokens": "int32[*]",
}


@pytest.fixture(params=["tar", "arrow"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with shardkit.create(
        tmp_path / "data", SCHEMA, format=request.param, shuffle=False, block_size="2KiB"
    ) as writer:
        for i in range(60):
            writer.add(
                {
                    "image": bytes([i]) * (i % 7),
                    "label": i % 5,
                    "text": f"größe {i}",
                    "meta": {"n": i},
                    "flag": i % 2 == 0,
                    "pixels": np.full((2, 3), i, np.uint8),
                    "tokens": list(range(i % 4)),
                }
            )
    return tmp_path / "data"


def texts(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["text"] for sample in samples]


def named(*numbers: int) -> list[str]:
    return [f"größe {number}" for number in numbers]


def test_what_people_type(root: Path) -> None:
    ds = shardkit.open(root)
    assert len(ds) == 60
    assert texts([sample for sample in ds]) == named(*range(60))  # noqa: C416  as a user types it
    assert texts(ds[10:20]) == named(*range(10, 20))
    assert texts(ds[[3, 5, 8]]) == named(3, 5, 8)
    assert ds[-1]["text"] == "größe 59"
    assert texts(ds[-2:]) == named(58, 59)
    assert texts(ds.head()) == named(0, 1, 2, 3, 4)
    assert texts(ds.head(2)) == named(0, 1)
    assert texts(ds.sample(5, seed=0)) == texts(ds.sample(5, seed=0)) != texts(ds.sample(5, seed=1))
    assert ds.to_arrow()["label"].to_pylist() == [i % 5 for i in range(60)]
    assert ds.to_pandas()["label"].sum() == 120
    assert ds.to_polars()["label"].sum() == 120
    assert [batch.num_rows for batch in ds.iter_arrow(batch_rows=25)] == [25, 25, 10]
    assert texts(list(ds.select(where="label == 3"))) == named(*range(3, 60, 5))
    assert [sample["pixels"].shape for sample in ds.select(rows=[7, -1])] == [(2, 3), (2, 3)]
    both = shardkit.open({"a": root, "b": root})
    assert texts(both[58:62]) == named(58, 59, 0, 1)


@pytest.mark.parametrize("wanted", [3, "0000000003", {"label": 3}, None])
def test_in_is_refused(root: Path, wanted: object) -> None:
    with pytest.raises(UsageError, match="say what is meant"):
        wanted in shardkit.open(root)  # noqa: B015


@pytest.mark.parametrize(
    ("plan", "batch"), [(512, 512), (None, 512), ("512", 512), (8, 8), (True, 512), ({}, 512)]
)
def test_a_loader_without_a_plan(root: Path, plan: Any, batch: int) -> None:
    import shardkit.torch

    ds = shardkit.open(root)
    for call in (ds.loader, lambda plan: shardkit.torch.dataset(ds, plan)):
        with pytest.raises(UsageError, match=rf"ds\.loader\(ds\.plan\(global_batch={batch}, seed=0\)\)"):
            call(plan)


def test_reprs(root: Path) -> None:
    import shardkit.torch

    ds = shardkit.open(root)
    plan = ds.plan(global_batch=8, lanes=4)
    with ds.loader(plan, rank=1, world=2) as loader:
        assert repr(loader).startswith(
            "<shardkit loader, rank 1 of 2: 2 of 4 lanes, 7 steps a loop, next is step 0; "
        )
        next(iter(loader))
        assert "next is step 1;" in repr(loader)
    data = shardkit.torch.dataset(ds, plan)
    assert repr(data).startswith(
        "<shardkit plan dataset, rank 0 of 1: 7 steps a loop, next begins at step 0; "
    )
    data.set_epoch(1)
    assert "step 7;" in repr(data)
    with shardkit.create(root, SCHEMA, ref="other") as writer:
        writer.add(ds[7])
        assert repr(writer).endswith("@other: 1 samples added>")
    assert repr(writer).endswith(f"@other: committed as {writer.manifest.id[:19]}…, 1 samples>")
    with pytest.raises(RuntimeError, match="stop"), shardkit.create(root, SCHEMA, ref="other") as writer:
        raise RuntimeError("stop")
    assert repr(writer).endswith("@other: closed>")


def test_duckdb_reads_a_dataset(root: Path) -> None:
    duckdb: Any = importlib.import_module("duckdb")
    ds = shardkit.open(root)
    found = duckdb.sql("select label, count(*), min(text) from ds group by label order by label").fetchall()
    assert found == [(label, 12, min(named(*range(label, 60, 5)))) for label in range(5)]
    view = ds.select(where="label < 3")  # noqa: F841  duckdb finds it by its name
    assert duckdb.sql("select sum(len(tokens)), sum(octet_length(image)) from view").fetchall() == [
        (sum(i % 4 for i in range(60) if i % 5 < 3), sum(i % 7 for i in range(60) if i % 5 < 3))
    ]
    batches = ds.iter_arrow(batch_rows=7, fields=["meta", "pixels"])  # noqa: F841  so this
    assert duckdb.sql("select count(*), max(meta->>'$.n') from batches").fetchall() == [(60, "9")]


def test_polars_and_pyarrow_read_a_dataset(root: Path) -> None:
    import polars as pl

    ds = shardkit.open(root)
    frame = pl.DataFrame(ds)
    assert frame.equals(ds.to_polars())
    assert frame["pixels"].dtype == pl.Array(pl.UInt8, (2, 3))
    assert frame["pixels"].to_numpy().tolist() == [sample["pixels"].tolist() for sample in ds]
    assert frame["tokens"].to_list() == [list(range(i % 4)) for i in range(60)]
    assert frame["image"].to_list() == [sample["image"] for sample in ds]
    assert pa.table(ds).equals(ds.to_arrow())
    assert pa.table(ds).schema.names == list(SCHEMA)


def test_pandas_gets_arrays(root: Path) -> None:
    frame = shardkit.open(root).to_pandas(fields=["tokens", "flag", "text"])
    assert list(frame.columns) == ["tokens", "flag", "text"]
    assert frame["flag"].dtype == bool
    assert [tokens.tolist() for tokens in frame["tokens"]] == [list(range(i % 4)) for i in range(60)]
    assert frame["text"][59] == "größe 59"


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_library_that_is_not_there(root: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependency, match=f"pip install {library}"):
        getattr(shardkit.open(root), f"to_{library}")()


def test_fields_that_are_none(root: Path) -> None:
    ds = shardkit.open(root)
    with pytest.raises(UsageError, match="'labels' is unknown; the fields are image, label"):
        ds.to_arrow(fields=["labels"])
    with pytest.raises(UsageError, match=r"such as \['label'\]"):
        ds.to_arrow(fields="label")
    with pytest.raises(UsageError, match="batch_rows = 0"):
        ds.iter_arrow(batch_rows=0)
