"""What block_rows.c does, in Python and numpy: the same results without a compiler, in about twice the time.

Rows of one size are gathered from the address space itself, one overlapping array of items over the whole of it:
`numpy.take` takes from one array, and a batch comes from dozens of blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.formats import xxh3

__all__ = ["COPIED", "bytes_at", "copy_rows", "decimals_at", "gather_rows", "load_blocks", "texts_at"]

Int64s = NDArray[np.int64]

COPIED = 0
_FIRST_ADDRESS = 1 << 12  # the zero page is never mapped
_ADDRESSES = 1 << 47  # user addresses on x86-64 and on arm64 with 4-level tables
_MAX_ITEM = 1 << 15  # bytes of an item; times the addresses must stay below 2**63
_COLD_NS = 100_000  # and one for each byte: longer than any read from memory
_DECIMAL = re.compile(rb"0|-?[1-9][0-9]{0,17}")


def load_blocks(
    files: Int64s, offsets: Int64s, addresses: Int64s, sizes: Int64s, hashes: NDArray[np.uint64], /
) -> bytes:
    """As block_rows.pyi says; of blocks of any size."""
    columns = [one.tolist() for one in (files, offsets, addresses, sizes, hashes)]
    states, asked = bytearray(), not hasattr(os, "posix_fadvise")
    for n, values in enumerate(zip(*columns, strict=True)):
        started = time.perf_counter_ns()
        states.append(_load(*values))
        if not asked and time.perf_counter_ns() - started > _COLD_NS + sizes[n]:
            asked = True  # disks are faster when asked for many blocks at a time
            for file, offset, size in zip(*(columns[i][n + 1 :] for i in (0, 1, 3)), strict=True):
                os.posix_fadvise(file, offset, size, os.POSIX_FADV_WILLNEED)
    return bytes(states)


def _load(file: int, offset: int, address: int, size: int, expected: int) -> int:
    into = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    done = 0
    with contextlib.suppress(OSError):
        while done < size and (got := os.preadv(file, [into[done:]], offset + done)):
            done += got
    return 2 if done < size else int(xxh3(into) != expected)


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
    targets: list[NDArray[Any]], facts: Int64s, which: Int64s, row: Int64s, column: int, /
) -> int:
    """As block_rows.pyi says."""
    rows, values, pitch = facts[which][:, [0, 1 + 4 * column, 4 + 4 * column]].T
    if bool(((row < 0) | (row >= rows) | (pitch < 0)).any()):
        return 1
    addresses, done = values + row * pitch, 0
    for target in targets:
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
