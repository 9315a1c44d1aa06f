"""What is exported is what was there: built again it gives the same samples, and foreign programs read it."""

from __future__ import annotations

import datetime as dt
import math
import os
import shlex
import signal
import warnings
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import shardkit
import shardkit_tools
from shardkit.formats import Schema
from shardkit_tools.commands import export as exporting
from shardkit_tools.importers.protocol import ImportOptions
from tests.command_line import typed as call
from tests.faults.killed_operations import run_in_child
from tests.flips import flip
from tests.pictures import grey

TYPES = {
    "number": "int64", "small": "uint8", "huge": "uint64?", "ok": "bool?", "score": "float32?", "half": "float16",
    "price": "float64", "vector": "float32[2,3]?", "flags": "bool[3]", "tokens": "int32[*]", "steps": "float64[*]?",
    "name": "str", "note": "str?", "image": "bytes", "mask": "bytes?", "meta": "json", "extra": "json?",
    "tags": "str[*]", "parts": "bytes[*]?", "grid": "int16[*,*]", "day": "date", "when": "timestamp[us, UTC]?",
    "cost": "decimal[9,2]", "took": "duration[ms]",
}  # fmt: skip
UNFIT = {"jsonl": "bytes", "webdataset": "bytes[*]"}
"""Form → types that it refuses."""
FORMS = ["parquet", "jsonl", "webdataset", "hf"]

FULL: dict[str, Any] = {
    "number": 1, "small": 2, "huge": 2**64 - 1, "ok": True, "score": 0.5, "half": 0.25, "price": 0.1,
    "vector": np.zeros((2, 3), np.float32), "flags": [True, False, True], "tokens": [1], "steps": [0.5],
    "name": "a", "note": "b", "image": b"c", "mask": b"d", "meta": {"e": 1}, "extra": [2],
    "tags": ["f"], "parts": [b"g"], "grid": np.ones((1, 2), np.int16), "day": dt.date(2020, 1, 2),
    "when": dt.datetime(2020, 1, 2, tzinfo=dt.UTC), "cost": Decimal("1.25"), "took": dt.timedelta(seconds=-1.5),
}  # fmt: skip
"""A sample with every value: a member that no sample of a tar has is a field that nobody knows of."""

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.integers(-(2**63), 2**63 - 1)
plain = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | texts, lambda inner: st.lists(inner, max_size=3)
                     | st.dictionaries(texts, inner, max_size=3), max_leaves=6)  # fmt: skip
floats = {width: st.floats(width=width, allow_nan=False, allow_infinity=False) for width in (16, 32, 64)}
rows = st.fixed_dictionaries(
    {
        "number": numbers, "small": st.integers(0, 255), "huge": st.none() | st.integers(0, 2**64 - 1),
        "ok": st.none() | st.booleans(), "score": st.none() | floats[32], "half": floats[16], "price": floats[64],
        "vector": st.none() | st.lists(floats[32], min_size=6, max_size=6).map(
            lambda v: np.array(v, np.float32).reshape(2, 3)
        ),
        "flags": st.lists(st.booleans(), min_size=3, max_size=3).map(np.array),
        "tokens": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(lambda v: np.array(v, np.int32)),
        "steps": st.none() | st.lists(floats[64], max_size=3).map(lambda v: np.array(v, np.float64)),
        "name": texts, "note": st.none() | texts,
        "image": st.binary(max_size=20), "mask": st.none() | st.binary(max_size=9),
        "meta": plain, "extra": plain,
        "tags": st.lists(texts, max_size=3), "parts": st.none() | st.lists(st.binary(max_size=5), max_size=3),
        "grid": st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda shape: np.full(shape, 7, np.int16)),
        "day": st.dates(), "when": st.none() | st.datetimes(timezones=st.just(dt.UTC)),
        "cost": st.integers(-(10**9) + 1, 10**9 - 1).map(lambda cents: Decimal(cents).scaleb(-2)),
        "took": st.integers(-(10**12), 10**12).map(lambda ms: dt.timedelta(milliseconds=ms)),
    }
)  # fmt: skip


def write(root: Path, samples: list[dict[str, Any]], types: dict[str, str], **given: Any) -> shardkit.Dataset:
    with shardkit.create(root, types, shard_size="8KiB", block_size="1KiB", **given) as writer:
        for number, sample in enumerate(samples):
            writer.add(sample, key=f"größe/{number}")  # no shard keeps such a key as it is
    return shardkit.open(root)


def export(root: Path | str, form: str, target: Path, *options: str) -> str:
    code, out, err = call("export", root, "--as", form, "-o", target, *options)
    assert code == 0, err
    return out


def canonical(samples: Any, types: dict[str, str]) -> list[tuple[bytes, ...]]:
    parsed = Schema.parse(types)
    return [parsed.encode(sample, where="test") for sample in samples]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("format", ["tar", "arrow"])
@settings(max_examples=4, phases=[Phase.generate])
@given(
    samples=st.lists(rows, min_size=1, max_size=40),
    size=st.sampled_from(["1KiB", "256MiB"]),
    fields=st.just(set(TYPES)) | st.sets(st.sampled_from(sorted(TYPES))),
)
def test_built_again_it_is_the_same(
    form: str, format: str, samples: list[dict[str, Any]], size: str, fields: set[str]
) -> None:
    fields |= {"number"}  # a tar has no sample without a value
    types = {
        name: text
        for name, text in TYPES.items()
        if name in fields and not text.startswith(UNFIT.get(form, "-"))
    }
    if form == "parquet" and int(pa.__version__.partition(".")[0]) < 26:
        types.pop("vector", None)  # which pyarrow before 26 writes and cannot read if it is missing
    samples = [{name: sample[name] for name in types} for sample in [FULL, *samples]]
    with TemporaryDirectory() as folder:
        base = Path(folder)
        ds = write(base / "a", samples, types, format=format)
        said = shlex.split(export(base / "a", form, base / "out", "--file-size", size))
        given_types = dict(after.split("=", 1) for word, after in pairwise(said) if word == "--schema")
        shardkit_tools.build(
            str(base / "out"), str(base / "b"), options=ImportOptions(field_types=given_types), shuffle=False
        )
        again = shardkit.open(base / "b")
        assert {name: str(kind) for name, kind in again.schema.items()} == types
        assert canonical(again, types) == canonical(ds, types)
        if form != "jsonl":
            assert list(map(again.key, range(len(again)))) == list(map(ds.key, range(len(ds))))


@pytest.mark.parametrize(("form", "again"), [("parquet", (0, 0)), ("webdataset", (0, 4))])
def test_a_shape_that_a_form_does_not_tell_is_said(form: str, again: tuple[int, int], tmp_path: Path) -> None:
    types = {"fixed": "int8[*,4]", "free": "int8[*,*]"}
    write(tmp_path / "a", [{name: np.zeros((n, 4), np.int8) for name in types} for n in (1, 0)], types)
    said = export(tmp_path / "a", form, tmp_path / "out")
    assert ("(0, 4) becomes (0, 0) in free" in said) == (again == (0, 0))
    shardkit_tools.build(
        str(tmp_path / "out"), str(tmp_path / "b"), options=ImportOptions(field_types=types), shuffle=False
    )
    last = shardkit.open(tmp_path / "b")[1]
    assert (last["fixed"].shape, last["free"].shape) == ((0, 4), again)


def test_members_have_the_names_that_webdataset_gives_them(tmp_path: Path) -> None:
    import tarfile

    types = {"image": "bytes", "label": "int64", "text": "str", "meta": "json", "left": "bytes"}
    sample = {"image": grey(1), "label": 3, "text": "a", "meta": {"b": 1}, "left": grey(2)}
    with shardkit.create(tmp_path / "a", types) as writer:
        for key in ("a/b", "dotted.key", "k" * 90):
            writer.add(sample, key=key)
    export(tmp_path / "a", "webdataset", tmp_path / "x.tar")
    with tarfile.open(tmp_path / "x.tar") as tar:
        names = tar.getnames()
    assert {name.partition(".")[2] for name in names} == {"png", "cls", "txt", "json", "left.png"}
    keys = {name.partition(".")[0] for name in names}
    assert "a/b" in keys
    assert len(keys) == 3


COUNT = 37
PICTURES = {
    "image": "bytes",
    "label": "int64",
    "caption": "str?",
    "tokens": "int32[*]",
    "pixels": "uint8[2,3]",
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = [
        {
            "image": grey(number), "label": number % 5, "caption": None if number % 4 == 1 else f"größe {number}",
            "tokens": np.arange(number % 4, dtype=np.int32), "pixels": np.full((2, 3), number, np.uint8),
        }
        for number in range(COUNT)
    ]  # fmt: skip
    root = tmp_path_factory.mktemp("pictures") / "data"
    write(root, samples, PICTURES, stratify="label")
    return str(root)


def test_pandas_and_polars_read_parquet_and_json_lines(pictures: str, tmp_path: Path) -> None:
    import pandas as pd  # type: ignore[import-untyped]
    import polars as pl

    ds = shardkit.open(pictures)
    said = export(pictures, "parquet", tmp_path / "p", "--file-size", "1KiB")
    files = sorted((tmp_path / "p").iterdir())
    assert len(files) > 1
    assert f"37 samples in {len(files)} files" in said
    frame = pd.read_parquet(tmp_path / "p")
    assert frame["image"].tolist() == [sample["image"] for sample in ds]
    assert frame["caption"].isna().sum() == sum(sample["caption"] is None for sample in ds) > 0
    assert [tokens.tolist() for tokens in frame["tokens"]] == [sample["tokens"].tolist() for sample in ds]
    assert pl.read_parquet(tmp_path / "p" / "*.parquet")["label"].to_list() == frame["label"].tolist()
    export(
        pictures, "jsonl", tmp_path / "x.jsonl", "--columns", "label,caption,tokens", "--where", "label < 3"
    )
    rows = pd.read_json(tmp_path / "x.jsonl", lines=True)
    assert list(rows) == ["label", "caption", "tokens"]
    assert rows["label"].tolist() == [sample["label"] for sample in ds if sample["label"] < 3]
    assert pl.read_ndjson(tmp_path / "x.jsonl")["tokens"].to_list() == rows["tokens"].tolist()


def test_webdataset_and_datasets_read_pictures(pictures: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():  # of the other libraries
        warnings.simplefilter("ignore")
        import datasets
        import webdataset

        ds = shardkit.open(pictures)
        export(pictures, "webdataset", tmp_path / "x.tar")
        found = list(webdataset.WebDataset(str(tmp_path / "x.tar"), shardshuffle=False).decode("pil"))
        assert [sample["cls"] for sample in found] == [sample["label"] for sample in ds]
        assert [sample["png"].getpixel((0, 0))[0] for sample in found] == [s["pixels"][0, 0] for s in ds]
        assert [sample.get("caption.txt") for sample in found] == [sample["caption"] for sample in ds]
        export(pictures, "hf", tmp_path / "hf", "--file-size", "1KiB")
        loaded = datasets.load_from_disk(str(tmp_path / "hf"))
        assert isinstance(loaded.features["image"], datasets.Image)
        assert [sample["image"].getpixel((0, 0)) for sample in loaded] == [s["pixels"][0, 0] for s in ds]
        assert loaded["caption"][:] == [sample["caption"] for sample in ds]
        assert loaded["__key__"][0] == ds.key(0)
        assert loaded["pixels"][5] == ds[5]["pixels"].tolist()
        again = tmp_path / "again"
        loaded.select(range(5)).save_to_disk(str(again))  # what comes out is theirs
        assert len(datasets.load_from_disk(str(again))) == 5


def test_class_names_go_along(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "1.png").write_bytes(grey(3))
    shardkit_tools.build(str(tmp_path / "photos"), str(tmp_path / "a"))
    export(tmp_path / "a", "hf", tmp_path / "hf")
    shardkit_tools.build(str(tmp_path / "hf"), str(tmp_path / "b"))
    assert shardkit.open(tmp_path / "b").classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("types", "sample", "form", "words"),
    [
        (
            {"a": "int8", "b": "bytes?"},
            {"a": 1, "b": b"x"},
            "jsonl",
            ("'b'", "bytes?", "parquet", "--columns"),
        ),
        (
            {"a": "float32[2]"},
            {"a": [1, math.nan]},
            "jsonl",
            ("'a'", "float32[2]", "NaN", "parquet", "'größe/0'"),
        ),
        ({"a": "float64?"}, {"a": -math.inf}, "jsonl", ("'a'", "float64?", "parquet")),
        (
            {"a": "int8", "Big": "str"},
            {"a": 1, "Big": "x"},
            "webdataset",
            ("'Big'", "str", "lower case", "parquet"),
        ),
        ({"a": "int8?", "b": "str?"}, {}, "webdataset", ("no field has a value", "parquet", "'größe/0'")),
    ],
)
def test_what_a_form_cannot_hold_is_named(
    types: dict[str, str], sample: dict[str, Any], form: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    write(tmp_path / "a", [sample], types, format="arrow")
    code, _, err = call("export", tmp_path / "a", "--as", form, "-o", tmp_path / "out")
    assert code == 1
    assert [word for word in words if word not in err] == []
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


@pytest.mark.parametrize("form", FORMS)
def test_damage_leaves_nothing_and_is_named(form: str, tmp_path: Path) -> None:
    write(
        tmp_path / "a", [{"text": str(number) * 50} for number in range(200)], {"text": "str"}, format="arrow"
    )
    shard = max((tmp_path / "a" / "objects").rglob("*.arrow"), key=lambda path: path.stat().st_size)
    flip(shard)
    code, _, err = call("export", tmp_path / "a", "--as", form, "-o", tmp_path / "out", "--file-size", "1KiB")
    assert (code, "mismatch" in err) == (4, True), err
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_an_export_that_is_killed_leaves_nothing_under_its_name(pictures: str, tmp_path: Path) -> None:
    written = exporting._write_lines

    def write(stream: Any, schema: Any, runs: Any) -> None:
        written(stream, schema, runs)
        if stream.tell() > 50:
            stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        exporting._write_lines = write
        export(pictures, "jsonl", tmp_path / "out", "--columns", "label", "--file-size", "100")

    assert run_in_child(run) == -signal.SIGKILL
    assert [path.name.endswith(".partial") and path.name.startswith(".") for path in tmp_path.iterdir()] == [
        True
    ]


def test_what_is_there_stays_unless_asked(pictures: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    export(pictures, "parquet", target, "--file-size", "1KiB")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    code, _, err = call("export", pictures, "--as", "parquet", "-o", target)
    assert (code, "--replace" in err) == (1, True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    export(pictures, "parquet", target, "--replace")
    assert [path.name for path in target.iterdir()] == ["data-00000.parquet"]
    (target / "thesis.txt").write_text("mine")
    code, _, err = call("export", pictures, "--as", "parquet", "-o", target, "--replace")
    assert (code, "more than an export" in err) == (1, True)
    assert (target / "thesis.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    for options in (["--as", "parquet"], ["--as", "urls", "--where", "label < 3"]):
        assert call("export", pictures, *options)[0] == 2
    code, _, err = call("export", pictures, "--as", "jsonl", "-o", tmp_path / "y", "--columns", "labl")
    assert (code, "'labl'" in err) == (1, True)


@pytest.mark.slow
def test_memory_holds_some_blocks_and_never_all(tmp_path: Path) -> None:
    import tracemalloc

    from shardkit_tools.commands.export import Form, export_samples

    def peak(count: int, form: Form) -> int:
        root = tmp_path / f"{count}"
        if not root.exists():
            with shardkit.create(root, {"text": "str"}, format="arrow", block_size="64KiB") as writer:
                for number in range(count):
                    writer.add({"text": f"{number:06}" * 10_000})
        ds = shardkit.open(root)
        tracemalloc.start()
        pool = pa.default_memory_pool()
        before = pool.max_memory()
        export_samples(ds, form, tmp_path / f"{count}.{form}", schema=ds.schema, file_bytes=1 << 40)
        held: int = tracemalloc.get_traced_memory()[1] + pool.max_memory() - before
        tracemalloc.stop()
        return held

    forms: tuple[Form, ...] = ("jsonl", "webdataset", "parquet", "hf")
    for form in forms:
        peak(100, form)
        assert peak(1100, form) < 50 << 20 < 1100 * 60_000
