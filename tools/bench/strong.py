"""CPU time per row of loading with `verify="fast"` and with `verify="strong"`, measured in turns.

    python tools/bench/strong.py [--rows N] [--turns N]

Prints one line per workload: tokens (8 KiB rows, Arrow) and images (48 KiB rows, tar).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np

import shardkit

TOKENS, PICTURE_BYTES = 2048, 48 << 10


def build(root: Path, workload: str, rows: int) -> None:
    """Write the dataset of a workload."""
    generator = np.random.default_rng(0)
    if workload == "tokens":
        with shardkit.create(root, {"tokens": f"int32[{TOKENS}]"}, format="arrow") as writer:
            for _ in range(rows):
                writer.add({"tokens": generator.integers(0, 50_000, TOKENS, dtype=np.int32)})
    else:
        with shardkit.create(root, {"image": "bytes"}, format="tar") as writer:
            for _ in range(rows):
                writer.add({"image": generator.bytes(PICTURE_BYTES)})


def cpu_per_row(root: Path, verify: Literal["fast", "strong"]) -> float:
    """Return the CPU time of an epoch in microseconds per row; all threads of the process count."""
    dataset = shardkit.open(root, verify=verify)
    plan = dataset.plan(global_batch=64, seed=0)
    rows = 0
    with dataset.loader(plan, rank=0, world=1, tensors=False) as loader:
        batches = iter(loader)
        next(batches)  # threads and buffers exist from here on
        started = time.process_time()
        for batch in batches:
            rows += len(batch.samples)
        return (time.process_time() - started) / rows * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    print("| workload | fast, µs per row | strong, µs per row | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for workload, rows in (("tokens", arguments.rows), ("images", arguments.rows // 4)):
            root = Path(folder, workload)
            build(root, workload, rows)
            fast: list[float] = []
            strong: list[float] = []
            for _ in range(arguments.turns):
                fast.append(cpu_per_row(root, "fast"))
                strong.append(cpu_per_row(root, "strong"))
            best = min(fast), min(strong)
            print(f"| {workload} | {best[0]:.2f} | {best[1]:.2f} | {best[1] / best[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
