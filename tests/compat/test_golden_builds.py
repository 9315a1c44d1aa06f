"""Golden builds: these samples and settings have the recorded manifest ids, with one release of the libraries."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

import shardkit
import shardkit_tools
from shardkit.repository.repository import Repository

GOLDEN = Path(__file__).parents[1] / "golden" / "builds.json"

SCHEMA = {
    "blob": "bytes",
    "label": "int64",
    "name": "str",
    "vector": "float32[3]",
    "tokens": "int32[*]",
    "meta": "json",
}


def releases() -> dict[str, str]:
    """Return the releases of the libraries on whose output the ids depend: compressed columns and Arrow messages."""
    return {name: importlib.metadata.version(name) for name in ("zstandard", "pyarrow")}


def sample(n: int) -> dict[str, Any]:
    return {
        "blob": bytes((n * k) % 256 for k in range(n % 60)),
        "label": n % 4 if n % 50 else 100 + n,
        "name": f"sample é {n}",
        "vector": [n, n / 2, -n],
        "tokens": list(range(n % 9)),
        "meta": {"n": n, "even": n % 2 == 0},
    }


CREATED: dict[str, dict[str, Any]] = {
    "tar": {"format": "tar", "shard_size": "100KB"},
    "arrow": {"format": "arrow", "shard_size": "6KB"},
    "arrow in order": {"format": "arrow", "shard_size": "6KB", "shuffle": False},
}


def created(root: Path, **settings: Any) -> dict[str, str]:
    """Return the refs of a dataset that `shardkit.create` writes."""
    with shardkit.create(
        root, SCHEMA, stratify="label", block_size="2KB", split={"train": 0.8, "val": 0.2}, **settings
    ) as writer:
        for n in range(200):
            writer.add(sample(n), key=f"key {n}", source=("list", n))
    assert writer.manifest.shards > 3
    assert any(stratum.pooled for stratum in writer.manifest.strata)
    return dict(Repository.open(root).refs)


def built(folder: Path) -> dict[str, str]:
    """Return the refs of a dataset that `shardkit_tools.build` makes of a folder."""
    for n in range(40):
        path = folder / "source" / f"class{n % 3}" / f"{n}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes((n * k) % 256 for k in range(300 + n)))
    result = shardkit_tools.build(
        str(folder / "source"), folder / "root", stratify="__class__", shard_size="16KiB", block_size="4KiB"
    )
    assert result.manifest is not None
    return {"main": result.manifest.id}


def recorded() -> dict[str, Any]:
    """Return the recorded ids, or skip the test if they are of other releases of the libraries."""
    document: dict[str, Any] = json.loads(GOLDEN.read_text())
    if document["releases"] != releases():
        pytest.skip(f"golden ids are those of {document['releases']}, installed are {releases()}")
    return document


@pytest.mark.parametrize("name", CREATED)
def test_created(tmp_path: Path, name: str) -> None:
    expected = recorded()[name]
    assert created(tmp_path, **CREATED[name]) == expected


def test_built(tmp_path: Path) -> None:
    expected = recorded()["built"]
    assert built(tmp_path) == expected


def write(folder: Path) -> None:
    """Record the ids."""
    document: dict[str, Any] = {name: created(folder / name, **more) for name, more in CREATED.items()}
    document |= {"built": built(folder), "releases": releases()}
    GOLDEN.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
