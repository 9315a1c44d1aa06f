"""Throughput of `shardkit_tools.build` beside the limit: the same bytes written, SHA-256 and XXH3, in one process.

    python tools/bench/build_throughput.py FOLDER [MEGABYTES]

FOLDER is on the disk to be measured and must not be in memory (tmpfs); everything made there is removed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

import shardkit_tools
from shardkit_tools.building import Progress

BLOB_BYTES = 100_000
TOKENS = 2048
PIECE = 1 << 20


def make_tokens(path: Path, megabytes: int) -> int:
    rows = megabytes * 1_000_000 // (4 * TOKENS)
    array = np.lib.format.open_memmap(path, "w+", np.int32, (rows, TOKENS))
    for start in range(0, rows, 4096):
        random = np.random.default_rng(start)
        array[start : start + 4096] = random.integers(0, 50_000, (min(4096, rows - start), TOKENS))
    array.flush()
    return rows * 4 * TOKENS


def make_blobs(folder: Path, megabytes: int) -> int:
    folder.mkdir()
    data = np.random.default_rng(1).bytes(BLOB_BYTES)
    count = megabytes * 1_000_000 // BLOB_BYTES
    for n in range(count):
        (folder / f"{n:07d}.bin").write_bytes(n.to_bytes(8, "little") + data[8:])
    return count * BLOB_BYTES


@contextlib.contextmanager
def timed() -> Iterator[list[float]]:
    os.sync()  # what was written before is not on this bill
    seconds: list[float] = []
    cpu = _cpu()
    begun = time.perf_counter()
    yield seconds
    seconds += [time.perf_counter() - begun, _cpu() - cpu]


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def limit(path: Path, size: int) -> float:
    """Seconds to write and hash that many bytes, synced."""
    piece = np.random.default_rng(2).bytes(PIECE)
    with timed() as seconds, path.open("wb") as stream:
        for _ in range(size // PIECE):
            stream.write(piece)
            hashlib.sha256(piece).digest()
            xxhash.xxh3_64_intdigest(piece)
        stream.flush()
        os.fsync(stream.fileno())
    path.unlink()
    return seconds[0]


def main() -> None:
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    megabytes = int(sys.argv[2]) if len(sys.argv) > 2 else 500
    try:
        sources = {
            "8 KiB token rows": (folder / "tokens.npy", make_tokens(folder / "tokens.npy", megabytes)),
            "100 kB blobs": (folder / "blobs", make_blobs(folder / "blobs", megabytes)),
        }
        for name, (source, size) in sources.items():
            print(f"{name}: limit {size / 1e6 / limit(folder / 'limit', size):.0f} MB/s")
            for form in ("tar", "arrow"):
                for jobs in (1, 2):
                    phases: dict[str, float] = {}

                    def told(now: Progress, phases: dict[str, float] = phases) -> None:
                        phases[now.phase] = now.seconds

                    with timed() as seconds:
                        shardkit_tools.build(
                            str(source), folder / "root", format=form, jobs=jobs, progress=told
                        )
                    shutil.rmtree(folder / "root")
                    print(
                        f"  {form:5} jobs {jobs}: {size / 1e6 / seconds[0]:4.0f} MB/s ({phases['read']:.1f} s reading, "
                        f"{phases['write']:.1f} s writing); {size / 1e6 / seconds[1]:4.0f} MB per CPU second"
                    )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
