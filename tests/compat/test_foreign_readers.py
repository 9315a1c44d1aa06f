"""Shards read without shardkit: by tar, sha256sum, webdataset, pyarrow, polars, duckdb and Hugging Face datasets.

Every reader must give the samples that were written; what they are compared with never went through our reader.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from shardkit.formats import Schema
from tests.format_conformance import write_shard
from tests.pictures import grey

SCHEMA = Schema.parse(
    {
        "image": "bytes",
        "text": "str",
        "meta": "json",
        "label": "int64",
        "flag": "bool",
        "score": "float32",
        "pixels": "uint8[2,3]",
        "tokens": "int32[*]",
    }
)
COUNT = 21
ARROW = ["none", "zstd"]


@pytest.fixture(scope="module")
def samples() -> list[dict[str, Any]]:
    return [
        {
            "image": grey(i),
            "text": f"größe {i}" * (i % 3),
            "meta": {"n": i, "list": ["a", None, "ü"]},
            "label": i - 10,
            "flag": i % 2 == 0,
            "score": i / 4,
            "pixels": np.arange(6, dtype=np.uint8).reshape(2, 3) + np.uint8(i),
            "tokens": np.arange(i % 5, dtype=np.int32) - 1,
        }
        for i in range(COUNT)
    ]


def written(path: Path, samples: list[dict[str, Any]], format: str, compression: str) -> Path:
    """A shard in a file, named by its digest."""
    data, _ = write_shard(samples, SCHEMA, format=format, compression=compression, block_rows=8)
    name = f"{hashlib.sha256(data).hexdigest()}.{format}"
    (path / name).write_bytes(data)
    return path / name


def tool(name: str) -> str:
    """Path of a program; skips where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine")
    return found


def expected_members(samples: list[dict[str, Any]]) -> dict[str, bytes]:
    """Members of the tar by name, made without shardkit."""
    members: dict[str, bytes] = {}
    for i, sample in enumerate(samples):
        arrays = {}
        for field in ("score", "pixels", "tokens"):
            buffer = io.BytesIO()
            value = np.float32(sample[field]) if field == "score" else sample[field]
            np.lib.format.write_array(buffer, np.asarray(value), version=(1, 0), allow_pickle=False)
            arrays[f"key-{i}.{field}.npy"] = buffer.getvalue()
        members |= {
            f"key-{i}.image.png": sample["image"],
            f"key-{i}.text.txt": sample["text"].encode(),
            f"key-{i}.meta.json": json.dumps(
                sample["meta"], ensure_ascii=False, separators=(",", ":")
            ).encode(),
            f"key-{i}.label.cls": str(sample["label"]).encode(),
            f"key-{i}.flag.cls": str(int(sample["flag"])).encode(),
            **arrays,
        }
    return members


def test_tar_unpacks_every_member(tmp_path: Path, samples: list[dict[str, Any]]) -> None:
    shard = written(tmp_path, samples, "tar", "none")
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        [tool("tar"), "-xf", str(shard), "-C", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == expected_members(samples)


@pytest.mark.parametrize(("format", "compression"), [("tar", "none"), ("arrow", "zstd")])
def test_names_are_what_sha256sum_says(
    tmp_path: Path, samples: list[dict[str, Any]], format: str, compression: str
) -> None:
    shard = written(tmp_path, samples, format, compression)
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(f"{shard.name.partition('.')[0]}  {shard.name}\n")
    done = subprocess.run(
        [tool("sha256sum"), "--strict", "-c", sums.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{shard.name}: OK\n")


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its files to the collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset(tmp_path: Path, samples: list[dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import, not of the reading
        import webdataset
    shard = written(tmp_path, samples, "tar", "none")
    dataset = webdataset.WebDataset(str(shard), shardshuffle=False)
    found = list(dataset.decode(partial=True))
    assert [sample["__key__"] for sample in found] == [f"key-{i}" for i in range(COUNT)]
    for got, sample in zip(found, samples, strict=True):
        assert got["image.png"] == sample["image"]
        assert got["text.txt"] == sample["text"]
        assert got["meta.json"] == sample["meta"]
        assert got["label.cls"] == sample["label"]
        assert got["flag.cls"] == int(sample["flag"])
        assert float(got["score.npy"]) == sample["score"]
        assert np.array_equal(got["pixels.npy"], sample["pixels"])
        assert np.array_equal(got["tokens.npy"], sample["tokens"])


def check_table(table: pa.Table, samples: list[dict[str, Any]]) -> None:
    """A table as pyarrow gives it against the samples."""
    assert table.column("__key__").to_pylist() == [f"key-{i}" for i in range(COUNT)]
    for name in ("image", "text", "label", "flag", "score"):
        assert table.column(name).to_pylist() == [sample[name] for sample in samples], name
    assert [json.loads(text) for text in table.column("meta").to_pylist()] == [s["meta"] for s in samples]
    for name in ("pixels", "tokens"):
        assert table.column(name).to_pylist() == [sample[name].tolist() for sample in samples], name


@pytest.mark.parametrize("compression", ARROW)
def test_pyarrow(tmp_path: Path, samples: list[dict[str, Any]], compression: str) -> None:
    shard = written(tmp_path, samples, "arrow", compression)
    with pa.memory_map(str(shard)) as source, pa.ipc.open_file(source) as reader:
        table = reader.read_all()
        assert reader.num_record_batches == 3
        table.validate(full=True)
        check_table(table, samples)
        assert pc.sum(table.column("label")).as_py() == sum(sample["label"] for sample in samples)
        assert not any(field.nullable for field in table.schema)
        assert table.schema.field("meta").metadata == {b"shardkit": b"json"}
        assert json.loads(table.schema.metadata[b"shardkit"])["version"] == 1
        del table


@pytest.mark.parametrize("compression", ARROW)
def test_polars(tmp_path: Path, samples: list[dict[str, Any]], compression: str) -> None:
    import polars as pl

    shard = written(tmp_path, samples, "arrow", compression)
    frame = pl.read_ipc(shard)
    check_table(frame.to_arrow(), samples)
    lazy = pl.scan_ipc(shard).filter(pl.col("label") > 0).select("label").collect()
    assert lazy["label"].to_list() == [sample["label"] for sample in samples if sample["label"] > 0]


@pytest.mark.parametrize("compression", ARROW)
def test_duckdb(tmp_path: Path, samples: list[dict[str, Any]], compression: str) -> None:
    """duckdb takes Arrow through pyarrow's readers; reading the file alone needs an extension from the network."""
    import duckdb

    shard = written(tmp_path, samples, "arrow", compression)
    with pa.OSFile(str(shard)) as source, pa.ipc.open_file(source) as reader:
        shard_table = reader.read_all()
    with duckdb.connect() as connection:
        connection.register("shard", shard_table)
        rows = connection.sql(
            'SELECT "__key__", image, text, meta, label, flag, score, pixels, tokens FROM shard '
            "WHERE label >= 0 ORDER BY label"
        ).fetchall()
    wanted = [(i, sample) for i, sample in enumerate(samples) if sample["label"] >= 0]
    assert len(rows) == len(wanted)
    for (key, image, text, meta, label, flag, score, pixels, tokens), (i, sample) in zip(
        rows, wanted, strict=True
    ):
        assert (key, bytes(image), text, label, flag, score) == (
            f"key-{i}",
            sample["image"],
            sample["text"],
            sample["label"],
            sample["flag"],
            sample["score"],
        )
        assert json.loads(meta) == sample["meta"]
        assert [list(row) for row in pixels] == sample["pixels"].tolist()
        assert list(tokens) == sample["tokens"].tolist()


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hugging Face datasets, offline, with everything that it writes under `tmp_path`."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import, not of the reading
        datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True, raising=False)
    datasets.disable_progress_bars()
    return datasets


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.filterwarnings("default")
def test_hugging_face_arrow(
    tmp_path: Path, samples: list[dict[str, Any]], hugging_face: Any, compression: str
) -> None:
    shard = written(tmp_path, samples, "arrow", compression)
    dataset = hugging_face.load_dataset(
        "arrow", data_files=str(shard), split="train", cache_dir=str(tmp_path / "cache")
    )
    check_table(dataset.with_format("arrow")[:], samples)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.filterwarnings("default")
def test_hugging_face_webdataset(
    tmp_path: Path, samples: list[dict[str, Any]], hugging_face: Any, streaming: bool
) -> None:
    shard = written(tmp_path, samples, "tar", "none")
    dataset = hugging_face.load_dataset(
        "webdataset",
        data_files=str(shard),
        split="train",
        cache_dir=str(tmp_path / "cache"),
        streaming=streaming,
    )
    found = list(dataset)
    assert [row["__key__"] for row in found] == [f"key-{i}" for i in range(COUNT)]
    for i, (got, sample) in enumerate(zip(found, samples, strict=True)):
        assert np.asarray(got["image.png"]).tolist() == [[i] * 4] * 3
        assert got["text.txt"] == sample["text"]
        assert got["meta.json"] == sample["meta"]
        assert int(got["label.cls"]) == sample["label"]
        assert np.array_equal(np.asarray(got["pixels.npy"]), sample["pixels"])
        assert np.array_equal(np.asarray(got["tokens.npy"]).ravel(), sample["tokens"])
