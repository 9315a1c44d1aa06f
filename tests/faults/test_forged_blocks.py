"""Blocks forged so that XXH3 does not change: refused wherever another user could have written them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import shardkit
from shardkit.errors import IntegrityError
from shardkit.reading.cache.block_cache import BlockCache
from shardkit.reading.objects import BlockRequest
from shardkit.stores.ownership import WriteAccess
from tests.forged_xxh3 import forge


def _make_foreign(path: Path) -> None:
    if os.geteuid():
        pytest.skip("changing an owner needs root")
    os.chown(path, 12345, 12345)


def _share_with_group(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, -1, 12345)
    path.chmod(0o664 if os.geteuid() == 0 else 0o666)


OPENINGS: dict[str, Callable[[Path], None]] = {
    "writable file": lambda path: path.chmod(0o666),
    "file of a group": _share_with_group,
    "writable folder": lambda path: path.parent.chmod(0o777),
    "writable root": lambda path: path.parents[2].chmod(0o777),
    "file of another user": _make_foreign,
    "folder of another user": lambda path: _make_foreign(path.parent),
}


def _forged_dataset(root: Path, shard_format: str) -> Path:
    """Write a dataset, forge a sample of it and return its shard."""
    draw = np.random.default_rng(3)
    with shardkit.create(root, {"tokens": "int32[1024]"}, format=shard_format, block_size="32KiB") as writer:
        for _ in range(24):
            writer.add({"tokens": draw.integers(0, 50_000, 1024, dtype=np.int32)})
    dataset = shardkit.open(root)
    index = dataset.reader.index(0)
    (shard,) = (path for path in root.rglob("*") if path.suffix in (".arrow", ".tar"))
    data = bytearray(shard.read_bytes())
    offset, size = int(index.block_offset[0]), int(index.block_size[0])
    data[offset : offset + size] = forge(bytes(data[offset : offset + size]), 2048 * 3)
    shard.chmod(0o644)
    shard.write_bytes(data)
    return shard


def _first_sample(root: Path, **options: Any) -> None:
    list(shardkit.open(root, **options))


def _first_batches(root: Path, **options: Any) -> None:
    dataset = shardkit.open(root, **options)
    plan = dataset.plan(global_batch=4, seed=0, lanes=2)
    with dataset.loader(plan, rank=0, world=1, tensors=False) as loader:
        list(loader)


@pytest.mark.parametrize("read", [_first_sample, _first_batches])
@pytest.mark.parametrize("shard_format", ["arrow", "tar"])
def test_strong_and_auto_find_a_forgery(tmp_path: Path, shard_format: str, read: Callable[..., None]) -> None:
    shard = _forged_dataset(tmp_path / "data", shard_format)
    with pytest.raises(IntegrityError, match="SHA-256"):
        read(tmp_path / "data", verify="strong")
    read(tmp_path / "data")  # nobody else can write it: XXH3 is compared, which this forgery keeps
    shard.chmod(0o666)
    with pytest.raises(IntegrityError, match="SHA-256"):
        read(tmp_path / "data")
    read(tmp_path / "data", verify="fast")  # as the caller says


@pytest.mark.parametrize("how", OPENINGS)
def test_others_can_write_a_file_or_a_folder_above_it(tmp_path: Path, how: str) -> None:
    path = tmp_path / "root" / "a" / "b" / "file"
    path.parent.mkdir(parents=True)
    for folder in (path.parent, *path.parent.parents[:2]):
        folder.chmod(0o755)
    path.touch()
    path.chmod(0o644)
    link = tmp_path / "link"
    link.symlink_to(path.parent.parent)
    assert not WriteAccess().others_can_write(path)
    assert not WriteAccess().others_can_write(link / "b" / "file")
    OPENINGS[how](path)
    assert WriteAccess().others_can_write(path)
    assert WriteAccess().others_can_write(link / "b" / "file")


def test_what_is_missing_counts_as_writable_and_a_sticky_folder_does_not(tmp_path: Path) -> None:
    path = tmp_path / "shared" / "file"
    assert WriteAccess().others_can_write(path)
    path.parent.mkdir()
    path.parent.chmod(0o1777)
    path.touch()
    path.chmod(0o600)
    assert not WriteAccess().others_can_write(path)


def test_a_cache_that_others_can_write_gives_no_forged_block(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(20_000)
    request = BlockRequest(
        "objects/x", 0, len(data), hashlib.sha256(data).digest(), xxhash.xxh3_64_intdigest(data)
    )
    forged = forge(data)
    for mode, expected in ((0o755, forged), (0o777, data)):
        cache = BlockCache(tmp_path / oct(mode), limit=4 << 20)
        cache.fetch(request, lambda: data)
        (file,) = (path for path in (tmp_path / oct(mode) / "blocks").rglob("*") if path.is_file())
        file.chmod(0o644)
        file.write_bytes(forged)
        file.parent.chmod(mode)
        assert bytes(cache.fetch(request, lambda: data)) == expected
        cache.close()
