"""Measure parity in CPU time per core: P+Q of 8+2, all losses of two, and XOR and SHA-256 for comparison.

Run: nice -n 5 .venv/bin/python tools/bench/parity.py [--write parity.md]
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardkit.reading.parity.galois import recover, sums
from shardkit.reading.parity.rebuilding import encode_set, rebuild_range, restore
from shardkit.reading.parity.sets import ParitySet
from shardkit.stores.local import LocalStore
from shardkit.stores.store import Descriptor

K = 8
PIECE = 1 << 20


def rate(work: Callable[[], object], num_bytes: int, turns: int = 5) -> float:
    """Return the best rate in MiB per second of CPU time."""
    best = float("inf")
    for _ in range(turns):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return num_bytes / best / 2**20


def arithmetic() -> list[tuple[str, str]]:
    """Measure rates over the bytes of the members, in pieces of 1 MiB as in streaming."""
    rng = np.random.default_rng(1)
    members = [rng.integers(0, 256, PIECE, dtype=np.uint8) for _ in range(K)]
    p, q = np.empty(PIECE, np.uint8), np.empty(PIECE, np.uint8)
    turns = 32

    def repeat(work: Callable[[], object]) -> Callable[[], object]:
        return lambda: [work() for _ in range(turns)]

    total = turns * K * PIECE
    wide = [member.view(np.uint64) for member in members]
    out = np.empty(PIECE // 8, np.uint64)

    def xor() -> None:
        np.bitwise_xor(wide[0], wide[1], out=out)
        for one in wide[2:]:
            np.bitwise_xor(out, one, out=out)

    data = members[0].tobytes()
    sums(members, p, q)
    rows = [
        ("SHA-256 of the members", rate(repeat(lambda: [hashlib.sha256(data) for _ in range(K)]), total)),
        ("XOR of the members (numpy, the least that any code does)", rate(repeat(xor), total)),
        ("encode P + Q", rate(repeat(lambda: sums(members, p, q)), total)),
    ]
    by_kind: dict[str, list[float]] = {}
    for lost in [(i,) for i in range(K + 2)] + list(itertools.combinations(range(K + 2), 2)):
        pieces = [None if i in lost else one for i, one in enumerate([*members, p, q])]
        kind = f"{sum(i < K for i in lost)} members and {sum(i >= K for i in lost)} of P, Q lost"
        decode = functools.partial(recover, pieces[:K], pieces[K], pieces[K + 1], PIECE)
        by_kind.setdefault(kind, []).append(rate(repeat(decode), total, 2))
    told = [(name, f"{found:,.0f}") for name, found in rows]
    return told + [
        (f"decode, {kind} ({len(f)} patterns), slowest", f"{min(f):,.0f}")
        for kind, f in sorted(by_kind.items())
    ]


def objects(size: int) -> list[tuple[str, str]]:
    """Measure whole objects through local stores with every digest checked, in CPU time of all threads."""
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(folder)
        rng = np.random.default_rng(2)
        members = []
        for _ in range(K):
            data = rng.bytes(size)
            found = Descriptor(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data), "tar")
            store.put_new(found.name, data)
            members.append(found)
        one = ParitySet(tuple(members))
        begun, wall = time.process_time(), time.perf_counter()
        record = encode_set(store, one, [store])
        encode_s, encode_wall = time.process_time() - begun, time.perf_counter() - wall
        names = [record.object_at(i) for i in range(K + 2)]
        for i in (1, 6):
            store.delete(names[i].name)
        begun, wall = time.process_time(), time.perf_counter()
        restore(one, names, {1: store, 6: store}, [store])
        repair_s, repair_wall = time.process_time() - begun, time.perf_counter() - wall
        block = store.get_range(names[3].name, size // 2, PIECE)
        store.delete(names[3].name)
        requests = 0

        def read(name: str, offset: int, length: int) -> bytes:
            nonlocal requests
            requests += 1
            return store.get_range(name, offset, length)

        begun = time.process_time()
        digest = hashlib.sha256(block).digest()
        assert rebuild_range(record, 3, size // 2, PIECE, digest, read) == block
        block_s = time.process_time() - begun
    total = K * size / 2**20
    encoding = f"{total / encode_s:,.0f} ({total / encode_wall:,.0f} by the clock)"
    repairing = f"{total / repair_s:,.0f} ({total / repair_wall:,.0f} by the clock)"
    return [
        (f"encode 8 × {size >> 20} MiB: read, hash, P + Q, hash, write, fsync", encoding),
        ("rebuild two of them: likewise", repairing),
        (f"degraded read of a block of 1 MiB: {requests} requests", f"{1e3 * block_s:.1f} ms of CPU time"),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=64, help="MiB of each object")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    np.seterr(all="raise")
    machine = f"{platform.machine()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    lines = [
        f"{machine}, {versions}. MiB of members per second of CPU time; best of 5.",
        "",
        "| 8+2 | MiB/s per core |",
        "|---|---|",
        *(f"| {name} | {found} |" for name, found in arithmetic()),
        *(f"| {name} | {found} |" for name, found in objects(options.size << 20)),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        options.write.write_text(f"# Parity, {time.strftime('%Y-%m-%d')}\n\n{text}")


if __name__ == "__main__":
    main()
