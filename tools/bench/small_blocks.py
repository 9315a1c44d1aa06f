"""Measure blocks of a few KiB from a bucket: requests, bytes and time of an epoch, by read-ahead memory and cache.

::

    python tools/bench/small_blocks.py      # a bucket in this process, prints Markdown

The server runs in the same process and its processor time is included, so the relevant figures are requests and bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import resource
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import shardkit
from tests.servers.google import GoogleServer, google_environment, google_server

ROWS = 24_000
CASES = (("2MiB", None), ("64MiB", None), ("4MiB", "1GiB"), ("4MiB", "4MiB"))


def epoch(served: GoogleServer, root: str, memory: str, cache: Path | None, size: str | None) -> str:
    """One row of the table."""
    dataset = shardkit.open(root)
    plan = dataset.plan(global_batch=16, seed=1, lanes=4)
    requests, num_bytes = served.counts["GET", 206], served.body_bytes
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    loader = dataset.loader(
        plan, rank=0, world=1, tensors=False, memory=memory, prefetch=0, cache=cache, cache_size=size
    )
    with contextlib.closing(loader):
        steps = sum(1 for _ in loader)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    share = (served.body_bytes - num_bytes) / dataset.manifest.stored_bytes
    return (
        f"| {memory} | {size or 'none'} | {steps} | {served.counts['GET', 206] - requests} | {share:.3f} "
        f"| {wall:.1f} | {cpu:.1f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block-size", default="8KiB")
    block_size = parser.parse_args().block_size
    with google_server("shards") as served, tempfile.TemporaryDirectory() as folder:
        os.environ.update(google_environment(served.endpoint))
        root = "gs://shards/small"
        schema = {"x": "int64[128]", "kind": "int64"}
        with shardkit.create(
            root, schema, stratify="kind", shard_size="512KiB", block_size=block_size
        ) as writer:
            for number in range(ROWS):
                writer.add({"x": [number] * 128, "kind": number % 3})
        manifest = shardkit.open(root).manifest
        print(
            f"{manifest.stored_bytes / 1e6:.1f} MB in {manifest.shards} shards, blocks of {block_size}; "
            f"{platform.machine()}, "
            f"{os.cpu_count()} processors, Python {platform.python_version()}, obstore {version('obstore')}.\n\n"
            "| memory | cache | steps | requests | bytes ÷ dataset | wall s | CPU s (with the server's) |\n"
            "|---|---|---|---|---|---|---|"
        )
        for number, (memory, size) in enumerate(CASES):
            cache = Path(folder, f"cache{number}") if size else None
            print(epoch(served, root, memory, cache, size), flush=True)


if __name__ == "__main__":
    main()
