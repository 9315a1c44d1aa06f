"""Measure the repair of a lost location: seconds per GB, and the operations that bound them.

::

    python tools/bench/replicate.py --folder /data/scratch --size 2GB         # prints Markdown
    python tools/bench/replicate.py --folder /data/scratch --size 256MB --s3  # the copies go to LocalStack

A dataset with two copies loses the location with one copy of each shard; `place --forget` writes these copies to
another location. For comparison, the same bytes on the same disk are copied with fsync, hashed with SHA-256, and read.
The sum of the three is the cost of a sequential copy; the largest bounds a copy that does all three in parallel.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import hashlib
import os
import platform
import resource
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import shardkit
from shardkit.copies.place import PlacementChange, place
from shardkit.copies.replicate import find_lag
from shardkit.ranges import parse_size
from shardkit.repository.policy import LocationRecord
from shardkit.repository.repository import Repository
from tests.servers.object_stores import localstack, s3_environment

PIECE = 8 << 20
ROW_BYTES = 64 << 10


def time_work(work: Callable[[], Any]) -> tuple[float, float]:
    """(wall, processor) seconds."""
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make(root: Path, size: int) -> int:
    """Write a dataset of about `size` incompressible bytes; return the size of its shards in bytes."""
    chance = np.random.default_rng(0)
    with shardkit.create(root, {"x": "bytes"}, shard_size="64MiB", block_size="1MiB") as writer:
        for _ in range(max(1, size // ROW_BYTES)):
            writer.add({"x": chance.bytes(ROW_BYTES)})
    return sum(path.stat().st_size for path in shards(root))


def shards(root: Path) -> list[Path]:
    """Return the paths of the shards of a root."""
    return sorted(root.glob("objects/**/*.tar"))


def pieces(path: Path) -> Iterator[bytes]:
    """Yield a file in pieces of 8 MiB."""
    with path.open("rb") as file:
        while data := file.read(PIECE):
            yield data


def hash_all(paths: list[Path]) -> None:
    """Compute SHA-256 of bytes in memory, the cost of verifying."""
    data = bytes(PIECE)
    for path in paths:
        digest = hashlib.sha256()
        for _ in range(-(-path.stat().st_size // PIECE)):
            digest.update(data)


def read_all(paths: list[Path]) -> None:
    """Read the files and drop the bytes."""
    for path in paths:
        for _ in pieces(path):
            pass


def copy_all(paths: list[Path], folder: Path) -> None:
    """Copy the files and sync each, the cost of durable writes."""
    folder.mkdir()
    for path in paths:
        with (folder / path.name).open("wb") as file:
            for data in pieces(path):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())


def run(folder: Path, size: int, bucket: str | None) -> Iterator[str]:
    """Measure, and yield the results as lines of Markdown."""
    root = folder / "root"
    num_bytes = make(root, size)
    gigabytes = num_bytes / 1e9
    lost = LocationRecord.parse(f"lost={folder / 'lost'}")
    spare = LocationRecord.parse(f"spare={bucket or folder / 'spare'}")
    change = PlacementChange(locations=(lost,), policy=lambda old: old.changed(copies=2, mode="async"))
    place(Repository.open(root), change)
    shutil.rmtree(folder / "lost")
    found: dict[str, tuple[float, float]] = {}
    found["noticing it (replicate --dry-run)"] = time_work(lambda: find_lag(Repository.open(root)))

    def heal() -> None:
        done = place(Repository.open(root), PlacementChange(locations=(spare,), forget=("lost",)))
        assert done.committed
        assert done.copies.lag_after == 0

    found["policy met again (place --forget)"] = time_work(heal)
    files = shards(root)
    found["alone: reading"] = time_work(lambda: read_all(files))
    found["alone: SHA-256"] = time_work(lambda: hash_all(files))
    found["alone: copy with fsync to the same disk"] = time_work(lambda: copy_all(files, folder / "plain"))
    target = "LocalStack on 127.0.0.1" if bucket else "the same disk"
    yield f"{num_bytes / 1e6:.0f} MB in {len(files)} shards, copies to {target}."
    yield ""
    yield "| what | wall s | wall s per GB | MB/s | CPU s per GB |"
    yield "|---|---|---|---|---|"
    for what, (wall, cpu) in found.items():
        if what.startswith("noticing"):
            yield f"| {what} | {wall:.2f} | – | – | – |"
        else:
            rate = num_bytes / 1e6 / wall
            yield f"| {what} | {wall:.2f} | {wall / gigabytes:.2f} | {rate:.0f} | {cpu / gigabytes:.2f} |"


def main() -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="on the disk that is measured; emptied afterwards"
    )
    parser.add_argument("--size", default="1GB", help="of the dataset")
    parser.add_argument("--s3", action="store_true", help="copies go to LocalStack")
    given = parser.parse_args()
    folder = given.folder / f"replicate-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    load = os.getloadavg()[0]
    print(f"# From a lost location to a policy that is met, {dt.datetime.now(dt.UTC).date()}\n")
    print(
        f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}; "
        f"load average at the start {load:.1f}.\n"
    )
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        bucket = None
        if given.s3:
            os.environ.update(s3_environment(cleanup.enter_context(localstack(folder / "server", "copies"))))
            bucket = f"s3://copies/{uuid.uuid4().hex}"
        for line in run(folder, parse_size(given.size), bucket):
            print(line, flush=True)


if __name__ == "__main__":
    main()
