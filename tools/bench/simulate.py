"""Compare `shardkit simulate` with the loader: two processes, injected store latency, caches, a slowed rank.

::

    python tools/bench/simulate.py            # prints Markdown

Each case runs the loader in two processes that meet at a barrier after every step, like the ranks of a run. Cells sleep
instead of computing, because the processors are shared and only waits are compared. The stall of a step is the longest
wait of a rank. The simulation gets the same description and the root's manifest, but no measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import multiprocessing as mp
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardkit
from shardkit.dataset.dataset import Dataset
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import Location
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.repository import Repository
from shardkit.repository.versions import load_manifest
from shardkit.stores.local import LocalStore
from shardkit_tools.simulation.cluster import Cluster, with_changes
from shardkit_tools.simulation.run import prepare, simulate_lanes

ROWS, ROW_WORDS = 4_096, 4_096
GLOBAL_BATCH, LANES, WINDOW = 64, 8, 4
WORLD = 2
THREADS = 16


@dataclass(frozen=True)
class Case:
    """The settings of one comparison."""

    name: str
    latency_ms: int
    cell_ms: int = 4
    cache: str = "0"
    memory: str = "8MiB"
    slow: float = 1.0  # of rank 1
    epochs: int = 2


CASES = (
    Case("400 ms, no cache", 400),
    Case("600 ms, no cache", 600),
    Case("600 ms, everything cached", 600, cache="100MiB"),
    Case("500 ms, half cached", 500, cache="32MiB"),
    Case("500 ms, a quarter cached", 500, cache="16MiB"),
    Case("600 ms, rank 1 three times slower", 600, slow=3.0),
    Case("500 ms, half cached, rank 1 twice slower", 500, cache="32MiB", slow=2.0),
    Case("500 ms, cells of 8 ms", 500, cell_ms=8),
    Case("500 ms, twice the memory, one epoch", 500, memory="16MiB", epochs=1),
)


class SlowStore:
    """A local store that delays range reads."""

    def __init__(self, root: str, latency_s: float) -> None:
        self._store, self._latency_s = LocalStore(root), latency_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def local_path(self, name: str) -> None:
        return None

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        time.sleep(self._latency_s)
        return self._store.get_range(name, offset, length)


def open_slow(root: str, latency_s: float) -> Dataset:
    slow: Any = SlowStore(root, latency_s)
    store = LocatedStore([Location(name="root", store=slow)], settings=ReadSettings(hedge=False))
    repository = Repository._open_store(store, read_only=True)  # noqa: SLF001
    dataset = Dataset(load_manifest(repository, repository.resolve(None)))
    for shard in range(dataset.manifest.shards):
        dataset.reader.index(shard)
    return dataset


def work(rank: int, root: str, case: Case, cache: str, barrier: Any, answers: Any) -> None:
    """Run one rank, and report its waits and reads."""
    dataset = open_slow(root, case.latency_ms / 1e3)
    plan = dataset.plan(GLOBAL_BATCH, lanes=LANES, window_blocks=WINDOW)
    is_cached = case.cache != "0"
    loader = dataset.loader(plan, rank=rank, world=WORLD, tensors=False, memory=case.memory, prefetch=0,
                            threads=THREADS, cache=cache if is_cached else None,
                            cache_size=case.cache if is_cached else None)  # fmt: skip
    step_s = LANES // WORLD * case.cell_ms / 1e3 * (case.slow if rank else 1.0)
    store = dataset.reader.stores[0]
    assert isinstance(store, LocatedStore)
    indexes = store.read_events.stats()["bytes_from_root"]
    waits: list[float] = []
    with contextlib.closing(loader):
        barrier.wait()
        began = time.perf_counter()
        for _ in range(case.epochs):
            batches = iter(loader)
            while True:
                asked = time.perf_counter()
                if next(batches, None) is None:
                    break
                waits.append(time.perf_counter() - asked)
                time.sleep(step_s)
                barrier.wait()
        seconds = time.perf_counter() - began
        stats = loader.stats()
    answers.put({
        "rank": rank,
        "waits": waits,
        "seconds": seconds,
        "egress": stats["bytes_from_root"] - indexes,
        "hits": stats["cache_hits"],
        "misses": stats["cache_misses"] - stats["cache_waits"],
    })  # fmt: skip


def measure(root: str, case: Case, folder: str, repeats: int) -> dict[str, Any]:
    """Return the fastest of some runs: other load on the machine can only make waits longer."""
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            runs.append(measure_once(root, case, cache))
    best: dict[str, Any] = min(runs, key=lambda run: run["seconds"])
    return best | {"all_stall_s": [run["stall_s"] for run in runs]}


def measure_once(root: str, case: Case, cache: str) -> dict[str, float]:
    context = mp.get_context("spawn")
    barrier, answers = context.Barrier(WORLD), context.Queue()
    ranks = [
        context.Process(target=work, args=(r, root, case, cache, barrier, answers)) for r in range(WORLD)
    ]
    for process in ranks:
        process.start()
    found = [answers.get(timeout=300) for _ in ranks]
    for process in ranks:
        process.join()
    return {
        "stall_s": sum(map(max, zip(*(one["waits"] for one in found), strict=True))),
        "rank_stall_s": sum(sum(one["waits"]) for one in found),
        "seconds": statistics.mean(one["seconds"] for one in found),
        "egress": sum(one["egress"] for one in found),
        "hits": sum(one["hits"] for one in found),
    }


def predict(root: str, case: Case) -> dict[str, float]:
    cluster = with_changes(Cluster(), [
        f"data.root={root}", "nodes=1", f"ranks={WORLD}", f"cache={case.cache}", f"memory={case.memory}",
        "disk_read=unlimited", "nic=unlimited", "verify=unlimited", "stream=unlimited",
        f"threads={THREADS}", f"latency={case.latency_ms}ms", f"cell={case.cell_ms}ms", f"global_batch={GLOBAL_BATCH}",
        f"lanes={LANES}",
        f"window_blocks={WINDOW}", f"epochs={case.epochs}", "model=none", "rebalance=false",
    ])  # fmt: skip
    result = simulate_lanes(cluster, prepare(cluster), slow={1: case.slow} if case.slow > 1 else None)
    return {
        "stall_s": sum(one["stall_s"] for one in result["epochs"]),
        "rank_stall_s": result["rank_stall_s"] * WORLD,
        "seconds": sum(one["seconds"] for one in result["epochs"]),
        "egress": sum(one["egress_bytes"] for one in result["epochs"]),
        "hits": result["cache_hits"],
    }


def compare(cases: Sequence[Case], repeats: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(folder, "data"))
        with shardkit.create(root, {"x": f"int32[{ROW_WORDS}]"}, format="arrow", shard_size="8MiB",
                             block_size="128KiB") as writer:  # fmt: skip
            for number in range(ROWS):
                writer.add({"x": [number] * ROW_WORDS})
        for case in cases:
            real, said = measure(root, case, folder, repeats), predict(root, case)
            row = {"case": case.name, "real": real, "said": said, "load": os.getloadavg()[0]}
            rows.append(row)
            print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    real, said = row["real"], row["said"]

    def pair(name: str, scale: float, digits: int) -> str:
        off = (said[name] / real[name] - 1) * 100 if real[name] else 0.0
        return f"{real[name] / scale:.{digits}f} | {said[name] / scale:.{digits}f} | {off:+.1f} %"

    return (
        f"| {row['case']} | {pair('stall_s', 1, 1)} | {pair('egress', 2**20, 1)} | {real['hits']:.0f} | "
        f"{said['hits']:.0f} | {real['seconds']:.1f} | {said['seconds']:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases, from 0")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the least disturbed counts")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    chosen = CASES if given.only is None else [CASES[i] for i in given.only]
    print(f"# Simulated and real, {dt.datetime.now(dt.UTC):%Y-%m-%d}\n")
    print(f"{platform.machine()}, {os.cpu_count()} shared processors, Python {platform.python_version()}; load average "
          f"{os.getloadavg()[0]:.1f} at the start. Least disturbed of {given.repeats} runs each.\n")  # fmt: skip
    print("| case | stall s, of the slowest rank: real | simulated | off by | egress MiB: real | simulated | off by | "
          "cache hits: real | simulated | seconds: real | simulated |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    rows = compare(chosen, given.repeats)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
