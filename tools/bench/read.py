"""Read benchmark: limits of the machine, shardkit, its peers. Interleaved, medians and ranges, every sample touched.

    python tools/bench/read.py --peers-python PATH --scale 0.05 --out tools/bench/results/DATE-read

Each reader is a process of its own (worker.py of shardkit_tools/benchmarks/reading), opened one after the other, then
asked for one epoch each in turn, `--repeats` times; an epoch is left after `--seconds`, its rate is that of what was
read by then. Files are read once untimed before every timed epoch; datasets are made once and deleted after each
workload.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.read_report import report
from shardkit_tools.benchmarks.machine import versions
from shardkit_tools.benchmarks.reading.limits import limits
from shardkit_tools.benchmarks.reading.readers import (
    OWN,
    PEERS,
    SHARES_DATA,
    THREADS_ONLY,
    Reader,
    build_data,
    spread,
)
from shardkit_tools.benchmarks.reading.workloads import WORKLOADS, Workload


def measure(workload: Workload, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Limits and readers of one workload."""
    pythons = dict.fromkeys(OWN, sys.executable)
    if options.peers_python:
        pythons |= dict.fromkeys(PEERS, options.peers_python)
    pythons = {n: python for n, python in pythons.items() if not options.readers or n in options.readers}
    builders = {SHARES_DATA.get(name, name): python for name, python in pythons.items()}
    builders["memmap"] = sys.executable
    failed = build_data(workload, options.scale, scratch, builders, jobs=options.build_jobs)
    known = limits(workload, options.scale, str(scratch / "memmap"))
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in known}
    facts: dict[str, Any] = {}
    for workers in options.workers:
        chosen = {n: python for n, python in pythons.items() if not (workers and n in THREADS_ONLY)}
        facts |= _measure_readers(workload, options, scratch, chosen, workers, failed, known, rates)
    return {"rows": workload.rows(options.scale), "batch": workload.batch,
            "limits": {name: spread(rates[name]) for name in known}, "readers": facts,
            "verification": _verification(workload, options, scratch)}  # fmt: skip


def _measure_readers(
    workload: Workload,
    options: argparse.Namespace,
    scratch: Path,
    pythons: dict[str, str],
    workers: int,
    failed: dict[str, str],
    known: dict[str, Any],
    rates: dict[str, list[dict[str, float]]],
) -> dict[str, Any]:
    """Readers with so many worker processes, and the limits, in turn; what the limits gave is added to `rates`."""
    facts: dict[str, Any] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as running:
        readers: dict[str, Reader] = {}
        for name, python in pythons.items():
            key, source = f"{name}/{workers}", SHARES_DATA.get(name, name)
            if source in failed:
                facts[key] = {"error": failed[source]}
                continue
            starts = []
            for _ in range(options.repeats if name in OWN else 1):  # the last of these processes stays
                reader = Reader(name, workload, options.scale, scratch, workers, python)
                running.callback(reader.end)
                starts.append(reader.ask("open"))
                if readers.get(key) is not None:
                    readers[key].end()
                readers[key] = reader
            facts[key] = min(starts, key=lambda one: "error" not in one)  # an error, if there was one
            if "error" in facts[key]:
                readers.pop(key).end()
                continue
            facts[key] = {k: statistics.median(one[k] for one in starts) for k in starts[0]}
            found[key] = []
        for repeat in range(options.repeats):
            print(f"  {workers} workers, repeat {repeat + 1} of {options.repeats}", flush=True)
            for name, run in known.items():
                rates[name].append(run())
            for key, reader in readers.items():
                found[key].append(reader.ask(f"epoch {options.seconds}"))
        for key, reader in readers.items():
            facts[key] |= spread(found[key])
            if "error" not in facts[key]:
                resumed = reader.ask(f"resume {2 * options.seconds}")
                facts[key] |= {"resume_s": resumed.get("seconds"), "resumed_at": resumed.get("at")}
            reader.end()
            print(f"  {key}: {facts[key]}", flush=True)
    return facts


def _verification(workload: Workload, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Our reader with and without verification, epoch by epoch in one process: what verifying costs."""
    if not options.pairs or (options.readers and "shardkit_reader" not in options.readers):
        return {}
    with Reader("shardkit_reader", workload, options.scale, scratch, 0, sys.executable) as reader:
        reader.ask("open")
        reader.ask(f"epoch {options.seconds}")
        seconds, cpu = [], []
        for pair in range(options.pairs):
            costs = {}
            for mode in ("verified", "unverified") if pair % 2 else ("unverified", "verified"):
                reader.ask(mode)
                answer = reader.ask(f"epoch {options.seconds}")
                if not answer.get("samples"):
                    return {"error": answer.get("error", "no samples")}
                costs[mode] = (answer["seconds"] / answer["samples"], answer["cpu_s"] / answer["samples"])
            on, off = costs["verified"], costs["unverified"]
            seconds.append(on[0] / off[0] - 1)
            cpu.append(on[1] / off[1] - 1)
    found = {"pairs": options.pairs}
    for name, values in (("wall", seconds), ("cpu", cpu)):
        found[name] = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    print(f"  verification: {found}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers-python", help="interpreter of an environment with the peers installed")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the stated row counts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--workers", type=int, nargs="*", default=[0, 2], help="worker processes of each reader"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="longest timed epoch")
    parser.add_argument("--pairs", type=int, default=9, help="epochs with and without verification")
    parser.add_argument("--build-jobs", type=int, default=2, help="readers whose data are made at a time")
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--readers", nargs="*", help="only these modules of benchmarks/reading/peers")
    parser.add_argument("--out", help="path without suffix for .md and .json")
    options = parser.parse_args()
    load, started = os.getloadavg(), time.time()
    results = {}
    for name in options.workloads:
        print(name, flush=True)
        scratch = Path(tempfile.mkdtemp(prefix="read-bench-"))
        try:
            results[name] = measure(WORKLOADS[name], options, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            _write(
                options, results, load[0], time.time() - started
            )  # what is known stays if a later workload hangs
    print(_write(options, results, load[0], time.time() - started))


def _write(options: argparse.Namespace, results: dict[str, Any], load_before: float, seconds: float) -> str:
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "scale": options.scale,
        "repeats": options.repeats,
        "seconds_per_epoch": options.seconds,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "seconds": seconds,
        "versions": versions(sys.executable),
        "peer_versions": versions(options.peers_python or sys.executable),
    }
    text = report(facts, results)
    if options.out:
        Path(options.out + ".md").write_text(text)
        Path(options.out + ".json").write_text(
            json.dumps({"facts": facts, "results": results}, indent=1) + "\n"
        )
    return text


if __name__ == "__main__":
    main()
