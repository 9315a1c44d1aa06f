"""The four workloads of the read benchmark, and the limit of each: the same samples without checks.

A sample depends only on its number. A limit is a function that returns one epoch, an iterator of batches in fresh
memory. This module also runs in the peers' environment, so it imports numpy and nothing of shardkit.
"""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 1000
BLOB_BYTES = 100_000
PICTURE_BYTES = 115_000
"""Mean of ImageNet: 147,897,477,120 bytes of ILSVRC2012_img_train.tar by 1,281,167 pictures."""
TEXT_BYTES = 1500


@dataclass(frozen=True)
class Workload:
    """A workload: `rows` samples of `field` (and a label if `label`), read `batch` at a time."""

    name: str
    full_rows: int
    batch: int
    field: str
    shape: tuple[int, ...]  # of arrays; () for bytes and text
    dtype: str  # "" for bytes, "str" for text
    label: bool
    compressed: bool
    limit: str  # name of its limit in tables
    make: Callable[[int, np.random.Generator], Any]  # (number of samples, generator) → values

    def rows(self, scale: float) -> int:
        """Return the number of samples at this share of the full number: whole batches, at least 20."""
        return max(self.batch * 20, int(self.full_rows * scale)) // self.batch * self.batch

    def samples(self, scale: float) -> Iterator[dict[str, Any]]:
        """Yield one dict per sample; arrays are rows of a fresh chunk."""
        for first in range(0, self.rows(scale), CHUNK):
            rng = np.random.default_rng(first)
            values = self.make(min(CHUNK, self.rows(scale) - first), rng)
            for offset, value in enumerate(values):
                sample: dict[str, Any] = {self.field: value}
                if self.label:
                    sample["label"] = (first + offset) % 1000
                yield sample

    def value_bytes(self, sample: dict[str, Any]) -> bytes:
        """Return the value of a sample as formats of plain records store it."""
        value = sample[self.field]
        if isinstance(value, str):
            return value.encode()
        return value if isinstance(value, bytes) else bytes(value.tobytes())


def _blobs(count: int, rng: np.random.Generator) -> Any:
    sizes = rng.integers(BLOB_BYTES * 8 // 10, BLOB_BYTES * 12 // 10, count)
    return [rng.bytes(int(size)) for size in sizes]


def _pictures(count: int, rng: np.random.Generator) -> Any:
    """Return bytes of log-normal sizes, whose deviation of 0.6 is assumed."""
    sizes = rng.lognormal(np.log(PICTURE_BYTES) - 0.6**2 / 2, 0.6, count).clip(2_000, 4_000_000)
    return [rng.bytes(int(size)) for size in sizes]


@functools.cache
def _words() -> list[str]:
    """Return English-like text that is available on every machine."""
    source = "".join(p.read_text(encoding="utf-8", errors="replace")
                     for p in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py")))  # fmt: skip
    return re.findall(r"\S+\s*", source)


def _texts(count: int, rng: np.random.Generator) -> Any:
    starts = rng.integers(0, len(_words()) - 600, count)
    return ["".join(_words()[start : start + 600])[:TEXT_BYTES] for start in starts.tolist()]


_TAKE = "numpy.take from a map"
WORKLOADS = {
    w.name: w
    for w in (
        Workload("tokens", 200_000, 64, "tokens", (2048,), "int32", label=False, compressed=False, limit=_TAKE,
                 make=lambda count, rng: rng.integers(0, 50_000, (count, 2048), dtype=np.int32)),
        Workload("small", 500_000, 256, "image", (3072,), "uint8", label=True, compressed=False, limit=_TAKE,
                 make=lambda count, rng: rng.integers(0, 256, (count, 3072), dtype=np.uint8)),
        Workload("blobs", 20_000, 64, "blob", (), "", label=True, compressed=False, limit="map + XXH3 + new bytes",
                 make=_blobs),
        Workload("text", 500_000, 64, "text", (), "str", label=False, compressed=True, limit="zstd on all threads",
                 make=_texts),
    )
}  # fmt: skip

PICTURES = Workload(
    "pictures", 4_000, 64, "image", (), "", label=True, compressed=False, limit="", make=_pictures
)
"""Read from a bucket only, so that it has no limit on the disk."""


def touch(value: Any) -> int:
    """Read the first value of every sample of a batch; return the number of samples.

    A batch given as an integer is a number of samples whose values are not available.
    """
    if isinstance(value, int):
        return value
    if isinstance(value, (list, tuple)):
        for one in value:
            one[0]
        return len(value)
    value.reshape(len(value), -1)[:, 0].sum()
    return len(value)


_FRAME_BYTES = 256 << 10
_TASK_FRAMES = 8


def write_rows(workload: Workload, scale: float, directory: str) -> None:
    """Write the values end to end, their offsets and the labels."""
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
        offsets: start of each value, followed by the end of the last.
        labels: labels of the rows.
        table: array of the rows if they have a fixed size; otherwise all bytes of the file.
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
        """Return a value of variable size as a view of the map."""
        return memoryview(self.table)[self.offsets[row] : self.offsets[row + 1]]

    def batches(self, epoch: int) -> Iterator[Any]:
        """Return the shuffled row numbers of an epoch in whole batches."""
        order, size = np.random.default_rng(epoch).permutation(len(self)), self.workload.batch
        return (order[first : first + size] for first in range(0, len(order) - size + 1, size))


def open_limit(workload: Workload, directory: str) -> Callable[[int], Iterator[Any]]:
    """Return the limit of a workload: epoch number → batches (for text, numbers of samples)."""
    rows = Rows(workload, directory)
    if workload.shape:
        return lambda epoch: _take(rows, epoch)
    if workload.compressed:
        frames = _compress(rows.table)
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


def _compress(data: Any) -> list[bytes]:
    from shardkit.formats.compression import compress_frame  # not in the peers' environment

    starts = range(0, len(data), _FRAME_BYTES)
    return [compress_frame(data[start : start + _FRAME_BYTES].tobytes(), 3) for start in starts]


def _decompress(frames: list[bytes], rows: int) -> Iterator[int]:
    from shardkit.formats.compression import decompress

    def work(first: int) -> int:
        for frame in frames[first : first + _TASK_FRAMES]:
            decompress(frame)
        last = min(first + _TASK_FRAMES, len(frames))
        return rows * last // len(frames) - rows * first // len(frames)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(work, range(0, len(frames), _TASK_FRAMES))
