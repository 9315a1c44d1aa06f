"""Values whose size varies in more than one way, as one byte string that says its own shape (SPEC.md §1).

An array of varying shape is a .npy file of version 1.0; a list of byte strings is their count, their sizes (u64 each)
and the strings end to end. There is one encoding of each value, and reading believes no size: what a header calls for
has to be the very bytes that are there before an array is made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHAPE = re.compile(rb"'shape': \(([0-9, ]{1,200})\), \}")
_MAX_ITEMS = 2**40  # with 1 for 0: NumPy multiplies the sizes of an empty array, too
_MAX_EMPTY = 2**16  # lists inside of an array that has no items: as Arrow lists they have an offset each
HEAD_BYTES = 320
"""No header of eight dimensions is longer."""


@lru_cache(maxsize=4096)
def array_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The .npy header of an array in C order: what NumPy writes, at least 128 bytes."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    total = max(-(-(10 + len(text) + 1) // 64) * 64, 128)
    return b"\x93NUMPY\x01\x00" + (total - 10).to_bytes(2, "little") + text.ljust(total - 11) + b"\n"


def pack_array(array: NDArray[Any], sizes: Sequence[int]) -> bytes:
    """The .npy file of a little-endian array.

    Raises:
        ValueError: see `_check_shape`.
    """
    _check_shape(array.shape, sizes)
    return array_header(array.dtype, array.shape) + array.tobytes()


def array_place(
    head: bytes, size: int, dtype: np.dtype[Any], sizes: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Shape of the array of `pack_array`, and where its items begin.

    Args:
        head: the first `HEAD_BYTES` of the payload, or all of it.
        size: of the payload, in bytes.
        dtype: of the items, little-endian.
        sizes: of each dimension; 0 where it is free.

    Raises:
        ValueError: the bytes are not those of such an array.
    """
    found = _SHAPE.search(head)
    texts = found[1].rstrip(b",").split(b", ") if found else []
    if len(texts) != len(sizes) or any(not text.isdigit() or len(text) > 13 for text in texts):
        raise ValueError("no .npy header of as many dimensions")
    shape = tuple(map(int, texts))
    header = array_header(dtype, shape)
    if not head.startswith(header):
        raise ValueError(f"its .npy header is not that of {dtype.name} in shape {shape}, in C order")
    _check_shape(shape, sizes)
    expected = len(header) + dtype.itemsize * prod(shape)
    if expected != size:
        raise ValueError(f"its header calls for {expected} bytes in shape {shape}")
    return shape, len(header)


def _check_shape(shape: Sequence[int], sizes: Sequence[int]) -> None:
    """Refuse a shape that is not of the type, or would cost a reader more memory than the value has bytes.

    Raises:
        ValueError: it is; says why.
    """
    if any(n != fixed for n, fixed in zip(shape, sizes, strict=True) if fixed):
        raise ValueError(f"its shape is {tuple(shape)}")
    lists = prod(max(n, 1) for n in shape[: max(place for place, size in enumerate(sizes) if not size)])
    if prod(max(n, 1) for n in shape) > _MAX_ITEMS or (0 in shape and lists > _MAX_EMPTY):
        raise ValueError(f"its shape is {tuple(shape)}: an array without items has at most {_MAX_EMPTY} rows")


def unpack_array(payload: bytes | memoryview, dtype: np.dtype[Any], sizes: Sequence[int]) -> NDArray[Any]:
    """The array of `pack_array`, fresh and writable; see `array_place`."""
    shape, start = array_place(bytes(payload[:HEAD_BYTES]), len(payload), dtype, sizes)
    items = np.frombuffer(payload, np.uint8, offset=start) if len(payload) > start else np.empty(0, np.uint8)
    check_bools(items, dtype)
    return items.copy().view(dtype).reshape(shape)


def check_bools(items: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Refuse items of bool that are neither 0 nor 1: ValueError."""
    if dtype.kind == "b" and bool((items.view(np.uint8) > 1).any()):
        raise ValueError("a bool is neither 0 nor 1")


def pack_list(items: Sequence[bytes]) -> bytes:
    """Count, sizes, items."""
    return b"".join([np.array([len(items), *map(len, items)], "<u8").tobytes(), *items])


def unpack_list(payload: bytes | memoryview) -> list[bytes]:
    """The items of `pack_list`.

    Raises:
        ValueError: the sizes are not those of the bytes that are there.
    """
    count = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or count > len(payload) // 8 - 1:
        raise ValueError(f"{len(payload)} bytes cannot hold the sizes of {count} items")
    at = 8 * (count + 1)
    sizes: list[int] = np.frombuffer(payload, "<u8", count, 8).tolist()
    if at + sum(sizes) != len(payload):
        raise ValueError(f"{len(payload)} bytes, but its sizes add up to {at + sum(sizes)}")
    items = []
    for size in sizes:
        items.append(bytes(payload[at : at + size]))
        at += size
    return items
