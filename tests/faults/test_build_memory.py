"""A build keeps within a limit that the kernel enforces, however much larger its source is."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shardkit
import shardkit_tools
from tests.drills import DRILLS

resource = pytest.importorskip("resource")

HEADROOM = (96 if DRILLS else 64) << 20
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
            # allocators reserve address space, which the limit counts: malloc per thread, mimalloc a GiB at once,
            # in which a build could take memory without the limit
            "MALLOC_ARENA_MAX": "1",
            "ARROW_DEFAULT_MEMORY_POOL": "system",
        },
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


GROWTH_BYTES = 450 << 20
"""Memory that a job may take, whatever its source; what the imports take differs between machines."""

GROWTH = """
import re, sys
from pathlib import Path
import shardkit_tools
def peak_bytes():  # not ru_maxrss, which begins with that of the starting process
    return int(re.search("VmHWM: *\\\\s*(\\\\d+)", Path("/proc/self/status").read_text())[1]) << 10
few, source, root = sys.argv[1:]
shardkit_tools.build(few, root + "-few", jobs=1)  # imports what a build needs
before = peak_bytes()
result = shardkit_tools.build(source, root, jobs=1)
print(result.rows, peak_bytes() - before)
"""


def long_lines(path: Path, rows: int, size: int) -> None:
    """Lines of so many bytes, of 128 values."""
    with path.open("w") as stream:
        for number in range(rows):
            values = ", ".join(f'"f{field}": "{"x" * (size // 128)}"' for field in range(128))
            stream.write(f'{{"n": {number}, {values}}}\n')


def long_cells(path: Path, rows: int, size: int) -> None:
    with path.open("w") as stream:
        stream.write("n,text\n")
        for number in range(rows):
            stream.write(f'{number},"{"x" * size}"\n')


def large_members(path: Path, rows: int, size: int) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(rows):
            member = tarfile.TarInfo(f"{number}.bin")
            member.size = size
            tar.addfile(member, io.BytesIO(os.urandom(size)))


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the system does not say what a process held"
)
@pytest.mark.parametrize(
    ("name", "write", "rows", "size"),
    [
        ("a.jsonl", long_lines, 8, 16 << 20),
        ("a.csv", long_cells, 12, 8 << 20),
        ("a.tar", large_members, 5, 64 << 20),
    ],
)
def test_a_job_grows_by_less_than_450_mib(
    name: str, write: Callable[[Path, int, int], None], rows: int, size: int, tmp_path: Path
) -> None:
    """Whatever the line, the cell or the member; tests/unit/test_parquet_memory.py has the row group."""
    write(tmp_path / name, rows, size)
    write(tmp_path / f"few-{name}", 2, 1024)
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path / f"few-{name}"), str(tmp_path / name), str(tmp_path / "root")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, grown = map(int, done.stdout.split())
    assert found == rows
    assert grown <= GROWTH_BYTES, f"{grown >> 20} MiB"
