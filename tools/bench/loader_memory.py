"""Measure the loader's memory: its bound on the workloads of read.py, and its growth over epochs of a small set.

    python tools/bench/loader_memory.py --memory 64MiB --out tools/bench/results/DATE-loader-memory

Each reading runs in its own process with default allocators. "Grew by" is the process's highest resident memory less
its resident memory before the loader was made: blocks (the bound), batches in flight, indexes, and freed memory that
the allocators keep.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import shardkit
from bench.datasets import write_dataset
from bench.machine import machine_facts
from bench.reading.workloads import WORKLOADS
from shardkit.ranges import parse_size

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", default="64MiB", help="the loader's bound")
    parser.add_argument("--scale", type=float, default=0.12, help="share of the rows of read.py")
    parser.add_argument("--epochs", type=int, default=50, help="of the small sets")
    parser.add_argument("--out", help="path without suffix for .md and .json")
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--lanes", type=int, help="of the plan; default: the plan's own")
    parser.add_argument("--window-blocks", type=int, help="of the plan; default: the plan's own")
    parser.add_argument("--one", nargs=3, metavar=("DATA", "BATCH", "EPOCHS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(read(options)))
        return
    load, results = os.getloadavg()[0], {}
    for name in options.workloads:
        results[name] = measure(name, options)
        print(f"{name}: {results[name]}", flush=True)
    facts = {**machine_facts(), "load_before": load, "memory": options.memory, "epochs": options.epochs}
    text = report(facts, results)
    if options.out:
        Path(options.out + ".md").write_text(text)
        Path(options.out + ".json").write_text(
            json.dumps({"facts": facts, "results": results}, indent=1) + "\n"
        )
    print(text)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one workload: two epochs of many rows, and many epochs of few rows."""
    workload, found = WORKLOADS[name], {}
    for kind, scale, epochs in (("bound", options.scale, 2), ("growth", 0.0, options.epochs)):
        scratch = Path(tempfile.mkdtemp(prefix="loader-memory-"))
        try:
            write_dataset(workload, scale, scratch / "data")
            command = [sys.executable, __file__, "--memory", options.memory, "--one", str(scratch / "data"),
                       str(workload.batch), str(epochs)]  # fmt: skip
            for argument in ("lanes", "window_blocks"):
                if getattr(options, argument) is not None:
                    command += [f"--{argument.replace('_', '-')}", str(getattr(options, argument))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name}: reading failed: {done.stderr[-2000:]}")
            found[kind] = {**json.loads(done.stdout), "rows": workload.rows(scale)}
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    resident = found["growth"].pop("resident")
    begin = len(resident) * 2 // 5  # plan and allocators have reached their sizes
    (slope, _), covariance = np.polyfit(np.arange(begin, len(resident)), resident[begin:], 1, cov=True)
    found["growth"] |= {
        "bytes_per_epoch": float(slope),
        "standard_error": float(np.sqrt(covariance[0, 0])),
        "resident": [min(resident[begin:]), max(resident[begin:])],
    }
    del found["bound"]["resident"]
    return found


def read(options: argparse.Namespace) -> dict[str, Any]:
    """Read some epochs and record resident memory; runs in its own process."""
    data, batch, epochs = options.one
    ds = shardkit.open(data)
    chosen = {"lanes": options.lanes, "window_blocks": options.window_blocks}
    plan = ds.plan(
        global_batch=int(batch), **{name: value for name, value in chosen.items() if value is not None}
    )
    step_blocks = _blocks_of_a_step(ds, plan)
    with ds.loader(plan, tensors=False, memory=options.memory) as loader:
        before, resident, batch_bytes = _resident("VmRSS"), [], 0
        for _ in range(int(epochs)):
            for one in loader:
                batch_bytes = max(batch_bytes, sum(_nbytes(value) for value in one.values()))
            resident.append(_resident("VmRSS"))
        stats = loader.stats()
    return {
        "before": before,
        "highest": _resident("VmHWM"),
        "peak_bytes": int(stats["peak_bytes"]),
        "batch_bytes": batch_bytes,
        "step_blocks": step_blocks,
        "lanes": plan.lanes,
        "resident": resident,
    }


def _blocks_of_a_step(ds: Any, plan: Any) -> int:
    """Return the largest number of distinct blocks of one step, over every seventh step."""
    rows = ds.rows
    return max(
        len(set(rows.locate(plan.step(step).ravel()).block.tolist())) for step in range(0, plan.loop_steps, 7)
    )


def _nbytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(sys.getsizeof, value))
    if isinstance(value, tuple):
        return sum(map(_nbytes, value))
    return int(getattr(value, "nbytes", 0))


def _resident(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def report(facts: dict[str, Any], results: dict[str, Any]) -> str:
    """Return the results as one table in Markdown."""
    bound = parse_size(facts["memory"])
    head = (
        f"Bound {facts['memory']}, {facts['cpus']} virtual cores, Python {facts['python']}, load average "
        f"{facts['load_before']:.1f}.\n"
    )
    columns = ("workload", "rows", "lanes", "blocks of a step", "blocks in memory, MiB", "of the bound",
               "process grew by, MiB", "a batch, MiB",
               f"growth over {facts['epochs']} epochs of a small set, KiB an epoch, and its standard error",
               "resident then, MiB")  # fmt: skip
    lines = [head, f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, one in results.items():
        part, growth = one["bound"], one["growth"]
        lines.append(
            f"| {name} | {part['rows']:,} | {part['lanes']} | {part['step_blocks']} | {part['peak_bytes'] / MIB:.1f} "
            f"| {part['peak_bytes'] / bound:.2f} | {(part['highest'] - part['before']) / MIB:.0f} "
            f"| {part['batch_bytes'] / MIB:.2f} | {growth['bytes_per_epoch'] / 1024:+.1f} "
            f"± {growth['standard_error'] / 1024:.1f} ({growth['rows']:,} rows) "
            f"| {' to '.join(f'{size / MIB:.0f}' for size in growth['resident'])} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
