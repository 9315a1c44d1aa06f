"""Golden builds: these samples and settings have these manifest ids for ever (for one zstandard and pyarrow)."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

import shardkit
import shardkit_tools
from shardkit.storage import Repository

LOCKED = {"zstandard": "0.25.0", "pyarrow": "26.0.1"}
"""Compressed columns are zstandard's bytes, arrow shards pyarrow's; other releases may choose others."""

SCHEMA = {
    "blob": "bytes",
    "label": "int64",
    "name": "str",
    "vector": "float32[3]",
    "tokens": "int32[*]",
    "meta": "json",
}


def sample(n: int) -> dict[str, Any]:
    return {
        "blob": bytes((n * k) % 256 for k in range(n % 60)),
        "label": n % 4 if n % 50 else 100 + n,
        "name": f"sample é {n}",
        "vector": [n, n / 2, -n],
        "tokens": list(range(n % 9)),
        "meta": {"n": n, "even": n % 2 == 0},
    }


@pytest.fixture(autouse=True)
def locked_releases() -> None:
    found = {name: importlib.metadata.version(name) for name in LOCKED}
    if found != LOCKED:
        pytest.skip(f"golden ids are those of {LOCKED}, installed are {found}")


@pytest.mark.parametrize(
    ("settings", "main", "train"),
    [
        (
            {"format": "tar"},
            "0b0276f2644eaf4a2a55e1b5b63932d1f22cc0267287d0a0920a234f954f587c",
            "943345947d64f79506a84e9f6437edc0ac5a8313e40cebdf8846fe17aa4d005d",
        ),
        (
            {"format": "tar", "compression": "zstd:3", "seed": 7},
            "7eb76c00f7fa45af5b30d35225b95903f5faec918a756fb97c013e59e742ea1a",
            "bb8b285f73c271c49ba0aedb2cc9e15089296013512c488094740745e3ba1792",
        ),
        (
            {"format": "arrow"},
            "5540dfdedf489d93a4a7800de6fd6d540a40e9700cd24ac7031c5b13296504e2",
            "bd9c9799aebde90e0c0bf3718974c40e98604ebddbbda7910a918f6143fc5e47",
        ),
        (
            {"format": "arrow", "shuffle": False},
            "afb35dca88ffe1a7a13f767d47a571df9217b1ed688413cd438db8b7655672e8",
            "adde8ad4c8cb1c4c7dd95d330e307c09dff465e5998ce3d38239817f8c14360c",
        ),
    ],
    ids=["tar", "tar.zst", "arrow", "in order"],
)
def test_created(tmp_path: Path, settings: dict[str, Any], main: str, train: str) -> None:
    with shardkit.create(
        tmp_path, SCHEMA, stratify="label", shard_size="100KB" if settings["format"] == "tar" else "6KB",
        block_size="2KB", split={"train": 0.8, "val": 0.2}, **settings,
    ) as writer:  # fmt: skip
        for n in range(200):
            writer.add(sample(n), key=f"key {n}", source=("list", n))
    assert writer.manifest.shards > 3
    assert any(stratum.pooled for stratum in writer.manifest.strata)
    refs = Repository.open(tmp_path).refs
    assert (refs["main"], refs["train"]) == (f"sha256:{main}", f"sha256:{train}")


def test_built(tmp_path: Path) -> None:
    for n in range(40):
        path = tmp_path / "source" / f"class{n % 3}" / f"{n}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes((n * k) % 256 for k in range(300 + n)))
    result = shardkit_tools.build(
        str(tmp_path / "source"),
        tmp_path / "root",
        stratify="__class__",
        shard_size="16KiB",
        block_size="4KiB",
    )
    assert result.manifest is not None
    assert result.manifest.id == "sha256:dfb9086d373bb5019805bbf62137b5979681a28531d87b56ca2a01a14c4e2542"
