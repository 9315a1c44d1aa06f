"""Headers of NumPy's npy format 1.0, written by ourselves so that they are the same under every NumPy.

Format: numpy.lib.format, version 1.0: magic, version, little-endian uint16 header length, a Python literal
padded with spaces and ended by a newline so that the data begins at a multiple of 64 bytes. Nothing here is
ever evaluated: a header is compared with the one that the schema calls for.
"""

from __future__ import annotations

from functools import lru_cache

from .schema import FieldType

__all__ = ["RAGGED_HEADER_BYTES", "npy_header"]

RAGGED_HEADER_BYTES = 128  # of any one-dimensional array: no length has enough digits for 192


@lru_cache(maxsize=4096)
def npy_header(kind: FieldType, length: int = 0) -> bytes:
    """Header of a member of type `kind`; `length` is the number of items of a ragged one."""
    shape = (length,) if kind.kind == "ragged" else kind.shape
    dtype = kind.numpy_dtype
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    total = -(-(10 + len(text) + 1) // 64) * 64
    total = max(total, RAGGED_HEADER_BYTES)
    return b"\x93NUMPY\x01\x00" + (total - 10).to_bytes(2, "little") + text.ljust(total - 11) + b"\n"
