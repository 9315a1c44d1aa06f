"""Measure reading from an object store: shardkit's client, obstore and s3fs; stalls with and without hedging.

::

    python tools/bench/remote.py            # starts LocalStack on 127.0.0.1, prints Markdown

Over loopback the server is the limit, so the relevant figure is the client's processor time. Each figure is the median
of `ROUNDS` runs. The runs take turns, so that other load on the machine affects all equally.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import shardkit
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import Location
from shardkit.reading.read_path import ReadSettings
from shardkit.stores.remote.addresses import parse_address
from shardkit.stores.remote.object_store import ObjectStore
from tests.servers.fault_proxy import Fault, FaultProxy, Request
from tests.servers.object_stores import localstack, s3_environment

MIB = 1 << 20
OBJECT_BYTES = 64 * MIB
NUM_RANGES, RANGE_BYTES, IN_FLIGHT = 1_000, 100_000, 16
ROUNDS = 5


def time_work(work: Callable[[], Any]) -> tuple[float, float]:
    """(wall, processor) seconds."""
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(
    contestants: dict[str, Callable[[], Any]], num_bytes: int, s3fs: list[tuple[float, float]] | None
) -> Iterator[str]:
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for work in contestants.values():
        work()
    for turn in range(ROUNDS):
        names = list(contestants)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            results[name].append(time_work(contestants[name]))
    if s3fs is not None:
        results["s3fs"] = s3fs
    yield "| client | MiB/s | wall ms | client CPU ms | CPU ns per byte |"
    yield "|---|---|---|---|---|"
    for name, runs in results.items():
        wall = statistics.median(one for one, _ in runs)
        cpu = statistics.median(one for _, one in runs)
        rate, per_byte = num_bytes / MIB / wall, cpu / num_bytes * 1e9
        yield f"| {name} | {rate:.0f} | {wall * 1e3:.0f} | {cpu * 1e3:.0f} | {per_byte:.2f} |"


def throughput(endpoint: str, peer: str | None) -> Iterator[str]:
    import obstore
    from obstore.store import S3Store

    address = parse_address("s3://bench/objects")
    ours = ObjectStore(address)
    data = random.Random(1).randbytes(OBJECT_BYTES)
    ours.replace("big", data)
    raw = S3Store("bench", prefix="objects", endpoint=endpoint, client_options={"allow_http": True},
                  virtual_hosted_style_request=False)  # fmt: skip
    path = LocatedStore([Location(name="bench", store=ours)], settings=ReadSettings(hedge=False))
    chance = random.Random(2)
    starts = [chance.randrange(OBJECT_BYTES - RANGE_BYTES) for _ in range(NUM_RANGES)]

    def spread(read: Callable[[int], Any]) -> None:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(read, starts))

    other = _s3fs(peer, endpoint, starts)
    yield f"## One object of {OBJECT_BYTES // MIB} MiB"
    yield ""
    yield from compare(
        {
            "obstore, raw": lambda: obstore.get(raw, "big").buffer(),
            "shardkit ObjectStore.read_range": lambda: ours.read_range("big", 0, OBJECT_BYTES),
            "shardkit ObjectStore.get (copied to bytes)": lambda: ours.get("big", max_bytes=OBJECT_BYTES),
        },
        OBJECT_BYTES,
        other.get("whole"),
    )
    yield ""
    yield f"## {NUM_RANGES:,} random ranges of {RANGE_BYTES // 1000} KB, {IN_FLIGHT} in flight"
    yield ""
    import hashlib

    from shardkit.reading.objects import BlockRequest

    digests = {start: hashlib.sha256(data[start : start + RANGE_BYTES]).digest() for start in starts}
    yield from compare(
        {
            "obstore, raw": lambda: spread(
                lambda s: obstore.get_range(raw, "big", start=s, length=RANGE_BYTES)
            ),
            "shardkit ObjectStore.read_range": lambda: spread(
                lambda s: ours.read_range("big", s, RANGE_BYTES)
            ),
            "shardkit read path, each verified by SHA-256": lambda: spread(
                lambda s: path.read_block(BlockRequest("big", s, RANGE_BYTES, digests[s]))
            ),
        },
        NUM_RANGES * RANGE_BYTES,
        other.get("ranges"),
    )


def _s3fs(python: str | None, endpoint: str, starts: list[int]) -> dict[str, Any]:
    """Run `remote_s3fs.py` under another interpreter."""
    if python is None:
        return {}
    script = Path(__file__).with_name("remote_s3fs.py")
    command = [
        python,
        str(script),
        endpoint,
        "bench/objects/big",
        str(RANGE_BYTES),
        str(IN_FLIGHT),
        str(ROUNDS),
    ]
    done = subprocess.run(command, input=json.dumps(starts), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def stalls(endpoint: str, folder: Path) -> Iterator[str]:
    """Measure the trainer's wait per step if every request takes 50 ms longer, and 2 % of them 2 s."""
    root = "s3://bench/stalls"
    with shardkit.create(root, {"x": "int64[4096]"}, shard_size="4MiB", block_size="256KiB") as writer:
        for number in range(2_000):
            writer.add({"x": [number] * 4096})
    yield "| reads | steps | wait per step, mean | 99th percentile | worst | requests | hedges won |"
    yield "|---|---|---|---|---|---|---|"
    for name, hedge, cache, prefetch in (
        ("no hedging, no reading ahead", False, False, False),
        ("hedging alone", True, False, False),
        ("reading ahead alone", False, False, True),
        ("both", True, False, True),
        ("both, second epoch with a cache", True, True, True),
    ):
        with FaultProxy(endpoint) as proxy:
            os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
            dataset = shardkit.open(root, settings=ReadSettings(hedge=hedge))
            plan = dataset.plan(global_batch=16, lanes=4, seed=3)
            loader = dataset.loader(plan, rank=0, world=1, tensors=False, memory="64MiB", prefetch=0,
                                    cache=folder / "cache" if cache else None)  # fmt: skip
            for shard in range(dataset.manifest.shards):
                dataset.reader.index(shard)
            chance = random.Random(4)

            def slow(request: Request, chance: random.Random = chance) -> Fault | None:
                return Fault("delay", seconds=2.0 if chance.random() < 0.02 else 0.05)

            with contextlib.closing(loader):
                iterator = iter(loader)
                if not prefetch:
                    loader.resources.remote.supply.close()  # type: ignore[union-attr]
                if cache:
                    for _ in iterator:
                        pass
                    iterator = iter(loader)
                proxy.faults = slow
                waits = []
                while True:
                    started = time.perf_counter()
                    if next(iterator, None) is None:
                        break
                    waits.append(time.perf_counter() - started)
                    time.sleep(0.03)  # the training step
                stats = loader.stats()
        waits.sort()
        yield (
            f"| {name} | {len(waits)} | {statistics.mean(waits) * 1e3:.0f} ms | "
            f"{waits[int(0.99 * len(waits))] * 1e3:.0f} ms | {waits[-1] * 1e3:.0f} ms | "
            f"{stats['remote_requests']:.0f} | {stats['remote_hedges_won']:.0f} |"
        )
    os.environ["AWS_ENDPOINT_URL"] = endpoint


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--s3fs-python", help="an interpreter that has s3fs; without it s3fs is left out")
    peer = parser.parse_args().s3fs_python
    with tempfile.TemporaryDirectory() as folder, localstack(Path(folder, "server"), "bench") as endpoint:
        os.environ.update(s3_environment(endpoint))
        packages = ", ".join(f"{name} {version(name)}" for name in ("obstore", "boto3"))
        print(f"# Remote reads, {dt.datetime.now(dt.UTC):%Y-%m-%d}\n")
        print(
            f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}, {packages},"
        )
        print(f"LocalStack core 2026.3.0 on 127.0.0.1. Median of {ROUNDS} runs.\n")
        for line in throughput(endpoint, peer):
            print(line, flush=True)
        print("\n## Stall per step: 50 ms on every request, 2 s on 2 % of them; a training step of 30 ms\n")
        for line in stalls(endpoint, Path(folder)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
