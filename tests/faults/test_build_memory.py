"""A build keeps within a limit that the kernel enforces, however much larger its source is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shardkit
import shardkit_tools
from tests.drills import DRILLS

resource = pytest.importorskip("resource")

HEADROOM = (96 if DRILLS else 40) << 20
"""What a build may take, in bytes, beyond what a process that has done a build before holds."""

SOURCE_BYTES = (768 << 20) if DRILLS else 3 * HEADROOM
"""Three times the headroom; in full, three times all that the process may hold."""

BUILDER = """
import resource, sys, threading
import shardkit_tools

def held():
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) * 1024 for line in stream if line.startswith("VmData"))

threading.stack_size(2**20)  # the limit counts what a stack may take, 8 MiB by default, not what it does
source, tiny, root, headroom, by = sys.argv[1:]
shardkit_tools.build(tiny, root + "-tiny", jobs=1, format=by)  # what it imports is not counted
limit = held() + int(headroom)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
result = shardkit_tools.build(source, root, jobs=1, shard_size="64MiB", format=by)
print(limit, result.rows, result.scratch_bytes, result.manifest.id)
"""


def tokens(path: Path, size: int) -> str:
    rows = size // 8192
    array = np.lib.format.open_memmap(str(path), "w+", np.int32, (rows, 2048))
    for start in range(0, rows, 4096):
        stop = min(rows, start + 4096)
        array[start:stop] = np.random.default_rng(start).integers(0, 50_000, (stop - start, 2048))
    array.flush()
    return str(path)


def built_within(source: str, root: Path, headroom: int, by: str) -> subprocess.CompletedProcess[str]:
    tiny = tokens(root.with_suffix(".npy"), 10 * 8192)
    return subprocess.run(
        [sys.executable, "-c", BUILDER, source, tiny, str(root), str(headroom), by],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "MALLOC_ARENA_MAX": "1",
        },  # arenas are address space, which the limit counts, not memory
    )


@pytest.mark.drill
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the system does not say what a process holds"
)
@pytest.mark.parametrize("by", ["arrow", "tar"])
def test_a_source_of_three_times_the_limit(tmp_path: Path, by: str) -> None:
    """Shuffled over all of it, through scratch, and the same version as without a limit."""
    size = SOURCE_BYTES
    source = tokens(tmp_path / "tokens.npy", size)
    done = built_within(source, tmp_path / "root", HEADROOM, by)
    assert done.returncode == 0, done.stderr
    limit, rows, scratch, found = done.stdout.split()
    assert int(rows) == size // 8192
    assert int(scratch) >= size, "nothing was left in the source"
    if DRILLS:
        assert size >= 3 * int(limit)
    result = shardkit_tools.build(source, tmp_path / "free", jobs=1, shard_size="64MiB", format=by)
    assert result.manifest is not None
    assert result.manifest.id == found
    values = np.load(source, mmap_mode="r")
    ds = shardkit.open(tmp_path / "root")
    first = sorted(int(ds[row]["value"][0]) for row in range(0, len(ds), 997))
    assert len(set(first)) > 1
    assert np.isin(first, values[:, 0]).all()
    print(f"limit {int(limit) >> 20} MiB, source {size >> 20} MiB")  # what a drill's record wants


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the system does not say what a process holds"
)
def test_the_limit_is_one(tmp_path: Path) -> None:
    """The same build does not fit a tenth of it: what the other test passes is enforced."""
    source = tokens(tmp_path / "tokens.npy", SOURCE_BYTES)
    done = built_within(source, tmp_path / "root", HEADROOM // 10, "arrow")
    assert done.returncode != 0
