"""What block_rows.c does, in Python and numpy: the same results without a compiler, in about twice the time.

Rows of one size are gathered from the address space itself, one overlapping array of items over the whole of it:
`numpy.take` takes from one array, and a batch comes from dozens of blocks.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ShardkitError
from shardkit.formats import xxh3
from shardkit.stores.open_files import open_files

__all__ = ["COPIED", "Loads", "bytes_at", "copy_rows", "decimals_at", "gather_rows", "texts_at"]

Int64s = NDArray[np.int64]

COPIED = 0
_FIRST_ADDRESS = 1 << 12  # the zero page is never mapped
_ADDRESSES = 1 << 47  # user addresses on x86-64 and on arm64 with 4-level tables
_MAX_ITEM = 1 << 15  # bytes of an item; times the addresses must stay below 2**63
_JOB = 10  # numbers of a job before its facts
_DECIMAL = re.compile(rb"0|-?[1-9][0-9]{0,17}")


class Loads:
    """As block_rows.pyi says; of blocks of any size."""

    def __init__(self, width: int, timed: bool = False) -> None:
        self._width, self._timed = width, timed
        self._changed = threading.Condition()
        self._jobs: list[list[int]] = []
        self._done: set[int] = set()  # jobs past `_prefix`
        self._began: dict[int, tuple[float, int, int]] = {}  # (when, slot, block) of what is being loaded
        self._files: list[tuple[str, int]] = []
        self._facts = np.zeros((0, width), np.int64)
        self._times: list[tuple[int, int]] = []
        self._prefix = self._next = self._dropped = self._now = self._drops = 0
        self._first = 0  # the number of `_jobs[0]`
        self._loads, self._bytes, self._seconds = 0, 0, 0.0
        self._closed = False

    def add_file(self, path: str, size: int, /) -> int:
        self._files.append((path, size))
        return len(self._files) - 1

    def set_table(self, facts: NDArray[np.int64], /) -> None:
        with self._changed:
            facts[: len(self._facts)] = self._facts
            self._facts = facts

    def add(self, jobs: Int64s, /) -> int:
        with self._changed:
            del self._jobs[: self._prefix - self._first]
            self._first = self._prefix
            first = self._first + len(self._jobs)
            self._jobs += jobs.tolist()
            self._changed.notify_all()
            return first

    def work(self) -> tuple[int, int, int, bool] | None:
        while True:
            with self._changed:
                while not (self._closed or self._may_begin()):
                    self._changed.wait()
                if self._closed:
                    return None
                number, job = self._next, self._jobs[self._next - self._first]
                self._next += 1
                file, offset, size, address, expected, _, slot, block, layout, layout_size = job[:_JOB]
                self._began[number] = time.perf_counter(), slot, block
            if file < 0:
                return number, slot, block, False
            if not _load(*self._files[file], offset, address, size, expected % 2**64):
                return number, slot, block, False
            took = time.perf_counter() - self._began[number][0]
            with self._changed:
                self._loads, self._bytes, self._seconds = (
                    self._loads + 1,
                    self._bytes + size,
                    self._seconds + took,
                )
                if self._timed:
                    self._times.append((block, int(took * 1e9)))
            if layout_size < 0 or ctypes.string_at(address, layout_size) != ctypes.string_at(
                layout, layout_size
            ):
                return number, slot, block, True
            self.finish(number, slot, job[_JOB:])

    def _may_begin(self) -> bool:
        place = self._next - self._first
        return place < len(self._jobs) and self._jobs[place][5] <= self._now

    def finish(self, number: int, slot: int, facts: bytes | list[int] | None, /) -> None:
        with self._changed:
            del self._began[number]
            if number >= self._dropped:
                if facts is not None:
                    given = np.frombuffer(facts, np.int64) if isinstance(facts, bytes) else facts
                    self._facts[slot] = given
                self._done.add(number)
                while self._prefix in self._done:
                    self._done.remove(self._prefix)
                    self._prefix += 1
            self._changed.notify_all()

    def wait(self, need: int, timeout_s: float, /) -> int:
        with self._changed:
            drops = self._drops

            def is_over() -> bool:
                return self._prefix >= need or self._closed or self._drops != drops

            in_time = self._changed.wait_for(is_over, timeout_s)
            if self._closed or self._drops != drops:
                return -2
            return self._prefix if in_time else -1

    def advance(self, step: int, /) -> None:
        with self._changed:
            self._now = step
            if self._may_begin():
                self._changed.notify_all()

    def drop(self) -> int:
        with self._changed:
            begun = self._next
            self._prefix = self._next = self._dropped = self._first = self._first + len(self._jobs)
            self._jobs, self._done = [], set()
            self._drops += 1
            self._changed.notify_all()
            return begun

    def running(self) -> list[int]:
        with self._changed:
            return [slot for number, (_, slot, _) in self._began.items() if number < self._dropped]

    def longest(self) -> tuple[int, float] | None:
        with self._changed:
            since, _, block = min(self._began.values(), default=(0.0, 0, -1))
            return None if block < 0 else (block, time.perf_counter() - since)

    def counts(self) -> tuple[int, int, int, float]:
        return self._prefix, self._loads, self._bytes, self._seconds

    def take_times(self) -> bytes:
        with self._changed:
            times, self._times = self._times, []
        return np.array(times, np.int64).tobytes()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _load(path: str, file_size: int, offset: int, address: int, size: int, expected: int) -> bool:
    into = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    try:
        open_files.read(path, file_size, offset, into)
    except ShardkitError:
        open_files.forget(path)
        return False
    return xxh3(into) == expected


def copy_rows(target: NDArray[Any], addresses: Int64s, sizes: Int64s | int, /) -> None:
    """As block_rows.pyi says."""
    if isinstance(sizes, int) and 0 < sizes <= _MAX_ITEM:
        items = _address_space(sizes)[addresses - _FIRST_ADDRESS]
        target.reshape(-1).view(np.uint8)[:] = items.view(np.uint8)
        return
    each = [sizes] * len(addresses) if isinstance(sizes, int) else sizes.tolist()
    to = target.__array_interface__["data"][0]
    for address, size in zip(addresses.tolist(), each, strict=True):
        ctypes.memmove(to, address, size)
        to += size


def gather_rows(
    targets: list[NDArray[Any]], facts: Int64s, which: Int64s, row: Int64s, columns: tuple[int, ...], /
) -> int:
    """As block_rows.pyi says."""
    parts = len(targets) // len(columns)
    for number, column in enumerate(columns):
        rows, values, pitch = facts[which][:, [0, 1 + 4 * column, 4 + 4 * column]].T
        if bool(((row < 0) | (row >= rows) | (pitch < 0)).any()):
            return 1
        addresses, done = values + row * pitch, 0
        for target in targets[number * parts : (number + 1) * parts]:
            if target.nbytes:
                copy_rows(target, addresses[done : done + len(target)], target.nbytes // len(target))
            done += len(target)
    return COPIED


@lru_cache(maxsize=64)
def _address_space(item: int) -> NDArray[np.void]:
    """All addresses as overlapping items of `item` bytes; element a is the item that begins at address a + 4096."""
    space = (ctypes.c_char * (_ADDRESSES - _FIRST_ADDRESS)).from_address(_FIRST_ADDRESS)
    count = _ADDRESSES - _FIRST_ADDRESS - item
    return np.ndarray((count,), dtype=np.dtype((np.void, item)), buffer=memoryview(space), strides=(1,))


def bytes_at(addresses: Int64s, sizes: Int64s, /) -> list[bytes]:
    """As block_rows.pyi says."""
    return list(map(ctypes.string_at, addresses.tolist(), sizes.tolist()))


def texts_at(addresses: Int64s, sizes: Int64s, /) -> list[str]:
    """As block_rows.pyi says."""
    return [str(one, "utf-8") for one in bytes_at(addresses, sizes)]


def decimals_at(addresses: Int64s, sizes: Int64s, /) -> bytes | None:
    """As block_rows.pyi says."""
    texts = bytes_at(addresses, sizes)
    if not all(map(_DECIMAL.fullmatch, texts)):
        return None
    return np.array(list(map(int, texts)), np.int64).tobytes()
