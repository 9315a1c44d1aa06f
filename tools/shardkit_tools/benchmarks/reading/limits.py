"""What the machine can do with the same bytes: the yardstick of every reader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
import zstandard

from shardkit_tools.benchmarks.reading.workloads import Workload

BLOCK = 1 << 20
_YARDSTICKS = {"blobs": "sequential read + XXH3", "text": "zstd decompression"}


def yardstick_of(workload: str) -> str:
    """Name of the limit that readers of a workload are measured by: what no reader can do without."""
    return _YARDSTICKS.get(workload, "numpy.take gather")


def limits(workload: Workload, scale: float, directory: str) -> dict[str, Callable[[], dict[str, float]]]:
    """Name → a function that runs once and tells samples, seconds and CPU seconds. Reads the memmap reader's file."""
    rows = workload.rows(scale)
    data = np.memmap(f"{directory}/rows.bin", dtype=np.uint8, mode="r")
    data[::4096].sum()  # map every page once
    found: dict[str, Callable[[], dict[str, float]]] = {
        "memcpy": lambda: _rate(rows, lambda: _copy(data)),
        "sequential read": lambda: _rate(rows, lambda: _read(f"{directory}/rows.bin", hashed=False)),
        "sequential read + XXH3": lambda: _rate(rows, lambda: _read(f"{directory}/rows.bin", hashed=True)),
    }
    if workload.shape:
        table = data.view(workload.dtype).reshape(-1, *workload.shape)
        found["numpy.take gather"] = lambda: _rate(rows, lambda: _take(table, workload.batch))
    if workload.compressed:
        frames = [
            zstandard.ZstdCompressor(level=3).compress(data[a : a + BLOCK].tobytes())
            for a in range(0, len(data), BLOCK)
        ]
        found["zstd decompression"] = lambda: _rate(rows, lambda: _decompress(frames))
    return found


def _rate(rows: int, work: Callable[[], Any]) -> dict[str, float]:
    cpu, started = time.process_time(), time.perf_counter()
    work()
    return {"samples": rows, "seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}


def _copy(data: Any) -> None:
    out = np.empty(BLOCK, np.uint8)
    for start in range(0, len(data) - BLOCK, BLOCK):
        out[:] = data[start : start + BLOCK]


def _read(path: str, *, hashed: bool) -> None:
    buffer = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            if hashed:
                xxhash.xxh3_64_intdigest(memoryview(buffer)[:size])


def _take(table: Any, batch: int) -> None:
    order = np.random.default_rng(0).permutation(len(table))
    out = np.empty((batch, *table.shape[1:]), table.dtype)
    for start in range(0, len(order) - batch + 1, batch):
        np.take(table, order[start : start + batch], axis=0, out=out, mode="clip")
        out[:, 0].sum()


def _decompress(frames: list[bytes]) -> None:
    for frame in frames:
        zstandard.ZstdDecompressor().decompress(frame)
