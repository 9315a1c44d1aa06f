"""A loader with only the work that shardkit cannot avoid: read blocks into private memory, hash, copy rows.

Two loading threads fill one half of a pool (pread, XXH3-64) while rows are gathered from the other half by one
`numpy.take` per batch into fresh memory. The loading is compiled with pyarrow's copy of xxHash if a compiler is found.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from bench.reading.workloads import Rows
from bench.reading.workloads import write_rows as build

__all__ = ["build", "open_reader"]

BLOCK_BYTES = 256 << 10
HALF_BYTES = 128 << 20
THREADS = 2
_SOURCE = r"""
#define XXH_INLINE_ALL
#include <unistd.h>
#include "xxhash.h"
unsigned long long load(int fd, long offset, long size, char *into) {
    for (long got = 0; got < size;) {
        long more = pread(fd, into + got, size - got, offset + got);
        if (more <= 0) return 0;
        got += more;
    }
    return XXH3_64bits(into, size);
}
"""
Load = Callable[[int, int, "np.ndarray[Any, Any]"], int]  # (descriptor, offset, destination) → hash


class _Reader:
    def __init__(self, workload: Any, directory: str) -> None:
        if not workload.shape:
            raise NotImplementedError("rows of one size only")
        self.rows, self.row_bytes = Rows(workload, directory), Rows(workload, directory).table[0].nbytes
        self.file = os.open(Path(directory, "rows.bin"), os.O_RDONLY)
        self.block_rows = max(1, BLOCK_BYTES // self.row_bytes)
        self.half_blocks = min(HALF_BYTES // BLOCK_BYTES, -(-len(self.rows) // self.block_rows))
        half = (2, self.half_blocks * self.block_rows, *workload.shape)
        self.pool: Any = np.empty(half, workload.dtype)
        self.load, compiled = _load_function()
        self.facts = {"compiled": compiled}
        self.rng = np.random.default_rng(1)

    def epoch(self) -> Any:
        blocks = self.rng.permutation(len(self.rows) // self.block_rows)  # the short last block is left out
        parts = [blocks[i : i + self.half_blocks] for i in range(0, len(blocks), self.half_blocks)]
        workload = self.rows.workload
        with ThreadPoolExecutor(THREADS) as threads:
            coming = self._fill(threads, 0, parts[0])
            for number, part in enumerate(parts):
                wait(coming)
                half = self.pool[number % 2]
                if number + 1 < len(parts):
                    coming = self._fill(threads, (number + 1) % 2, parts[number + 1])
                order = self.rng.permutation(len(part) * self.block_rows)
                for first in range(0, len(order), workload.batch):
                    chosen = order[first : first + workload.batch]
                    if workload.label:
                        np.take(self.rows.labels, chosen, mode="clip")
                    yield np.take(half, chosen, axis=0, mode="clip")

    def _fill(self, threads: ThreadPoolExecutor, half: int, blocks: Any) -> list[Any]:
        places, size = itertools.count(), self.block_rows * self.row_bytes
        into = self.pool[half].reshape(-1).view(np.uint8)

        def work() -> None:
            while (place := next(places)) < len(blocks):
                self.load(self.file, int(blocks[place]) * size, into[place * size : (place + 1) * size])

        return [threads.submit(work) for _ in range(THREADS)]


def _load_function() -> tuple[Load, bool]:
    """Return the function that loads one block, and whether it is compiled."""
    import pyarrow as pa

    header = Path(pa.get_include(), "arrow", "vendored", "xxhash")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not (header / "xxhash.h").exists():
        return _plain, False
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "load.c"), Path(folder, "load.so")
        source.write_text(_SOURCE)
        command = [
            compiler,
            "-O3",
            "-march=native",
            "-shared",
            "-fPIC",
            f"-I{header}",
            str(source),
            "-o",
            str(library),
        ]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            return _plain, False
        load = ctypes.CDLL(str(library)).load
    load.restype, load.argtypes = (
        ctypes.c_uint64,
        [ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_void_p],
    )
    return lambda file, offset, into: int(load(file, offset, into.nbytes, into.ctypes.data)), True


def _plain(file: int, offset: int, into: np.ndarray[Any, Any]) -> int:
    import xxhash

    os.preadv(file, [into.data], offset)
    return xxhash.xxh3_64_intdigest(into.data)


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(workload, directory)
