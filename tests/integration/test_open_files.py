"""Files that are open at a time are bounded, however many a dataset has; what a reader finds is what lies there now."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.errors import IntegrityError, NotFoundError
from shardkit.stores.file_operations import FileOperations, Handle, read_file, substituted
from tests.flips import flip

SHARDS, ROWS = 1608, 4
MOST_OPEN_FILES = 32 + 16  # of a loader: files that stay open, and files that its threads are reading
LOOP = """
import os, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
import numpy as np, shardkit
ds = shardkit.open(sys.argv[1])
most, samples, rows = 0, 0, set()
with ds.loader(ds.plan(global_batch=64), tensors=False, threads=2) as loader:
    before = len(os.listdir("/proc/self/fd"))
    for batch in loader:
        samples += len(batch.samples)
        assert (batch["x"] == batch["x"][:, :1]).all()
        rows.update(batch["x"][:, 0].tolist())
        most = max(most, len(os.listdir("/proc/self/fd")) - before)
assert len(rows) == samples
print(samples, most, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


class _Hurried(FileOperations):
    """Nobody will cut the power."""

    def fsync(self, file: Handle) -> None: ...
    def fsync_directory(self, directory: Handle) -> None: ...


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 1,608 shards."""
    root = tmp_path_factory.mktemp("data") / "many"
    with substituted(_Hurried()), shardkit.create(str(root), schema={"x": "int64[64]"},
                         format="arrow", shard_size=ROWS * 512, block_size=512) as writer:  # fmt: skip
        for number in range(SHARDS * ROWS):
            writer.add({"x": np.full(64, number, np.int64)})
    assert shardkit.open(str(root)).manifest.shards >= SHARDS
    return root


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
@pytest.mark.parametrize(("soft", "hard"), [(1024, 1024), (128, 128), (128, 1024)])
def test_more_shards_than_files_may_be_open(many_shards: Path, soft: int, hard: int) -> None:
    program = [sys.executable, "-c", textwrap.dedent(LOOP), str(many_shards), str(soft), str(hard)]
    found = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    samples, most, limit = map(int, found.stdout.split())
    assert samples == SHARDS * ROWS // 64 * 64
    assert 0 < most <= MOST_OPEN_FILES + 4  # four for whatever else a loop opens for a moment
    assert limit == hard  # raised where it can be


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    path, into = tmp_path / "a", memoryview(bytearray(10))
    with pytest.raises(NotFoundError, match="is gone"):
        read_file(str(path), 100, 0, into)
    path.write_bytes(b"x" * 99)
    with pytest.raises(IntegrityError, match="holds 99 bytes, the manifest says 100"):
        read_file(str(path), 100, 0, into)
    path.write_bytes(b"x" * 100)
    read_file(str(path), 100, 90, into)
    assert bytes(into) == b"x" * 10
    with pytest.raises(IntegrityError, match="ends at byte 100"):
        read_file(str(path), 100, 95, into)


def test_a_file_that_was_replaced_by_a_good_one_is_read_from_then_on(tmp_path: Path) -> None:
    root, bad = tmp_path / "data", tmp_path / "bad"
    with substituted(_Hurried()), shardkit.create(str(root), schema={"x": "int64"}, format="arrow") as writer:
        for number in range(100):
            writer.add({"x": number})
    (shard,) = (root / "objects").rglob("*.arrow")
    shutil.copy(shard, bad)
    ds = shardkit.open(str(root))
    expected = ds[3]
    flip(shard)
    with pytest.raises(IntegrityError, match="mismatch"):
        ds[3]
    os.replace(bad, shard)
    assert ds[3] == expected
