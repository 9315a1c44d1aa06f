"""Blocks read and hashed, rows copied out of them, while other threads run (block_rows.c)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

def load_blocks(
    files: Int64s,
    offsets: Int64s,
    addresses: Int64s,
    sizes: Int64s,
    hashes: NDArray[np.uint64],
    way: int = ...,
    /,
) -> bytes:
    """Read `sizes` (each above 240) bytes of open files to `addresses`; all (n,).

    `way` is the widest that this processor knows unless a test says otherwise.

    Returns:
        (n,) 0 where the bytes have the XXH3-64 of `hashes`, 1 where they have another, 2 where they could not be read.
    """

def ways() -> int:
    """In how many ways this processor can hash; all give the same hashes."""

def copy_rows(target: NDArray[Any], addresses: Int64s, sizes: Int64s | int, /) -> None:
    """The row at each of (n,) addresses, of `sizes` bytes each or (n,), end to end into `target`, which they fill."""

COPIED: int

def gather_rows(
    targets: list[NDArray[Any]], facts: Int64s, which: Int64s, row: Int64s, column: int, /
) -> int:
    """Rows `row`, (n,), of blocks `which`, (n,), of the field `column`, in order into `targets`, which they fill.

    `facts`, (blocks, 1 + 4 · fields), says of each block how many rows it has and where its fields lie.

    Returns:
        COPIED; anything else where nothing was: a row is past the end of its block, or a decimal text.
    """

def bytes_at(addresses: Int64s, sizes: Int64s, /) -> list[bytes]:
    """What lies at each address, (n,) and (n,)."""

def texts_at(addresses: Int64s, sizes: Int64s, /) -> list[str]:
    """The UTF-8 text at each address.

    Raises:
        UnicodeDecodeError: one is not.
    """

def decimals_at(addresses: Int64s, sizes: Int64s, /) -> bytes | None:
    """Values of the canonical decimals at each address, (n,) int64; None where one is none of up to 18 digits."""
