"""Copies of many rows in one call, during which other threads run (row_copies.c)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

def copy_rows(target: NDArray[Any], addresses: Int64s, size: int, /) -> None:
    """The row of `size` bytes at each of (n,) addresses, end to end into `target` of n · `size` bytes."""

def copy_spans(target: NDArray[Any], addresses: Int64s, sizes: Int64s, /) -> None:
    """Rows of any sizes, (n,) and (n,), end to end into `target`, whose bytes are the sum of them."""

def bytes_at(addresses: Int64s, sizes: Int64s, /) -> list[bytes]:
    """What lies at each address, (n,) and (n,)."""

def texts_at(addresses: Int64s, sizes: Int64s, /) -> list[str]:
    """The UTF-8 text at each address.

    Raises:
        UnicodeDecodeError: one is not.
    """

def decimals_at(target: Int64s, addresses: Int64s, sizes: Int64s, /) -> bool:
    """Values of the canonical decimals at each address into `target`; False where one is none of up to 18 digits."""
