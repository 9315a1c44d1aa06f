"""Compare builds of many small samples: --jobs 2, and --engine ray with two workers, with and without kills.

    python tools/bench/ray_build.py FOLDER [--rows 1000000] [--repeats 2] [--bucket]

With --bucket, the root is a bucket (moto, in this process) and Ray is a running cluster of two nodes. The nodes do not
share a temporary directory, so scratch and journal go through the root. FOLDER is on the disk to be measured; files
created there are removed. Ray must be installed. Every build is a separate command, so the start and end of a local
cluster are included. In the killed build, one Ray worker gets SIGKILL, by process id, in the middle of each pass.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.stores.local import open_store
from tests.servers.object_stores import moto, s3_environment

BUCKET = "bench"
PASSES = ("ReadTask", "ShardRows")


def make_source(folder: Path, rows: int, files: int = 20) -> Path:
    """Write JSON lines with a number, a label and a text of about 200 bytes."""
    folder.mkdir()
    for number in range(files):
        first, last = number * rows // files, (number + 1) * rows // files
        labels = np.random.default_rng(number).integers(0, 10, last - first).tolist()
        with (folder / f"part-{number:03d}.jsonl").open("w") as stream:
            for row, label in zip(range(first, last), labels, strict=True):
                text = f"sample {row} of many, {row * 7919 % 104729} " * 6
                stream.write(json.dumps({"row": row, "label": label, "text": text}) + "\n")
    return folder


class Killer(threading.Thread):
    """Kill one worker per pass while it is working."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.killed: list[str] = []
        self._root = root
        self._met: dict[str, int] = {}
        self.over = False

    def run(self) -> None:
        while not self.over and len(self.killed) < len(PASSES):
            time.sleep(0.2)
            for pid in descendants(self._root):
                title = Path(f"/proc/{pid}/cmdline")
                try:
                    name = title.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                kind = next((k for k in PASSES if f"ray::shardkit {k}" in name), None)
                if kind is None or kind in self.killed:
                    continue
                self._met[kind] = self._met.get(kind, 0) + 1
                if self._met[kind] == 20:  # some seconds into the pass
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(kind)


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def build(
    source: Path, root: Path | str, engine: str, *, address: str | None = None, kill: bool = False
) -> dict[str, Any]:
    command = [sys.executable, "-m", "shardkit_tools", "build", str(source), str(root), "--engine", engine]
    command += [] if address is None or engine == "local" else ["--address", address]
    command += ["--jobs", "2", "--stratify", "label", "--shard-size", "32MiB", "--format", "arrow", "--json"]
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    killer = Killer(
        process.pid if address is None else os.getpid()
    )  # a cluster's workers are not the build's
    if kill:
        killer.start()
    out, err = process.communicate()
    seconds = time.perf_counter() - begun
    killer.over = True
    if process.returncode:
        raise SystemExit(f"{engine}: {err[-2000:]}")
    if isinstance(root, Path):
        files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        shutil.rmtree(root)
    else:
        files = sorted(open_store(root, read_only=True).list_after(""))
    left = [name for name in files if not name.startswith(("objects/", "log/", "shardkit.json"))]
    objects = [name for name in files if name.startswith("objects/")]
    document = json.loads(out)
    return {"engine": engine, "seconds": seconds, "id": document["id"], "samples": document["samples"],
            "killed": killer.killed, "left": left, "objects": objects}  # fmt: skip


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[str]:
    """Start a bucket and a cluster of two nodes with one processor each; yield the cluster's address."""
    from ray.cluster_utils import Cluster

    with moto(BUCKET) as endpoint:
        os.environ.update(s3_environment(endpoint))
        cluster = Cluster(shutdown_at_exit=True)
        try:
            for number in range(2):
                (folder / f"node-{number}").mkdir()
                cluster.add_node(
                    num_cpus=1, env_vars={"TMPDIR": str(folder / f"node-{number}")}, include_dashboard=False
                )
            yield cluster.address
        finally:
            cluster.shutdown()  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--bucket", action="store_true")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=given.folder, prefix="ray-bench-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        address = stack.enter_context(two_nodes(folder)) if given.bucket else None
        roots = (f"s3://{BUCKET}/{n}" if given.bucket else folder / "root" for n in itertools.count())
        source = make_source(folder / "source", given.rows)
        times: dict[str, list[float]] = {"local": [], "ray": []}
        results = []
        for _ in range(given.repeats):
            for engine, seconds in times.items():
                results.append(build(source, next(roots), engine, address=address))
                seconds.append(results[-1]["seconds"])
                print(f"{engine}: {seconds[-1]:.1f} s", flush=True)
        results.append(build(source, next(roots), "ray", address=address, kill=True))
        killed = results[-1]
        print(f"ray, killed in {', '.join(killed['killed']) or 'no pass'}: {killed['seconds']:.1f} s")
        ids, objects = {r["id"] for r in results}, {tuple(r["objects"]) for r in results}
        print(f"{killed['samples']} samples; {len(ids)} manifest id, {len(objects)} set of objects, left over: "
              f"{[r['left'] for r in results if r['left']] or 'nothing'}")  # fmt: skip
        local, ray = (statistics.median(times[name]) for name in ("local", "ray"))
        print(f"local --jobs 2 {local:.1f} s, ray with two workers {ray:.1f} s: {ray / local - 1:+.0%}")


if __name__ == "__main__":
    main()
