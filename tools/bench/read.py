"""Read benchmark: limits of the machine, shardkit, its peers. Interleaved, medians and ranges, every sample touched.

    python tools/bench/read.py --peers-python PATH --scale 0.05 --out tools/bench/results/DATE-read

Each reader is a process of its own (read_worker.py), opened one after the other, then asked for one epoch each in turn,
`--repeats` times. Files are read once untimed before every timed epoch; datasets are deleted after each workload.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.read_data import WORKLOADS, Workload
from bench.read_limits import limits
from bench.read_report import report, spread, versions

OWN = ("shardkit_reader", "shardkit_compact")
PEERS = (
    "memmap",
    "mosaicml",
    "litdata_reader",
    "webdataset_reader",
    "hf_map",
    "hf_iterable",
    "grain_reader",
    "lance_reader",
)
SHARES_DATA = {"shardkit_compact": "shardkit_reader", "hf_iterable": "hf_map"}
PATIENCE_S = 240.0  # some readers hang


class Reader:
    """One reader's process."""

    def __init__(
        self, name: str, workload: Workload, scale: float, directory: Path, workers: int, python: str
    ) -> None:
        self.name, self.workers = name, workers
        data = directory / SHARES_DATA.get(name, name)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(p) for p in Path(__file__).parents[1:3]),
            "HF_HUB_OFFLINE": "1",
            "TQDM_DISABLE": "1",
        }
        self._process = subprocess.Popen(
            [python, str(Path(__file__).parent / "read_worker.py"), name, workload.name, str(scale), str(data),
             str(workers)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip

    def ask(self, command: str) -> dict[str, Any]:
        """One answer; {"error": …} where the process failed or took longer than anybody would wait."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
            timer = threading.Timer(PATIENCE_S, self._process.kill)
            timer.start()
            line = self._process.stdout.readline()
            timer.cancel()
            return dict(json.loads(line)) if line else {"error": "the process ended"}
        except (BrokenPipeError, ValueError) as error:
            return {"error": str(error)}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(workload: Workload, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Limits and readers of one workload."""
    pythons = dict.fromkeys(OWN, sys.executable)
    if options.peers_python:
        pythons |= dict.fromkeys(PEERS, options.peers_python)
    pythons = {n: python for n, python in pythons.items() if not options.readers or n in options.readers}
    failed = _build(workload, options.scale, scratch, {**pythons, "memmap": sys.executable})
    known = limits(workload, options.scale, str(scratch / "memmap"))
    facts: dict[str, Any] = {}
    readers = []
    for name, python in pythons.items():
        for workers in options.workers:
            key, source = f"{name}/{workers}", SHARES_DATA.get(name, name)
            reader = Reader(name, workload, options.scale, scratch, workers, python)
            facts[key] = {"error": failed[source]} if source in failed else reader.ask("open")
            if "error" in facts[key]:
                reader.end()
            else:
                readers.append((key, reader))
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in [*known, *facts]}
    for _ in range(options.repeats):
        for name, run in known.items():
            rates[name].append(run())
        for key, reader in readers:
            rates[key].append(reader.ask("epoch"))
    for key, reader in readers:
        facts[key] |= spread(rates[key])
        if "error" not in facts[key]:
            facts[key]["resume_s"] = reader.ask("resume").get("seconds")
        reader.end()
        print(f"  {key}: {facts[key]}", flush=True)
    return {"rows": workload.rows(options.scale), "batch": workload.batch,
            "limits": {name: spread(rates[name]) for name in known}, "readers": facts}  # fmt: skip


def _build(workload: Workload, scale: float, scratch: Path, pythons: dict[str, str]) -> dict[str, str]:
    """Make every reader's data; what failed and why."""
    failed = {}
    for name, python in pythons.items():
        if name not in SHARES_DATA:
            builder = Reader(name, workload, scale, scratch, 0, python)
            answer = builder.ask("build")
            builder.end()
            print(f"  built {name}: {answer}", flush=True)
            if "error" in answer:
                failed[name] = answer["error"]
    return failed


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
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--readers", nargs="*", help="only these modules of read_peers")
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
