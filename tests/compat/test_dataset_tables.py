"""What people type first at a dataset, as they type it; and foreign readers of it as an Arrow stream."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import shardkit
from shardkit.errors import MissingDependency, ShardkitError, UsageError

ROOT = Path(__file__).parents[2]

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


SNIPPETS: list[tuple[str, str, str]] = [
    # what is looked at, as people type it, and what it says: a repr, or the words of an error
    ("iteration", "[sample['label'] for sample in ds] == [i % 5 for i in range(60)]", "True"),
    ("slice", "[sample['text'] for sample in ds[10:13]]", "['größe 10', 'größe 11', 'größe 12']"),
    ("slice from the end", "[sample['text'] for sample in ds[-2:]]", "['größe 58', 'größe 59']"),
    ("list of numbers", "[sample['meta']['n'] for sample in ds[[3, 5, 8]]]", "[3, 5, 8]"),
    ("array of numbers", "[sample['meta']['n'] for sample in ds[np.array([8, -1])]]", "[8, 59]"),
    ("head", "len(ds.head()), [sample['label'] for sample in ds.head(2)]", "(5, [0, 1])"),
    ("sample", "[s['text'] for s in ds.sample(5, seed=0)] == [s['text'] for s in ds.sample(5)]", "True"),
    ("another seed", "[s['text'] for s in ds.sample(5, seed=0)] == [s['text'] for s in ds.sample(5, seed=1)]", "False"),
    ("len", "len(ds)", "60"),
    ("in", "3 in ds", "UsageError: .*say what is meant"),
    ("a key for a number", "ds['000']", "UsageError: .*000"),
    ("a number with a fraction", "ds[1.7]", "UsageError: .*1.7"),
    ("beyond the end", "ds[60]", ".*Error: .*60"),
    ("to_arrow", "ds.to_arrow()['label'].to_pylist()[:6]", "[0, 1, 2, 3, 4, 0]"),
    ("to_pandas", "int(ds.to_pandas()['label'].sum())", "120"),
    ("to_polars", "ds.to_polars()['label'].sum()", "120"),
    ("iter_arrow", "[batch.num_rows for batch in ds.iter_arrow(batch_rows=25)]", "[25, 25, 10]"),
    ("duckdb", "duckdb.sql('select sum(label) from ds').fetchall()[0][0]", "120"),
    ("polars", "pl.DataFrame(ds).height", "60"),
    ("select", "[s['text'] for s in ds.select(where='label == 3').head(2)]", "['größe 3', 'größe 8']"),
    ("two datasets", "[s['text'] for s in shardkit.open({'a': root, 'b': root})[59:61]]", "['größe 59', 'größe 0']"),
    ("repr of a dataset", "ds", "<shardkit .*60 samples"),
    ("in a notebook", "'<table' in ds._repr_html_(), '<table' in ds.plan(8)._repr_html_()", r"\(True, True\)"),
    ("repr of a plan", "ds.plan(8)", r"Plan\(global_batch=8, lanes=8, "),
    ("repr of a loader", "ds.loader(ds.plan(8), rank=0, world=1)", "<shardkit loader, rank 0 of 1: .*7 steps a loop"),
    ("repr of a plan dataset", "shardkit.torch.dataset(ds, ds.plan(8))", "<shardkit plan dataset, .*: 7 steps"),
    ("a number for a plan", "ds.loader(512)", r"UsageError: .*ds\.loader\(ds\.plan\(global_batch=512, seed=0\)\)"),
    ("a loop", "[b.array('label').shape for b in ds.loader(ds.plan(25), rank=0, world=1)]", r"\[\(25,\), \(25,\)\]"),
    ("a field of texts as an array", "next(iter(ds.loader(ds.plan(8), rank=0, world=1))).array('text')",
     r"UsageError: .*take batch\['text'\]"),
]  # fmt: skip


def test_what_people_type(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb
    import polars as pl

    import shardkit.torch

    ds = shardkit.open(root)
    names = {"ds": ds, "root": root, "np": np, "duckdb": duckdb, "pl": pl, "shardkit": shardkit}
    wrong = []
    for title, typed, says in SNIPPETS:
        try:
            answer = repr(eval(typed, names))
        except ShardkitError as error:
            answer = f"{type(error).__name__}: {error}"
        if answer != says and not re.match(says, answer, re.DOTALL):
            wrong.append(f"{title}: {typed}\n    {answer}, not {says}")
    assert not wrong, "\n".join(wrong)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match=r"pip install .*torch"):
        ds.loader(ds.plan(8), tensors=True)


def test_a_users_program_runs(tmp_path: Path) -> None:
    """Lint holds its types (users_program.py)."""
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("users_program.py")], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 13


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
