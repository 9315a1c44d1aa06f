"""Compare blocks of 256 KiB and 1 MiB by windows, bytes and requests, and measure the memory of workers and ranks.

::

    python tools/bench/windows.py --out tools/bench/results/windows

Rows are tokens of int32[2048]. *1 MiB* is read with the plan of version 0.1, 64 lanes of 16 blocks; *256 KiB* with the
current defaults. The bucket is a LocalStack server on this machine. A proxy counts requests in a separate epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
import shardkit
from bench.machine import machine_facts
from tests.servers.fault_proxy import Fault, FaultProxy, Request
from tests.servers.object_stores import localstack, s3_environment

ROW = 2048
BATCH = 64
SIZES: dict[str, dict[str, Any]] = {
    "256KiB": {},
    "1MiB": {"lanes": 64, "window_blocks": 16},
}


def build(root: str, rows: int, block_size: str, compression: str) -> Any:
    tokens = np.random.default_rng(0).zipf(1.3, (256, ROW)) % 50_000
    with shardkit.create(
        root, {"tokens": f"int32[{ROW}]"}, block_size=block_size, compression=compression
    ) as writer:
        for number in range(rows):
            writer.add({"tokens": np.roll(tokens[number % 256], number).astype(np.int32)})
    return shardkit.open(root)


def epoch(root: str, settings: dict[str, Any]) -> dict[str, float]:
    """Run one epoch of one rank; return its rate, window, rows per block and memory."""
    dataset = shardkit.open(root)
    plan = dataset.plan(global_batch=BATCH, **settings)
    with dataset.loader(plan, rank=0, world=1, tensors=False) as loader:
        started = time.perf_counter()
        rows = sum(len(batch.samples) for batch in loader)
        seconds, stats = time.perf_counter() - started, loader.stats()
        per_block = rows / (stats["block_loads"] - stats["block_reloads"])
        return {"mib_s": rows * ROW * 4 / 2**20 / seconds, "window_blocks": plan.settings.window_blocks,
                "rows": per_block, "memory": loader.memory_needed}  # fmt: skip


def block_sizes(rows: int, repeats: int, scratch: Path) -> list[str]:
    """Measure both block sizes from a bucket; return the lines of a table."""
    head = ("blocks", "rows per block", "rows per window", "memory of windows, MiB", "zstd, bytes ÷ raw",
            "requests of an epoch", "MiB/s from the bucket")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    with localstack(scratch / "server", "bench") as endpoint:
        os.environ.update(s3_environment(endpoint))
        rates: dict[str, list[float]] = {size: [] for size in SIZES}
        found, counts = {}, {}
        for size in SIZES:
            build(f"s3://bench/{size}", rows, size, "none")
        for _ in range(repeats):
            for size, settings in SIZES.items():
                found[size] = epoch(f"s3://bench/{size}", settings)
                rates[size].append(found[size]["mib_s"])
        for size, settings in SIZES.items():
            counts[size] = requests(endpoint, f"s3://bench/{size}", settings)
    for size in SIZES:
        packed = build(str(scratch / size), rows, size, "zstd")
        ratio = packed.manifest.stored_bytes / packed.manifest.raw_bytes
        one = found[size]
        lines.append(
            f"| {size} | {one['rows']:.0f} | {one['rows'] * one['window_blocks']:.0f} | {one['memory'] / 2**20:.0f} "
            f"| {ratio:.3f} | {counts[size]} "
            f"| {statistics.median(rates[size]):.0f} ({min(rates[size]):.0f}–{max(rates[size]):.0f}) |"
        )
    small, large = (statistics.median(rates[size]) for size in SIZES)
    return [*lines, "", f"256 KiB ÷ 1 MiB: {small / large:.2f} of the bytes a second."]


def requests(endpoint: str, root: str, settings: dict[str, Any]) -> int:
    asked = 0

    def note(request: Request) -> Fault | None:
        nonlocal asked
        asked += request.method == "GET" and "range" in request.headers
        return None

    with FaultProxy(endpoint, note) as proxy:
        code = f"import bench.windows as w; w.epoch({root!r}, {settings!r})"
        environment = os.environ | {"AWS_ENDPOINT_URL": proxy.endpoint, "PYTHONPATH": _python_path()}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    return asked


def _python_path() -> str:
    return os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])


# ---- workers and ranks


def rank_alone(root: str, rank: int, world: int, workers: int) -> None:
    """Run an epoch of one rank; print its memory near the end of the epoch and the bytes that it read."""
    import warnings

    import torch.utils.data

    import shardkit.torch

    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than processors
    dataset = shardkit.open(root)
    plan = dataset.plan(global_batch=BATCH)
    batches: Any
    if workers:
        reader = shardkit.torch.dataset(dataset, plan, rank=rank, world=world)
        batches = torch.utils.data.DataLoader(reader, batch_size=None, num_workers=workers)
    else:
        batches = dataset.loader(plan, rank=rank, world=world, tensors=False)
    left, proportional, read = plan.loop_steps, 0, 0
    for _batch in batches:
        left -= 1
        if left == 2 * max(1, workers):  # workers end with their last steps
            proportional, read = in_memory()
    print(json.dumps({"memory": proportional, "read": read}))


def in_memory() -> tuple[int, int]:
    """Return the proportional resident bytes and the bytes read of this process and its children."""
    ids = [os.getpid()]
    for path in Path("/proc/self/task").glob("*/children"):
        ids += map(int, path.read_text().split())
    memory = read = 0
    for process in ids:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            memory += next(
                int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")
            )
            read += int(Path(f"/proc/{process}/io").read_text().split()[1])
    return memory, read


def processes(rows: int, scratch: Path) -> list[str]:
    """Measure memory and bytes read with 1, 4 and 8 workers, and with 1, 4 and 8 ranks of one node."""
    root = str(scratch / "tokens")
    build(root, rows, "256KiB", "none")
    lines = ["| | resident, MiB | bytes read ÷ dataset |", "|---|---|---|"]
    for count in (0, 1, 4, 8):
        name = f"1 rank, {count} workers" if count else "1 rank, no workers"
        lines.append(_row(name, _ranks(root, 1, count), rows))
    lines += [_row(f"{count} ranks", _ranks(root, count, 0), rows) for count in (4, 8)]
    return lines


def _ranks(root: str, world: int, workers: int) -> list[dict[str, int]]:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", f"import bench.windows as w; w.rank_alone({root!r}, {rank}, {world}, {workers})"],
            env=os.environ | {"PYTHONPATH": _python_path()}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    return [json.loads(one.communicate()[0]) for one in running]


def _row(name: str, found: list[dict[str, int]], rows: int) -> str:
    memory, read = (sum(one[key] for one in found) for key in ("memory", "read"))
    return f"| {name} | {memory / 2**20:.0f} | {read / (rows * ROW * 4):.2f} |"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rows", type=int, default=40_000)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--out", type=Path, required=True, help="path without an extension")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        facts = machine_facts()
        text = [f"# Windows, {facts['date']}", "",
                f"{facts['cpus']} × {facts['processor']}, Python {facts['python']}; `tools/bench/windows.py`.", "",
                f"Tokens, {chosen.rows} rows of 8 KiB, median of {chosen.repeats} epochs in turns.", "",
                "## Block sizes", "", *block_sizes(chosen.rows, chosen.repeats, Path(scratch)), "",
                "## Processes of one node", "", *processes(chosen.rows, Path(scratch)), ""]  # fmt: skip
    chosen.out.with_suffix(".md").write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
