"""The four workloads of the read benchmark: the same samples for every reader, made from their number alone.

It runs in the peers' environment too: numpy, and nothing of shardkit.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 1000
BLOB_BYTES = 100_000
TEXT_BYTES = 1500


@dataclass(frozen=True)
class Workload:
    """What is read: `rows` samples of `field` (and a label where `label`), `batch` at a time."""

    name: str
    full_rows: int
    batch: int
    field: str
    shape: tuple[int, ...]  # of arrays; () for bytes and text
    dtype: str  # "" for bytes, "str" for text
    label: bool
    compressed: bool

    def rows(self, scale: float) -> int:
        """Samples at this share of the stated ones: whole batches, at least 20."""
        return max(self.batch * 20, int(self.full_rows * scale)) // self.batch * self.batch

    def samples(self, scale: float) -> Iterator[dict[str, Any]]:
        """One dict per sample; arrays are rows of a fresh chunk."""
        make: Callable[[int, np.random.Generator], Any] = {
            "tokens": _tokens,
            "small": _small,
            "blobs": _blobs,
            "text": _texts,
        }[self.name]
        for first in range(0, self.rows(scale), CHUNK):
            rng = np.random.default_rng(first)
            values = make(min(CHUNK, self.rows(scale) - first), rng)
            for offset, value in enumerate(values):
                sample: dict[str, Any] = {self.field: value}
                if self.label:
                    sample["label"] = (first + offset) % 1000
                yield sample

    def value_bytes(self, sample: dict[str, Any]) -> bytes:
        """The value of a sample as formats of plain records store it."""
        value = sample[self.field]
        if isinstance(value, str):
            return value.encode()
        return value if isinstance(value, bytes) else bytes(value.tobytes())


def _tokens(count: int, rng: np.random.Generator) -> Any:
    return rng.integers(0, 50_000, (count, 2048), dtype=np.int32)


def _small(count: int, rng: np.random.Generator) -> Any:
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8)


def _blobs(count: int, rng: np.random.Generator) -> Any:
    sizes = rng.integers(BLOB_BYTES * 8 // 10, BLOB_BYTES * 12 // 10, count)
    return [rng.bytes(int(size)) for size in sizes]


_words: list[str] = []


def _texts(count: int, rng: np.random.Generator) -> Any:
    if not _words:  # English-like text that every machine has
        source = "".join(p.read_text(encoding="utf-8", errors="replace")
                         for p in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py")))  # fmt: skip
        _words.extend(re.findall(r"\S+\s*", source))
    starts = rng.integers(0, len(_words) - 600, count)
    return ["".join(_words[start : start + 600])[:TEXT_BYTES] for start in starts.tolist()]


WORKLOADS = {
    w.name: w
    for w in (
        Workload("tokens", 200_000, 64, "tokens", (2048,), "int32", label=False, compressed=False),
        Workload("small", 500_000, 256, "image", (3072,), "uint8", label=True, compressed=False),
        Workload("blobs", 20_000, 64, "blob", (), "", label=True, compressed=False),
        Workload("text", 500_000, 64, "text", (), "str", label=False, compressed=True),
    )
}


def touch(value: Any) -> int:
    """Look at the first value of every sample of a batch; returns how many samples there are.

    A number stands for so many samples of which there is nothing to look at.
    """
    if isinstance(value, int):
        return value
    if isinstance(value, (list, tuple)):
        for one in value:
            one[0]
        return len(value)
    value.reshape(len(value), -1)[:, 0].sum()
    return len(value)
