"""The functions of block_rows.c in Python and numpy: the same results without a compiler, in up to twice the time.

A batch comes from dozens of blocks, but numpy indexes one array at a time. Rows of one size are therefore taken from an
array of overlapping items that spans the whole address space.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s

__all__ = ["COPIED", "Loads", "bytes_at", "copy_rows", "decimals_at", "gather_rows", "objects_of"]


COPIED = 0
_PLACED = -24  # gather.PLACED
_FIRST_ADDRESS = 1 << 12  # the zero page is never mapped
_ADDRESSES = 1 << 47  # user addresses on x86-64 and on arm64 with 4-level tables
_MAX_ITEM = 1 << 15  # bytes of an item; times the addresses must stay below 2**63
_DECIMAL = re.compile(rb"0|-?[1-9][0-9]{0,17}")


class Loads:
    """See block_rows.pyi; here `work` returns every job to the caller, which reads and verifies the block in Python."""

    def __init__(self, width: int, timed: bool = False) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, int, int]] = deque()  # after, slot, block; from job `_next` on
        self._began: dict[int, tuple[float, int, int]] = {}  # job → when, slot, block
        self._facts = np.zeros((0, width), np.int64)
        self._next = self._dropped = self._now = self._drops = 0
        self._closed = False

    def _done(self) -> int:
        """Return how many jobs are done without a gap."""
        return min((number for number in self._began if number >= self._dropped), default=self._next)

    def set_table(self, facts: Int64s, /) -> None:
        with self._changed:
            facts[: len(self._facts)] = self._facts
            self._facts = facts

    def add(self, jobs: Int64s, /) -> int:
        with self._changed:
            first = self._next + len(self._waiting)
            self._waiting += zip(*jobs[:, 5:8].T.tolist(), strict=True)
            self._changed.notify_all()
            return first

    def work(self) -> tuple[int, int, int] | None:
        with self._changed:
            while not self._closed and not self._may_begin():
                self._changed.wait()
            if self._closed:
                return None
            _, slot, block = self._waiting.popleft()
            self._began[self._next] = time.perf_counter(), slot, block
            self._next += 1
            return self._next - 1, slot, block

    def _may_begin(self) -> bool:
        return bool(self._waiting) and self._waiting[0][0] <= self._now

    def finish(self, number: int, slot: int, facts: bytes | None, /) -> None:
        with self._changed:
            del self._began[number]
            if number >= self._dropped and facts is not None:
                self._facts[slot] = np.frombuffer(facts, np.int64)
            self._changed.notify_all()

    def wait(self, jobs: int, timeout_s: float, /) -> int:
        with self._changed:
            drops = self._drops
            in_time = self._changed.wait_for(
                lambda: self._closed or self._drops != drops or self._done() >= jobs, timeout_s
            )
            return -2 if self._closed or self._drops != drops else self._done() if in_time else -1

    def advance(self, step: int, /) -> None:
        with self._changed:
            self._now = step
            if self._may_begin():
                self._changed.notify_all()

    def drop(self) -> tuple[int, list[int]]:
        with self._changed:
            begun = self._next
            self._next = self._dropped = begun + len(self._waiting)
            self._waiting.clear()
            self._drops += 1
            self._changed.notify_all()
            return begun, [slot for _, slot, _ in self._began.values()]

    def gather_rows(self, *places: Any) -> int:
        return gather_rows(*places)

    def running(self) -> list[int]:
        with self._changed:
            return [slot for number, (_, slot, _) in self._began.items() if number < self._dropped]

    def longest(self) -> tuple[int, float] | None:
        with self._changed:
            since, _, block = min(self._began.values(), default=(0.0, 0, -1))
            return None if block < 0 else (block, time.perf_counter() - since)

    def counts(self) -> tuple[int, int, int, float]:
        with self._changed:
            return self._done(), 0, 0, 0.0

    def take_times(self) -> bytes:
        return b""

    def release(self, number: int, slot: int, /) -> None:
        pass

    def leave(self) -> None:
        pass

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def copy_rows(target: NDArray[Any], addresses: Int64s, sizes: Int64s | int, /) -> None:
    """See block_rows.pyi."""
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
    """See block_rows.pyi."""
    parts = len(targets) // len(columns)
    found = []
    for column in columns:  # check all fields before any row is copied
        rows, values, data, pitch = facts[which][:, [0, 1 + 4 * column, 3 + 4 * column, 4 + 4 * column]].T
        placed = pitch == _PLACED
        if bool(((row < 0) | (row >= rows) | ((pitch < 0) & ~placed)).any()):
            return 1
        addresses, starts = values + row * pitch, np.empty(int(placed.sum()), np.int64)
        copy_rows(starts, values[placed] + 8 * row[placed], 8)
        addresses[placed] = data[placed] + starts
        found.append(addresses)
    for number, addresses in enumerate(found):
        done = 0
        for target in targets[number * parts : (number + 1) * parts]:
            if target.nbytes:
                copy_rows(target, addresses[done : done + len(target)], target.nbytes // len(target))
            done += len(target)
    return COPIED


@lru_cache(maxsize=64)
def _address_space(item: int) -> NDArray[np.void]:
    """Return the address space as an array of overlapping items; element a is `item` bytes at address a + 4096."""
    space = (ctypes.c_char * (_ADDRESSES - _FIRST_ADDRESS)).from_address(_FIRST_ADDRESS)
    count = _ADDRESSES - _FIRST_ADDRESS - item
    return np.ndarray((count,), dtype=np.dtype((np.void, item)), buffer=memoryview(space), strides=(1,))


def bytes_at(addresses: Int64s, sizes: Int64s, /) -> list[bytes]:
    """See block_rows.pyi."""
    return list(map(ctypes.string_at, addresses.tolist(), sizes.tolist()))


def objects_of(
    facts: Int64s, which: Int64s, row: Int64s, column: int, text: bool, /
) -> list[bytes] | list[str]:
    """See block_rows.pyi; no rows are read into objects in advance."""
    values, ends, data = facts[which, 1 + 4 * column : 4 + 4 * column].T
    spans = np.empty((2, len(row)), np.int64)
    copy_rows(spans, np.concatenate([values + 8 * row, ends + 8 * row]), 8)
    found = bytes_at(data + spans[0], spans[1] - spans[0])
    return [str(one, "utf-8") for one in found] if text else found


def decimals_at(addresses: Int64s, sizes: Int64s, /) -> bytes | None:
    """See block_rows.pyi."""
    texts = bytes_at(addresses, sizes)
    if not all(map(_DECIMAL.fullmatch, texts)):
        return None
    return np.array(list(map(int, texts)), np.int64).tobytes()
