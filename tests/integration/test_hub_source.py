"""`build hf://datasets/…`: a dataset of the Hugging Face Hub, here a stand-in of it, through its own file system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fsspec.registry  # noqa: F401
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.errors import MissingDependency, NotFoundError, UsageError
from shardkit_tools.importers import open_source
from tests.servers.hub import hub

pytest.importorskip("huggingface_hub")
TOKEN = "hf_" + "s3cr3ttoken" * 3


def hub_environment(url: str, home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
    }


def build(url: str, home: Path, *arguments: object) -> tuple[int, str]:
    """A build in a process of its own, for the library reads its settings once; what it said."""
    typed = [sys.executable, "-m", "shardkit_tools", "build", *map(str, arguments)]
    done = subprocess.run(typed, env=hub_environment(url, home), capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_a_repository_of_the_hub_is_a_source(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    for split, first in (("train", 0), ("test", 30)):
        table = pa.table(
            {"text": [f"t{n}" for n in range(first, first + 30)], "id": range(first, first + 30)}
        )
        pq.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet", row_group_size=10)
    for name in ("README.md", ".gitattributes", "LICENSE"):
        (folder / name).write_text("words")
    with hub("me/cats", folder, TOKEN) as served:
        code, said = build(
            served.url, tmp_path, "hf://datasets/me/cats", tmp_path / "all", "--from", "huggingface"
        )
        assert code == 0, said
        assert "left out what is not parquet (2): LICENSE, README.md" in said
        train = "hf://datasets/me/cats/data/train-*.parquet"
        code, said = build(served.url, tmp_path, train, tmp_path / "train", "--jobs", 2)
        assert code == 0, said
        assert {path.rpartition("/")[2] for _, path in served.calls if "resolve" in path} == {
            "train-00000-of-00001.parquet", "test-00000-of-00001.parquet"
        }  # fmt: skip
        assert not [path for _, path in served.calls if "/resolve/main/" in path], "main may move meanwhile"
        served.fails.add("data/train-00000-of-00001.parquet")
        code, broken = build(served.url, tmp_path, train, tmp_path / "none")
        assert code == 1
        assert "train-00000-of-00001.parquet: cannot be read" in broken
    assert sorted(row["id"] for row in shardkit.open(str(tmp_path / "all"))) == list(range(60))
    assert sorted(row["text"] for row in shardkit.open(str(tmp_path / "train"))) == sorted(
        f"t{n}" for n in range(30)
    )
    for text in (said, broken):
        assert TOKEN not in text
        assert "secretsignature" not in text
    for path in [*(tmp_path / "all").rglob("*"), *(tmp_path / "train").rglob("*")]:
        data = path.read_bytes() if path.is_file() else b""
        assert TOKEN.encode() not in data
        assert b"hf://" not in data, f"{path} holds the URL"
        assert served.url.encode() not in data


READ = """
import json, sys, shardkit
ds = shardkit.open(sys.argv[1])
with ds.loader(ds.plan(global_batch=10, lanes=1), rank=0, world=1, tensors=False, fields=["text"]) as loader:
    texts = [text for batch in loader for text in batch["text"]]
print(json.dumps([[dict(ds[row]) for row in range(len(ds))], sorted(texts)]))
"""


def test_a_repository_of_the_hub_is_adopted_at_its_commit(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    texts = [f"t{n}" for n in range(30)]
    rows = [{"text": text, "id": n} for n, text in enumerate(texts)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data" / "train.parquet", row_group_size=10)
    with hub("me/cats", folder, TOKEN) as served:
        environment = hub_environment(served.url, tmp_path)
        root = str(tmp_path / "root")
        adopting = ["-m", "shardkit_tools", "adopt", "hf://datasets/me/cats/data/*.parquet", root]
        for arguments in (adopting, ["-c", READ, root]):
            done = subprocess.run(
                [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout) == [rows, sorted(texts)]
        (place,) = (tmp_path / "root" / "locations").iterdir()
        url = json.loads(place.read_bytes())["urls"][0]
        assert url == f"hf://datasets/me/cats@{'5' * 40}/data/train.parquet"


def test_what_to_do_where_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match="is given as hf://datasets/me/cats"):
        open_source("me/cats", "huggingface")
    with pytest.raises(UsageError, match=r"the URL of a source holds|a hf:// URL with a query"):
        open_source(f"hf://me:{TOKEN}@datasets/me/cats")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "hf", raising=False)
    with pytest.raises(MissingDependency, match="run: pip install huggingface_hub"):
        open_source("hf://datasets/me/cats")
