"""Blocks of new datasets are small; a ref keeps the size that its version was built with, whoever builds onto it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.ranges import parse_size
from shardkit_tools.building.build_run import build
from shardkit_tools.building.rebuilding import rebuild


def _held(root: Path, ref: str = "main") -> int:
    return int(shardkit.open(f"{root}@{ref}").manifest.build["block_size"])


def _source(folder: Path) -> str:
    folder.mkdir()
    np.save(folder / "x.npy", np.arange(4096, dtype=np.int64).reshape(-1, 8))
    return str(folder / "x.npy")


def _create(root: Path, *, append: bool = False, **settings: object) -> str:
    with shardkit.create(root, {"x": "int64"}, append=append, **settings) as writer:  # type: ignore[arg-type]
        for number in range(100):
            writer.add({"x": number}, key=f"{append}{number}")
    return writer.manifest.id


def test_a_new_dataset_has_small_blocks(tmp_path: Path) -> None:
    _create(tmp_path / "a")
    build(_source(tmp_path / "source"), tmp_path / "b")
    assert _held(tmp_path / "a") == _held(tmp_path / "b") == 256 << 10


@pytest.mark.parametrize("size", ["1MiB", "4KiB"])
def test_a_ref_keeps_its_size(tmp_path: Path, size: str) -> None:
    root, source = tmp_path / "a", _source(tmp_path / "source")
    first = build(source, root, block_size=size)
    assert build(source, root).manifest == first.manifest
    assert rebuild(root, seed=7).manifest != first.manifest
    assert _held(root) == parse_size(size)
    build(source, root, ref="other")
    assert _held(root, "other") == 256 << 10
    build(source, root, block_size="64KiB")
    assert _held(root) == 64 << 10


def test_what_is_created_again_or_appended_keeps_it_too(tmp_path: Path) -> None:
    first = _create(tmp_path / "a", block_size="1MiB")
    assert _create(tmp_path / "a") == first
    _create(tmp_path / "a", append=True)
    assert _held(tmp_path / "a") == 1 << 20
