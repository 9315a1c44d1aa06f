"""What the machine can do with the same samples and nothing checked: what readers are measured by.

Each limit is a function that makes one epoch, an iterator of batches of fresh memory. They read a file of plain rows,
which tools/bench also reads as the memory map that people write. Nothing here imports shardkit: peers have none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from shardkit_tools.benchmarks.workloads import Workload

__all__ = ["LIMIT_NAMES", "Rows", "open_limit", "write_rows"]

LIMIT_NAMES = {
    "tokens": "numpy.take from a map",
    "small": "numpy.take from a map",
    "blobs": "map + XXH3 + new bytes",
    "text": "zstd on all threads",
}
"""Workload → what tables call its limit."""

_FRAME_BYTES = 256 << 10
_TASK_FRAMES = 8


def write_rows(workload: Workload, scale: float, directory: str) -> None:
    """Write values end to end, their offsets, and labels."""
    root, offsets, labels = Path(directory), [0], []
    root.mkdir(parents=True)
    with (root / "rows.bin").open("wb") as file:
        for sample in workload.samples(scale):
            offsets.append(offsets[-1] + file.write(workload.value_bytes(sample)))
            labels.append(sample.get("label", 0))
    np.save(root / "offsets.npy", np.array(offsets))
    np.save(root / "labels.npy", np.array(labels))


class Rows:
    """The file of `write_rows`, mapped.

    Attributes:
        offsets: where values begin, and the end. labels: of the rows.
        table: fixed rows as an array; of others the bytes of all.
    """

    def __init__(self, workload: Workload, directory: str) -> None:
        root = Path(directory)
        self.workload = workload
        self.offsets, self.labels = np.load(root / "offsets.npy"), np.load(root / "labels.npy")
        kind = workload.dtype if workload.shape else np.uint8
        mapped = np.memmap(root / "rows.bin", dtype=kind, mode="r").view(np.ndarray)
        self.table: Any = mapped.reshape(-1, *workload.shape) if workload.shape else mapped

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def value(self, row: int) -> memoryview:
        """A value of variable size where it lies in the map."""
        return memoryview(self.table)[self.offsets[row] : self.offsets[row + 1]]

    def batches(self, epoch: int) -> Iterator[Any]:
        """Row numbers of whole batches, shuffled."""
        order, size = np.random.default_rng(epoch).permutation(len(self)), self.workload.batch
        return (order[first : first + size] for first in range(0, len(order) - size + 1, size))


def open_limit(workload: Workload, directory: str) -> Callable[[int], Iterator[Any]]:
    """The limit of a workload: number of the epoch → its batches; of text, numbers of samples."""
    rows = Rows(workload, directory)
    if workload.shape:
        return lambda epoch: _take(rows, epoch)
    if workload.compressed:
        frames = _compressed(rows.table)
        return lambda epoch: _decompress(frames, len(rows))
    return lambda epoch: _hash(rows, epoch)


def _take(rows: Rows, epoch: int) -> Iterator[Any]:
    for chosen in rows.batches(epoch):
        if rows.workload.label:
            np.take(rows.labels, chosen, mode="clip")
        yield np.take(rows.table, chosen, axis=0, mode="clip")


def _hash(rows: Rows, epoch: int) -> Iterator[Any]:
    import xxhash

    for chosen in rows.batches(epoch):
        batch = []
        for row in chosen.tolist():
            value = rows.value(row)
            xxhash.xxh3_64_intdigest(value)
            batch.append(bytes(value))
        yield batch


def _compressed(data: Any) -> list[bytes]:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=3)
    starts = range(0, len(data), _FRAME_BYTES)
    return [compressor.compress(data[start : start + _FRAME_BYTES].tobytes()) for start in starts]


def _decompress(frames: list[bytes], rows: int) -> Iterator[int]:
    import zstandard

    def work(first: int) -> int:
        decompressor = zstandard.ZstdDecompressor()
        for frame in frames[first : first + _TASK_FRAMES]:
            decompressor.decompress(frame)
        last = min(first + _TASK_FRAMES, len(frames))
        return rows * last // len(frames) - rows * first // len(frames)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(work, range(0, len(frames), _TASK_FRAMES))
