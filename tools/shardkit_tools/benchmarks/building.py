"""From a file of rows to durable shards, beside the limit: the same bytes written, hashed twice, and synced."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from shardkit_tools.benchmarks.rounds import Contest, Entry, Round, timed
from shardkit_tools.building import ProgressCallback, build

__all__ = ["BLOB_BYTES", "build_contest", "build_round", "make_blobs", "make_tokens", "write_limit"]

BLOB_BYTES = 100_000
"""Of a sample of the build benchmark."""

TOKENS = 2048
_PIECE = 1 << 20
_FULL_MEGABYTES = 1600


def make_tokens(path: Path, megabytes: int) -> int:
    """Write an ``.npy`` of int32[2048] rows; returns its bytes of tokens."""
    rows = max(1, megabytes * 1_000_000 // (4 * TOKENS))
    array = np.lib.format.open_memmap(path, "w+", np.int32, (rows, TOKENS))
    for start in range(0, rows, 4096):
        random = np.random.default_rng(start)
        array[start : start + 4096] = random.integers(0, 50_000, (min(4096, rows - start), TOKENS))
    array.flush()
    return rows * 4 * TOKENS


def make_blobs(folder: Path, megabytes: int) -> int:
    """Write files of 100 kB; returns their bytes."""
    folder.mkdir()
    data = np.random.default_rng(1).bytes(BLOB_BYTES)
    count = max(1, megabytes * 1_000_000 // BLOB_BYTES)
    for n in range(count):
        (folder / f"{n:07d}.bin").write_bytes(n.to_bytes(8, "little") + data[8:])
    return count * BLOB_BYTES


def write_limit(path: Path, size: int) -> Round:
    """Write that many bytes with SHA-256 and XXH3, synced; bytes are the amount."""
    piece = np.random.default_rng(2).bytes(_PIECE)
    os.sync()  # what was written before is not on this bill

    def work() -> None:
        with path.open("wb") as stream:
            for first in range(0, size, _PIECE):
                part = memoryview(piece)[: size - first]
                stream.write(part)
                hashlib.sha256(part).digest()
                xxhash.xxh3_64_intdigest(part)
            stream.flush()
            os.fsync(stream.fileno())

    try:
        return timed(size, work)
    finally:
        path.unlink(missing_ok=True)


def build_round(
    source: Path, size: int, root: Path, form: str, jobs: int, progress: ProgressCallback | None = None
) -> Round:
    """Build a root and remove it again; bytes of the source are the amount."""
    os.sync()
    try:
        return timed(size, lambda: build(str(source), root, format=form, jobs=jobs, progress=progress))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def build_contest(scale: float, scratch: Path) -> Contest:
    """Token rows of 8 KiB into arrow and tar shards, one process.

    Args:
        scale: share of 1.6 GB.
        scratch: on the disk to be measured.
    """
    source = scratch / "tokens.npy"
    size = make_tokens(source, max(16, int(_FULL_MEGABYTES * scale)))

    def building(form: str) -> Callable[[], Round]:
        return lambda: build_round(source, size, scratch / f"root-{form}", form, 1)

    return Contest(
        "build tokens",
        {"bytes": size},
        [
            Entry("write + SHA-256 + XXH3, synced", "limit", lambda: write_limit(scratch / "limit", size)),
            Entry("shardkit arrow", "shardkit", building("arrow")),
            Entry("shardkit tar", "shardkit", building("tar")),
        ],
    )
