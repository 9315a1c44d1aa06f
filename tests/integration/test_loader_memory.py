"""The memory bound is kept, and nothing grows from epoch to epoch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import shardkit

MIB = 1 << 20
ROW_BYTES, ROWS = 32 * 1024, 6000  # 188 MiB in all


@pytest.fixture(scope="module", params=["none", "zstd"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("data") / request.param)
    rng = np.random.default_rng(0)
    with shardkit.create(path, schema={"x": f"uint8[{ROW_BYTES}]", "n": "int64"}, format="arrow",
                         compression=request.param, block_size="512KiB", shard_size="8MiB") as writer:  # fmt: skip
        for n in range(ROWS):
            writer.add({"x": rng.integers(0, 256, ROW_BYTES, dtype=np.uint8), "n": n})
    return path


PROGRAM = """
    import sys
    import shardkit

    def resident(name):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

    ds = shardkit.open(sys.argv[1])
    memory, batch, epochs = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    plan = ds.plan(global_batch=batch, lanes=4, window_blocks=4)
    with ds.loader(plan, tensors=False, memory=memory, threads=2) as loader:
        before = resident("VmRSS")
        seen = []
        for epoch in range(epochs):
            for one in loader:
                pass
            seen.append(resident("VmRSS"))
        print(before, resident("VmHWM"), int(loader.stats()["peak_bytes"]), *seen)
"""


# What is measured is the loader, not how much freed memory the allocators of several threads keep for later.
QUIET_ALLOCATORS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}


def _run(root: str, memory: int, batch: int, epochs: int) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), root, str(memory), str(batch), str(epochs)],
        capture_output=True, text=True, check=True, env={**os.environ, **QUIET_ALLOCATORS},
    )  # fmt: skip
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_the_bound_holds_for_the_whole_process(root: str) -> None:
    memory, batch = 24 * MIB, 32
    before, highest, counted, *_ = _run(root, memory, batch, 2)
    assert counted <= memory
    # beside the blocks: batches on the way, indexes, and what allocators keep (pyarrow about 30 MiB)
    assert highest - before <= memory + 6 * batch * ROW_BYTES + 32 * MIB
    assert highest - before < ROWS * ROW_BYTES // 2  # a loader that keeps all would fail


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_fifty_epochs_do_not_grow(tmp_path: Path) -> None:
    root = str(tmp_path / "small")
    with shardkit.create(root, schema={"x": "uint8[4096]", "t": "str"}, block_size="64KiB") as writer:
        for n in range(400):
            writer.add({"x": np.full(4096, n % 256, dtype=np.uint8), "t": "t" * n})
    _, _, _, *resident = _run(root, 64 * MIB, 20, 50)
    slope = float(np.polyfit(np.arange(10, 50), resident[10:], 1)[0])
    # what the plan keeps of recent epochs fills up for some hundred epochs; a leak of 1 row in 20 would fail
    assert slope < 400 * 4096 / 20, f"{slope:.0f} bytes an epoch; the set has {400 * 4096}"
