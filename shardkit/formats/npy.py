"""Headers of NumPy's npy format 1.0, written by ourselves so that they are the same under every NumPy.

Format: numpy.lib.format, version 1.0: magic, version, little-endian uint16 header length, a Python literal
padded with spaces and ended by a newline so that the data begins at a multiple of 64 bytes. Reading evaluates
nothing: a header is compared with the one that the schema calls for. Only where somebody else's tar is adopted is a
header parsed, once, by NumPy's own parser of literals; what reading needs of it goes into the index.
"""

from __future__ import annotations

import io
from functools import lru_cache
from math import prod

import numpy as np
from numpy.lib import format as npy_format

from shardkit.errors import FormatError

from .schema import FieldType

__all__ = ["RAGGED_HEADER_BYTES", "npy_header", "npy_payload_offset"]

_MAX_HEADER_BYTES = 10_000  # of a literal that is parsed; honest ones have about a hundred

RAGGED_HEADER_BYTES = 128
"""Of any one-dimensional array: no length has enough digits for 192."""


@lru_cache(maxsize=4096)
def npy_header(kind: FieldType, length: int = 0) -> bytes:
    """Header of a member of type `kind`; `length` is the number of items of a ragged one."""
    shape = (length,) if kind.kind == "ragged" else kind.shape
    dtype = kind.numpy_dtype
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    total = -(-(10 + len(text) + 1) // 64) * 64
    total = max(total, RAGGED_HEADER_BYTES)
    return b"\x93NUMPY\x01\x00" + (total - 10).to_bytes(2, "little") + text.ljust(total - 11) + b"\n"


def npy_payload_offset(data: bytes | memoryview, kind: FieldType) -> int:
    """Where the canonical payload of type `kind` begins in an npy file that NumPy, or anybody, wrote.

    Args:
        data: The whole member.
        kind: A scalar, array or ragged type.

    Raises:
        FormatError: The member is no npy file, or its items do not lie there as `kind` calls for: another dtype or
            shape, big-endian, column by column, pickled, or cut short.
    """
    stream = io.BytesIO(bytes(data[: 12 + _MAX_HEADER_BYTES]))
    try:
        version = npy_format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version[0]}.{version[1]}")
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, columns_first, dtype = read(stream, max_header_size=_MAX_HEADER_BYTES)
    except (ValueError, EOFError, TypeError, SyntaxError, OverflowError, RecursionError) as error:
        raise FormatError(f"not a readable .npy member ({str(error)[:100]})") from None
    if dtype.hasobject:
        raise FormatError("a pickled array, which is never read")
    if dtype != kind.numpy_dtype or dtype.byteorder == ">":
        raise FormatError(f"an array of dtype {dtype.str}, expected {kind.numpy_dtype.str}")
    if len(shape) != 1 if kind.kind == "ragged" else tuple(shape) != kind.shape:
        raise FormatError(f"an array of shape {shape}, expected {kind}")
    if columns_first and len(shape) > 1:
        raise FormatError("an array that is stored column by column (Fortran order)")
    expected = stream.tell() + np.dtype(dtype).itemsize * prod(shape)
    if expected != len(data):
        raise FormatError(f"{len(data)} bytes, but the array's header asks for {expected}")
    return stream.tell()
