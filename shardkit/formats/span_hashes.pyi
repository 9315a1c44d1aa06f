"""XXH3-64 of many spans of memory in one call, during which other threads run (span_hashes.c)."""

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

def xxh3_spans(hashes: NDArray[np.uint64], addresses: Int64s, sizes: Int64s, way: int = ..., /) -> None:
    """XXH3-64 of the bytes at each address, into `hashes`; all (n,), sizes above 240.

    `way` is the widest that this processor knows unless a test says otherwise.
    """

def ways() -> int:
    """In how many ways this processor can do it; all give the same hashes."""
