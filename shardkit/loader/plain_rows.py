"""The functions of block_rows.c that copy rows, in Python and numpy: the same results in up to twice the time.

Blocks are read and verified by `BlockReader.read` then.

A batch comes from dozens of blocks, but numpy indexes one array at a time. Rows of one size are therefore taken from an
array of overlapping items that spans the whole address space.
"""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s

__all__ = ["COPIED", "bytes_at", "copy_rows", "decimals_at", "gather_rows", "objects_of"]


COPIED = 0
_PLACED = -24  # gather.PLACED
_FIRST_ADDRESS = 1 << 12  # the zero page is never mapped
_ADDRESSES = 1 << 47  # user addresses on x86-64 and on arm64 with 4-level tables
_MAX_ITEM = 1 << 15  # bytes of an item; times the addresses must stay below 2**63
_DECIMAL = re.compile(rb"0|-?[1-9][0-9]{0,17}")


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
